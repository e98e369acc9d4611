"""Regeneration: training rows that the target generates, as continuations of prompts from the source.

A draft has to predict what the target generates, and the target's own generations train it best: on two CPU cores, in equal time,
acceptance length went from 1.78 to 2.63. All tokens of a text carry loss, its prompt included; in a conversation those of the answer.

A conversation gives a prompt of everything up to its first assistant turn. A text gives a fixed number of tokens from its beginning and,
if more prompts are wanted than there are texts, from the beginnings of its paragraphs, lines or words.
"""

import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdistill.cost import Cost
from specdistill.data.answers import Answer, Answers, Question, digest
from specdistill.data.batch_generate import fast_dtype, generate, generation_mode
from specdistill.data.cache import Row
from specdistill.data.chat import Message, prompt_ids
from specdistill.errors import ResourceError
from specdistill.processes import Crew
from specdistill.progress import progress
from specdistill.targets.loading import end_ids

logger = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 16  # more than a token has on average, so that a snippet surely has enough tokens
TEXTS_AT_ONCE = 64
# Where a prompt may start within a text, the most natural places first: paragraphs, lines, words.
STARTS = (re.compile(r"(?<=\n\n)(?=[^\n]*\S)"), re.compile(r"(?<=\n)(?=[^\n]*\S)"), re.compile(r"(?<=\s)(?=\S)"))
# Share of the tokens, if the source has both conversations and texts. Answers are short, so that most rows are answers.
CHAT_SHARE = 1 / 3
SHORT_ROW = 256  # tokens of a text, prompt and continuation, that are always worth generating
SORTED_BATCHES = 4  # batches whose prompts are sorted by length together, so that little of a batch is padding
ENOUGH = 0.995  # generation ends at this share of the tokens asked for: a batch of a few rows costs as much time as a full one


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, their row, and whether they ask for an assistant's answer; then the whole conversation, too. source: its
    place in data.source.
    """

    ids: list[int]
    row: int
    is_chat: bool
    is_beginning: bool = True
    messages: tuple[Message, ...] = ()
    source: int = 0


def chat_prompts(rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_tokens: int, limit: int, seed: int) -> list[Prompt]:
    """Up to `limit` prompts of at most `max_tokens`, one for each conversation, in shuffled order; says how many were longer."""
    prompts: list[Prompt] = []
    num_longer = 0
    for row, record in _shuffled(rows, seed):
        if len(prompts) == limit:
            break
        if record["messages"] is not None:
            ids = prompt_ids(tokenizer, record["messages"], f"data.source row {row}")
            if len(ids) <= max_tokens:
                prompts.append(Prompt(ids, row, is_chat=True, messages=tuple(record["messages"])))
            else:
                num_longer += 1
    if num_longer:
        told = "%d conversations, beside %d that are answered, ask in more than %d tokens, half of data.max_length, and are left out"
        logger.warning(told, num_longer, len(prompts), max_tokens)
    return prompts


def text_prompts(rows: Dataset, tokenizer: PreTrainedTokenizerBase, num_tokens: int, limit: int, seed: int) -> list[Prompt]:
    """Up to twice `limit` prompts of exactly `num_tokens`: first the beginnings of the texts, then places within them."""
    num_texts = len(rows) - rows.data.column("text").null_count
    if num_texts == 0:
        return []
    per_text = -(-2 * limit // num_texts)  # twice the need: some texts are short
    generator = random.Random(seed)
    prompts: list[Prompt] = []
    texts = ((row, record["text"]) for row, record in _shuffled(rows, seed) if record["text"] is not None)
    while len(prompts) < 2 * limit and (batch := list(islice(texts, TEXTS_AT_ONCE))):
        starts = [(row, text, start) for row, text in batch for start in _starts(text, per_text, generator)]
        snippets = [text[start : start + num_tokens * CHARACTERS_PER_TOKEN] for _, text, start in starts]
        for (row, _, start), ids in zip(starts, tokenizer(snippets, verbose=False)["input_ids"], strict=True):
            if len(ids) >= num_tokens:
                prompts.append(Prompt(list(ids[:num_tokens]), row, is_chat=False, is_beginning=start == 0))
    generator.shuffle(prompts)
    return sorted(prompts, key=lambda prompt: not prompt.is_beginning)


def repeated(prompts: Sequence[Prompt], temperatures: Sequence[float]) -> Iterator[tuple[Prompt, float]]:
    """Every prompt at every temperature, then again and again at those above 0, which generate something new."""
    count = len(temperatures)
    for turn in range(count):
        for index, prompt in enumerate(prompts):
            yield prompt, temperatures[(index + turn) % count]
    sampled = [temperature for temperature in temperatures if temperature > 0]
    while sampled and prompts:
        for index, prompt in enumerate(prompts):
            yield prompt, sampled[index % len(sampled)]


class Order(NamedTuple):
    """A batch to generate, as one process hands it to another."""

    prompts: list[list[int]]
    temperatures: list[float]
    max_new_tokens: int
    end_ids: list[int]
    seed: int

    def questions(self) -> list[Question]:
        """One for each row."""
        batch = digest(self)
        return [Question(batch, row, temperature, self.seed) for row, temperature in enumerate(self.temperatures)]


@dataclass(eq=False)
class _PromptPool:
    """Prompts of texts, or of chats.

    share: of all tokens. batches: (prompt, temperature) pairs, and those that were drawn. lengths: to which each batch is continued, in
    turn. number, tokens, rows: batches, tokens and rows generated so far.
    """

    share: float
    batches: Iterator[list[tuple[Prompt, float]]]
    lengths: Sequence[int]
    drawn: list[list[tuple[Prompt, float]]] = field(default_factory=list)
    number: int = 0
    tokens: float = 0.0
    rows: int = 0

    def batch(self) -> list[tuple[Prompt, float]]:
        """The next; empty when the prompts are used up."""
        while len(self.drawn) <= self.number and (drawn := next(self.batches, None)):
            self.drawn.append(drawn)
        return self.drawn[self.number] if self.number < len(self.drawn) else []

    def count(self, tokens: float, rows: int) -> None:
        self.number, self.tokens, self.rows = self.number + 1, self.tokens + tokens, self.rows + rows


class _Wanted(NamedTuple):
    """A batch, and the place of its pool."""

    pool: int
    pairs: list[tuple[Prompt, float]]
    order: Order


def row_lengths(max_length: int, prompt_tokens: int) -> list[int]:
    """Lengths to which batches of texts are continued, in turn.

    Three in four stop half way, though not before SHORT_ROW tokens: attention over the first half costs a third of that over both, and
    greedy text of a small target begins to loop. The fourth is as long as a row, so that every position is trained.
    """
    short = min(max_length, max(SHORT_ROW, max_length // 2))
    return [short, short, short, max_length] if short >= 2 * prompt_tokens else [max_length]


@contextmanager
def generating(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[Callable[..., list[list[int]]]]:
    """What continues the prompts of an order, in `dtype`, by default the fastest of the model's device. Only the first order makes the
    model ready for it. Raises ResourceError when the device's memory does not hold a batch.
    """
    with ExitStack() as stack:
        ready = cache(lambda: stack.enter_context(generation_mode(model, dtype or fast_dtype(model.device))))

        def continued(order: Order, on_tokens: Callable[[int], object] = lambda count: None) -> list[list[int]]:
            try:
                return generate(ready(), **order._asdict(), on_tokens=on_tokens)
            except torch.OutOfMemoryError as error:
                what = f"the device ran out of memory while it generated {len(order.prompts)} rows at a time"
                raise ResourceError(what, next_step="lower data.regenerate.batch_size or data.max_length") from error

        yield continued


def generated_rows(
    crew: Crew,
    answers: Answers,
    prompts: Sequence[Prompt],
    num_tokens: int,
    temperatures: Sequence[float],
    max_length: int,
    batch_size: int,
    seed: int,
    end_ids: Sequence[int],
    *,
    name: str = "",
    loss_mask: str = "assistant",
    announced: Callable[[Cost, str], object] = lambda cost, sample: None,
) -> Iterator[Row]:
    """About `num_tokens` tokens generated by the target, as rows {input_ids, loss_mask, length, source} of at most `max_length`.

    crew: of processes that are `generating`. Rows depend on the seed and the number of cores, not on the number of processes, which
    generate what will be wanted next as far as that can be told. A batch is among the answers before its rows come, and is not generated
    again: a run that was killed goes on behind the last one it finished. name: the target's. announced: is told once, after the first
    batches, what the rest and these cost, and the sample that says so.
    """
    pools: list[_PromptPool] = []
    for is_chat, share in ((False, 1 - CHAT_SHARE), (True, CHAT_SHARE)):
        if own := [prompt for prompt in prompts if prompt.is_chat == is_chat]:
            pairs, lengths = repeated(own, temperatures), [max_length] if is_chat else row_lengths(max_length, len(own[0].ids))
            batches = _by_length(pairs, batch_size, seed) if is_chat else _batched(pairs, batch_size)
            pools.append(_PromptPool(share, batches, lengths))
    upcoming, counted = partial(_upcoming, pools, num_tokens, end_ids, seed * 1_000_003), set[Question]()
    with progress("Generating training data", num_tokens, "tokens") as advance:
        while wanted := next(upcoming(), None):
            known = _known(wanted.order, answers)
            if known is None:
                orders = list(islice((it.order for it in upcoming() if _known(it.order, answers) is None), crew.size))
                _generate(orders, crew, answers, name, advance)
                if not counted:
                    answered = answers.added.loss_tokens or 1
                    missing = num_tokens - sum(pool.tokens for pool in pools)
                    sample = f"{answers.added.rows:,.0f} rows in {answers.added.seconds:.1f} s"
                    announced(answers.added.times(missing / answered), sample)
                counted.add(orders[0].questions()[0])
                continue
            if wanted.order.questions()[0] not in counted:
                advance(sum(map(len, known)))
            for (prompt, _), continuation in zip(wanted.pairs, known, strict=True):
                ids = prompt.ids + continuation
                prompt_mask = [int(loss_mask == "all" or not prompt.is_chat)] * len(prompt.ids)
                mask = prompt_mask + [1] * len(continuation)
                yield {"input_ids": ids, "loss_mask": mask, "length": len(ids), "source": prompt.source}
            pools[wanted.pool].count(sum(map(len, known)), len(known))
    total = sum(pool.tokens for pool in pools)
    if total < ENOUGH * num_tokens:
        logger.warning("the prompts of data.source were used up after %d of %d tokens", total, num_tokens)


def _upcoming(pools: Sequence[_PromptPool], num_tokens: int, end_ids: Sequence[int], first_seed: int) -> Iterator[_Wanted]:
    """The batches that are still wanted. The first is certain; the others are as far as batches go on giving as many tokens as they did.

    Each pool gives its share; the last batch only as many rows as are missing.
    """
    pools = [replace(pool) for pool in pools]
    left = dict(enumerate(pools))
    while left and (total := sum(pool.tokens for pool in pools)) < ENOUGH * num_tokens:
        place, pool = min(left.items(), key=lambda item: item[1].tokens / item[1].share)
        if not (pairs := pool.batch()):
            del left[place]
            continue
        new_tokens = pool.lengths[pool.number % len(pool.lengths)] - max(len(prompt.ids) for prompt, _ in pairs)
        expected = min(new_tokens, pool.tokens / pool.rows) if pool.rows else new_tokens
        missing = pool.share * num_tokens - pool.tokens if len(left) > 1 else num_tokens - total
        pairs = pairs[: math.ceil(missing / expected)]
        ids, temperatures = [prompt.ids for prompt, _ in pairs], [temperature for _, temperature in pairs]
        yield _Wanted(
            place, pairs, Order(ids, temperatures, new_tokens, list(end_ids), first_seed + sum(it.number for it in pools))
        )
        pool.count(expected * len(pairs), len(pairs))


def continuations(
    orders: Sequence[Order], crew: Crew, answers: Answers, name: str, on_tokens: Callable[[int], object] = lambda count: None
) -> list[list[int]]:
    """Of all prompts of the orders, in turn. Those that are not among the answers are generated, and kept there."""
    missing = iter([order for order in orders if _known(order, answers) is None])
    while some := list(islice(missing, crew.size)):
        _generate(some, crew, answers, name, on_tokens)
    return [list(answer.token_ids) for order in orders for question in order.questions() if (answer := answers.get(question))]


def _generate(orders: Sequence[Order], crew: Crew, answers: Answers, name: str, on_tokens: Callable[[int], object]) -> None:
    """Have each of up to `crew.size` orders generated, and keep what comes."""
    for order, made in zip(orders, crew(orders, on_tokens=on_tokens), strict=True):
        for question, ids, continuation in zip(order.questions(), order.prompts, made, strict=True):
            answers.add(question, Answer(tuple(ids), tuple(continuation), "", name, "", {}, {}))


def _known(order: Order, answers: Answers) -> list[list[int]] | None:
    """The continuations of an order; None unless the answers have all of them."""
    found = [answers.get(question) for question in order.questions()]
    return [list(answer.token_ids) for answer in found if answer] if all(found) else None


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a generation, by the model's configuration and its tokenizer's."""
    return end_ids(model.generation_config, model.config, tokenizer)


def _batched(items: Iterator[tuple[Prompt, float]], size: int) -> Iterator[list[tuple[Prompt, float]]]:
    while batch := list(islice(items, size)):
        yield batch


def _by_length(items: Iterator[tuple[Prompt, float]], size: int, seed: int) -> Iterator[list[tuple[Prompt, float]]]:
    """Batches of prompts of similar length, in shuffled order."""
    generator = random.Random(seed)
    for several in _batched(items, SORTED_BATCHES * size):
        several.sort(key=lambda item: len(item[0].ids))
        batches = list(_batched(iter(several), size))
        generator.shuffle(batches)
        yield from batches


def _starts(text: str, count: int, generator: random.Random) -> list[int]:
    """The beginning of a text and up to `count` - 1 other places to start from."""
    chosen: list[int] = []
    for pattern in STARTS:
        missing = count - 1 - len(chosen)
        if missing <= 0:
            break
        places = sorted({match.start() for match in pattern.finditer(text)} - set(chosen))
        chosen += generator.sample(places, min(missing, len(places)))
    return [0, *chosen]


def _shuffled(rows: Dataset, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    for row in order:
        yield row, rows[row]
