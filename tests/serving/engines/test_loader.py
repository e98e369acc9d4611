"""The loader check passes exports and fails refused heads; the traps of each engine by hand."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specdistill.common.errors import UserError
from specdistill.methods import METHODS
from specdistill.serving.engines.engine import Layout, Serving
from specdistill.serving.engines.loader import (
    LLAMA_SETTINGS,
    LoaderCheck,
    check_loader,
    find_loader,
)
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.heads import head_of, load_head, save_head
from tests.serving import layouts

PRUNED = {"draft_vocabulary": torch.arange(5, 105, 4)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return layouts.saved_target(tmp_path_factory.mktemp("target"))


def check_folder(
    engine: str, method: str, folder: Path, head: Any, target: FrozenTarget, **keys: Any
) -> LoaderCheck:
    """Check how an engine would load a folder, with some keys of its config.json changed."""
    config = json.loads((folder / "config.json").read_text()) | keys
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    loader = find_loader(METHODS[method].serving()[engine].loaders, config)
    assert loader is not None
    return check_loader(loader, config, shapes, head.config, target)


def draw_shape(draw: random.Random, method: str) -> dict[str, Any]:
    """Return the shape of a random head; engines do not support many of them."""
    shape: dict[str, Any] = {"num_layers": draw.choice([1, 1, 1, 1, 2, 3, 4])}
    heads, groups, size = draw.choice([(2, 1, 32), (2, 2, 32), (4, 2, 16), (4, 1, 64)])
    shape |= {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size}
    shape["intermediate_size"] = draw.choice([32, 96, 128])
    if draw.random() < 0.2:
        shape["sliding_window"] = draw.choice([4, 32])
    if method == "eagle":
        return shape | {"fc_bias": draw.random() < 0.3}
    layers = draw.sample(range(layouts.NUM_LAYERS + 1), draw.randint(1, 5))
    shape["aux_layers"] = draw.choice(
        [[2, 4, 5], [2, 4, 5], sorted(layers), sorted(layers), layers]
    )
    shape["hidden_size"] = draw.choice([32, 64, 64, 128])
    shape |= draw.choice([{}, {"fc_norm": True}, {"norm_before_fc": True}])
    shape |= {name: True for name in ("norm_output", "norm_before_residual") if draw.random() < 0.2}
    shape |= {"own_embedding": True} if shape["hidden_size"] == 64 and draw.random() < 0.2 else {}
    return shape | (PRUNED if draw.random() < 0.5 else {})


@pytest.mark.parametrize(
    "seed",
    # More seeds draw more heads of the same kinds, and take a second for each dozen.
    [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))],
)
@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("eagle3", "vllm"),
        ("eagle3", "sglang"),
        ("eagle3", "speculators"),
        ("eagle", "vllm"),
        ("eagle", "sglang"),
    ],
)
def test_exported_heads_load_and_refused_heads_would_not(
    method: str,
    layout: str,
    seed: int,
    target: FrozenTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dozen random heads are exported, and come back bit for bit.

    A refused head is written without the check, to show that the engine would not load it.
    """
    draw = random.Random(f"{seed} {method} {layout}")
    engine = "sglang" if layout == "sglang" else "vllm"
    able = 0
    for index in range(12):
        shape = draw_shape(draw, method)
        head = head_of(method, target, shape)
        ours, output, files = (
            tmp_path / f"ours-{index}",
            tmp_path / f"out-{index}",
            TargetFiles(target.name),
        )
        save_head(method, head, ours)
        refusal = ""
        try:
            export(ours, layout, output, files)
        except UserError as error:
            refusal = str(error)
            with monkeypatch.context() as without:
                without.setattr(Layout, "check", lambda *_: None)
                export(ours, layout, output, files)
        result = check_folder(engine, method, output, head, target)
        if refusal:
            assert refusal.startswith(f"engine: got {layout} for ") and ", a head with " in refusal
        else:
            back = load_head(method, output, target).state_dict()
            assert all(
                torch.equal(back[name], tensor) for name, tensor in head.state_dict().items()
            ), shape
        assert bool(result.refused or result.silent) == bool(refusal), (shape, refusal, result)
        able += not refusal
    assert able > 0


