"""Generate in batches: continue prompts token by token, each row at its own temperature.

On a CPU most of the time is spent reading keys and values (measured with 16 layers of 128, and
batches of 256 rows). Three changes to the model's own forward pass make that cheap:

* `GrowingLayer` keeps keys and values dense. transformers' dynamic cache copies all of them at
  every token. A view into a larger buffer would not help, because oneDNN's bfloat16 product copies
  it.
* `attend_by_group` reads every key and value once for all the query heads that share it. It does
  so on a GPU too.
* Rows that have ended leave the batch. On a CPU a batch is also generated in parts, as many at a
  time as there are cores. Threads that never wait for one another are faster than threads inside
  each of hundreds of small operations.

Shapes: B rows, P prompt tokens (with padding), D head width, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specdistill.targets.cache import is_recurrent
from specdistill.targets.loading import is_plain
from specdistill.targets.memory import map_large_tensors

# Tokens by which a cache grows. Copying it then costs about as much as reading its unused tail.
BLOCK = 32
# Steps between two checks of which rows have ended. A check waits for the device, and ended rows
# stay in the batch until the next check.
STEPS_BETWEEN_END_CHECKS = 8
# Rows that have ended leave the batch once at most this share of it is unfinished. A higher share
# copies the KV cache more often, and a lower one computes more tokens that nobody needs.
KEEP_SHARE = 0.75
# The last rows are cut short once at most this share of all rows is unfinished, because a step
# costs the same for a few rows.
STOP_SHARE = 1 / 8
# The fewest rows of a part. Smaller parts read the weights more often for each token.
MIN_PART_ROWS = 40
# The numbers of parts that a batch may be split into. On most machines the cores finish these in
# whole rounds.
PARTS = (16, 8, 4, 2, 1)
# The share of the free memory that a batch may take. A cache exists twice while it is copied to
# grow, and other memory is needed too.
MEMORY_SHARE = 0.7
# The most bytes of float32 probabilities that exist at once while tokens are drawn.
SAMPLING_BYTES = 2**26
GROUPED_ATTENTION = "specdistill_grouped"


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, each in a dense tensor [B, heads, room, head_dim].

    The positions after the first `length` are zero, and the attention mask hides them.
    """

    length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, new, head_dim], and return all of them with spare room.

        The first pass, over the prompts, leaves no spare room. From the second pass on, there is
        room for a multiple of BLOCK tokens. Positions after the last token are zero, and the
        attention mask hides them.
        """
        end = self.length + key_states.shape[2]
        # The first pass reads the prompts. Their keys and values are kept without spare room.
        if not self.is_initialized:
            keys = key_states
            values = value_states
            self.is_initialized = True
        else:
            assert self.keys is not None and self.values is not None
            keys = self.keys
            values = self.values
            # Copy them into longer tensors if the new tokens do not fit. Then write the new tokens.
            room = round_up_length(self.length, end)
            if keys.shape[2] != room:
                padding = (0, 0, 0, room - self.length)
                keys = F.pad(keys[:, :, : self.length], padding)
                values = F.pad(values[:, :, : self.length], padding)
            keys[:, :, self.length : end] = key_states
            values[:, :, self.length : end] = value_states
        self.keys = keys
        self.values = values
        self.length = end
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions a mask must cover for `query_length` new tokens, and offset 0.

        transformers calls this to build the attention mask. The offset is the number of positions
        that the cache has dropped at its beginning, and this layer drops none.
        """
        return round_up_length(self.length, self.length + query_length), 0

    def get_seq_length(self) -> int:
        """Return the number of tokens that the layer holds."""
        return self.length


