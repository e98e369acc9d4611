"""The doctor finds and names mistakes that the files of a draft show."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdistill.advice.doctor import diagnosis
from specdistill.advice.doctor.diagnosis import Diagnosis, _check_values, examine_draft
from specdistill.cli.main import main
from specdistill.common.errors import ExitCode
from specdistill.methods.models.checkpoint import save_draft_model
from specdistill.methods.models.create import create_draft_model
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.finished_runs import edit
from tests.heads import build_head, head_of, save_head
from tests.refusals import refused_key
from tests.targets.architectures import tiny_model
from tests.tiny import tiny_target_model, tiny_tokenizer

NARROW = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and heads for it.

    They are `eagle3` with a pruned vocabulary, `narrow` with another width, `eagle` and `mtp`.
    """
    path = tmp_path_factory.mktemp("doctor")
    tiny_target_model(num_layers=8).save_pretrained(path / "target")
    tiny_tokenizer().save_pretrained(path / "target")
    target = FrozenTarget.load(str(path / "target"))
    ids = torch.tensor([5, 6, 7, *range(20, 64, 2)])
    save_head("eagle3", head_of("eagle3", target, {"draft_vocabulary": ids}), path / "eagle3")
    save_head("eagle3", head_of("eagle3", target, NARROW), path / "narrow")
    save_head("eagle", head_of("eagle", target, {}), path / "eagle")
    save_head("mtp", build_head("mtp", target), path / "mtp")
    return path


def examine_folder(folder: Path, draft: Path, engine: str | None = None) -> Diagnosis:
    return examine_draft(draft, TargetFiles(str(folder / "target")), engine)


def list_findings(result: Diagnosis, severity: str = "problem") -> list[str]:
    return [finding.what for finding in result.findings if finding.severity == severity]


@pytest.mark.parametrize("draft", ["eagle3", "narrow", "eagle", "mtp"])
def test_a_good_draft_has_no_finding(draft: str, folder: Path) -> None:
    assert examine_folder(folder, folder / draft).findings == []


Config, Tensors = dict[str, Any], dict[str, Tensor]


