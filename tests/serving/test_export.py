"""`specdistill export`: serving commands, expected acceptance, untrained drafts, and mistakes."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdistill.cli.main import main
from specdistill.common.documents import read_json
from specdistill.common.project import PICO, ROOT
from specdistill.evaluation.report.schema import PER_POSITION
from specdistill.methods.eagle3.checkpoint import load_eagle3
from specdistill.methods.load import find_method, load_method
from specdistill.methods.mtp.checkpoint import build_mtp, save_mtp
from specdistill.methods.target_record import SECTION, TEMPLATE, save_draft
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.engine import Served
from specdistill.serving.export import export, export_lookup, serve_md
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.finished_runs import edit
from tests.gguf_writer import write_gguf
from tests.heads import build_head, save_head
from tests.mtp_targets import write_checkpoint
from tests.refusals import refused, refused_key
from tests.rendered import HOSTILE, Page, renamed
from tests.serving.layouts import NUM_LAYERS, saved_target
from tests.tiny import save_adapter, tiny_target_model, write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, and with `run/draft`, an EAGLE-3 head for it."""
    path = tmp_path_factory.mktemp("export")
    save_head("eagle3", build_head("eagle3", saved_target(path / "target")), path / "run" / "draft")
    return path


def make_report(method: str = "eagle3", **settings: Any) -> dict[str, Any]:
    """Return the sample report of the documentation with one row, without `theory` and `engine`."""
    sample = read_json(ROOT / "docs" / "sample" / "report.json")
    measured = {name: part for name, part in sample.items() if name not in ("theory", "engine")}
    k = settings.get("num_speculative_tokens", 4)
    row = {
        name: value for name, value in measured["results"][0].items() if not name.endswith("_ci95")
    } | {
        "num_prompts": 24,
        "mean_acceptance_length": 2.891,
        "mean_acceptance_length_ci95": [2.73, 3.08],
        "acceptance_rate_per_position": [0.7, 0.551, 0.4, 0.3, 0.2, 0.1][:k],
    }
    return measured | {
        "draft": measured["draft"] | {"method": method},
        "target": measured["target"] | {"dtype": "float32"},
        "settings": measured["settings"] | {"drafting": {}, **settings},
        "results": [change_k(row, k)],
    }


def change_k(row: dict[str, Any], k: int) -> dict[str, Any]:
    """Return a result with the positions of another K."""
    lists = {name: (row[name] * 2)[:k] for name in PER_POSITION}
    return row | lists | {"num_speculative_tokens": k}


def test_names_from_a_report_are_plain_text_in_serve_md() -> None:
    pages = []
    for name in ("name", HOSTILE):
        measured = renamed(make_report(), name) | {"engine": {"name": "vllm", "version": name}}
        failed = {"metric": name, "severity": "fail", "passed": False, "verdict": "failed"}
        measured["gate"] = {"verdict": "failed", "passed": False, "rules": [failed]}
        pages.append(
            Page(
                serve_md(
                    ENGINES["vllm"],
                    Served("eagle3", Path("draft"), "target", 4, False, {}),
                    measured,
                    (),
                )
            )
        )
    friendly, hostile = pages
    assert hostile.elements == friendly.elements and hostile.references == []


def read_serve_md(folder: Path) -> tuple[list[str], str]:
    """Return the words of the last command in SERVE.md, and the whole text."""
    text = (folder / "SERVE.md").read_text()
    lines = text.split("```bash\n")[1].split("\n```")[0].replace("\\\n", " ").splitlines()
    return shlex.split(lines[-1]), text


