"""Caches whose rows advance by different lengths give what a pass without a cache gives."""

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from specdistill.decoding.kv_cache import FIRST_SIZE, BatchKVCache, DraftKVCache
from specdistill.decoding.transformers_models import prepare_pass
from specdistill.methods.models.proposer import LlamaLayers
from tests import mtp_targets
from tests.tiny import qwen, tiny_target_model

TEXTS = [
    [5, 9, 5, 9, 20, 31, 7, 8, 40, 41, 42, 43],
    [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61],
    [99, 98, 97, 96, 95, 94, 93, 92],
]


def pad_rows(rows: list[list[int]]) -> Tensor:
    """Pad rows with an ordinary token, so that only the mask hides the padding."""
    width = max(map(len, rows))
    return torch.tensor([row + [77] * (width - len(row)) for row in rows])


def run_step(
    model: PreTrainedModel, cache: BatchKVCache | DraftKVCache, rows: list[list[int]]
) -> Tensor:
    counts = [len(row) for row in rows]
    with torch.inference_mode():
        if isinstance(cache, DraftKVCache):
            layers = LlamaLayers(model)
            layers.cache = cache
            return layers(pad_rows(rows), counts)  # type: ignore[no-any-return]
        positions, mask = prepare_pass(cache, counts, model.config.get_text_config(), torch.float32)
        decoder = model.get_decoder()
        return decoder(  # type: ignore[no-any-return, operator]
            input_ids=pad_rows(rows),
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state


def run_without_cache(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Return the hidden states of a text, [T, H]."""
    with torch.inference_mode():
        return model.get_decoder()(input_ids=torch.tensor([text])).last_hidden_state[0]  # type: ignore[no-any-return, operator]


def make_batch_cache(model: PreTrainedModel, num_rows: int) -> BatchKVCache:
    return BatchKVCache(num_rows, torch.device("cpu"))


def make_ragged_cache(model: PreTrainedModel, num_rows: int) -> DraftKVCache:
    return DraftKVCache(
        num_rows, partial(LlamaLayers(model).rotary, model.lm_head.weight), torch.device("cpu")
    )


CASES = {
    "llama, of transformers": (tiny_target_model, make_batch_cache),
    "llama, ragged": (tiny_target_model, make_ragged_cache),
    "sliding windows, of transformers": (qwen, make_batch_cache),
    "latent attention, of transformers": (
        partial(mtp_targets.tiny_model, "deepseek_v3"),
        make_batch_cache,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rejections_of_different_lengths_leave_no_trace(case: str) -> None:
    """Three rows of different lengths keep different numbers of tokens; then one row leaves."""
    build, make = CASES[case]
    model = build()
    cache = make(model, 3)
    lengths = [4, 2, 1]
    run_step(model, cache, [text[:length] for text, length in zip(TEXTS, lengths, strict=True)])
    rows = [0, 1, 2]
    for kept_counts in ([1, 3, 2], [2, 1, 3], [3, 3], [1, 2]):
        if len(kept_counts) < len(rows):
            rows = [0, 1]
            cache.keep(rows)
            lengths = lengths[:2]
        draft_rows = [
            [*TEXTS[row][lengths[row] : lengths[row] + count], *[200 + row] * (4 - count)]
            for row, count in zip(rows, kept_counts, strict=True)
        ]
        hidden = run_step(model, cache, draft_rows)
        for row, count in zip(rows, kept_counts, strict=True):
            expected = run_without_cache(model, TEXTS[row][: lengths[row] + count])[lengths[row] :]
            assert torch.allclose(hidden[row, :count], expected, atol=1e-4), (row, kept_counts)
        lengths = [length + count for length, count in zip(lengths, kept_counts, strict=True)]
        cache.truncate(lengths)


def test_rejected_tokens_are_never_read() -> None:
    """Huge values in every slot behind a row's tokens do not change the next pass."""
    outputs = []
    for poison in (0.0, 1e6):
        model = tiny_target_model()
        cache = make_batch_cache(model, 2)
        run_step(model, cache, [TEXTS[0][:9], TEXTS[1][:6]])
        cache.truncate([8, 6])
        is_behind_BS = torch.arange(cache._buffers[0][0].shape[2]) >= torch.tensor([[8], [6]])
        for layer, buffers in cache._buffers.items():
            keys, values = (
                buffer.masked_fill(is_behind_BS[:, None, :, None], poison) for buffer in buffers
            )
            cache._buffers[layer] = keys, values
        outputs.append(run_step(model, cache, [TEXTS[0][8:10], TEXTS[1][6:7]]))
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(
        outputs[0][1, :1], outputs[1][1, :1]
    )


def test_ragged_buffers_grow_and_keep_what_they_hold() -> None:
    model: LlamaForCausalLM = tiny_target_model(num_layers=1)
    cache = make_ragged_cache(model, 2)
    generator = torch.Generator().manual_seed(0)
    long, short = (
        torch.randint(3, 250, (length,), generator=generator).tolist()
        for length in (FIRST_SIZE + 30, 40)
    )
    run_step(model, cache, [long[:500], short[:20]])
    hidden = run_step(model, cache, [long[500:], short[20:]])
    assert torch.allclose(hidden[0], run_without_cache(model, long)[500:], atol=1e-4)
    assert torch.allclose(hidden[1, :20], run_without_cache(model, short)[20:], atol=1e-4)