def round_up_length(num_seen: int, end: int) -> int:
    """Return how many positions attention runs over in a pass.

    For a prompt these are its tokens. For later tokens, the number is rounded up to a multiple of
    BLOCK, because the cache has room for whole blocks of tokens.

    Args:
        num_seen: tokens that are cached before the pass; 0 for a prompt.
        end: tokens that will be cached after the pass.
    """
    return end if num_seen == 0 else -(-end // BLOCK) * BLOCK


def attend_by_group(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute softmax(scaling · Q Kᵀ) V for one new token per row.

    transformers calls this in place of `sdpa`. Keys and values are read once for all query heads
    that share them. Prompts, which have more than one token, are passed on to `sdpa`.

    Args:
        module: the attention module that calls this.
        query: [B, heads, 1, D], for B rows and heads of size D.
        key: [B, shared heads, room, D], with room for later tokens.
        value: [B, shared heads, room, D].
        attention_mask: boolean, True for tokens that are seen; None if all are seen.
        scaling: factor of the scores; None for D^-1/2.
        **kwargs: passed on to `sdpa`.

    Returns:
        The output [B, 1, heads, D], and None in place of attention weights.
    """
    # Prompts go to `sdpa`, and so do calls with the position bias that some classes add.
    batch, heads, num_queries, width = query.shape
    if num_queries > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )

    # Group the query heads by the key/value head that they share, so that one product computes the
    # scores of a whole group: [B, shared heads, heads of a group, room].
    scale = width**-0.5 if scaling is None else scaling
    query = query.reshape(batch, key.shape[1], -1, width) * scale
    # The keys are on the left, so that the product reads them in the order they are stored.
    scores = (key @ query.transpose(2, 3)).transpose(2, 3)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    return (scores.softmax(-1) @ value).reshape(batch, 1, heads, -1), None


AttentionInterface.register(GROUPED_ATTENTION, attend_by_group)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


@contextmanager
def prepare_generation(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """Prepare a model for fast generation while the block runs, and restore the model afterwards.

    Args:
        model: the model.
        dtype: the dtype of the weights. If the model's weights have another one, a copy is made.

    Yields:
        The model or its copy. If its attention was `sdpa`, it now is `attend_by_group`, which
        reads keys and values only once for all query heads that share them.
    """
    # Copy the model in the wanted dtype, unless its weights are quantized or sharded.
    attention = model.config._attn_implementation
    training = model.training
    if is_plain(model) and model.dtype != dtype:
        # `model.to` would round the rotary frequencies too. Here only parameters are rounded.
        # `deepcopy` takes the rounded parameters from its memo, so it never copies a parameter in
        # the old dtype.
        rounded: dict[int, object] = {
            id(parameter): torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            for parameter in model.parameters()
        }
        model = copy.deepcopy(model, rounded)

    # GROUPED_ATTENTION is the name of `attend_by_group`. The hook gives the LM head contiguous
    # hidden states (see `copy_contiguous`).
    model.eval()
    if attention == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)
    hook = model.get_output_embeddings().register_forward_pre_hook(copy_contiguous)
    try:
        with (
            # Keys and values grow, so torch.compile would compile a new graph for each length.
            torch.compiler.set_stance("force_eager"),
            # The logits of a large vocabulary take much memory, which the C library may keep when
            # they are freed. This makes it return the memory to the system at once.
            map_large_tensors(model.config.get_text_config(decoder=True).vocab_size),
        ):
            yield model
    finally:
        hook.remove()
        model.set_attn_implementation(attention)
        model.train(training)


def copy_contiguous(head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy the hidden states that an LM head gets into contiguous memory.

    This is a hook for `register_forward_pre_hook`. The hidden states of the last position of each
    prompt are a view with gaps. torch multiplies such a view by a copy of the head for each row:
    with 64 rows and a vocabulary of 262,144 the copies take 20 GB, and the product takes a minute.
    """
    # Tensor.contiguous() would not copy the view of a single prompt: torch ignores the stride of an
    # axis of length 1, and counts the view as contiguous. Its product would copy the head as well.
    return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs)


def choose_fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the hardware can multiply it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


@dataclass(frozen=True)
class BatchPlan:
    """The size of a batch that fits the memory.

    Attributes:
        num_rows: rows of the batch.
        num_parallel: parts of it that are generated at a time on a CPU.
    """

    num_rows: int
    num_parallel: int


def plan_batch(batch_size: int, device: torch.device, row_bytes: int, free_bytes: int) -> BatchPlan:
    """Plan a batch of at most `batch_size` rows that fits the free memory.

    On a CPU, the rows of a batch are divided into parts, and several parts are generated at a time.
    If memory is short, fewer parts are generated at a time. The generated tokens stay the same. If
    not even one part fits, the number of rows is halved until one part fits. Then the batch is
    divided in another way, so other tokens are sampled.

    Args:
        batch_size: the most rows.
        device: the device of the model.
        row_bytes: bytes that one row takes.
        free_bytes: bytes of free memory.
    """
    fitting_rows = max(1, int(MEMORY_SHARE * free_bytes) // row_bytes)

    # Halve the rows of the batch until one part fits. A smaller batch may be split into fewer
    # parts: half the rows in half the parts leave each part as large as before. In this case the
    # rows are halved again.
    num_rows = batch_size
    part_rows = choose_part_rows(num_rows, device)
    while num_rows > 1 and part_rows > fitting_rows:
        num_rows //= 2
        part_rows = choose_part_rows(num_rows, device)

    # Generate as many parts at a time as fit.
    num_parallel = max(1, fitting_rows // part_rows)
    return BatchPlan(num_rows, num_parallel)


def choose_part_rows(num_rows: int, device: torch.device) -> int:
    """Return the number of rows of the largest part of a batch."""
    return -(-num_rows // _count_parts(num_rows, device))


def _count_parts(num_rows: int, device: torch.device) -> int:
    """Return how many parts a batch is split into.

    On a CPU there may be several, each with at least MIN_PART_ROWS rows. Their number does not
    depend on the number of cores, so that the generated tokens do not depend on it, either.
    """
    if device.type != "cpu":
        return 1
    # PARTS is in descending order, so this is the greatest number that leaves parts large enough.
    return next(parts for parts in PARTS if parts == 1 or num_rows >= parts * MIN_PART_ROWS)


def generate_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int],
    seed: int,
    num_parts: int | None = None,
    num_parallel: int | None = None,
) -> list[list[int]]:
    """Continue every prompt, and return the new tokens of each row.

    The same seed, prompts and parts give the same tokens, however many threads this process may
    use, and however many parts are generated at a time.

    Args:
        model: the model, prepared by `prepare_generation`.
        prompts: token ids of each row.
        temperatures: the temperature of each row; 0 is greedy.
        max_new_tokens: the most new tokens of a row.
        end_ids: tokens that end a row.
        seed: the seed of all sampling.
        num_parts: parts that the batch is split into; None for a number that suits the device and
            the number of prompts.
        num_parallel: parts that are generated at a time, at most one for each thread; None for all.

    Returns:
        The new tokens of each row. A row ends with a token of `end_ids`, which is included. A row
        without such a token is cut short after `max_new_tokens`, or once nearly all other rows have
        ended.
    """
    # Choose the number of parts, and how many of them are generated at a time.
    threads = torch.get_num_threads()
    num_parts = _count_parts(len(prompts), model.device) if num_parts is None else num_parts
    num_workers = min(threads, num_parts, num_parallel or num_parts)

    def generate_part(part: int) -> list[list[int]]:
        """Continue the prompts of a part: every `num_parts`-th prompt, from number `part` on."""
        return _generate_part(
            model,
            prompts[part::num_parts],
            temperatures[part::num_parts],
            max_new_tokens,
            end_ids,
            # Each part has its own random numbers. 1,009 is larger than any number of parts, so the
            # parts of batches with different seeds never have the same seed.
            seed * 1_009 + part,
        )

    if num_parts == 1:
        return generate_part(0)

    # The workers share the threads of this process. Row r is in part r modulo the number of parts.
    try:
        with ThreadPoolExecutor(
            num_workers,
            initializer=torch.set_num_threads,
            initargs=(max(1, threads // num_workers),),
        ) as pool:
            generated = list(pool.map(generate_part, range(num_parts)))
    finally:
        torch.set_num_threads(threads)

    # Put the rows back into the order of the prompts.
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
    """Continue the prompts of one part of a batch, and return the new tokens of each row.

    The arguments are those of `generate_batch`.
    """
    # `generated` holds the new tokens of all rows, and -1 for tokens that are not generated yet.
    device = model.device
    num_rows = len(prompts)
    generator = torch.Generator(device).manual_seed(seed)
    ends = torch.tensor(list(end_ids), dtype=torch.long, device=device)
    generated = torch.full((num_rows, max_new_tokens), -1, device=device)

    # Pad the prompts on the left, so that the new tokens of all rows are in the same cache slots.
    ids = pad_sequence(
        [torch.tensor(prompt) for prompt in prompts], batch_first=True, padding_side="left"
    ).to(device)
    length = ids.shape[1]

    # The state of the rows that are still in the batch: their numbers, which of them have ended,
    # their temperatures, and how many tokens their prompts have.
    row_number = torch.arange(num_rows, device=device)
    ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
    temperature = torch.tensor(temperatures, device=device)
    num_prompt_tokens = torch.tensor([[len(prompt)] for prompt in prompts], device=device)

    # `seen_mask` says which slots of the cache hold tokens, and not padding. It covers all slots
    # that the cache can get. After the prompts the cache grows by whole blocks, so the number of
    # slots is a multiple of BLOCK. `round_up_length` rounds up for any `num_seen` above 0.
    num_slots = round_up_length(num_seen=1, end=length + max_new_tokens)
    seen_mask = torch.zeros(num_rows, num_slots, dtype=torch.bool, device=device)
    seen_mask[:, :length] = torch.arange(length, device=device) >= length - num_prompt_tokens
    cache = _create_growing_cache(model)
    # A token's position is the number of tokens before it, without padding. For the padding this
    # would be -1, so it gets 0.
    positions = (seen_mask[:, :length].cumsum(1) - 1).clamp(min=0)

    for step in range(max_new_tokens):
        # Read the prompts in the first step, and one token per row in later steps. The mask covers
        # the positions that attention runs over. Sample the next token of each row.
        logits_BV = model(
            input_ids=ids,
            attention_mask=seen_mask[:, : round_up_length(length - ids.shape[1], length)],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens_B = sample(logits_BV, temperature, generator)
        generated[row_number, step] = tokens_B
        ended |= torch.isin(tokens_B, ends)

        # From time to time, stop if nearly all rows have ended, or drop the rows that have ended.
        if step % STEPS_BETWEEN_END_CHECKS == STEPS_BETWEEN_END_CHECKS - 1:
            unfinished = (~ended).nonzero().flatten()
            if len(unfinished) <= STOP_SHARE * num_rows:
                break
            # A recurrent layer's state cannot be selected by rows, so such a batch stays whole.
            if len(unfinished) <= KEEP_SHARE * len(tokens_B) and not is_recurrent(
                model.config.get_text_config()
            ):
                row_number, ended, temperature, num_prompt_tokens, seen_mask, tokens_B = (
                    tensor[unfinished]
                    for tensor in (
                        row_number,
                        ended,
                        temperature,
                        num_prompt_tokens,
                        seen_mask,
                        tokens_B,
                    )
                )
                cache.batch_select_indices(unfinished)

        # The new tokens are the inputs of the next step.
        seen_mask[:, length] = True
        ids = tokens_B[:, None]
        positions = num_prompt_tokens + step
        length += 1
    return _cut_after_end(generated, ends)


def _create_growing_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty KV cache in which each full attention layer has a `GrowingLayer`."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer  # type: ignore[no-untyped-call]
        for layer in cache.layers
    ]
    return cache


def _cut_after_end(generated: Tensor, ends: Tensor) -> list[list[int]]:
    """Return the tokens of each row up to its first end token, which is included.

    Args:
        generated: token ids [B, max_new_tokens]; -1 for tokens that were not generated.
        ends: the end tokens.
    """
    # A token is kept if it was generated and no end token comes before it.
    is_end = torch.isin(generated, ends).long()
    num_ends_before = is_end.cumsum(1) - is_end
    is_kept = (generated >= 0) & (num_ends_before == 0)
    return [row[mask].tolist() for row, mask in zip(generated.cpu(), is_kept.cpu(), strict=True)]


def sample(logits_BV: Tensor, temperatures_B: Tensor, generator: torch.Generator) -> Tensor:
    """Choose one token per row.

    At temperature 0 the token is the argmax. Otherwise it is drawn from softmax(logits /
    temperature) by inverting the cumulative sum. That takes one uniform number per row instead of
    the V numbers of `torch.multinomial`, which on a CPU cost more than the LM head.

    Probabilities are float32. SAMPLING_BYTES limits for how many rows they exist at a time. Each
    row is computed by itself, so the limit changes no token.

    Args:
        logits_BV: [B, V], for B rows and V tokens.
        temperatures_B: [B], on the same device.
        generator: the source of the uniform numbers.

    Returns:
        Token ids [B].
    """
    # Start with the greedy tokens, and replace those of rows with a temperature. All uniform
    # numbers are drawn at once, so that they do not depend on how rows are divided below.
    tokens_B = logits_BV.argmax(-1)
    sampled = (temperatures_B > 0).nonzero().flatten()
    uniform = torch.rand(len(sampled), 1, generator=generator, device=logits_BV.device)

    # Draw for as many rows at a time as fit the limit; one number takes 4 bytes.
    rows_at_once = max(1, SAMPLING_BYTES // (4 * logits_BV.shape[1]))
    for rows, uniform_r1 in zip(
        sampled.split(rows_at_once), uniform.split(rows_at_once), strict=True
    ):
        if len(rows) > 0:
            tokens_B[rows] = _draw(logits_BV[rows], temperatures_B[rows], uniform_r1)
    return tokens_B


def _draw(logits_rV: Tensor, temperatures_r: Tensor, uniform_r1: Tensor) -> Tensor:
    """Draw a token for each row from softmax(logits / temperature).

    The draw inverts the cumulative sum of the probabilities at a uniform number.

    Args:
        logits_rV: [r, V], for r rows and V tokens.
        temperatures_r: [r], above 0.
        uniform_r1: uniform numbers [r, 1] in [0, 1).

    Returns:
        Token ids [r].
    """
    # The drawn token is the first whose cumulative sum exceeds u times the total, with the uniform
    # number u. The total is 1 except for rounding. Without the factor, a u near 1 could exceed
    # every cumulative sum. If u times the total is rounded to the total, no sum exceeds it, and
    # `searchsorted` returns V, which is no token. The clamp then takes the last token.
    probabilities = (logits_rV.float() / temperatures_r[:, None]).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniform_r1 * cumulative[:, -1:], right=True)
    return drawn.squeeze(1).clamp(max=logits_rV.shape[1] - 1)