def test_vllm_is_told_method_draft_and_number(folder: Path, tmp_path: Path) -> None:
    export(folder / "run" / "draft", "vllm", tmp_path / "out", TargetFiles(str(folder / "target")))
    words, text = read_serve_md(tmp_path / "out")
    assert (
        words[:3] == ["vllm", "serve", str(folder / "target")]
        and words[3] == "--speculative-config"
    )
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 3,
    }
    assert (
        "vLLM (0.32 and 0.33)" in text
        and "Not measured" in text
        and "`--tensor-parallel-size 2`" in text
    )
    program = text.split("```python\n")[1].split("\n```")[0]
    compile(program, "SERVE.md", "exec")
    assert (
        f"LLM({str(folder / 'target')!r}, speculative_config=" in program
        and "llm.get_metrics()" in program
    )


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_an_adapted_target_is_served_as_a_merged_copy(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    adapted = save_adapter(tmp_path / "adapter", str(folder / "target"), num_layers=NUM_LAYERS)
    target = FrozenTarget.load(str(folder / "target"), adapter=str(tmp_path / "adapter"))
    save_draft(load_method("eagle3"), target, build_head("eagle3", target), tmp_path / "draft")
    export(tmp_path / "draft", engine, tmp_path / "out", target.files)
    words, merged = read_serve_md(tmp_path / "out")[0], str(tmp_path / "out-target")
    if engine == "speculators":
        verifier = read_json(tmp_path / "out" / "config.json")["speculators_config"]["verifier"][
            "name_or_path"
        ]
        assert verifier == merged
    else:
        assert words[2] == merged and "--revision" not in words
    # In float64 nothing but the merged weights is rounded. In float32 a CPU's kernels round, too.
    ids = torch.arange(4, 28)[None]
    merged_logits = AutoModelForCausalLM.from_pretrained(merged).double()(ids).logits
    assert torch.allclose(merged_logits, adapted.double()(ids).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(merged)("ab").input_ids == target.tokenizer("ab").input_ids


@pytest.mark.parametrize(("engine", "flag"), [("vllm", ""), ("sglang", ""), ("gguf", "-file")])
def test_a_template_that_replaces_the_targets_is_served(
    engine: str, flag: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "run" / "draft", tmp_path / "draft")
    (tmp_path / "draft" / TEMPLATE).write_text("{{ messages }}")
    export(tmp_path / "draft", engine, tmp_path / "out")
    words, _ = read_serve_md(tmp_path / "out")
    place = words[words.index(f"--chat-template{flag}") + 1]
    assert place == str(tmp_path / "out" / TEMPLATE) and Path(place).read_text() == "{{ messages }}"


def test_sglang_is_told_steps_and_drafted_tokens(folder: Path, tmp_path: Path) -> None:
    export(folder / "run" / "draft", "sglang", tmp_path / "out", num_speculative_tokens=5)
    words, text = read_serve_md(tmp_path / "out")
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert flags == {
        "--model-path": "TARGET",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(tmp_path / "out"),
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
    }
    assert "TARGET stands for the target" in text


def test_a_speculators_folder_is_served_as_it_is(folder: Path, tmp_path: Path) -> None:
    export(
        folder / "run" / "draft",
        "speculators",
        tmp_path / "out",
        TargetFiles(str(folder / "target")),
    )
    assert read_serve_md(tmp_path / "out")[0][:3] == ["vllm", "serve", str(tmp_path / "out")]


def test_llama_cpp_is_told_both_files_and_how_to_convert_them(folder: Path, tmp_path: Path) -> None:
    export(folder / "run" / "draft", "gguf", tmp_path / "out", TargetFiles(str(folder / "target")))
    command, text = read_serve_md(tmp_path / "out")
    files = ["-m", "target.gguf", "-md", "draft.gguf"]
    assert command[:9] == [
        "llama-server",
        *files,
        "--spec-type",
        "draft-eagle3",
        "--spec-draft-n-max",
        "3",
    ]
    assert (
        f"convert_hf_to_gguf.py {tmp_path / 'out'} --target-model-dir {folder / 'target'}" in text
    )


def test_a_small_draft_is_served_by_each_engine(tmp_path: Path) -> None:
    write_target(tmp_path / "ours", num_layers=2)
    export(tmp_path / "ours", "vllm", tmp_path / "vllm")
    assert json.loads(read_serve_md(tmp_path / "vllm")[0][4])["method"] == "draft_model"
    export(tmp_path / "ours", "sglang", tmp_path / "sglang")
    assert "STANDALONE" in read_serve_md(tmp_path / "sglang")[0]
    export(tmp_path / "ours", "gguf", tmp_path / "gguf")
    command, text = read_serve_md(tmp_path / "gguf")
    assert (
        "draft-simple" in command and f"convert_hf_to_gguf.py {tmp_path / 'gguf'} --outtype" in text
    )


@pytest.mark.parametrize("named", [True, False])
def test_serve_md_states_the_measured_acceptance(named: bool, folder: Path, tmp_path: Path) -> None:
    """The acceptance is that of the named report, or of the one beside the draft in its run."""
    place = tmp_path / "elsewhere" if named else tmp_path / "run" / "report"
    place.mkdir(parents=True)
    (place / "report.json").write_text(json.dumps(make_report()))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "draft").symlink_to(folder / "run" / "draft")
    export(tmp_path / "run" / "draft", "vllm", tmp_path / "out", report=place if named else None)
    words, text = read_serve_md(tmp_path / "out")
    assert json.loads(words[4])["num_speculative_tokens"] == 4
    assert "| all of pico | 24 | 2.89 (2.73 to 3.08) |" in text
    assert "70% 55% 40% 30%" in text and "K = 4 · greedy · suite pico" in text


def test_serve_md_warns_of_a_failed_gate_before_the_command(folder: Path, tmp_path: Path) -> None:
    judged = make_report()
    rule = next(rule for rule in judged["gate"]["rules"] if rule["metric"] == "speedup")
    judged["gate"] |= {
        "verdict": "failed",
        "rules": [rule | {"verdict": verdict} for verdict in ("failed", "passed")],
    }
    judged["results"][0].update(speedup=0.87, speedup_ci95=[0.83, 0.91])
    (tmp_path / "report.json").write_text(json.dumps(judged))
    export(folder / "run" / "draft", "vllm", tmp_path / "out", report=tmp_path / "report.json")
    printed = read_serve_md(tmp_path / "out")[1].partition("```bash")[0]
    assert (
        "1 of 2 rules failed: speedup" in printed
        and "0.87" in printed
        and "0.83 to 0.91" in printed
    )
    judged["gate"]["verdict"], judged["results"][0]["speedup"] = "passed", 1.2
    (tmp_path / "report.json").write_text(json.dumps(judged))
    export(folder / "run" / "draft", "vllm", tmp_path / "good", report=tmp_path / "report.json")
    assert "Before you serve it" not in read_serve_md(tmp_path / "good")[1]


def make_swept_report(*speeds: tuple[int, int, float]) -> dict[str, Any]:
    """Return a report of two GPUs.

    speeds: For each configuration, K, the requests at once and the speedup.
    """
    measured = make_report() | {
        "engine": {
            "name": "vllm",
            "version": "0.33.0",
            "command": "vllm serve T --tensor-parallel-size 2",
        }
    }
    (row,) = measured["results"]
    row |= {"category": "all", "temperature": 0.0, "tree": None, "context_bucket": "all"}
    row |= {"tokens_per_second": 100.0, "baseline_tokens_per_second": 100.0}
    names = ("num_speculative_tokens", "batch_size", "speedup")
    return measured | {
        "results": [
            {**change_k(row, entry[0]), **dict(zip(names, entry, strict=True))} for entry in speeds
        ]
    }


SWEPT = make_swept_report(
    (4, 1, 1.5), (2, 1, 1.8), (4, 8, 1.4), (2, 8, 1.3), (4, 32, 0.7), (2, 32, 0.9)
)


def test_vllm_drafts_by_load_as_it_was_measured(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(SWEPT))
    draft, options = folder / "run" / "draft", {"report": tmp_path / "report.json"}
    export(draft, "vllm", tmp_path / "vllm", **options)
    words, text = read_serve_md(tmp_path / "vllm")
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 7, 2], [8, 31, 4], [32, 32, 0]]
    assert config["num_speculative_tokens"] == 4 and words[3:5] == ["--tensor-parallel-size", "2"]
    assert "tensor_parallel_size=2" in text
    export(draft, "vllm", tmp_path / "said", **options, num_speculative_tokens=3)
    words, _ = read_serve_md(tmp_path / "said")
    assert json.loads(words[-1]) == {
        "method": "eagle3",
        "model": str(tmp_path / "said"),
        "num_speculative_tokens": 3,
    }