def test_defaults_of_llama_settings_are_those_of_transformers() -> None:
    config = LlamaConfig()
    there = {name: "num_hidden_layers" if name == "num_layers" else name for name in LLAMA_SETTINGS}
    for name, setting in LLAMA_SETTINGS.items():
        if name not in ("bias", "head_dim"):
            assert setting.default == getattr(config, there[name]), name


def export_head(target: FrozenTarget, folder: Path, layout: str = "vllm", **shape: Any) -> Any:
    """Write a head with a pruned vocabulary in an engine's layout, and return the head.

    The layout `ours` is the one that drafts are saved in.
    """
    head = head_of("eagle3", target, {**PRUNED, **shape})
    save_head("eagle3", head, folder / "ours")
    if layout != "ours":
        export(folder / "ours", layout, folder / layout, TargetFiles(target.name))
    return head


def rewrite_tensors(folder: Path, *, without: str = "", **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name != without}
    save_file(kept | tensors, path)


MISSING, EXTRA = "midlayer.mlp.up_proj.weight", "midlayer.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("engine", "missing", "extra"),
    [
        ("vllm", "silent", "refused"),
        ("sglang", "silent", "silent"),
        ("trtllm", "refused", "silent"),
    ],
)
def test_missing_and_unknown_tensors_are_found(
    engine: str, missing: str, extra: str, target: FrozenTarget, tmp_path: Path
) -> None:
    head = export_head(target, tmp_path)
    rewrite_tensors(tmp_path / "vllm", without=MISSING, **{EXTRA: torch.ones(32)})
    result = check_folder(engine, "eagle3", tmp_path / "vllm", head, target)
    assert any(
        what.startswith("layers.0.mlp.up_proj.weight [128, 64]")
        for what in getattr(result, missing)
    )
    assert any(what.endswith(EXTRA) for what in getattr(result, extra))


@pytest.mark.parametrize(
    ("engine", "layout", "read"),
    [
        ("vllm", "ours", "[0, 5] (V1 runner)"),
        ("vllm", "ours", "[2, 4, 5] (V2 runner)"),
        ("vllm", "sglang", "[0, 5] (V1 runner)"),
        ("sglang", "vllm", "[2, 4, 5]"),
        ("sglang", "ours", None),
        ("vllm", "vllm", None),
        ("vllm", "speculators", None),
    ],
)
def test_layers_are_read_where_each_engine_looks(
    engine: str, layout: str, read: str | None, target: FrozenTarget, tmp_path: Path
) -> None:
    head = export_head(target, tmp_path, layout, aux_layers=[1, 6])
    result = check_folder(engine, "eagle3", tmp_path / layout, head, target)
    assert not result.refused and bool(result.silent) == bool(read)
    assert not read or any(read in what and "[1, 6]" in what for what in result.silent)


def test_tensorrt_is_told_the_layers_when_it_starts(target: FrozenTarget, tmp_path: Path) -> None:
    head = export_head(target, tmp_path, aux_layers=[1, 6])
    result = check_folder("trtllm", "eagle3", tmp_path / "vllm", head, target)
    assert ["eagle3_layers_to_capture=[0, 5]" in note for note in result.notes] == [True]
    assert not result.refused and not result.silent


def test_a_whole_vocabulary_with_a_map_is_refused_by_vllm_alone(
    target: FrozenTarget, tmp_path: Path
) -> None:
    head = export_head(target, tmp_path, draft_vocabulary=None)
    rewrite_tensors(tmp_path / "vllm", d2t=torch.zeros(260, dtype=torch.long))
    results = {
        engine: check_folder(engine, "eagle3", tmp_path / "vllm", head, target)
        for engine in ("vllm", "sglang")
    }
    assert ["d2t" in what for what in results["vllm"].refused] == [True]
    assert not results["sglang"].refused and not results["sglang"].silent


