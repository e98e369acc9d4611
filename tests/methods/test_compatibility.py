"""Six commands agree about each fault of a draft: all refuse it, or all warn of it."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.hub.evidence import PROVENANCE, RECIPE
from specdistill.methods.compatibility import check_draft
from specdistill.methods.early_exit.module import build_exit
from specdistill.methods.load import load_method
from specdistill.methods.models.create import create_draft_model
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import save_draft
from specdistill.recipe.load import format_recipe, load_recipe
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import LLAMA3
from tests.finished_runs import edit
from tests.heads import build_block, build_head, head_of
from tests.loopback_hub import Hub, loopback_hub
from tests.refusals import refused, refused_key
from tests.scripts import specdistill
from tests.tiny import SMALL, input_keys, tiny_target_model, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("compatibility")  # one worker measures the runs
TEMPLATE = "{% for turn in messages %}<|user|>{{ turn.content }}<|end|>{% endfor %}"
SCALING = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
PRUNED = torch.tensor([5, 6, 7, *range(20, 64, 2)])  # target tokens that the head proposes
LAYERS = "eagle_aux_hidden_state_layer_ids"
METHODS = ("eagle", "eagle3", "mtp", "early_exit", "dflash", "dspark", "draft_model", "pard")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, texts, a suite and a draft of each method.

    The target has scaled rotary angles; two of the drafts are in measured runs.
    """
    folder = tmp_path_factory.mktemp("compatibility")
    model = tiny_target_model(num_layers=8)
    model.config.rope_parameters = dict(LLAMA3)
    type(model)(model.config).save_pretrained(folder / "model")
    tiny_tokenizer(TEMPLATE).save_pretrained(folder / "model")
    rows = [
        json.dumps({"text": f"Row {index} says {index * 7} and then again {index * 7}."})
        for index in range(40)
    ]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    prompts = [json.dumps({"id": str(index), "prompt": f"number {index} "}) for index in range(2)]
    (folder / "suite.jsonl").write_text("\n".join(prompts), encoding="utf-8")
    target = FrozenTarget.load(str(folder / "model"))
    for method in METHODS:
        save_draft(
            load_method(method), target, build_draft(method, target), folder / method / "draft"
        )
    for method in ("eagle3", "draft_model"):
        measure(folder, method)
    return folder


def build_draft(method: str, target: FrozenTarget) -> Any:
    """Return a fresh draft of a method; that of EAGLE-3 has a pruned vocabulary."""
    if method == "early_exit":
        draft = build_exit(target)
        torch.nn.init.normal_(draft.layers[0].mlp.down_proj.weight)
        return draft
    if method in ("dflash", "dspark"):
        return build_block(method, target)
    if method in ("eagle", "mtp"):
        return build_head(method, target).bfloat16()
    if method == "eagle3":
        return head_of("eagle3", target, {"draft_vocabulary": PRUNED})
    draft = create_draft_model(target, num_layers=2)
    draft.config.update({"spd_type": "pard", "pard_token": 3} if method == "pard" else {})
    return draft


def measure(workspace: Path, method: str) -> None:
    """Leave the record and the report of a run next to its draft, as training and `eval` do."""
    run = workspace / method
    keys = [
        f"method={method}",
        f"target.model={workspace / 'model'}",
        f"train.output_dir={run}",
        f"eval.suite={workspace / 'suite.jsonl'}",
    ]
    recipe = format_recipe(load_recipe(Recipe, [*keys, *SHORT]))
    (run / "run").mkdir()
    (run / RECIPE).write_text(recipe, encoding="utf-8")
    provenance = {
        "created": "2026-11-28T00:00:00+00:00",
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(),
    }
    (run / PROVENANCE).write_text(json.dumps(provenance), encoding="utf-8")
    specdistill("eval", f"recipe={run / RECIPE}")
    assert (run / "report" / "report.json").is_file()