def test_sglang_drafts_by_load_from_a_file_that_is_written_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(SWEPT))
    export(folder / "run" / "draft", "sglang", tmp_path / "out", report=tmp_path / "report.json")
    words, text = read_serve_md(tmp_path / "out")
    written, _ = text.split("```bash\n")[1].splitlines()[:2]
    echo, content, _, file = shlex.split(written)
    slots = {
        "1": {"candidate_steps": [2]},
        "8": {"candidate_steps": [4]},
        "32": {"candidate_steps": [0]},
    }
    assert (echo, json.loads(content)) == ("echo", slots) and words[-2:] == [
        "--speculative-adaptive-config",
        file,
    ]
    assert (
        "--speculative-adaptive" in words
        and words[words.index("--speculative-num-steps") + 1] == "4"
    )
    begins, program, _ = text.split("```python\n")[1].split("\n```")[0].partition("import sglang")
    compile(program, "SERVE.md", "exec")
    monkeypatch.chdir(tmp_path)
    exec(begins, {})
    assert json.loads((tmp_path / file).read_text()) == slots


def test_other_engines_use_the_best_k_at_the_load_of_the_report(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(SWEPT))
    draft, target, options = (
        folder / "run" / "draft",
        TargetFiles(str(folder / "target")),
        {"report": tmp_path / "report.json"},
    )
    export(draft, "gguf", tmp_path / "out", **options)
    words, _ = read_serve_md(tmp_path / "out")
    assert words[words.index("--spec-draft-n-max") + 1] == "2"
    export(draft, "speculators", tmp_path / "whole", target, **options)
    proposal = json.loads((tmp_path / "whole" / "config.json").read_text())["speculators_config"][
        "proposal_methods"
    ][0]
    assert (
        proposal["speculative_tokens"] == 2
        and "and 2 draft tokens" in read_serve_md(tmp_path / "whole")[1]
    )


