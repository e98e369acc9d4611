"""Regeneration: training rows that the target itself writes, as continuations of prompts from the source.

A draft has to predict what the target writes, and text that it did write shows that better than any other: on two CPU cores, in equal
time, acceptance length went from 1.78 to 2.63. Of a text everything is supervised, its prompt included; of a conversation the answer.
"""

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdistill.data.batch_generate import Sampling, fast_dtype, generate, generation_mode
from specdistill.data.cache import Row
from specdistill.data.prompts import Prompt, repeated
from specdistill.errors import ResourceError

logger = logging.getLogger(__name__)

CHAT_SHARE = (
    1 / 3
)  # of the tokens, where the source has conversations and texts; answers are short, so that most rows are answers
SHORT_ROW = 256  # tokens of a text, prompt and continuation, that are always worth writing
SORTED_BATCHES = 4  # batches whose prompts are sorted by length together, so that little of a batch is padding
ENOUGH = 0.995  # share of the tokens asked for that ends the writing: a batch of a few rows costs as much time as a full one


@dataclass
class _Kind:
    """Prompts of one kind in batches, their share of the tokens, the lengths they are written to, and what was written so far."""

    share: float
    batches: Iterator[list[tuple[Prompt, float]]]
    lengths: Iterator[int]
    tokens: int = 0
    rows: int = 0


def row_lengths(max_length: int, prompt_tokens: int) -> list[int]:
    """Lengths that batches of texts are written to, in turn.

    Three in four stop half way, though not before SHORT_ROW tokens: attention over the first half costs a third of that over both, and
    a small target's greedy text begins to loop. The fourth is as long as a row, so that every position is trained.
    """
    short = min(max_length, max(SHORT_ROW, max_length // 2))
    return [short, short, short, max_length] if short >= 2 * prompt_tokens else [max_length]


def generated_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    num_tokens: int,
    temperatures: Sequence[float],
    max_length: int,
    batch_size: int,
    seed: int,
    dtype: torch.dtype | None = None,
) -> Iterator[Row]:
    """About `num_tokens` tokens that the target writes, as rows {input_ids, loss_mask, length} of at most `max_length` tokens.

    `dtype` is what the target computes in; by default the fastest that its device has. Deterministic for a seed and number of cores.
    """
    kinds = _kinds(prompts, temperatures, max_length, batch_size, seed)
    end_ids, total = end_token_ids(model, tokenizer), 0
    bar = tqdm(total=num_tokens, desc="The target writes", unit="tok", unit_scale=True, mininterval=0.5)
    with bar, generation_mode(model, dtype or fast_dtype(model.device)) as fast:
        for number in itertools.count():
            if not kinds or total >= ENOUGH * num_tokens:
                break
            kind = min(kinds, key=lambda kind: kind.tokens / kind.share)
            batch = next(kind.batches, None)
            if batch is None:
                kinds.remove(kind)
                continue
            new_tokens = next(kind.lengths) - max(len(prompt.ids) for prompt, _ in batch)
            expected = min(new_tokens, kind.tokens / kind.rows) if kind.rows else new_tokens
            missing = kind.share * num_tokens - kind.tokens if len(kinds) > 1 else num_tokens - total
            batch = batch[: math.ceil(missing / expected)]
            texts = _generate(fast, batch, Sampling(new_tokens, end_ids, seed * 1_000_003 + number), bar.update)
            for (prompt, _), text in zip(batch, texts, strict=True):
                yield _row(prompt, text)
            count = sum(map(len, texts))
            total, kind.tokens, kind.rows = total + count, kind.tokens + count, kind.rows + len(batch)
    if total < ENOUGH * num_tokens:
        logger.warning("the prompts of data.source were used up after %d of %d tokens", total, num_tokens)


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends what the target writes, by its own configuration and its tokenizer's."""
    ends: set[int] = set()
    for declared in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ends.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
    return sorted(ends)


def _kinds(
    prompts: Sequence[Prompt], temperatures: Sequence[float], max_length: int, batch_size: int, seed: int
) -> list[_Kind]:
    chats = [prompt for prompt in prompts if prompt.is_chat]
    texts = [prompt for prompt in prompts if not prompt.is_chat]
    kinds = []
    if texts:
        lengths = itertools.cycle(row_lengths(max_length, len(texts[0].ids)))
        kinds.append(_Kind(1 - CHAT_SHARE, _batched(repeated(texts, temperatures), batch_size), lengths))
    if chats:
        batches = _by_length(repeated(chats, temperatures), batch_size, seed)
        kinds.append(_Kind(CHAT_SHARE, batches, itertools.repeat(max_length)))
    return kinds


def _batched(items: Iterator[tuple[Prompt, float]], size: int) -> Iterator[list[tuple[Prompt, float]]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _by_length(items: Iterator[tuple[Prompt, float]], size: int, seed: int) -> Iterator[list[tuple[Prompt, float]]]:
    """Batches of prompts of similar length, in shuffled order."""
    generator = random.Random(seed)
    for several in _batched(items, SORTED_BATCHES * size):
        several.sort(key=lambda item: len(item[0].ids))
        batches = list(_batched(iter(several), size))
        generator.shuffle(batches)
        yield from batches


def _generate(
    model: PreTrainedModel, batch: Sequence[tuple[Prompt, float]], sampling: Sampling, on_tokens: Callable[[int], object]
) -> list[list[int]]:
    try:
        return generate(
            model, [prompt.ids for prompt, _ in batch], [temperature for _, temperature in batch], sampling, on_tokens
        )
    except torch.OutOfMemoryError as error:
        what = f"the device ran out of memory while the target wrote {len(batch)} rows at a time"
        raise ResourceError(what, next_step="lower data.regenerate.batch_size or data.max_length") from error


def _row(prompt: Prompt, text: list[int]) -> Row:
    prompt_mask = [0 if prompt.is_chat else 1] * len(prompt.ids)
    ids = prompt.ids + text
    return {"input_ids": ids, "loss_mask": prompt_mask + [1] * len(text), "length": len(ids)}