@pytest.mark.parametrize(
    ("engine", "keys", "outcome", "says"),
    [
        ("vllm", {"architectures": None}, "refused", "no architectures"),
        (
            "sglang",
            {"architectures": ["LlamaForCausalLM"]},
            "refused",
            "expects LlamaForCausalLMEagle3 for such a draft",
        ),
        (
            "trtllm",
            {"architectures": ["Eagle3Speculator"]},
            "refused",
            "architectures Eagle3Speculator",
        ),
        ("vllm", {"target_hidden_size": None}, "refused", "target_hidden_size null"),
        ("sglang", {"target_hidden_size": None}, "refused", "target_hidden_size null"),
        (
            "vllm",
            {"num_attention_heads": 4},
            "refused",
            "q_proj.weight is [64, 128], but by config.json it must be",
        ),
        ("vllm", {"draft_vocab_size": 24}, "refused", "lm_head.weight is [25, 64]"),
        ("vllm", {"draft_vocab_size": None}, "refused", "lm_head.weight is [25, 64]"),
        ("vllm", {"norm_before_residual": True}, "silent", "reads norm_before_residual as True"),
        (
            "sglang",
            {"norm_output": True},
            "silent",
            "reads norm_output as True, but the draft was trained with False",
        ),
        ("trtllm", {"tie_word_embeddings": True}, "silent", "reads tie_word_embeddings as True"),
        (
            "vllm",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "silent",
            "use_aux_hidden_state as False",
        ),
    ],
)
def test_config_keys_that_the_engine_reads_differently_are_found(
    engine: str, keys: dict[str, Any], outcome: str, says: str, target: FrozenTarget, tmp_path: Path
) -> None:
    head = export_head(target, tmp_path)
    result = check_folder(engine, "eagle3", tmp_path / "vllm", head, target, **keys)
    assert any(says in what for what in getattr(result, outcome)), result


def test_missing_config_keys_are_found(target: FrozenTarget, tmp_path: Path) -> None:
    """SGLang needs the size of the draft's vocabulary; every engine assumes 32 layers for a Llama
    whose config names no number."""
    head = export_head(target, tmp_path)
    path = tmp_path / "vllm" / "config.json"
    config = json.loads(path.read_text())
    del config["draft_vocab_size"], config["num_hidden_layers"]
    path.write_text(json.dumps(config))
    result = check_folder("sglang", "eagle3", tmp_path / "vllm", head, target)
    assert any("draft_vocab_size" in what for what in result.refused)
    assert any("num_layers as 32" in what for what in result.silent)


def test_a_missing_norm_before_residual_is_read_as_true_for_speculators(
    target: FrozenTarget, tmp_path: Path
) -> None:
    head = export_head(target, tmp_path, "speculators")
    path = tmp_path / "speculators" / "config.json"
    config = json.loads(path.read_text())
    del config["norm_before_residual"], config["speculators_config"]["verifier"]
    path.write_text(json.dumps(config))
    result = check_folder("vllm", "eagle3", tmp_path / "speculators", head, target)
    assert ["norm_before_residual as True" in what for what in result.silent] == [True]
    assert ["speculators_config.verifier.name_or_path" in what for what in result.refused] == [True]
    assert find_loader(METHODS["eagle3"].serving()["sglang"].loaders, config) is None


def test_another_width_needs_its_own_embedding(target: FrozenTarget, tmp_path: Path) -> None:
    head = export_head(
        target, tmp_path, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )
    rewrite_tensors(tmp_path / "vllm", without="embed_tokens.weight")
    for engine, outcome in (("vllm", "silent"), ("sglang", "silent"), ("trtllm", "refused")):
        result = check_folder(engine, "eagle3", tmp_path / "vllm", head, target)
        assert any("embed_tokens.weight [260, 32]" in what for what in getattr(result, outcome)), (
            engine
        )


def test_the_targets_head_is_taken_only_where_it_fits(target: FrozenTarget, tmp_path: Path) -> None:
    for vocabulary, problems in ((None, 0), (PRUNED["draft_vocabulary"], 1)):
        head = export_head(target, tmp_path / str(problems), draft_vocabulary=vocabulary)
        rewrite_tensors(tmp_path / str(problems) / "vllm", without="lm_head.weight")
        result = check_folder("vllm", "eagle3", tmp_path / str(problems) / "vllm", head, target)
        assert len(result.silent) == problems and not result.refused


def test_sglang_leaves_the_missing_bias_of_an_eagle_head_random(
    target: FrozenTarget, tmp_path: Path
) -> None:
    head = head_of("eagle", target, {})
    save_head("eagle", head, tmp_path / "ours")
    ours = check_folder("sglang", "eagle", tmp_path / "ours", head, target)
    assert ["fc.bias [64]" in what for what in ours.silent] == [True]
    assert ["LlamaForCausalLMEagle" in what for what in ours.refused] == [True]
    assert find_loader(METHODS["eagle"].serving().get("trtllm", Serving()).loaders, {}) is None