def test_serve_md_states_the_draft_lengths_of_the_started_engine(
    folder: Path, tmp_path: Path
) -> None:
    one_k = make_swept_report((4, 1, 1.5), (2, 1, 1.8), (2, 8, 1.3))
    k = {"num_speculative_tokens": 3}
    for engine, measured, options, sentence in (
        ("vllm", SWEPT, {}, "vLLM is started with this table"),
        ("vllm", one_k, {}, "vLLM is started with 2 draft tokens"),
        ("gguf", SWEPT, {}, "llama.cpp is started with 2 draft tokens"),
        ("vllm", SWEPT, k, ""),
    ):
        (tmp_path / "report.json").write_text(
            json.dumps({name: part for name, part in measured.items() if name != "engine"})
        )
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        export(folder / "run" / "draft", engine, out, report=tmp_path / "report.json", **options)
        text = read_serve_md(out)[1]
        assert sentence in text and ("is started with" in text) == ("known from" in text) == bool(
            sentence
        )


def test_flags_fit_the_target(folder: Path, tmp_path: Path) -> None:
    target = TargetFiles(str(folder / "target"))
    length = target.config["max_position_embeddings"]
    assert length != 8192
    flags = {
        "vllm": f"--max-model-len {length}",
        "sglang": f"--context-length {length}",
        "gguf": f"--ctx-size {4 * length}",
    }
    for engine, flag in flags.items():
        export(folder / "run" / "draft", engine, tmp_path / engine, target)
        text = read_serve_md(tmp_path / engine)[1]
        assert f"`{flag}`" in text and (engine == "gguf" or "`--dtype float32`" in text)
    in_gguf = make_report() | {
        "engine": {"name": "llama.cpp", "version": "b1"},
        "target": make_report()["target"] | {"dtype": "MOSTLY_Q4_1"},
    }
    (tmp_path / "report.json").write_text(json.dumps(in_gguf))
    export(
        folder / "run" / "draft", "vllm", tmp_path / "out", target, report=tmp_path / "report.json"
    )
    assert (
        "`--dtype float32`" in read_serve_md(tmp_path / "out")[1]
        and "target pico in MOSTLY_Q4_1" in read_serve_md(tmp_path / "out")[1]
    )


def test_llama_cpp_does_not_look_up_further_than_it_drafts(folder: Path, tmp_path: Path) -> None:
    """The report was measured with K = 6."""
    command, text = export_behind_lookup("gguf", {"min": 5, "draft_tokens": 2}, folder, tmp_path)
    assert "ngram-simple,draft-eagle3" in command and "the draft alone" not in text
    options = {"report": tmp_path / "report.json", "num_speculative_tokens": 4}
    export(folder / "run" / "draft", "gguf", tmp_path / "short", **options)
    command, text = read_serve_md(tmp_path / "short")
    assert command[-4:] == [
        "draft-eagle3",
        "--spec-draft-n-max",
        "4",
        "--no-spec-draft-backend-sampling",
    ]
    assert "the draft alone" in text


