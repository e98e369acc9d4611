"""Batched generation: prompts continued token by token, each row of the batch at its own temperature.

On a CPU (16 layers of 128, batches of 256 rows) most of the time is spent reading keys and values. Three things make that cheap, inside
the model's own forward pass:

* `GrowingLayer` keeps keys and values dense. transformers' dynamic cache copies all of them at every token, and oneDNN's bfloat16
  product copies a view into a larger buffer.
* `grouped_attention` reads every key and value once for all the query heads that share it, on a GPU too.
* Rows that have ended leave the batch, and on a CPU a batch is generated in parts, as many at a time as there are cores: threads that
  never wait for one another beat threads inside each of hundreds of small operations.

Shapes: B rows, P prompt tokens (with padding), D head width, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specdistill.targets.cache import is_recurrent
from specdistill.targets.loading import is_plain

BLOCK = 32  # tokens by which a cache grows: copying it then costs about as much as reading its unused tail
CHECK_EVERY = 8  # steps between two checks of which rows have ended
KEEP_SHARE = (
    0.75  # rows that have ended leave the batch once at most this share of it is unfinished
)
STOP_SHARE = (
    1 / 8
)  # the last rows are cut short once at most this share of all is unfinished: a step costs the same for a few
MIN_PART_ROWS = 40  # fewest rows worth a thread
PARTS = (16, 8, 4, 2, 1)  # of a batch: whole rounds on most machines
GROUPED_ATTENTION = "specdistill_grouped"


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a dense [B, heads, room, head_dim] block; beyond `length` it is zero and masked."""

    length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        if not self.is_initialized:
            keys, values, self.is_initialized = key_states, value_states, True
        else:
            assert self.keys is not None and self.values is not None
            keys, values, tokens = self.keys, self.values, room(self.length, end)
            if keys.shape[2] != tokens:
                padding = (0, 0, 0, tokens - self.length)
                keys, values = (
                    F.pad(block[:, :, : self.length], padding) for block in (keys, values)
                )
            keys[:, :, self.length : end] = key_states
            values[:, :, self.length : end] = value_states
        self.keys, self.values, self.length = keys, values, end
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return room(self.length, self.length + query_length), 0

    def get_seq_length(self) -> int:
        return self.length


