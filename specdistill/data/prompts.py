"""Prompts for the target to continue, taken from the rows of a source.

A conversation gives everything up to its first assistant turn. A text gives a fixed number of tokens from its beginning and, if more
prompts are wanted than there are texts, from the beginnings of its paragraphs, lines or words.
"""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from specdistill.data.chat import prompt_ids

CHARACTERS_PER_TOKEN = 16  # more than a token has on average, so that a snippet surely has enough tokens
TEXTS_AT_ONCE = 64
# Where a prompt may start within a text, the most natural places first: paragraphs, lines, words.
STARTS = (re.compile(r"(?<=\n\n)(?=[^\n]*\S)"), re.compile(r"(?<=\n)(?=[^\n]*\S)"), re.compile(r"(?<=\s)(?=\S)"))


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, their row, and whether they ask for an assistant's answer."""

    ids: list[int]
    row: int
    is_chat: bool
    is_beginning: bool = True


def chat_prompts(rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_tokens: int, limit: int, seed: int) -> list[Prompt]:
    """Up to `limit` prompts of at most `max_tokens`, one for each conversation, in shuffled order."""
    prompts: list[Prompt] = []
    for row, record in _shuffled(rows, seed):
        if len(prompts) == limit:
            break
        if record["messages"] is not None:
            ids = prompt_ids(tokenizer, record["messages"], f"data.source row {row}")
            if len(ids) <= max_tokens:
                prompts.append(Prompt(ids, row, is_chat=True))
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
    while len(prompts) < 2 * limit and (batch := list(itertools.islice(texts, TEXTS_AT_ONCE))):
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