@pytest.mark.parametrize(
    ("engine", "shape", "k", "shown"),
    [
        ("sglang", {"draft_tokens": 2}, 2, "a chain of 2"),
        ("vllm", {"draft_tree": {"branching": [2, 2, 1]}}, 3, "a tree with"),
    ],
)
def test_an_engine_without_such_a_lookup_serves_the_draft_with_its_own_k(
    engine: str, shape: dict[str, Any], k: int, shown: str, folder: Path, tmp_path: Path
) -> None:
    command, text = export_behind_lookup(engine, shape, folder, tmp_path)
    num = json.loads(command[4])["num_speculative_tokens"] if engine == "vllm" else int(command[8])
    assert num == k and "SPECDISTILL" not in text
    assert (
        f"behind a lookup (ngram lookup of 2 to 5 tokens first, behind it {shown}" in text
        and "the draft alone" in text
    )


def export_behind_lookup(
    engine: str, shape: dict[str, Any], folder: Path, tmp_path: Path
) -> tuple[list[str], str]:
    lookup = {"method": "ngram", "min": 2, "max": 5, **shape}
    settings = {
        "drafting": {"lookup_first": lookup},
        "num_speculative_tokens": 6,
        "temperature": 0.8,
    }
    (tmp_path / "report.json").write_text(
        json.dumps(make_report(**settings, draft_sampling="probabilistic"))
    )
    export(folder / "run" / "draft", engine, tmp_path / "out", report=tmp_path / "report.json")
    return read_serve_md(tmp_path / "out")


def test_vllm_looks_up_in_front_of_the_draft_by_its_plugin(folder: Path, tmp_path: Path) -> None:
    command, text = export_behind_lookup("vllm", {"draft_tokens": 2}, folder, tmp_path)
    lookup = {"method": "ngram", "min": 2, "max": 5, "draft_tokens": 2}
    assert command[:2] == [
        f"SPECDISTILL_LOOKUP_FIRST={json.dumps(lookup)}",
        "VLLM_USE_V2_MODEL_RUNNER=0",
    ]
    config = json.loads(command[command.index("--speculative-config") + 1])
    # The plugin refuses `draft_sample_method`.
    assert config["num_speculative_tokens"] == 6 and "draft_sample_method" not in config
    assert "--no-async-scheduling" in command and "async_scheduling=False" in text
    export(
        folder / "run" / "draft",
        "vllm",
        tmp_path / "one",
        report=tmp_path / "report.json",
        num_speculative_tokens=1,
    )
    assert json.loads(read_serve_md(tmp_path / "one")[0][0].partition("=")[2])["draft_tokens"] == 1
    assert "pip install 'specdistill[vllm]'" in text and "the draft alone" not in text


