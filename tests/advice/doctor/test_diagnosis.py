"""Heads with one thing wrong that no file tells: decoding notices, and the repair that helps names
the cause."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdistill.advice.doctor import diagnosis
from specdistill.advice.doctor.diagnosis import (
    Diagnosis,
    SimulatedAcceptance,
    _fit,
    diagnose,
    read_recorded_length,
)
from specdistill.advice.doctor.options import DoctorOptions
from specdistill.cli.main import main
from specdistill.data.rows.row_set import RowTarget
from specdistill.decoding.decoder import Decoder
from specdistill.methods.models.checkpoint import save_draft_model
from specdistill.methods.models.create import create_draft_model
from specdistill.recipe.load import validate_recipe
from specdistill.targets.frozen import FrozenTarget
from tests.data.produce.row_sets import config_for, opened
from tests.memorised import LENGTH, NUM_TOKENS, PROMPT, memorise
from tests.tiny import tiny_target_model, tiny_tokenizer

STEPS = {"mtp": 300, "dspark": 400}
IDS = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `prompts.jsonl`."""
    path = tmp_path_factory.mktemp("memorised")
    model = tiny_target_model()
    # its completions have no end
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(path / "target")
    tiny_tokenizer().save_pretrained(path / "target")
    (path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    return path


@pytest.fixture(scope="module")
def run_of(folder: Path) -> Callable[[str], Path]:
    """A method's run, which learned what the target generates for the prompt; trained when it is
    first asked for."""

    def learned(method: str) -> Path:
        target, shape = FrozenTarget.load(str(folder / "target")), {}
        if method == "eagle3":
            prompt = target.tokenizer(PROMPT)["input_ids"]
            written = Decoder(target).generate(prompt, max_new_tokens=NUM_TOKENS).token_ids
            # Side by side, as many of the tokens of any real vocabulary are.
            side_by_side = sorted(
                {near for token in written for near in (token, token + 1) if 0 < near < 259}
            )
            shape = {"draft_vocabulary": torch.tensor(side_by_side)}
        memorise(method, target, folder / method, num_steps=STEPS.get(method, 200), **shape)
        return folder / method

    return cache(learned)


def tried(draft: Path, target: Path, **prompts: Any) -> Diagnosis:
    return diagnose(
        validate_recipe(
            DoctorOptions, {"draft": str(draft), "target": {"model": str(target)}, "eval": prompts}
        )
    )


def diagnosed(folder: Path, run: Path) -> Diagnosis:
    return tried(
        run / "draft", folder / "target", suite=str(folder / "prompts.jsonl"), num_prompts=1
    )


@pytest.fixture
def fewer_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a draft and its repairs on half of the parts, where the difference is large."""
    monkeypatch.setattr(diagnosis, "NUM_PARTS", 4)


def mutated(learned: Path, change: Change, run: Path) -> Path:
    """A copy of a run whose draft has been changed."""
    shutil.copytree(learned, run)
    config_path, weights = run / "draft" / "config.json", run / "draft" / "model.safetensors"
    config, tensors = json.loads(config_path.read_text()), load_file(weights)
    change(config, tensors)
    config_path.write_text(json.dumps(config))
    save_file(tensors, weights)
    return run


def says(**keys: Any) -> Change:
    return lambda config, tensors: config.update(keys)


def swaps(one: str, other: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def swaps_halves(*names: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            first, second = tensors[name].chunk(2, dim=1)
            tensors[name] = torch.cat((second, first), dim=1)

    return change


def orders_fc(*order: int) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        blocks = tensors["fc.weight"].chunk(3, dim=1)
        tensors["fc.weight"] = torch.cat([blocks[index] for index in order], dim=1)

    return change


def transposes(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].T.contiguous()

    return change


def shifts_d2t(by: int) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = tensors["d2t"] + by
        del tensors["t2d"]  # else the files tell

    return change


def reads(*layers: int) -> Change:
    return says(eagle_config={"use_aux_hidden_state": True, IDS: [layer - 1 for layer in layers]})


NORMS = {
    name: f"midlayer.{name}.weight"
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
}
SMALLER_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
THETA = {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def says_of_blocks(**keys: Any) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config |= keys
        config["dflash_config"] |= keys

    return change


LONG = [  # a grid, and drafts of three more methods
    ("eagle3", says(norm_output=True), "norm_output is True"),
    ("eagle3", says(norm_before_residual=True), "norm_before_residual is True"),
    ("eagle3", reads(0, 1, 2), "after layers [0, 1, 2], but was trained on [1, 2, 3]"),
    ("eagle3", reads(2, 3, 4), "after layers [2, 3, 4], but was trained on [1, 2, 3]"),
    (
        "eagle3",
        swaps(NORMS["hidden_norm"], NORMS["input_layernorm"]),
        "input_layernorm and hidden_norm",
    ),
    (
        "eagle3",
        swaps(NORMS["hidden_norm"], NORMS["post_attention_layernorm"]),
        "hidden_norm and post_attention_layernorm",
    ),
    ("eagle3", orders_fc(2, 1, 0), "[3, 2, 1]"),
    (
        "eagle3",
        swaps_halves(*(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")),
        "halves",
    ),
    (
        "eagle3",
        swaps("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
        "layers.0.mlp.gate_proj and up_proj",
    ),
    (
        "eagle3",
        transposes("midlayer.self_attn.o_proj.weight"),
        "layers.0.self_attn.o_proj.weight is transposed",
    ),
    ("eagle3", says(**SMALLER_HEADS), "num_attention_heads 4"),
    ("eagle3", says(**THETA), "(rope_theta) is 500"),
    ("eagle3", shifts_d2t(-1), "d2t is too small"),
    ("eagle", swaps_halves("fc.weight"), "halves"),
    ("mtp", swaps_halves("mtp.fc.weight"), "halves"),
    ("dspark", says_of_blocks(target_layer_ids=[2]), "after layers [3], but was trained on"),
    ("dspark", says_of_blocks(is_causal=True, causal=True), "is_causal is True"),
    ("dspark", says_of_blocks(sample_from_anchor=False), "sample_from_anchor is False"),
    ("mtp", swaps("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"), "norms"),
]


@pytest.mark.usefixtures("fewer_parts")
@pytest.mark.parametrize(
    ("method", "change", "cause"),
    [
        ("eagle3", shifts_d2t(1), "d2t is too large"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_the_cause_of_low_acceptance_is_named(
    method: str,
    change: Change,
    cause: str,
    folder: Path,
    run_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    made = diagnosed(folder, mutated(run_of(method), change, tmp_path / "run"))
    *_, why = (finding.what for finding in made.findings if finding.severity == "problem")
    assert not made.is_sound and cause in why, made.findings


@pytest.mark.parametrize(
    "method",
    [
        "eagle3",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("eagle", "mtp", "dspark")),
    ],
)
def test_a_good_draft_has_no_problem(
    method: str, folder: Path, run_of: Callable[[str], Path]
) -> None:
    made = diagnosed(folder, run_of(method))
    assert made.is_sound and made.acceptance is not None and made.acceptance.length > 4.25, (
        made.findings
    )
    assert made.recorded == SimulatedAcceptance(4, LENGTH)


@pytest.mark.long  # two diagnoses, of three seconds
def test_a_draft_without_a_history_is_still_tried(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    run = mutated(run_of("eagle3"), reads(0, 1, 2), tmp_path / "run")
    shutil.rmtree(run / "run")
    assert "but was trained on [1, 2, 3]" in diagnosed(folder, run).findings[0].what
    shutil.copytree(run_of("eagle3") / "draft", tmp_path / "good" / "draft")
    assert [finding.severity for finding in diagnosed(folder, tmp_path / "good").findings] == [
        "warning"
    ]


def in_a_run(
    learned: Path, run: Path, *, suite: str | None, rows: str | None = None, **data: Any
) -> Path:
    """A copy of a run with a recipe, and with the draft as an export next to it, whose folder is
    returned. rows: their fingerprint."""
    shutil.copytree(learned, run)
    recipe = {"method": "eagle3", "target": {"model": "pico"}, "train": {"output_dir": str(run)}}
    recipe, record = {**recipe, "eval": {"suite": suite}, "data": data}, {"data_fingerprint": rows}
    for name, content in {"recipe.yaml": recipe, "provenance.json": record}.items():
        (run / "run" / name).write_text(json.dumps(content))
    return shutil.copytree(run / "draft", run / "vllm")


@pytest.mark.usefixtures("fewer_parts")
@pytest.mark.parametrize(
    ("stated", "is_questioned"),
    # a diagnosis each
    [(True, False), pytest.param(False, True, marks=pytest.mark.long)],
)
def test_what_the_recipe_of_the_run_records_is_not_questioned(
    stated: bool, is_questioned: bool, folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The draft decodes as its recipe says it was trained, however much better another setting
    looks."""
    run = mutated(run_of("eagle3"), says(norm_output=True), tmp_path / "run")
    recipe = {
        "method": "eagle3",
        "target": {"model": "pico"},
        "train": {"output_dir": str(run)},
        "eval": {"suite": str(folder / "prompts.jsonl")},
        "draft": {"norm_output": stated},
    }
    (run / "run" / "recipe.yaml").write_text(json.dumps(recipe))
    (run / "run" / "provenance.json").write_text('{"data_fingerprint": null}')
    said = "".join(finding.what for finding in diagnosed(folder, run).findings)
    assert ("norm_output is True" in said) == is_questioned, said


@pytest.mark.long  # three diagnoses, of four seconds
def test_a_draft_of_a_run_is_tried_on_what_it_is_for(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """An export, too: on the suite of the run's recipe, else on rows that its training held out,
    else on plain ones, which it says."""
    target, learned = folder / "target", run_of("eagle3")
    exported = in_a_run(learned, tmp_path / "suite", suite=str(folder / "prompts.jsonl"))
    made = tried(exported, target, num_prompts=2)
    assert (
        made.prompts == f"1 of suite {folder / 'prompts.jsonl'}, the first: {PROMPT!r}"
        and made.is_sound
    )
    assert made.recorded == SimulatedAcceptance(4, LENGTH)

    config = config_for(
        tmp_path,
        [{"text": f"{PROMPT} {number:02d} once upon a time"} for number in range(40)],
        max_length=64,
    )
    rows, _ = opened(config, RowTarget.from_target(FrozenTarget.load(str(target))))
    exported = in_a_run(
        learned, tmp_path / "rows", suite=None, rows=rows._fingerprint, cache_dir=config.cache_dir
    )
    made = tried(exported, target, num_prompts=2)
    assert made.prompts is not None and made.prompts.startswith(
        f"2 of the held-out rows of {tmp_path / 'rows'}, the first: '{PROMPT}"
    )
    assert made.recorded == SimulatedAcceptance(4, LENGTH)

    shutil.rmtree(config.cache_dir)
    made = tried(exported, target, num_prompts=2)
    assert (
        made.prompts is not None
        and made.prompts.startswith("2 of suite pico-short, the first: ")
        and made.recorded is None
    )
    assert "lines of Python" in "".join(
        finding.what for finding in made.findings if finding.severity == "warning"
    )


@pytest.mark.long  # tries every repair, for three seconds
def test_what_no_repair_helps_is_given_likely_causes(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    def noise(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() == 2:
                # Small, so that every distribution is near the uniform one whatever is changed:
                # large ones differ by luck.
                tensors[name] = 0.02 * torch.randn(
                    tensor.shape, generator=torch.Generator().manual_seed(1)
                )

    made = diagnosed(folder, mutated(run_of("eagle3"), noise, tmp_path / "run"))
    assert [finding.severity for finding in made.findings] == ["problem", "note"], made.findings
    assert "another target" in made.findings[1].what


def test_a_small_draft(folder: Path, tmp_path: Path) -> None:
    target = FrozenTarget.load(str(folder / "target"))
    save_draft_model(
        create_draft_model(target, init="layers", num_layers=4),
        target.tokenizer,
        tmp_path / "run" / "draft",
    )
    made = diagnosed(folder, tmp_path / "run")
    assert made.acceptance is not None and made.acceptance.length == 5 and made.is_sound


def test_a_fit_is_of_the_completion_alone() -> None:
    class Objective:
        def eval(self) -> "Objective":
            return self

        def prepare(self, batch: Any, number: None) -> Any:
            return batch

        def read_target(self, target: Any, inputs: dict[str, Any]) -> dict[str, Any]:
            assert inputs["loss_positions"].tolist() == [3, 4]
            return {}

        def __call__(self, **given: Any) -> tuple[None, Any]:
            return None, SimpleNamespace(
                loss=[2.0, 6.0], loss_tokens=[1, 2], chain_correct=[3.0, 1.0], chains=[4, 4]
            )

    target, completion = (
        SimpleNamespace(device="cpu"),
        SimpleNamespace(prompt_ids=[5, 6, 7], token_ids=[8, 9]),
    )
    fit = _fit(Objective(), target, completion, 0, 1)  # type: ignore[arg-type]
    assert fit == (2.5, 2.0)


def test_the_best_evaluation_is_what_was_recorded(tmp_path: Path) -> None:
    assert read_recorded_length(tmp_path / "draft") is None
    log = [{"step": 1, "loss": 2.0}]
    log += [
        {
            "step": step,
            "eval_acceptance_length": length,
            "eval_acceptance_length_sampled": 2.0,
            "eval_acceptance_1": 0.5,
        }
        for step, length in ((2, 3.5), (4, 3.0))
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.json").write_text(
        json.dumps({"seconds": None, "steps": 4, "log": log})
    )
    assert read_recorded_length(tmp_path / "draft") == SimulatedAcceptance(1, 3.5)


@pytest.mark.long  # two diagnoses, of three seconds
def test_the_verb(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"target={folder / 'target'}", f"suite={folder / 'prompts.jsonl'}", "engine=sglang"]
    assert main(["doctor", f"draft={run_of('eagle3') / 'draft'}", *common]) == 0
    output = capsys.readouterr().out
    assert all(
        fact in output
        for fact in (
            "eagle3",
            "15 tensors",
            "float32",
            "1 layer of 64",
            "1, 2, 3",
            "4 draft tokens",
        )
    )
    assert f"prompts: 1 of suite {folder / 'prompts.jsonl'}, the first: {PROMPT!r}" in output
    wrong = mutated(run_of("eagle3"), says(norm_output=True), tmp_path / "run")
    assert main(["doctor", f"draft={wrong / 'draft'}", *common]) == 1
    assert "2 problems" in capsys.readouterr().out


@pytest.mark.long  # three diagnoses, of four seconds
def test_a_lookup_in_front(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        f"draft={run_of('eagle3') / 'draft'}",
        f"target={folder / 'target'}",
        f"suite={folder / 'prompts.jsonl'}",
    ]
    lookup = "eval.lookup_first={min: 2, max: 2, draft_tokens: 1}"
    main(["doctor", *common, lookup, "engine=vllm"])
    printed = capsys.readouterr().out
    # One token, always accepted: 95 tokens after the prefill's in 48 rounds, without a lookup in
    # 20.
    behind = "with the lookup in front: acceptance length 1.98 (up to"
    assert (
        "acceptance length 4.75 with 4" in printed
        and behind in printed
        and "cannot start" not in printed
    )
    assert main(["doctor", *common, lookup, "engine=sglang"]) == 1
    assert (
        "specdistill cannot start SGLang with this lookup in front of the draft"
        in capsys.readouterr().out
    )
    assert main(["doctor", *common, "eval.lookup_first={min: 6}"]) == 2
    assert (
        "eval.lookup_first.min: got 6, expected at most eval.lookup_first.max, which is 5"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("theta", ["x", [1.0]])
def test_a_rotary_base_of_the_target_that_is_no_number_is_refused(
    theta: Any,
    folder: Path,
    run_of: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = shutil.copytree(folder / "target", tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "default", "rope_theta": theta}})
    )
    assert (
        main(["doctor", f"draft={run_of('eagle3') / 'draft'}", f"target={target}", "decode=false"])
        == 2
    )
    assert f"target: got a config.json with rope_theta {theta!r}" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_target_is_refused(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["def"])
    tokenizer.save_pretrained(tmp_path / "target")
    draft, suite = run_of("eagle3") / "draft", folder / "prompts.jsonl"
    assert (
        main(["doctor", f"draft={draft}", f"target={tmp_path / 'target'}", f"suite={suite}"]) == 2
    )
    assert "target: got a tokenizer whose token 'def' in prompt 1" in capsys.readouterr().err
