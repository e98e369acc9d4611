"""The KV cache of decoding, compared with the cache of transformers and with a single pass.

Appends copy nothing, and earlier states are restored.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from specdistill.targets.anatomy import find_backbone
from specdistill.targets.cache import (
    CROPPABLE_LAYERS,
    BufferedLayer,
    copy_state,
    create_empty_cache,
    roll_back,
)
from tests.targets.architectures import tiny_model
from tests.tiny import qwen, tiny_target_model

RECURRENT = (
    "bailing_hybrid",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
    "zaya",
)


@torch.no_grad()
def run_backbone(model: Any, cache: Any, token_ids: list[int]) -> Tensor:
    hidden: Tensor = find_backbone(model)(
        input_ids=torch.tensor([token_ids]), past_key_values=cache, use_cache=True
    ).last_hidden_state[0]
    return hidden


def draw_tokens(count: int) -> list[int]:
    return torch.randint(3, 150, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nested structure."""
    if isinstance(value, Tensor):
        return [value]
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [tensor for part in inner for tensor in list_tensors(part)]


def test_keys_and_values_are_those_of_transformers_own_layer() -> None:
    """The caches grow, are cropped and lose a row; keys and values have different widths."""
    ours, theirs = BufferedLayer(), DynamicLayer()
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        count = 1 + step % 5
        new = [
            torch.randn(len(ours.keys) if step else 2, 2, count, width, generator=generator)
            for width in (8, 4)
        ]
        for shown, expected in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(shown, expected)
        for layer in (ours, theirs):
            layer.crop(-(step % count))
            if step == 200:
                layer.batch_select_indices(torch.tensor([1]))
        assert (
            torch.equal(ours.keys, theirs.keys) and ours.get_seq_length() == theirs.get_seq_length()
        )


def test_appending_moves_the_buffer_only_a_few_times() -> None:
    layer, addresses = BufferedLayer(), set()
    for _ in range(4000):
        addresses.add(layer.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))[0].data_ptr())
    assert len(addresses) <= 12


@pytest.mark.parametrize("build", [tiny_target_model, qwen])
def test_attention_layers_roll_back_without_copies(build: Any) -> None:
    model, ids = build(), draw_tokens(30)
    cache = create_empty_cache(model.config)
    run_backbone(model, cache, ids[:20])
    before = copy_state(cache)
    assert not list_tensors(before)
    run_backbone(model, cache, draw_tokens(5))
    roll_back(cache, 5, before)
    expected = run_backbone(model, DynamicCache(config=model.config), ids)[20:]
    assert torch.allclose(run_backbone(model, cache, ids[20:]), expected, atol=1e-4)


@pytest.mark.long  # ten classes
@pytest.mark.filterwarnings("ignore")  # warnings of classes whose faster kernels are not installed
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_roll_back_by_copies_that_do_not_grow(kind: str) -> None:
    model, sizes = tiny_model(kind), []
    for length in (20, 80):
        ids = draw_tokens(length + 6)
        cache = create_empty_cache(model.config.get_text_config(decoder=True))
        run_backbone(model, cache, ids[:length])
        before = copy_state(cache)
        sizes.append(sum(tensor.nbytes for tensor in list_tensors(before)))
        cached_pointers = {
            layer.keys.data_ptr()
            for layer in cache.layers
            if type(layer) in CROPPABLE_LAYERS and layer.keys is not None
        }
        assert not cached_pointers & {tensor.data_ptr() for tensor in list_tensors(before)}
        run_backbone(model, cache, draw_tokens(5))
        roll_back(cache, 5, before)
        plain = DynamicCache(config=model.config.get_text_config(decoder=True))
        run_backbone(model, plain, ids[:length])
        assert torch.allclose(
            run_backbone(model, cache, ids[length:]),
            run_backbone(model, plain, ids[length:]),
            atol=1e-4,
        )
    assert 0 < sizes[0] == sizes[1]