def test_vllm_samples_as_the_measurement_did(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(
        json.dumps(make_report(temperature=0.8, draft_sampling="probabilistic"))
    )
    export(folder / "run" / "draft", "vllm", tmp_path / "out", report=tmp_path / "report.json")
    assert (
        json.loads(read_serve_md(tmp_path / "out")[0][4])["draft_sample_method"] == "probabilistic"
    )


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        json.dumps({}),
        json.dumps({**make_report(), "results": []}),
        json.dumps(make_report("eagle")),
    ],
)
def test_an_unusable_report_is_refused(content: str | None, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with refused("report", path):
        export(folder / "run" / "draft", "vllm", tmp_path / "out", report=path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_multi_token_prediction_layer_goes_into_its_target(engine: str, tmp_path: Path) -> None:
    target = write_checkpoint("qwen3_next", tmp_path / "target")
    save_mtp(build_mtp(target), tmp_path / "draft")
    assert (
        export(
            tmp_path / "draft", engine, tmp_path / "out", TargetFiles(str(tmp_path / "target"))
        ).method
        == "mtp"
    )
    words, _ = read_serve_md(tmp_path / "out")
    assert words[2 if engine == "vllm" else 4] == str(tmp_path / "out")
    assert ('"method": "mtp"' in words[-1]) if engine == "vllm" else ("NEXTN" in words)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("target", "out"))
    assert before.keys() == after.keys()


def test_a_layer_that_no_engine_looks_for_is_refused(folder: Path, tmp_path: Path) -> None:
    target = FrozenTarget.load(str(folder / "target"))
    save_mtp(build_mtp(target, init="scratch"), tmp_path / "draft")
    with refused("engine", "vllm", holds="llama"):
        export(tmp_path / "draft", "vllm", tmp_path / "out", TargetFiles(target.name))
    with refused("engine", "gguf", holds="mtp"):
        export(tmp_path / "draft", "gguf", tmp_path / "out", TargetFiles(target.name))
    with refused("target.model", "nothing"):
        export(tmp_path / "draft", "vllm", tmp_path / "out")


def test_a_draft_measured_with_replaced_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    measured = make_report(
        drafting={"heterogeneous_vocab": True, "token_replacements": {"<|end|>": "</s>"}}
    )
    (tmp_path / "report.json").write_text(json.dumps(measured))
    with refused("engine", "vllm for ", holds="measured with eval.token_replacements"):
        export(folder / "run" / "draft", "vllm", tmp_path / "out", report=tmp_path / "report.json")


def test_a_draft_that_records_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run" / "draft", tmp_path / "draft")
    other = {
        "name_or_path": "someone/else",
        "revision": None,
        "adapter": None,
        "weights": "1" * 64,
        "tokenizer": "2" * 64,
    }
    edit(tmp_path / "draft" / "config.json", lambda config: {**config, SECTION: {"target": other}})
    with refused("draft", holds="someone/else"):
        export(tmp_path / "draft", "vllm", tmp_path / "out", TargetFiles(str(folder / "target")))


def test_export_prints_the_path_of_serve_md_and_refuses_an_existing_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"draft={folder / 'run' / 'draft'}",
        "engine=sglang",
        f"target={folder / 'target'}",
        f"output_dir={tmp_path / 'out'}",
    ]
    assert main(["export", *arguments]) == 0
    assert str(tmp_path / "out" / "SERVE.md") in capsys.readouterr().out
    assert main(["export", *arguments]) == 2  # the folder exists now


@pytest.mark.parametrize(
    ("recipe", "engine", "method"),
    [
        ("eagle3", "vllm", "eagle3"),
        ("eagle3", "speculators", "eagle3"),
        ("eagle", "vllm", "eagle"),
        ("draft", "vllm", "draft_model"),
        ("pard", "vllm", "pard"),
    ],
)
def test_a_dry_run_exports_an_untrained_draft(
    recipe: str, engine: str, method: str, folder: Path, tmp_path: Path
) -> None:
    arguments = [
        f"recipe=pico/{recipe}",
        f"target={folder / 'target'}",
        f"engine={engine}",
        f"output_dir={tmp_path / 'out'}",
    ]
    shape = ["draft.num_layers=2", "draft.vocab_size=40"] if method == "eagle3" else []
    assert main(["export", "dry_run=true", *arguments, *shape]) == 0
    assert find_method(tmp_path / "out") == method
    if method == "eagle3":
        head = load_eagle3(tmp_path / "out", FrozenTarget.load(str(folder / "target")))
        assert (
            head.config.num_layers == 2
            and head.config.draft_vocab_size == 40
            and head.config.fc_norm
        )


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ([], "draft"),
        (["engine=tgi"], "engine"),
        (["recipe=pico/eagle3"], "recipe"),
        (["dry_run=true"], "recipe"),
        (["dry_run=true", "recipe=pico/eagle3", "draft=x"], "draft"),
        (["dry_run=true", "recipe=pico/eagle3", "draft.layers=1"], "draft.layers"),
        (["dry_run=true", "recipe=pico/eagle3", "draft.fc_bias=true"], "draft.fc_bias"),
        (["dry_run=true", "recipe=pico/eagle3", "method=ngram"], "data.source"),
        (["draft=./nowhere"], "draft"),
    ],
)
def test_mistakes_name_their_key(
    arguments: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [] if any(argument.startswith("engine=") for argument in arguments) else ["engine=vllm"]
    assert main(["export", *first, f"output_dir={tmp_path / 'out'}", *arguments]) == 2
    assert refused_key(capsys.readouterr().err) == key and not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["gguf", "vllm", "sglang", "speculators"])
