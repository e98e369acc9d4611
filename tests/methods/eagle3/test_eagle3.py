"""The EAGLE-3 head: exact tensors, and configs of older and newer writers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from specdistill.methods.eagle3.checkpoint import (
    check_eagle3,
    load_eagle3,
    save_eagle3,
    write_eagle3_config,
)
from specdistill.methods.eagle3.module import build_eagle3, check_aux_layers
from specdistill.targets.frozen import FrozenTarget
from tests.heads import causal
from tests.refusals import refused
from tests.serving import layouts
from tests.tiny import tiny_target_model, tiny_tokenizer

LINEAR = {"rope_type": "linear", "factor": 2.0}


def test_tensors_are_those_that_engines_load(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle3(
        build_eagle3(target, draft_vocabulary=torch.arange(5, 105, 4), fc_norm=True), tmp_path
    )
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert shapes == layouts.eagle3("midlayer.") | {
        f"fc_norm.{index}.weight": (64,) for index in range(3)
    }


@pytest.mark.parametrize("names", [["midlayer.", "layers.0."], ["layers.0.", "midlayer."]])
def test_a_tensor_under_two_names_is_refused_by_both(
    target: FrozenTarget, tmp_path: Path, names: list[str]
) -> None:
    save_eagle3(build_eagle3(target), tmp_path)
    first, second = (f"{name}hidden_norm.weight" for name in names)
    tensors = {first: torch.ones(64), second: torch.ones(64)}
    with refused("draft", holds=f"with {first} and {second}"):
        check_eagle3(tmp_path, tensors, None, key="draft", name="somebody's head")


def test_d2t_is_an_offset_and_t2d_a_mask(target: FrozenTarget, tmp_path: Path) -> None:
    ids = torch.tensor([5, 7, 100])
    draft = build_eagle3(target, draft_vocabulary=ids)
    save_eagle3(draft, tmp_path)
    maps = load_file(tmp_path / "model.safetensors")
    assert maps["d2t"].tolist() == [5, 6, 98] and maps["d2t"].dtype == torch.int64
    assert (
        maps["t2d"].nonzero().flatten().tolist() == ids.tolist() and maps["t2d"].dtype == torch.bool
    )
    assert draft.target_ids_W.tolist() == ids.tolist()
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[ids])


def test_layer_ids_in_the_file_count_outputs_and_defaults_are_left_out(
    target: FrozenTarget,
) -> None:
    deep = FrozenTarget(tiny_target_model(num_layers=8), tiny_tokenizer(), name="deep")
    default = write_eagle3_config(build_eagle3(deep).config, torch.float32)
    assert "eagle_aux_hidden_state_layer_ids" not in default["eagle_config"]
    # engines would take [2, 2, 1] for four layers
    shallow = write_eagle3_config(build_eagle3(target).config, torch.float32)
    assert shallow["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    chosen = write_eagle3_config(build_eagle3(target, aux_layers=[1, 3]).config, torch.float32)
    assert chosen["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert chosen["num_aux_hidden_states"] == 2


def test_norm_output_feeds_back_what_the_head_sees(target: FrozenTarget) -> None:
    ids = torch.arange(3, 8)[None]
    for norm_output in (False, True):
        draft = build_eagle3(target, norm_output=norm_output)
        draft.norm.weight.data = torch.linspace(0.5, 2.0, len(draft.norm.weight))
        hidden = draft.fuse(target.features(ids, draft.aux_layers))
        normed, next_hidden = draft(
            ids, hidden, draft.rotary(hidden, torch.arange(5)[None]), causal(ids)
        )
        assert torch.equal(normed, next_hidden) == norm_output
        assert torch.allclose(draft.norm(next_hidden), normed, atol=1e-6) != norm_output


@pytest.mark.parametrize(
    ("keys", "theta", "rope", "window"),
    [
        ({}, 10000.0, None, None),  # what transformers assumes
        ({"rope_theta": 5e5}, 5e5, None, None),
        ({"rope_parameters": {"rope_type": "default"}}, 10000.0, None, None),
        (
            {"rope_theta": 3e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            5e5,
            None,
            None,
        ),
        ({"rope_parameters": {**LINEAR, "rope_theta": 5e5}}, 5e5, LINEAR, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, LINEAR, None),
        # many configs repeat a window that no layer has
        ({"sliding_window": 8}, 10000.0, None, None),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, 10000.0, None, 8),
    ],
)
def test_rotary_and_window_keys_of_older_and_newer_writers_are_read(
    target: FrozenTarget,
    tmp_path: Path,
    keys: dict[str, Any],
    theta: float,
    rope: dict[str, Any] | None,
    window: int | None,
) -> None:
    save_eagle3(build_eagle3(target), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rest = {name: value for name, value in config.items() if not name.startswith("rope")}
    (tmp_path / "config.json").write_text(json.dumps({**rest, **keys}))
    head = load_eagle3(tmp_path, target).config
    assert (head.rope_theta, head.rope_scaling, head.sliding_window) == (theta, rope, window)
    assert LlamaConfig(**{**rest, **keys}).rope_parameters["rope_theta"] == theta


def test_default_layers_are_low_middle_high() -> None:
    assert check_aux_layers(None, 36) == [2, 18, 33]
    assert [check_aux_layers(None, n) for n in (7, 5, 4, 2)] == [
        [2, 3, 4],
        [1, 2, 4],
        [1, 2, 3],
        [1],
    ]
    assert check_aux_layers(None, 16) == [2, 8, 13]


@pytest.mark.parametrize("layers", [[17], [-1], [2, 2], []])
def test_layers_out_of_range_are_refused(layers: list[int]) -> None:
    with refused("draft.aux_layers", layers):
        check_aux_layers(layers, 16)
