"""Each head has one fault that its files do not show.

Decoding notices the fault, and the repair that helps names the cause.
"""

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
    """A folder with `target` and `prompts.jsonl`."""
    path = tmp_path_factory.mktemp("memorised")
    model = tiny_target_model()
    # Completions must not end early.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(path / "target")
    tiny_tokenizer().save_pretrained(path / "target")
    (path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    return path


@pytest.fixture(scope="module")
def run_of(folder: Path) -> Callable[[str], Path]:
    """A function from a method to its run, whose draft learned the completion of the prompt.

    A run is trained when a test first asks for it.
    """

    def train_run(method: str) -> Path:
        target, shape = FrozenTarget.load(str(folder / "target")), {}
        if method == "eagle3":
            prompt = target.tokenizer(PROMPT)["input_ids"]
            written = Decoder(target).generate(prompt, max_new_tokens=NUM_TOKENS).token_ids
            # Neighbouring ids, since many tokens of a real draft vocabulary are neighbours.
            side_by_side = sorted(
                {near for token in written for near in (token, token + 1) if 0 < near < 259}
            )
            shape = {"draft_vocabulary": torch.tensor(side_by_side)}
        memorise(method, target, folder / method, num_steps=STEPS.get(method, 200), **shape)
        return folder / method

    return cache(train_run)


def run_doctor(draft: Path, target: Path, **prompts: Any) -> Diagnosis:
    return diagnose(
        validate_recipe(
            DoctorOptions, {"draft": str(draft), "target": {"model": str(target)}, "eval": prompts}
        )
    )


def diagnose_run(folder: Path, run: Path) -> Diagnosis:
    return run_doctor(
        run / "draft", folder / "target", suite=str(folder / "prompts.jsonl"), num_prompts=1
    )


@pytest.fixture
def fewer_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagnosis compares a draft and its repairs on half of the parts.

    That is enough where the difference is large.
    """
    monkeypatch.setattr(diagnosis, "NUM_PARTS", 4)


def copy_mutated_run(source: Path, change: Change, run: Path) -> Path:
    """Copy a run, change its draft, and return the copy."""
    shutil.copytree(source, run)
    config_path, weights = run / "draft" / "config.json", run / "draft" / "model.safetensors"
    config, tensors = json.loads(config_path.read_text()), load_file(weights)
    change(config, tensors)
    config_path.write_text(json.dumps(config))
    save_file(tensors, weights)
    return run


def set_config_keys(**keys: Any) -> Change:
    return lambda config, tensors: config.update(keys)


def swap_tensors(one: str, other: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def swap_halves(*names: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            first, second = tensors[name].chunk(2, dim=1)
            tensors[name] = torch.cat((second, first), dim=1)

    return change


def reorder_fc(*order: int) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        blocks = tensors["fc.weight"].chunk(3, dim=1)
        tensors["fc.weight"] = torch.cat([blocks[index] for index in order], dim=1)

    return change


def transpose_tensor(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].T.contiguous()

    return change


def shift_d2t(by: int) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = tensors["d2t"] + by
        del tensors["t2d"]  # with t2d, the files would show the shift

    return change


def set_aux_layers(*layers: int) -> Change:
    return set_config_keys(
        eagle_config={"use_aux_hidden_state": True, IDS: [layer - 1 for layer in layers]}
    )


NORMS = {
    name: f"midlayer.{name}.weight"
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
}
SMALLER_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
THETA = {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def set_block_keys(**keys: Any) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config |= keys
        config["dflash_config"] |= keys

    return change


LONG = [  # many cases, and drafts of three more methods
    ("eagle3", set_config_keys(norm_output=True), "norm_output is True"),
    ("eagle3", set_config_keys(norm_before_residual=True), "norm_before_residual is True"),
    ("eagle3", set_aux_layers(0, 1, 2), "after layers [0, 1, 2], but was trained on [1, 2, 3]"),
    ("eagle3", set_aux_layers(2, 3, 4), "after layers [2, 3, 4], but was trained on [1, 2, 3]"),
    (
        "eagle3",
        swap_tensors(NORMS["hidden_norm"], NORMS["input_layernorm"]),
        "input_layernorm and hidden_norm",
    ),
    (
        "eagle3",
        swap_tensors(NORMS["hidden_norm"], NORMS["post_attention_layernorm"]),
        "hidden_norm and post_attention_layernorm",
    ),
    ("eagle3", reorder_fc(2, 1, 0), "[3, 2, 1]"),
    (
        "eagle3",
        swap_halves(*(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")),
        "halves",
    ),
    (
        "eagle3",
        swap_tensors("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
        "layers.0.mlp.gate_proj and up_proj",
    ),
    (
        "eagle3",
        transpose_tensor("midlayer.self_attn.o_proj.weight"),
        "layers.0.self_attn.o_proj.weight is transposed",
    ),
    ("eagle3", set_config_keys(**SMALLER_HEADS), "num_attention_heads 4"),
    ("eagle3", set_config_keys(**THETA), "(rope_theta) is 500"),
    ("eagle3", shift_d2t(-1), "d2t is too small"),
    ("eagle", swap_halves("fc.weight"), "halves"),
    ("mtp", swap_halves("mtp.fc.weight"), "halves"),
    ("dspark", set_block_keys(target_layer_ids=[2]), "after layers [3], but was trained on"),
    ("dspark", set_block_keys(is_causal=True, causal=True), "is_causal is True"),
    ("dspark", set_block_keys(sample_from_anchor=False), "sample_from_anchor is False"),
    (
        "mtp",
        swap_tensors("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
        "norms",
    ),
]


@pytest.mark.usefixtures("fewer_parts")
@pytest.mark.parametrize(
    ("method", "change", "cause"),
    [
        ("eagle3", shift_d2t(1), "d2t is too large"),
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
    result = diagnose_run(folder, copy_mutated_run(run_of(method), change, tmp_path / "run"))
    *_, why = (finding.what for finding in result.findings if finding.severity == "problem")
    assert not result.is_sound and cause in why, result.findings


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
    result = diagnose_run(folder, run_of(method))
    assert result.is_sound and result.acceptance is not None and result.acceptance.length > 4.25, (
        result.findings
    )
    assert result.recorded == SimulatedAcceptance(4, LENGTH)


@pytest.mark.long  # two diagnoses of three seconds each
def test_a_draft_without_a_history_is_still_diagnosed(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    run = copy_mutated_run(run_of("eagle3"), set_aux_layers(0, 1, 2), tmp_path / "run")
    shutil.rmtree(run / "run")
    assert "but was trained on [1, 2, 3]" in diagnose_run(folder, run).findings[0].what
    shutil.copytree(run_of("eagle3") / "draft", tmp_path / "good" / "draft")
    assert [finding.severity for finding in diagnose_run(folder, tmp_path / "good").findings] == [
        "warning"
    ]


def copy_run_with_recipe(
    source: Path, run: Path, *, suite: str | None, rows: str | None = None, **data: Any
) -> Path:
    """Copy a run, add a recipe and an export of its draft, and return the folder of the export.

    rows: The fingerprint of the rows that it was trained on.
    """
    shutil.copytree(source, run)
    recipe = {"method": "eagle3", "target": {"model": "pico"}, "train": {"output_dir": str(run)}}
    recipe, record = {**recipe, "eval": {"suite": suite}, "data": data}, {"data_fingerprint": rows}
    for name, content in {"recipe.yaml": recipe, "provenance.json": record}.items():
        (run / "run" / name).write_text(json.dumps(content))
    return shutil.copytree(run / "draft", run / "vllm")


@pytest.mark.usefixtures("fewer_parts")
@pytest.mark.parametrize(
    ("stated", "is_questioned"),
    # Each case takes a diagnosis.
    [(True, False), pytest.param(False, True, marks=pytest.mark.long)],
)
def test_a_setting_that_the_recipe_records_is_not_questioned(
    stated: bool, is_questioned: bool, folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The recipe says how the draft was trained, so a setting that looks better is no cause."""
    run = copy_mutated_run(run_of("eagle3"), set_config_keys(norm_output=True), tmp_path / "run")
    recipe = {
        "method": "eagle3",
        "target": {"model": "pico"},
        "train": {"output_dir": str(run)},
        "eval": {"suite": str(folder / "prompts.jsonl")},
        "draft": {"norm_output": stated},
    }
    (run / "run" / "recipe.yaml").write_text(json.dumps(recipe))
    (run / "run" / "provenance.json").write_text('{"data_fingerprint": null}')
    findings = "".join(finding.what for finding in diagnose_run(folder, run).findings)
    assert ("norm_output is True" in findings) == is_questioned, findings


@pytest.mark.long  # three diagnoses of four seconds each
def test_a_draft_is_diagnosed_on_the_prompts_of_its_run(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """An export, too, is diagnosed on the suite of its run's recipe, else on held-out rows.

    Without both, it is diagnosed on a suite of Python, and a warning says so.
    """
    target, learned = folder / "target", run_of("eagle3")
    exported = copy_run_with_recipe(
        learned, tmp_path / "suite", suite=str(folder / "prompts.jsonl")
    )
    result = run_doctor(exported, target, num_prompts=2)
    assert (
        result.prompts == f"1 of suite {folder / 'prompts.jsonl'}, the first: {PROMPT!r}"
        and result.is_sound
    )
    assert result.recorded == SimulatedAcceptance(4, LENGTH)

    config = config_for(
        tmp_path,
        [{"text": f"{PROMPT} {number:02d} once upon a time"} for number in range(40)],
        max_length=64,
    )
    rows, _ = opened(config, RowTarget.from_target(FrozenTarget.load(str(target))))
    exported = copy_run_with_recipe(
        learned, tmp_path / "rows", suite=None, rows=rows._fingerprint, cache_dir=config.cache_dir
    )
    result = run_doctor(exported, target, num_prompts=2)
    assert result.prompts is not None and result.prompts.startswith(
        f"2 of the held-out rows of {tmp_path / 'rows'}, the first: '{PROMPT}"
    )
    assert result.recorded == SimulatedAcceptance(4, LENGTH)

    shutil.rmtree(config.cache_dir)
    result = run_doctor(exported, target, num_prompts=2)
    assert (
        result.prompts is not None
        and result.prompts.startswith("2 of suite pico-short, the first: ")
        and result.recorded is None
    )
    assert "lines of Python" in "".join(
        finding.what for finding in result.findings if finding.severity == "warning"
    )


@pytest.mark.long  # tries every repair, which takes three seconds
def test_a_draft_that_no_repair_helps_gets_likely_causes(
    folder: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    def replace_with_noise(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() == 2:
                # Small weights keep every distribution near the uniform one, whatever a repair
                # changes; with large weights some repair would help by chance.
                tensors[name] = 0.02 * torch.randn(
                    tensor.shape, generator=torch.Generator().manual_seed(1)
                )

    result = diagnose_run(
        folder, copy_mutated_run(run_of("eagle3"), replace_with_noise, tmp_path / "run")
    )
    assert [finding.severity for finding in result.findings] == ["problem", "note"], result.findings
    assert "another target" in result.findings[1].what


def test_a_draft_model_that_copies_its_target_is_sound(folder: Path, tmp_path: Path) -> None:
    target = FrozenTarget.load(str(folder / "target"))
    save_draft_model(
        create_draft_model(target, init="layers", num_layers=4),
        target.tokenizer,
        tmp_path / "run" / "draft",
    )
    result = diagnose_run(folder, tmp_path / "run")
    assert result.acceptance is not None and result.acceptance.length == 5 and result.is_sound


def test_a_fit_uses_the_completion_alone() -> None:
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


def test_the_recorded_length_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
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


@pytest.mark.long  # two diagnoses of three seconds each
def test_doctor_prints_facts_and_counts_problems(
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
    wrong = copy_mutated_run(run_of("eagle3"), set_config_keys(norm_output=True), tmp_path / "run")
    assert main(["doctor", f"draft={wrong / 'draft'}", *common]) == 1
    assert "2 problems" in capsys.readouterr().out


@pytest.mark.long  # three diagnoses of four seconds each
def test_doctor_measures_a_lookup_in_front_of_the_draft(
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
    # The lookup drafts one token, which is always accepted: 95 tokens after the prefill take 48
    # rounds, and 20 without a lookup.
    behind = "with the lookup in front: acceptance length 1.98 (up to"
    assert (
        "acceptance length 4.75 with 4" in printed
        and behind in printed
        and "cannot start" not in printed
    )
    assert main(["doctor", *common, lookup, "engine=sglang"]) == 1
    assert (
        "specdistill cannot start SGLang with this eval.lookup_first, an n-gram or suffix lookup"
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