def test_a_gguf_target_is_served_as_the_file_or_as_its_copy(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp loads the file, and its converter a folder with the vocabulary; the other engines
    load the folder."""
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    tiny_target_model(num_layers=NUM_LAYERS, vocab_size=1024).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(PICO).save_pretrained(tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "target.gguf", "f32")
    target = FrozenTarget.load(str(file))
    save_head("eagle3", build_head("eagle3", target), tmp_path / "draft")
    export(tmp_path / "draft", engine, tmp_path / "out", TargetFiles(str(file)))
    words, text = read_serve_md(tmp_path / "out")
    (copy,) = (
        path for path in (tmp_path / "assets" / "specdistill" / "gguf").iterdir() if path.is_dir()
    )
    if engine == "gguf":
        assert words[:5] == ["llama-server", "-m", str(file), "-md", "draft.gguf"]
        (convert,) = (
            line for line in text.splitlines() if line.startswith("python convert_hf_to_gguf.py")
        )
        assert f"{tmp_path / 'out'} --target-model-dir {copy} " in convert
    elif engine == "speculators":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["speculators_config"]["verifier"] == {
            "name_or_path": str(copy),
            "architectures": ["LlamaForCausalLM"],
        }
    else:
        assert str(copy) in words and str(file) not in words and str(file) in text
    copy_logits = AutoModelForCausalLM.from_pretrained(copy)(torch.arange(4, 28)[None]).logits
    assert torch.equal(copy_logits, target.model(torch.arange(4, 28)[None]).logits)
    assert (
        AutoTokenizer.from_pretrained(copy)("def f(x):").input_ids
        == target.tokenizer("def f(x):").input_ids
    )


def write_lookup_report(folder: Path, k: int, **drafting: object) -> Path:
    folder.mkdir()
    measured = make_report("ngram", num_speculative_tokens=k, drafting=drafting)
    (folder / "report.json").write_text(json.dumps(measured))
    return folder


def test_a_lookup_is_served_by_vllm_as_it_was_measured(tmp_path: Path) -> None:
    measured = write_lookup_report(tmp_path / "lookup", 6, min=2, max=5, lookup="sequence")
    arguments = ["method=ngram", "engine=vllm", "target=pico", f"report={measured}"]
    assert main(["export", *arguments, f"output_dir={tmp_path / 'out'}"]) == 0
    words, text = read_serve_md(tmp_path / "out")
    assert words[:4] == ["vllm", "serve", str(PICO), "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["SERVE.md"]
    assert "`eval.ngram.rule=vllm` measures" in text and "2.89" in text and "draft was" not in text


def test_a_lookup_has_the_number_of_tokens_that_its_report_recommends(tmp_path: Path) -> None:
    measured = make_report("ngram", num_speculative_tokens=6, drafting={"min": 1, "max": 3})
    measured["results"] += [change_k(measured["results"][0], 4) | {"speedup": 5.0}]
    (tmp_path / "report.json").write_text(json.dumps(measured))
    exported = export_lookup("ngram", "vllm", tmp_path / "out", report=tmp_path)
    assert exported.num_tokens == 4 and "vllm serve TARGET" in read_serve_md(tmp_path / "out")[1]


def test_a_lookup_is_served_by_llama_cpp_without_a_draft(tmp_path: Path) -> None:
    measured = write_lookup_report(tmp_path / "lookup", 4, min=2, max=2, rule="llama.cpp")
    arguments = ["method=ngram", "engine=llama.cpp", "target=pico", f"report={measured}"]
    assert main(["export", *arguments, f"output_dir={tmp_path / 'out'}"]) == 0
    words, text = read_serve_md(tmp_path / "out")
    # tests/with_engines starts llama.cpp's lookup with the same flags.
    assert shlex.join(words) == (
        "llama-server -m target.gguf --spec-type ngram-simple --spec-ngram-simple-size-n 2"
        " --spec-ngram-simple-size-m 4"
    )
    assert text.count("convert_hf_to_gguf.py") == 1 and "rule of its own" not in text


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["method=ngram", "engine=sglang"], "engine"),
        (["method=suffix", "engine=llama.cpp"], "engine"),
        (["method=ngram", "engine=vllm", "draft=x"], "draft"),
        (["method=eagle3", "engine=vllm"], "method"),
        (
            ["method=ngram", "engine=llama.cpp", "num_speculative_tokens=2"],
            "num_speculative_tokens",
        ),
    ],
)
def test_a_lookup_that_an_engine_lacks_is_refused(
    arguments: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "target=pico", *arguments, f"output_dir={tmp_path / 'out'}"]) == 2
    assert refused_key(capsys.readouterr().err) == key and not (tmp_path / "out").exists()
