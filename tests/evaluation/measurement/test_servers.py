"""eval/run.py starts an engine, without the draft and with it, and measures it at every load: here
a program with known speeds."""

import dataclasses
import json
import shlex
import sys

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdistill.common.errors import ExitCode
from specdistill.common.project import ROOT
from specdistill.evaluation.report.files import read_report
from specdistill.methods.load import load_method
from specdistill.methods.target_record import SECTION, save_draft
from specdistill.serving.engines import start
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests import scripts
from tests.evaluation.measurement.peer import evaluate_pico
from tests.heads import build_head, save_head
from tests.loopback_hub import fetched, loopback_hub
from tests.refusals import refused_key
from tests.tiny import save_adapter

PROGRAM = ROOT / "tests" / "serving" / "engines" / "engine_program.py"
NUM_PROMPTS, NEW_TOKENS = 8, 16
GATE = (
    "- {metric: mean_acceptance_length, scope: {batch_size: 8, num_speculative_tokens: 3}, min:"
    " 2.1}\n"
)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(start, "GRACE_SECONDS", 0.2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "draft"
    save_head("eagle3", build_head("eagle3", FrozenTarget.load("pico")), folder)
    return folder


def evaluate(folder, draft, engine, *arguments):
    command = f"eval.engine_command={shlex.join([sys.executable, str(PROGRAM), engine])}"
    settings = (
        f"eval.engine={engine}",
        f"eval.max_new_tokens={NEW_TOKENS}",
        f"eval.num_prompts={NUM_PROMPTS}",
    )
    return evaluate_pico(
        folder, "method=eagle3", f"draft={draft}", command, *settings, *arguments, gate=GATE
    )


LOOKUPS = {
    "ngram": ("eval.ngram.max=4", {"prompt_lookup_min": 1, "prompt_lookup_max": 4}),
    "suffix": (
        "eval.suffix={max: 16, max_cached_requests: 0, max_spec_factor: 2}",
        {
            "suffix_decoding_max_tree_depth": 16,
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_max_spec_factor": 2.0,
            "suffix_decoding_min_token_prob": 0.1,
        },
    ),
}


@pytest.mark.parametrize("method", LOOKUPS)
def test_an_engine_is_started_with_its_own_lookup(tmp_path, method):
    setting, expected = LOOKUPS[method]
    command = f"eval.engine_command={shlex.join([sys.executable, str(PROGRAM), 'vllm'])}"
    keys = [
        "eval.engine=vllm",
        setting,
        "eval.max_new_tokens=4",
        "eval.num_prompts=2",
        "eval.repeats=1",
    ]
    evaluate_pico(
        tmp_path / "report", f"method={method}", command, *keys, "eval.warmup=0", gate=GATE
    )
    engine = read_report(tmp_path / "report")[0]["engine"]
    (config,) = (
        json.loads(word) for word in shlex.split(engine["command"]) if word.startswith("{")
    )
    assert config == {"method": method, "num_speculative_tokens": 4, **expected}
    assert "speculative" not in engine["baseline_command"]


@pytest.mark.long  # starts an engine twice, for two seconds
@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_an_engine_serves_the_adapted_target_with_and_without_the_draft(tmp_path, method):
    save_adapter(tmp_path / "adapter", "pico", model=FrozenTarget.load("pico").model)
    target = FrozenTarget.load("pico", adapter=str(tmp_path / "adapter"))
    save_draft(load_method("eagle3"), target, build_head("eagle3", target), tmp_path / "draft")
    keys = [
        f"method={method}",
        f"target.adapter={tmp_path / 'adapter'}",
        *[f"draft={tmp_path / 'draft'}"][: method == "eagle3"],
    ]
    command = f"eval.engine_command={shlex.join([sys.executable, str(PROGRAM), 'vllm'])}"
    short = ["eval.engine=vllm", "eval.max_new_tokens=4", "eval.num_prompts=2", "eval.warmup=0"]
    evaluate_pico(tmp_path / "report", command, *keys, *short, gate=GATE)
    report = read_report(tmp_path / "report")[0]
    assert report["target"]["model"] == "pico + adapter"
    served = [shlex.split(report["engine"][name])[3] for name in ("command", "baseline_command")]
    (merged,) = (tmp_path / "report").rglob(served[0])  # a report names no folder of this machine
    with torch.no_grad():
        ids = torch.arange(4, 28)[None]
        logits = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(ids).logits
        assert served[0] == served[1] and torch.allclose(logits, target.model(ids).logits, atol=0.1)
        assert not torch.allclose(logits, FrozenTarget.load("pico").model(ids).logits, atol=0.5)


LOOKED_UP = (
    "eval.lookup_first={draft_tokens: 2}",
    "eval.num_speculative_tokens=3",
    "eval.repeats=1",
    "eval.warmup=0",
)


def test_an_engine_is_started_with_a_lookup_in_front_of_a_draft(draft, tmp_path):
    evaluate(tmp_path / "report", draft, "vllm", *LOOKED_UP)
    report = read_report(tmp_path / "report")[0]
    lookup = {"method": "ngram", "min": 2, "max": 5, "draft_tokens": 2}
    assert report["settings"]["drafting"] == {"lookup_first": lookup}
    variable, runner, *words = shlex.split(report["engine"]["command"])
    assert (
        variable == f"SPECDISTILL_LOOKUP_FIRST={json.dumps(lookup)}"
        and runner == "VLLM_USE_V2_MODEL_RUNNER=0"
    )
    assert (
        "--no-async-scheduling" in words
        and json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"]
        == 3
    )
    assert (
        "LOOKUP" not in report["engine"]["baseline_command"]
        and "async" not in report["engine"]["baseline_command"]
    )


def test_a_lookup_that_was_not_asked_for_is_not_measured(draft, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDISTILL_LOOKUP_FIRST", "{}")
    evaluate(tmp_path / "report", draft, "vllm", "eval.repeats=1", "eval.warmup=0")
    assert "looks up first" not in (tmp_path / "report" / "engine" / "k4.log").read_text()


def test_an_earlier_report_of_the_run_does_not_change_the_command(draft, tmp_path):
    (tmp_path / "draft").symlink_to(draft)
    drafting = {"token_replacements": {"a": "b"}}
    old = {
        "draft": {"method": "eagle3"},
        "engine": {
            "name": "vllm",
            "version": "0.33.0",
            "command": "vllm serve T --tensor-parallel-size 2",
        },
        "settings": {
            "num_speculative_tokens": 4,
            "temperature": 0.8,
            "draft_sampling": "probabilistic",
            "drafting": drafting,
        },
        "results": [{}],
    }
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text(json.dumps(old))
    quick = ("eval.repeats=1", "eval.warmup=0", "eval.temperature=0.8", "eval.max_new_tokens=4")
    evaluate(tmp_path / "new", tmp_path / "draft", "vllm", *quick)
    command = read_report(tmp_path / "new")[0]["engine"]["command"]
    assert "tensor-parallel" not in command and "draft_sample_method" not in command


def test_an_engine_that_ignores_its_lookup_is_not_measured(draft, tmp_path, capsys):
    command = f"eval.engine_command={shlex.join([sys.executable, str(PROGRAM), 'vllm', '--deaf'])}"
    assert (
        evaluate(tmp_path / "report", draft, "vllm", *LOOKED_UP, command) == ExitCode.RESOURCE_ERROR
    )
    assert "vllm does not use the lookup in front of the draft" in capsys.readouterr().err
    assert not (tmp_path / "report" / "report.json").exists()


@pytest.mark.long  # an engine for each K
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_k_is_measured_at_every_load(draft, tmp_path, engine):
    folder = tmp_path / "report"
    sweep = (
        "eval.num_speculative_tokens=3",
        "eval.sweep.num_speculative_tokens=[1,3]",
        "eval.sweep.concurrency=[1,8]",
    )
    assert evaluate(folder, draft, engine, *sweep) == ExitCode.DONE
    report, samples = read_report(folder)
    rows = {
        (row["num_speculative_tokens"], row["batch_size"]): row
        for row in report["results"]
        if row["category"] == "all"
    }
    assert list(rows) == [(3, 1), (1, 1), (3, 8), (1, 8)]
    assert len(samples) == 4 * NUM_PROMPTS
    for (k, _), row in rows.items():
        # K + 1 tokens and one in alternation: 16 tokens take 11 rounds of K = 1, and 7 of K = 3.
        rounds, accepted = {1: (11, 6), 3: (7, 4)}[k]
        assert (row["num_drafts"], row["num_draft_tokens"]) == (
            NUM_PROMPTS * rounds,
            NUM_PROMPTS * rounds * k,
        )
        assert row["accepted_per_position"] == [NUM_PROMPTS * accepted] * k
        assert row["num_new_tokens"] == NUM_PROMPTS * NEW_TOKENS
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / row["baseline_tokens_per_second"]
        )
    assert report["lossless"]["greedy_identical"]
    assert report["hardware"]["device"] in ("cpu", "cuda")
    assert report["target"]["dtype"] == "float32"
    program = "--model-path" if engine == "sglang" else "--speculative-config"
    assert program in report["engine"]["command"]
    assert "spec" not in report["engine"]["baseline_command"].replace("specdistill", "")
    page = (folder / "report.md").read_text()
    assert "| requests at once | draft tokens | speedup | known from |" in page
    assert {path.name for path in (folder / "engine").iterdir()} == {
        ".specdistill",
        "draft",
        "plain.log",
        "k1.log",
        "k3.log",
    }


def test_a_failed_engine_leaves_no_process_and_says_why(draft, tmp_path, capsys):
    command = shlex.join([sys.executable, str(PROGRAM), "vllm", "--broken"])
    assert (
        evaluate(tmp_path / "report", draft, "vllm", f"eval.engine_command={command}")
        == ExitCode.RESOURCE_ERROR
    )
    printed = capsys.readouterr().err.strip().splitlines()
    assert "the engine ended with status 1" in printed
    assert (
        printed[-1].startswith("error: ")
        and "ValueError: this model has no draft and never had" in printed[-1]
    )
    assert not (tmp_path / "report" / "report.json").exists()
    ours = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    assert not ours


@pytest.mark.long  # three engines
def test_a_draft_length_that_fails_leaves_the_others(draft, tmp_path, capsys):
    command = shlex.join([sys.executable, str(PROGRAM), "vllm", "--broken-with", "1"])
    sweep = (
        "eval.num_speculative_tokens=3",
        "eval.sweep.num_speculative_tokens=[1,3]",
        f"eval.engine_command={command}",
    )
    assert evaluate(tmp_path / "report", draft, "vllm", *sweep) == ExitCode.RESOURCE_ERROR
    assert "this model has no draft" in capsys.readouterr().err.strip().splitlines()[-1]
    report, samples = read_report(tmp_path / "report")
    assert report["incomplete"] and not report["gate"]["passed"]
    assert {row["num_speculative_tokens"] for row in report["results"]} == {3} and len(
        samples
    ) == NUM_PROMPTS


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("eval.engine_command=vlm serve", "eval.engine_command"),
        ("eval.concurrency=9", "eval.concurrency"),
    ],
)
def test_an_engine_that_cannot_be_started_is_refused(draft, tmp_path, capsys, argument, key):
    assert evaluate(tmp_path / "report", draft, "vllm", argument) == ExitCode.USER_ERROR
    assert refused_key(capsys.readouterr().err) == key