def set_config_keys(**keys: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config.update(keys)


def remove_key(key: str) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: (tensors if key in tensors else config).pop(key)


def replace_tensor(
    name: str, of: Callable[[Tensor], Tensor], like: str | None = None
) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: tensors.update({name: of(tensors[like or name]).contiguous()})


def make_medusa(config: Config, tensors: Tensors) -> None:
    weight = tensors["fc.weight"]
    tensors.clear()
    tensors["0.0.linear.weight"] = weight
    config["architectures"] = ["MedusaModel"]


FC, NORM, Q = "fc.weight", "norm.weight", "midlayer.self_attn.q_proj.weight"
MUTATIONS: dict[str, tuple[str, Callable[[Config, Tensors], None], str]] = {
    "a tensor is missing": ("eagle3", remove_key(FC), "without fc.weight"),
    "a tensor by which EAGLE-1 is known is missing": ("eagle", remove_key(FC), "without fc.weight"),
    "a matrix is transposed": ("eagle3", replace_tensor(FC, torch.t), "(192, 64)"),
    "NaN": (
        "eagle3",
        replace_tensor(NORM, lambda tensor: tensor.index_fill(0, torch.tensor(3), float("nan"))),
        "NaN or infinity in norm.weight",
    ),
    "integers": ("eagle3", replace_tensor(FC, lambda tensor: tensor.to(torch.int8)), "torch.int8"),
    "zeros": ("eagle3", replace_tensor(Q, torch.zeros_like), f"{Q} is all zeros"),
    "a norm of zeros": (
        "mtp",
        replace_tensor("mtp.norm.weight", torch.zeros_like),
        "mtp.norm.weight is all zeros",
    ),
    "no embedding of another width": (
        "narrow",
        remove_key("embed_tokens.weight"),
        "without embed_tokens.weight",
    ),
    "d2t is shifted halfway": (
        "eagle3",
        replace_tensor("d2t", lambda d2t: d2t + (torch.arange(len(d2t)) > 9)),
        "d2t and t2d",
    ),
    "vocab_size": ("eagle3", set_config_keys(vocab_size=32000), "vocab_size 32000"),
    "two rotary bases": ("eagle3", set_config_keys(rope_theta=500.0), "rope_theta 500.0"),
    "no architectures": ("eagle3", remove_key("architectures"), "architectures"),
    "another MTP target": (
        "mtp",
        lambda config, tensors: config["text_config"].update(hidden_size=48),
        "hidden_size 48",
    ),
    "not a draft": ("eagle3", make_medusa, "MedusaModel"),
}


def copy_changed_draft(draft: Path, change: Callable[[Config, Tensors], Any], copy: Path) -> Path:
    """Copy a draft's folder, change its config.json or weights, and return the copy."""
    shutil.copytree(draft, copy)
    config, tensors = (
        json.loads((copy / "config.json").read_text()),
        load_file(copy / "model.safetensors"),
    )
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(("draft", "change", "what"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mistake_is_named(
    draft: str, change: Callable[[Config, Tensors], None], what: str, folder: Path, tmp_path: Path
) -> None:
    result = examine_folder(folder, copy_changed_draft(folder / draft, change, tmp_path / "draft"))
    assert any(what in problem for problem in list_findings(result)), result.findings


WARNINGS: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "a dtype that the weights do not have": (set_config_keys(torch_dtype="float16"), "float16"),
    "a rotary base that is not the target's": (
        set_config_keys(
            rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_theta=500.0
        ),
        "(rope_theta) is 500",
    ),
    "shorter texts than the target's": (
        set_config_keys(max_position_embeddings=128),
        "is 128 tokens, the target's 256",
    ),
    "a weight that is too large": (replace_tensor(FC, lambda weight: weight * 1e4), "fc.weight"),
}


@pytest.mark.parametrize(("change", "what"), WARNINGS.values(), ids=WARNINGS)
def test_a_possible_mistake_is_a_warning(
    change: Callable[[Config, Tensors], None], what: str, folder: Path, tmp_path: Path
) -> None:
    result = examine_folder(
        folder, copy_changed_draft(folder / "eagle3", change, tmp_path / "draft")
    )
    assert not list_findings(result) and any(
        what in warning for warning in list_findings(result, "warning")
    ), result.findings


def test_a_d2t_that_holds_ids_is_a_warning(folder: Path, tmp_path: Path) -> None:
    """Ids 5, 6, 7, 20, 22, … read as offsets still ascend within the vocabulary.

    Only their growth shows the mistake.
    """

    def write_ids(config: Config, tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"] + torch.arange(25)
        del tensors["t2d"]

    result = examine_folder(
        folder, copy_changed_draft(folder / "eagle3", write_ids, tmp_path / "draft")
    )
    assert not list_findings(result) and "25 draft tokens" in list_findings(result, "warning")[0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_loads_its_own_export_and_not_that_of_another(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    target = FrozenTarget.load(str(folder / "target"))
    save_head("eagle3", head_of("eagle3", target, {"aux_layers": [1, 3, 6]}), tmp_path / "ours")
    other = {"vllm": "sglang", "sglang": "vllm"}[engine]
    for layout in (engine, other):
        export(tmp_path / "ours", layout, tmp_path / layout, TargetFiles(target.name))
    assert not examine_folder(folder, tmp_path / engine, engine).findings
    problems = list_findings(examine_folder(folder, tmp_path / other, engine))
    assert problems and all("layers" in what for what in problems)


@pytest.mark.parametrize(
    ("draft", "engine", "what"),
    [
        ("mtp", "vllm", "vLLM"),
        ("eagle", "trtllm", "TensorRT-LLM"),
        ("eagle", "sglang", "fc.bias [64]"),
    ],
)
def test_a_draft_that_an_engine_does_not_load_is_a_problem(
    draft: str, engine: str, what: str, folder: Path
) -> None:
    assert any(
        what in problem for problem in list_findings(examine_folder(folder, folder / draft, engine))
    )


def test_a_missing_tensor_is_also_reported_for_the_engine(folder: Path, tmp_path: Path) -> None:
    problems = list_findings(
        examine_folder(
            folder,
            copy_changed_draft(folder / "eagle3", remove_key(NORM), tmp_path / "draft"),
            "vllm",
        )
    )
    assert (
        len(problems) == 2
        and "norm.weight of shape (64,)" in problems[0]
        and "norm.weight [64]" in problems[1]
    )


def test_a_draft_model_of_another_vocabulary_is_a_problem(folder: Path, tmp_path: Path) -> None:
    tiny_target_model(num_layers=2, vocab_size=300).save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    problems = list_findings(examine_folder(folder, tmp_path / "draft", "vllm"))
    assert len(problems) == 1 and "260" in problems[0] and "300" in problems[0]


def test_doctor_prints_each_finding_and_what_to_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", f"draft={folder / 'eagle3'}"]) == 0
    assert "problem  " not in capsys.readouterr().out
    wrong = copy_changed_draft(
        folder / "eagle3", lambda config, tensors: config.pop("architectures"), tmp_path / "draft"
    )
    edit(wrong / "config.json", lambda config: {**config, "torch_dtype": "float32"})
    assert main(["doctor", f"draft={wrong}"]) == 1
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert (
        lines[0].startswith("problem  ")
        and lines[2].startswith("warning  ")
        and lines[4] == "1 problem, 1 warning"
    )
    # These lines say what to do.
    assert all(line.startswith(" " * 9) for line in (lines[1], lines[3]))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ([], "draft"),
        (["draft=./nowhere"], "draft"),
        (["draft=x/y", "engine=tgi"], "engine"),
        (["draft=x/y", "engines=vllm"], "engines"),
        (["draft=DRAFT", "target=./nowhere"], "target"),
        (["draft=DRAFT", "target=TARGET", "suite=nothing"], "suite"),
    ],
)
def test_mistakes_name_their_key(
    arguments: list[str], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"DRAFT": str(folder / "eagle3"), "TARGET": str(folder / "target")}
    keys = [
        f"{name}={places.get(value, value)}"
        for name, _, value in (argument.partition("=") for argument in arguments)
    ]
    assert main(["doctor", *keys]) == 2
    assert refused_key(capsys.readouterr().err) == key


@pytest.mark.parametrize("draft", ["eagle3", "target"])
def test_a_malformed_section_of_the_config_is_named(
    draft: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = copy_changed_draft(
        folder / draft, set_config_keys(rope_parameters=3), tmp_path / "draft"
    )
    assert main(["doctor", f"draft={wrong}"]) in (1, 2)
    printed = capsys.readouterr()
    assert "with rope_parameters 3" in " ".join((printed.out + printed.err).split())


@pytest.fixture
def short_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor decodes 4 tokens for each prompt, for tests where the number does not matter."""
    monkeypatch.setattr(diagnosis, "NUM_TOKENS", 4)


def test_a_narrow_window_limits_the_draft_tokens(
    folder: Path,
    tmp_path: Path,
    short_completions: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = FrozenTarget.load(str(folder / "target"))
    save_head("eagle3", head_of("eagle3", target, {"sliding_window": 2}), tmp_path / "draft")
    main(
        [
            "doctor",
            f"draft={tmp_path / 'draft'}",
            f"target={folder / 'target'}",
            "eval.num_prompts=1",
        ]
    )
    assert "2 draft tokens" in capsys.readouterr().out


def test_a_short_context_is_a_problem_where_prompts_are_longer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = create_draft_model(
        FrozenTarget.load(str(folder / "target")), init="layers", num_layers=1
    )
    draft.config.max_position_embeddings = 64
    save_draft_model(draft, tiny_tokenizer(), tmp_path / "draft")
    keys = [
        "doctor",
        f"draft={tmp_path / 'draft'}",
        f"target={folder / 'target'}",
        "eval.num_prompts=1",
    ]
    assert main(keys) == ExitCode.CHECK_FAILED
    printed = capsys.readouterr().out
    assert "a draft whose context is 64 tokens for a sequence of" in printed
    assert "(max_position_embeddings) is 64 tokens, the target's 256" in printed


def test_the_target_is_loaded_with_its_device_map(
    folder: Path,
    tmp_path: Path,
    short_completions: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_head(
        "eagle3",
        head_of("eagle3", FrozenTarget.load(str(folder / "target")), {}),
        tmp_path / "draft",
    )
    keys = [
        "doctor",
        f"draft={tmp_path / 'draft'}",
        f"target={folder / 'target'}",
        "eval.num_prompts=1",
    ]
    assert main([*keys, "target.device_map=nowhere"]) == ExitCode.USER_ERROR
    assert refused_key(capsys.readouterr().err) == "target.device_map"
    assert main([*keys, "target.device_map=cpu"]) != ExitCode.USER_ERROR


@pytest.mark.parametrize("kind", ["gemma", "gemma3_text", "qwen3_next", "qwen3_5_text"])
def test_a_norm_that_adds_one_may_be_zero(kind: str) -> None:
    """The models of transformers initialize norms of this kind with zeros."""
    model = tiny_model(kind)
    tensors = model.state_dict()
    zero_norms = [name for name, tensor in tensors.items() if "norm" in name and not tensor.any()]
    assert any(name.endswith("input_layernorm.weight") for name in zero_norms)
    assert [finding.what for finding in _check_values(tensors, model.config.to_dict())] == []


def test_a_norm_that_adds_nothing_must_not_be_zero() -> None:
    """Qwen3-Next has both kinds of norm."""
    model = tiny_model("qwen3_next")
    name = "model.layers.0.linear_attn.norm.weight"
    tensors = model.state_dict() | {name: torch.zeros_like(model.state_dict()[name])}
    (finding,) = _check_values(tensors, model.config.to_dict())
    assert finding.what == f"{name} is all zeros"


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
def test_a_fresh_layer_with_norms_that_add_one_is_sound(kind: str, tmp_path: Path) -> None:
    """The norms around the layer have the class of the target's own norms."""
    target = FrozenTarget(tiny_model(kind), tiny_tokenizer(), name=kind)
    save_head("mtp", build_head("mtp", target), tmp_path)
    assert not load_file(tmp_path / "model.safetensors")["mtp.pre_fc_norm_hidden.weight"].any()
    assert examine_draft(tmp_path).findings == []