SHORT = ["eval.max_new_tokens=4", "eval.repeats=1", "eval.warmup=0", "eval.sampling_draws=10"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with loopback_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture
def checks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make measuring and training stop after they have checked the draft."""

    def stop(*arguments: Any, **options: Any) -> None:
        raise UserError("stopped", got="no fault", expected="one")

    monkeypatch.setattr("specdistill.evaluation.measurement.runner.plan_measurement", stop)
    monkeypatch.setattr("specdistill.workflows.train.check_engines", stop)


# What each command says


@dataclass(frozen=True)
class Answer:
    """The answer of a command about a draft.

    Attributes:
        severity: `problem`, `warning` or `fine`.
        output: All that the command printed.
        code: Its exit code.
        key: The key that a refusal names.
    """

    severity: str
    output: str
    code: int
    key: str | None = None


REFUSED_BY = {"eval": "draft", "export": "draft", "acquire": "draft", "train": "draft.init"}


def run_commands(method: str, run: Path, workspace: Path, hub: Hub, out: Path) -> dict[str, Answer]:
    """Return what each of six commands says about the draft of a run."""
    draft, target = f"draft={run / 'draft'}", f"target={workspace / 'model'}"
    commands = {
        "eval": [
            f"method={method}",
            target,
            draft,
            f"output_dir={out / 'report'}",
            f"suite={workspace / 'suite.jsonl'}",
            *SHORT,
        ],
        "doctor": [draft, target, "decode=false"],
        "export": [draft, target, "engine=vllm", f"output_dir={out / 'vllm'}"],
        "publish": [f"run={run}", "repo=someone/draft", "baseline=none", "dry_run=true"],
        "acquire": [f"method={method}", draft, target],
        "train": [
            f"method={method}",
            *input_keys(workspace),
            "data.regenerate=null",
            *SMALL,
            f"draft.init={run / 'draft'}",
            f"train.output_dir={out / 'run'}",
        ],
    }
    answers = {}
    for command, arguments in commands.items():
        with hub.client(out / "home"):
            done = specdistill(command, *arguments)
        answers[command] = read_answer(command, done.returncode, done.stdout, done.stderr)
    return answers


def read_answer(command: str, code: int, out: str, err: str) -> Answer:
    """Return the severity of what a command says about a draft, its output, exit code and key."""
    output = " ".join((out + err).split())
    if command == "doctor":
        severities = [
            severity
            for severity in ("problem", "warning")
            if any(line.startswith(f"{severity}  ") for line in out.splitlines())
        ]
        return Answer(severities[0] if severities else "fine", output, code)
    key = refused_key(err) if code == 2 else None
    is_refused = (
        "not a draft for its target" in err
        if command == "publish"
        else key not in (None, "stopped")
    )
    warns = any(line.startswith("warning: ") for line in err.splitlines())
    return Answer("problem" if is_refused else "warning" if warns else "fine", output, code, key)


# The faults


Change = Callable[[dict[str, Any], dict[str, Tensor], Path], Any]


def set_config(**keys: Any) -> Change:
    return lambda config, tensors, folder: config.update(keys)


def change_tensor(name: str, transform: Callable[[Tensor], Tensor]) -> Change:
    return lambda config, tensors, folder: tensors.update(
        {name: transform(tensors[name]).contiguous()}
    )


def set_rope(theta: float, scaling: dict[str, Any] | None) -> Change:
    """Return a change to another rotary embedding, the same in both spellings."""
    newer = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    return set_config(rope_parameters=newer, rope_theta=theta, rope_scaling=scaling)


def swap_ids(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """Swap the ids of 200 tokens in pairs."""

    def swap(tokenizer: Any) -> Any:
        vocabulary = tokenizer["model"]["vocab"]
        names = [name for name, token_id in vocabulary.items() if token_id >= 20][:200]
        for first, second in zip(names[::2], names[1::2], strict=True):
            vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        return tokenizer

    edit(folder / "tokenizer.json", swap)


def remove_chat_token(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    def remove(tokenizer: Any) -> Any:
        tokenizer["added_tokens"] = [
            token for token in tokenizer["added_tokens"] if token["content"] != "<|end|>"
        ]
        del tokenizer["model"]["vocab"]["<|end|>"]
        return tokenizer

    edit(folder / "tokenizer.json", remove)
    edit(
        folder / "tokenizer_config.json",
        lambda raw: raw | {"extra_special_tokens": raw["extra_special_tokens"][:-1]},
    )


def make_chat_token_ordinary(
    config: dict[str, Any], tensors: dict[str, Tensor], folder: Path
) -> None:
    """Make a chat token a token like any other."""

    def unmark(tokenizer: Any) -> Any:
        tokenizer["added_tokens"] = [
            token for token in tokenizer["added_tokens"] if token["content"] != "<|end|>"
        ]
        return tokenizer

    edit(folder / "tokenizer.json", unmark)
    edit(
        folder / "tokenizer_config.json",
        lambda raw: raw | {"extra_special_tokens": raw["extra_special_tokens"][:-1]},
    )


def remove_tokenizer(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    for path in [*folder.glob("tokenizer*"), *folder.glob("*.jinja")]:
        path.unlink()


def set_num_rows(num_rows: int) -> Change:
    """Return a change of the number of rows of embedding, head and config.json."""

    def resize(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        config["vocab_size"] = num_rows
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], tensors[name]])[:num_rows].contiguous()

    return resize


# These ids name the outputs of layers 2, 4 and 9; the target has 8 layers.
NESTED = {"eagle_config": {"use_aux_hidden_state": True, LAYERS: [1, 3, 8]}}
FAULTS: dict[str, tuple[str, Change, str, str]] = {
    # Faults of draft models
    "200 swapped ids": ("draft_model", swap_ids, "problem", "with 200 differences"),
    "a missing chat token": ("draft_model", remove_chat_token, "problem", "<|end|> is none"),
    "a chat token that is not special": (
        "draft_model",
        make_chat_token_ordinary,
        "problem",
        "<|end|>",
    ),
    "no tokenizer": (
        "draft_model",
        remove_tokenizer,
        "problem",
        "without the files of a tokenizer",
    ),
    "no tokenizer, of a class that makes an empty one": (
        "draft_model",
        lambda config, tensors, folder: (
            remove_tokenizer(config, tensors, folder),
            config.update(model_type="qwen3"),
        ),
        "problem",
        "without the files of a tokenizer",
    ),
    "too few rows": ("draft_model", set_num_rows(200), "problem", "no row for 60 tokens"),
    "a width that the weights do not have": (
        "draft_model",
        set_config(vocab_size=264),
        "problem",
        "of shape (260, 64)",
    ),
    "a shorter context": (
        "draft_model",
        set_config(max_position_embeddings=128),
        "warning",
        "is 128 tokens, the target's 256",
    ),
    "a rotary base of its own": ("draft_model", set_rope(5000.0, None), "fine", ""),
    "two rotary bases": (
        "draft_model",
        set_config(rope_theta=500.0),
        "problem",
        "rope_theta 500.0",
    ),
    "two rotary scalings": (
        "draft_model",
        set_config(rope_scaling={**SCALING, "factor": 2.0}),
        "problem",
        "factor 2.0",
    ),
    "another dtype": (
        "draft_model",
        set_config(dtype="float16"),
        "warning",
        "float16, the weights are float32",
    ),
    # Faults of heads
    "d2t points past the vocabulary": (
        "eagle3",
        change_tensor("d2t", lambda d2t: d2t + 240),
        "problem",
        "d2t",
    ),
    "d2t points before the vocabulary": (
        "eagle3",
        change_tensor("d2t", lambda d2t: d2t - 6),
        "problem",
        "d2t",
    ),
    "d2t does not ascend": (
        "eagle3",
        change_tensor("d2t", lambda d2t: d2t.flip(0)),
        "problem",
        "d2t",
    ),
    "d2t of another size": (
        "eagle3",
        change_tensor("d2t", lambda d2t: d2t[:-1]),
        "problem",
        "d2t of shape (24,)",
    ),
    "t2d marks other tokens": (
        "eagle3",
        change_tensor("t2d", lambda t2d: t2d.roll(1)),
        "problem",
        "d2t and t2d",
    ),
    "t2d of another size": (
        "eagle3",
        change_tensor("t2d", lambda t2d: t2d[:-1]),
        "problem",
        "t2d of shape (259,)",
    ),
    "another vocabulary": ("eagle3", set_config(vocab_size=264), "problem", "vocab_size 264"),
    "another width": (
        "eagle3",
        set_config(target_hidden_size=32),
        "problem",
        "target_hidden_size 32",
    ),
    "layers that the target lacks": ("eagle3", set_config(**NESTED), "problem", "[2, 4, 9]"),
    "another depth": ("eagle3", set_config(num_target_layers=9), "problem", "num_target_layers 9"),
    "a head's shorter context": (
        "eagle3",
        set_config(max_position_embeddings=128),
        "warning",
        "is 128 tokens, the target's 256",
    ),
    "a head's own rotary base": (
        "eagle3",
        set_rope(500.0, SCALING),
        "warning",
        "(rope_theta) is 500.0",
    ),
    "no rotary scaling": (
        "eagle3",
        set_rope(10000.0, None),
        "warning",
        "(rope_type) is default, the target's llama3",
    ),
    "no rotary scaling in the older spelling": (
        "eagle3",
        set_config(rope_scaling=None),
        "problem",
        "rope_type default in rope_theta",
    ),
    "another factor": (
        "eagle3",
        set_rope(10000.0, {**SCALING, "factor": 16.0}),
        "warning",
        "(factor) is 16.0, the target's 8.0",
    ),
    "another factor in the older spelling": (
        "eagle3",
        set_config(rope_scaling={**SCALING, "factor": 16.0}),
        "problem",
        "factor 8.0 in rope_parameters, and factor 16.0",
    ),
    "a head's two rotary bases": (
        "eagle3",
        set_config(rope_theta=500.0),
        "problem",
        "rope_theta 500.0",
    ),
    "a head's other dtype": (
        "eagle3",
        set_config(torch_dtype="float16"),
        "warning",
        "float16, the weights are bfloat16",
    ),
}


def change_draft(draft: Path, change: Change) -> None:
    config, tensors = (
        json.loads((draft / "config.json").read_text()),
        load_file(draft / "model.safetensors"),
    )
    change(config, tensors, draft)
    (draft / "config.json").write_text(json.dumps(config))
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("method", "change", "severity", "what"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(
    method: str, change: Change, severity: str, what: str, workspace: Path, tmp_path: Path
) -> None:
    shutil.copytree(workspace / method / "draft", tmp_path / "draft")
    change_draft(tmp_path / "draft", change)
    target = TargetFiles(str(workspace / "model"))
    if severity == "problem":
        with refused("draft", holds=what):
            check_draft(method, tmp_path / "draft", target, "draft")
        return
    findings = check_draft(method, tmp_path / "draft", target, "draft")
    expected = [] if severity == "fine" else ["warning"]
    assert [finding.severity for finding in findings] == expected
    assert all(what in finding.what for finding in findings)


# Refusals and warnings about config.json, tensors and tokenizer, for a model and for a head.
QUICK_FAULTS = (
    "200 swapped ids",
    "no tokenizer",
    "a width that the weights do not have",
    "a shorter context",
    "d2t points past the vocabulary",
    "layers that the target lacks",
)


@pytest.mark.parametrize(
    ("method", "change", "severity", "what"),
    [
        # six commands each
        pytest.param(*fault, id=name, marks=[] if name in QUICK_FAULTS else [pytest.mark.long])
        for name, fault in FAULTS.items()
    ],
)
def test_six_commands_agree_about_a_fault(
    method: str,
    change: Change,
    severity: str,
    what: str,
    workspace: Path,
    hub: Hub,
    checks_alone: None,
    tmp_path: Path,
) -> None:
    shutil.copytree(workspace / method, tmp_path / method)
    change_draft(tmp_path / method / "draft", change)
    answers = run_commands(method, tmp_path / method, workspace, hub, tmp_path / "out")
    assert {command: answer.severity for command, answer in answers.items()} == dict.fromkeys(
        answers, severity
    )
    assert {command: what in answer.output for command, answer in answers.items()} == dict.fromkeys(
        answers, True
    )
    if severity == "problem":
        assert {command: answers[command].key for command in REFUSED_BY} == REFUSED_BY
        assert {answers[command].code for command in ("doctor", "publish")} == {1}
        assert not (tmp_path / "out" / "vllm").exists()
    else:
        assert {answers[command].code for command in ("doctor", "export", "acquire")} == {0}
        # Each command gives the warning once, and SERVE.md, which ships with the draft, has it.
        miscounting_commands = [
            command
            for command, answer in answers.items()
            if what and answer.output.count(what) != 1
        ]
        assert miscounting_commands == []
        assert what in (tmp_path / "out" / "vllm" / "SERVE.md").read_text()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "gguf"])
@pytest.mark.parametrize("fault", ["200 swapped ids", "a missing chat token", "no tokenizer"])
def test_no_engine_is_given_a_draft_with_another_tokenizer(
    engine: str, fault: str, workspace: Path, tmp_path: Path
) -> None:
    shutil.copytree(workspace / "draft_model" / "draft", tmp_path / "draft")
    change_draft(tmp_path / "draft", FAULTS[fault][1])
    keys = [
        f"draft={tmp_path / 'draft'}",
        f"target={workspace / 'model'}",
        f"engine={engine}",
        f"output_dir={tmp_path / 'out'}",
    ]
    done = specdistill("export", *keys)
    assert (done.returncode, refused_key(done.stderr)) == (2, "draft") and not (
        tmp_path / "out"
    ).exists()


def test_commands_warn_of_other_padding_and_engines_refuse_it(
    workspace: Path, hub: Hub, checks_alone: None, tmp_path: Path
) -> None:
    """The tokens are the same, so the draft decodes here, and training resizes its tables."""
    shutil.copytree(workspace / "draft_model", tmp_path / "run")
    change_draft(tmp_path / "run" / "draft", set_num_rows(264))
    answers = run_commands("draft_model", tmp_path / "run", workspace, hub, tmp_path / "out")
    assert answers.pop("export").key == "engine"
    assert {answer.severity for answer in answers.values()} == {"warning"}
    assert all("is 264 wide, the target's 260" in answer.output for answer in answers.values())


# Drafts of another tokenizer


def test_a_translated_draft_decodes_here_and_is_refused_by_engines(
    workspace: Path, checks_alone: None, tmp_path: Path
) -> None:
    shutil.copytree(workspace / "draft_model" / "draft", tmp_path / "draft")
    change_draft(tmp_path / "draft", swap_ids)
    keys = [f"target={workspace / 'model'}", f"draft={tmp_path / 'draft'}"]
    translated = "heterogeneous_vocab=true"
    evaluated = specdistill(
        "eval",
        *keys,
        "method=draft_model",
        f"suite={workspace / 'suite.jsonl'}",
        f"eval.{translated}",
    )
    assert refused_key(evaluated.stderr) == "stopped"  # after the check
    assert specdistill("doctor", *keys, "decode=false", translated).returncode == 0
    assert specdistill("acquire", *keys, "method=draft_model", translated).returncode == 0
    in_engine = specdistill("doctor", *keys, "decode=false", translated, "engine=vllm")
    assert in_engine.returncode == 1 and "(heterogeneous_vocab)" in " ".join(
        in_engine.stdout.split()
    )
    exported = specdistill("export", *keys, "engine=vllm", f"output_dir={tmp_path / 'out'}")
    assert refused_key(exported.stderr) == "draft" and "heterogeneous_vocab" not in exported.stderr


# Sound drafts


@pytest.mark.parametrize("method", METHODS)
def test_a_sound_draft_of_each_method_passes_in_silence(
    method: str, workspace: Path, tmp_path: Path
) -> None:
    keys = [f"draft={workspace / method / 'draft'}", f"target={workspace / 'model'}"]
    examined = specdistill("doctor", *keys, "decode=false")
    assert examined.returncode == 0 and examined.stdout.splitlines()[-1] == "no problem found"
    acquired = specdistill("acquire", f"method={method}", *keys)
    assert acquired.returncode == 0 and "warning" not in acquired.stderr
    exported = specdistill("export", *keys, "engine=vllm", f"output_dir={tmp_path / 'out'}")
    if method in ("early_exit", "mtp"):  # no engine loads an exit, or an MTP layer of a Llama
        assert refused_key(exported.stderr) == "engine"
    else:
        assert exported.returncode == 0 and "warning" not in exported.stderr
        assert (
            f"Checked against {workspace / 'model'}: no warnings."
            in (tmp_path / "out" / "SERVE.md").read_text()
        )


@pytest.mark.parametrize(
    "method",
    # six commands, one of which trains
    ["draft_model", pytest.param("eagle3", marks=pytest.mark.long)],
)
def test_six_commands_are_silent_about_a_sound_draft(
    method: str, workspace: Path, hub: Hub, checks_alone: None, tmp_path: Path
) -> None:
    answers = run_commands(method, workspace / method, workspace, hub, tmp_path / "out")
    assert {command: answer.severity for command, answer in answers.items()} == dict.fromkeys(
        answers, "fine"
    )


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 10000.0, "rope_scaling": SCALING, "rope_parameters": None},
        {
            "rope_parameters": None,
            "rope_theta": 10000,
            "rope_scaling": {**SCALING, "type": "llama3", "factor": 8},
        },
    ],
)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_the_target_may_spell_its_rotary_embedding_otherwise(
    method: str, spelling: dict[str, Any], workspace: Path, tmp_path: Path
) -> None:
    shutil.copytree(workspace / "model", tmp_path / "model")
    edit(tmp_path / "model" / "config.json", lambda config: config | spelling)
    assert (
        check_draft(
            method, workspace / method / "draft", TargetFiles(str(tmp_path / "model")), "draft"
        )
        == []
    )


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_maps_of_block_drafters_are_checked(method: str, workspace: Path, tmp_path: Path) -> None:
    """Files of block drafters may hold a t2d, which their readers ignore."""
    target = FrozenTarget.load(str(workspace / "model"))
    marks = torch.isin(torch.arange(260), PRUNED)
    pruned = build_block(method, target, draft_vocabulary=PRUNED)
    for name, t2d, is_right in (
        ("right", marks, True),
        ("other", marks.roll(1), False),
        ("short", marks[:-1], False),
    ):
        save_draft(load_method(method), target, pruned, tmp_path / name)
        change_draft(
            tmp_path / name,
            lambda config, tensors, folder, t2d=t2d: tensors.update(t2d=t2d.clone()),
        )
        if is_right:
            assert check_draft(method, tmp_path / name, target.files, "draft") == []
        else:
            with refused("draft", holds="d2t and t2d name different tokens"):
                check_draft(method, tmp_path / name, target.files, "draft")


def set_layers_config(method: str, keys: dict[str, Any]) -> Change:
    """Return a change of keys in the part of config.json that has the sizes of the layers."""
    return lambda config, tensors, folder: (
        config["text_config"] if method == "mtp" else config
    ).update(keys)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_rotary_scaling_is_compared_for_every_head_that_reads_target_states(
    method: str, workspace: Path, tmp_path: Path
) -> None:
    target = TargetFiles(str(workspace / "model"))
    removed = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_scaling": None,
        "rope_theta": 1e4,
    }
    factor = removed | {
        "rope_parameters": {**LLAMA3, "factor": 2.0},
        "rope_scaling": {**SCALING, "factor": 2.0},
    }
    for name, keys, what in (
        ("removed", removed, "(rope_type) is default"),
        ("factor", factor, "(factor) is 2.0"),
    ):
        shutil.copytree(workspace / method / "draft", tmp_path / name)
        change_draft(tmp_path / name, set_layers_config(method, keys))
        (finding,) = check_draft(method, tmp_path / name, target, "draft")
        assert finding.severity == "warning" and what in finding.what
    shutil.copytree(workspace / method / "draft", tmp_path / "both")
    change_draft(
        tmp_path / "both",
        set_layers_config(method, {"rope_scaling": factor["rope_scaling"], "rope_theta": 1e4}),
    )
    with refused("draft", holds="factor 8.0 in rope_parameters, and factor 2.0"):
        check_draft(method, tmp_path / "both", target, "draft")


def test_a_head_may_have_the_rotary_embedding_of_any_kind_of_layer(
    workspace: Path, tmp_path: Path
) -> None:
    shutil.copytree(workspace / "model", tmp_path / "model")
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": dict(LLAMA3),
    }
    edit(tmp_path / "model" / "config.json", lambda config: config | {"rope_parameters": kinds})
    target = TargetFiles(str(tmp_path / "model"))
    assert check_draft("eagle3", workspace / "eagle3" / "draft", target, "draft") == []
    edit(
        tmp_path / "model" / "config.json",
        lambda config: config | {"rope_parameters": {"full_attention": kinds["full_attention"]}},
    )
    findings = check_draft(
        "eagle3", workspace / "eagle3" / "draft", TargetFiles(str(tmp_path / "model")), "draft"
    )
    # one for the base and one for the kind
    assert {finding.severity for finding in findings} == {"warning"} and len(findings) == 2


def test_tokens_that_no_text_holds_need_no_row(workspace: Path, tmp_path: Path) -> None:
    """An example is the image token in a tokenizer that a family's text models share."""
    shutil.copytree(workspace / "draft_model" / "draft", tmp_path / "draft")
    tokenizer = tiny_tokenizer(TEMPLATE)
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "draft")
    assert check_draft("draft_model", tmp_path / "draft", None, "draft") == []
    tokenizer.chat_template = f"{TEMPLATE}<|image|>"
    tokenizer.save_pretrained(tmp_path / "draft")
    with refused("draft", holds="no row for 1 tokens, such as '<|image|>'"):
        check_draft("draft_model", tmp_path / "draft", None, "draft")


def test_an_export_without_a_target_says_that_it_was_not_checked(
    workspace: Path, tmp_path: Path
) -> None:
    keys = [
        f"draft={workspace / 'draft_model' / 'draft'}",
        "engine=sglang",
        f"output_dir={tmp_path / 'out'}",
    ]
    done = specdistill("export", *keys)
    assert done.returncode == 0 and "not checked against its target" in done.stderr
    assert "was not checked against its target" in (tmp_path / "out" / "SERVE.md").read_text()