# The draft that a running server is said to have loaded: it must be one for the target

ON_HUB = "someone/tiny-draft"
OTHER = {
    "name_or_path": "someone/else",
    "revision": None,
    "adapter": None,
    "weights": "1" * 64,
    "tokenizer": "2" * 64,
}


def build_config(target):
    return json.dumps(
        {"architectures": ["LlamaForCausalLMEagle3"], SECTION: {"target": target}}
    ).encode()


@pytest.mark.parametrize("made_for", ["pico", "another target"])
def test_a_draft_on_the_hub_is_checked_by_its_config_alone(made_for, tmp_path, capsys):
    """With the right draft the command continues to the server, which nobody has started."""
    target = dataclasses.asdict(TargetFiles("pico").identity) if made_for == "pico" else OTHER
    keys = [
        "target=pico",
        "method=eagle3",
        "suite=pico",
        "eval.engine=vllm",
        "eval.server=http://127.0.0.1:9",
    ]
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home", token=None):
        hub.create(ON_HUB, {"config.json": build_config(target), "model.safetensors": b"large"})
        code = scripts.evaluate(*keys, f"draft={ON_HUB}", f"output_dir={tmp_path / 'report'}")
    assert fetched(tmp_path / "home") == {"config.json"}
    error = capsys.readouterr().err
    if made_for == "pico":
        assert code == ExitCode.RESOURCE_ERROR and "http://127.0.0.1:9/" in error
    else:
        assert (code, refused_key(error)) == (ExitCode.USER_ERROR, "draft")
        assert "11111111" in error and "22222222" in error


@pytest.mark.parametrize(
    ("method", "expected"), [("eagle3", ExitCode.USER_ERROR), ("mtp", ExitCode.RESOURCE_ERROR)]
)
def test_a_draft_inside_the_checkpoint_of_the_target_is_not_checked(
    tmp_path, capsys, method, expected
):
    """Without a check the command continues to the server, which nobody has started."""
    (tmp_path / "config.json").write_bytes(build_config(OTHER))
    keys = [
        "target=pico",
        f"method={method}",
        "suite=pico",
        "eval.engine=vllm",
        "eval.server=http://127.0.0.1:9",
    ]
    assert (
        scripts.evaluate(*keys, f"draft={tmp_path}", f"output_dir={tmp_path / 'report'}")
        == expected
    )
    assert (
        "someone/else" if method == "eagle3" else "http://127.0.0.1:9/"
    ) in capsys.readouterr().err