def room(seen: int, end: int) -> int:
    """Tokens that attention runs over when `seen` are cached and `end` will be: a prompt exactly, then whole blocks."""
    return end if seen == 0 else -(-end // BLOCK) * BLOCK


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token: query [B, heads, 1, D], key and value [B, shared heads, room, D] -> [B, 1, heads, D].

    softmax(scaling · Q Kᵀ) V. Prompts, of more than one token, go to `sdpa`.
    """
    batch, heads, num_queries, width = query.shape
    if num_queries > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    query = query.reshape(batch, key.shape[1], -1, width) * (
        width**-0.5 if scaling is None else scaling
    )
    # Keys on the left: the product then streams through them in the order they are stored.
    scores = (key @ query.transpose(2, 3)).transpose(2, 3)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    mixed = scores.softmax(-1) @ value
    return mixed.reshape(batch, 1, heads, -1), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


@contextmanager
def generation_mode(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """The model prepared for fast generation: weights in `dtype` (a copy if they are not), keys and values read by groups."""
    attention, training = model.config._attn_implementation, model.training
    if is_plain(model) and model.dtype != dtype:
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(
                dtype
            )  # not `model.to`, which would round the rotary frequencies too
    model.eval()
    if attention == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)
    try:
        with torch.compiler.set_stance(
            "force_eager"
        ):  # keys and values grow: each token would be a graph
            yield model
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int],
    seed: int,
    num_parts: int | None = None,
) -> list[list[int]]:
    """Continue every prompt; returns the new tokens of each row. Temperature 0 is greedy.

    A row ends with a token of `end_ids`, included, or is cut before: after `max_new_tokens`, or once nearly all others have ended.
    The batch is split into `num_parts`, by default as many as suit the device and the prompts, that are generated in parallel; the same
    seed, prompts and parts give the same tokens, whatever number of threads this process may use.
    """
    threads = torch.get_num_threads()
    if num_parts is None:
        num_parts = next(
            parts for parts in PARTS if parts == 1 or len(prompts) >= parts * MIN_PART_ROWS
        )
        num_parts = num_parts if model.device.type == "cpu" else 1

    def one_part(part: int) -> list[list[int]]:
        rows = (prompts[part::num_parts], temperatures[part::num_parts])
        return _generate_part(model, *rows, max_new_tokens, end_ids, seed * 1_009 + part)

    if num_parts == 1:
        return one_part(0)
    try:
        share = max(1, threads // num_parts)
        with ThreadPoolExecutor(
            min(threads, num_parts), initializer=torch.set_num_threads, initargs=(share,)
        ) as pool:
            generated = list(pool.map(one_part, range(num_parts)))
    finally:
        torch.set_num_threads(threads)
    return [generated[row % num_parts][row // num_parts] for row in range(len(prompts))]


@torch.inference_mode()
def _generate_part(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    end_ids: Sequence[int],
    seed: int,
) -> list[list[int]]:
    device, num_rows, length = model.device, len(prompts), max(map(len, prompts))
    generator = torch.Generator(device).manual_seed(seed)
    ends = torch.tensor(list(end_ids), dtype=torch.long, device=device)
    generated = torch.full((num_rows, max_new_tokens), -1, device=device)
    ids = torch.tensor(
        [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    # Of each unfinished row: its number, whether it has ended, its temperature, its prompt's tokens, which slots of the cache hold tokens.
    number, ended = (
        torch.arange(num_rows, device=device),
        torch.zeros(num_rows, dtype=torch.bool, device=device),
    )
    temperature = torch.tensor(temperatures, device=device)
    num_seen = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    seen = torch.zeros(num_rows, room(1, length + max_new_tokens), dtype=torch.bool, device=device)
    seen[:, :length] = torch.arange(length, device=device) >= length - num_seen
    cache = DynamicCache(config=model.config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]  # type: ignore[no-untyped-call]
    positions = (seen[:, :length].cumsum(1) - 1).clamp(min=0)

    for step in range(max_new_tokens):
        logits_BV = model(
            input_ids=ids,
            attention_mask=seen[:, : room(length - ids.shape[1], length)],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens_B = sample(logits_BV, temperature, generator)
        generated[number, step] = tokens_B
        ended |= torch.isin(tokens_B, ends)
        if step % CHECK_EVERY == CHECK_EVERY - 1:
            unfinished = (~ended).nonzero().flatten()
            if len(unfinished) <= STOP_SHARE * num_rows:
                break
            if len(unfinished) <= KEEP_SHARE * len(tokens_B) and not is_recurrent(
                model.config.get_text_config()
            ):
                of_rows = (number, ended, temperature, num_seen, seen, tokens_B)
                number, ended, temperature, num_seen, seen, tokens_B = (
                    each[unfinished] for each in of_rows
                )
                cache.batch_select_indices(unfinished)
        seen[:, length] = True
        ids, positions = tokens_B[:, None], num_seen + step
        length += 1
    is_end = torch.isin(generated, ends).long()
    kept = (generated >= 0) & (
        is_end.cumsum(1) - is_end == 0
    )  # up to the first end token, included
    return [row[mask].tolist() for row, mask in zip(generated.cpu(), kept.cpu(), strict=True)]


def sample(logits_BV: Tensor, temperatures_B: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row: the argmax at temperature 0, else a draw from softmax(logits / temperature) by inverting its cumulative sum.

    It takes one uniform number a row instead of the V of `torch.multinomial`, which on a CPU cost more than the head. float32.
    """
    tokens_B = logits_BV.argmax(-1)
    sampled = (temperatures_B > 0).nonzero().flatten()
    if len(sampled) > 0:
        probabilities = (logits_BV[sampled].float() / temperatures_B[sampled, None]).softmax(-1)
        cumulative = probabilities.cumsum(-1)
        uniform = torch.rand(len(sampled), 1, generator=generator, device=logits_BV.device)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens_B[sampled] = drawn.squeeze(1).clamp(max=logits_BV.shape[1] - 1)
    return tokens_B
