"""Prompts of a block: beginnings of conversations and texts of its own rows, and the tasks that they make.

A conversation gives a prompt for each turn of the assistant: all that came before it, as recorded, results of tools too. A text gives a
fixed number of tokens from its beginning and, if more prompts are wanted than there are texts, from the beginnings of its paragraphs,
lines or words.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from specdistill.produce.blocks import Block
from specdistill.produce.sources import Source
from specdistill.recipe.sections import DataConfig
from specdistill.rows.chat import prompt_ids
from specdistill.rows.encoding import row_hash
from specdistill.suites.conversations import (
    Message,
    Tools,
    check_expressed,
    is_learned,
    is_unanswered,
)

CHARACTERS_PER_TOKEN = (
    16  # more than a token has on average, so that a snippet surely has enough tokens
)
TEXTS_AT_ONCE = 64
# Where a prompt may start within a text, the most natural places first: paragraphs, lines, words.
STARTS = (
    re.compile(r"(?<=\n\n)(?=[^\n]*\S)"),
    re.compile(r"(?<=\n)(?=[^\n]*\S)"),
    re.compile(r"(?<=\s)(?=\S)"),
)
# Share of the tokens, if the source has both conversations and texts. Answers are short, so that most rows are answers.
CHAT_SHARE = 1 / 3
SHORT_ROW = 256  # tokens of a text, prompt and continuation, that are always worth generating
SHORT_ANSWER = 32  # tokens, fewer than an answer has on average, so that there are enough questions
SORTED = 512  # prompts that are sorted by length together, in parts of PART, so that little of a batch is padding
PART = 128


@dataclass(frozen=True)
class GenerationPrompt:
    """Token ids to continue, and of a conversation its messages and tools. row: a hash of the source's row. source: its place in
    data.source. is_first: whether it is the first of a row whose prompts other blocks have, too. asked: the text of a prompt that the
    target generated.
    """

    ids: list[int]
    row: int = 0
    messages: tuple[Message, ...] = ()
    tools: Tools = None
    source: int = 0
    is_beginning: bool = True
    is_first: bool = True
    asked: str | None = None


class GenerationTask(NamedTuple):
    """What is generated from a prompt. name: of all tasks of a block this one alone has it. max_length: of a context with its answer, in
    tokens.
    """

    name: str
    prompt: GenerationPrompt
    temperature: float
    seed: int
    max_length: int


@dataclass(frozen=True)
class BlockPlan:
    """What a block is generated from. tokenizer: of one thread alone. end_ids: tokens that end a generation."""

    block: Block
    config: DataConfig
    sources: Sequence[Source]
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]

    def seed_of(self, name: str) -> int:
        """Of sampling; 31 bits, which every server takes."""
        return random.Random(f"{self.config.seed} {self.block.number} {name}").getrandbits(31)


class Stream(NamedTuple):
    """Tasks of one length, to be answered in their order until they give a share of a block's tokens."""

    tasks: Iterator[GenerationTask]
    share: float


def chat_prompts(
    plan: BlockPlan, rows: Iterable[dict[str, Any]], filtered: Counter[str]
) -> Iterator[GenerationPrompt]:
    """A prompt of at most half a row for each turn of the assistant; longer ones are counted."""
    config = plan.config
    template, is_served = config.regenerate.template, bool(config.regenerate.server)
    for row in rows:
        if row["messages"] is None:
            continue
        tools = row.get("tools")
        check_expressed(
            plan.tokenizer,
            [it for it in row["messages"] if not is_unanswered(it)],
            tools,
            **template,
        )
        turns = [*before_turns(row["messages"])]
        filtered.update(["not_learned"] * (not turns))  # all of weight 0
        for messages in turns:
            ids = prompt_ids(plan.tokenizer, messages, tools, **template)
            if len(ids) <= config.max_length // 2:
                yield GenerationPrompt(ids, row_hash(row, config.seed), tuple(messages), tools)
            else:
                filtered["long_prompt"] += 1
            if (
                left := sum(map(is_unanswered, messages))
            ) and not is_served:  # the first one is generated here
                filtered["follow_up"] += left


def before_turns(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """What came before each turn of the assistant that is learned; of the first that is yet to be generated, what the user says after it,
    too.
    """
    for number, message in enumerate(messages):
        if is_unanswered(message):
            break
        if is_learned(message):
            yield messages[:number]
    if messages[-1]["role"] != "assistant":
        yield messages


def text_prompts(
    plan: BlockPlan,
    rows: Iterable[dict[str, Any]],
    per_text: int,
    generator: random.Random,
    part: tuple[int, int],
) -> Iterator[GenerationPrompt]:
    """Prompts of `prompt_tokens`: for each text its beginning and `per_text` - 1 places within it. part: of how many that share them."""
    texts, num_tokens = (
        (row for row in rows if row["text"] is not None),
        plan.config.regenerate.prompt_tokens,
    )
    first, step = part
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        starts = [
            (row, start)
            for row in batch
            for start in _starts(row["text"], per_text * step, generator)[first::step]
        ]
        snippets = [
            row["text"][start : start + num_tokens * CHARACTERS_PER_TOKEN] for row, start in starts
        ]
        tokens = plan.tokenizer(snippets, verbose=False)["input_ids"] if snippets else []
        for (row, start), ids in zip(starts, tokens, strict=True):
            if len(ids) >= num_tokens:
                yield GenerationPrompt(
                    list(ids[:num_tokens]), row_hash(row, plan.config.seed), is_beginning=start == 0
                )


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


def prompts_of(
    plan: BlockPlan, of_self: Mapping[int, Sequence[GenerationPrompt]], filtered: Counter[str]
) -> tuple[list[GenerationPrompt], list[GenerationPrompt]]:
    """(conversations, texts) of the block's own rows; each source gives its weighted share of them. of_self: by the source's number."""
    block, config, sources = plan.block, plan.config, plan.sources
    own_sizes = {number: len(prompts) * block.num_blocks for number, prompts in of_self.items()}
    weights = [
        source.entry.weight * own_sizes.get(number, len(source.rows))
        for number, source in enumerate(sources)
    ]
    shortest = (
        row_lengths(config.max_length, config.regenerate.prompt_tokens)[0]
        - config.regenerate.prompt_tokens
    )
    placed: list[list[tuple[float, GenerationPrompt]]] = [[], []]
    for number, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        if number in of_self:
            placed[0] += [
                ((place + 0.5) / weight, prompt) for place, prompt in enumerate(of_self[number])
            ]
            continue
        num_chats, num_texts = (
            math.ceil(block.num_tokens / length * weight / sum(weights))
            for length in (SHORT_ANSWER, shortest)
        )
        order = list(range(len(source.rows)))
        random.Random(config.seed).shuffle(order)
        own, first, num_sharing = block.own(order)
        shared = Dataset.select(source.rows, own)
        generator = random.Random(
            f"{config.seed} {number} {own[0] if num_sharing > 1 else block.number}"
        )
        texts = sum(row is not None for row in shared.with_format(None)["text"])
        chats = chat_prompts(plan, shared, filtered)
        per_text = -(-2 * num_texts // max(1, texts))  # twice the need: some texts are short
        several = list(
            islice(
                text_prompts(plan, shared, per_text, generator, (first, num_sharing)), 2 * num_texts
            )
        )
        generator.shuffle(several)
        several.sort(key=lambda prompt: not prompt.is_beginning)
        for kind, prompts in enumerate((islice(chats, num_chats), several)):
            placed[kind] += [
                (
                    (place + 0.5) / weight,
                    replace(prompt, source=number, is_first=first == 0 or kind == 1),
                )
                for place, prompt in enumerate(prompts)
            ]
    # More prompts than will be needed: as many of the first ones are of each source as its weight says.
    in_order = [[prompt for _, prompt in sorted(kind, key=lambda it: it[0])] for kind in placed]
    return in_order[0], in_order[1]


def streams(
    plan: BlockPlan, chats: Sequence[GenerationPrompt], texts: Sequence[GenerationPrompt]
) -> list[Stream]:
    """The tasks of a block: of conversations, of texts that stop half way, of those as long as a row. Shares add up to 1."""
    prompt_tokens = plan.config.regenerate.prompt_tokens
    short, whole = row_lengths(plan.config.max_length, prompt_tokens)
    share = 1 - CHAT_SHARE if chats else 1.0
    planned = [("chat", chats, 1 - share if texts else 1.0, whole)]
    if short == whole or len(texts) < 2:
        planned.append((f"text{whole}", texts, share, whole))
    else:
        stopped = [text for number, text in enumerate(texts) if number % 4 != 3]
        weights = 3 * (short - prompt_tokens), whole - prompt_tokens
        planned.append((f"text{short}", stopped, share * weights[0] / sum(weights), short))
        planned.append(
            (f"text{whole}", texts[3::4] or texts[:1], share * weights[1] / sum(weights), whole)
        )
    return [
        Stream(_tasks(plan, name, own, length), part) for name, own, part, length in planned if own
    ]


def _tasks(
    plan: BlockPlan, kind: str, prompts: Sequence[GenerationPrompt], length: int
) -> Iterator[GenerationTask]:
    pairs = repeated(prompts, plan.config.regenerate.temperatures)
    if kind == "chat":
        pairs = _by_length(
            pairs,
            min(SORTED, len(prompts)),
            random.Random(f"{plan.config.seed} {plan.block.number}"),
        )
    for number, (prompt, temperature) in enumerate(pairs):
        name = f"{kind}-{number}"
        yield GenerationTask(name, prompt, temperature, plan.seed_of(name), length)


def repeated(
    prompts: Sequence[GenerationPrompt], temperatures: Sequence[float]
) -> Iterator[tuple[GenerationPrompt, float]]:
    """Every prompt at every temperature, then again and again at those above 0, which generate something new. A prompt that other blocks
    have, too, at those alone.
    """
    count = len(temperatures)
    sampled = [temperature for temperature in temperatures if temperature > 0]
    for turn in range(count):
        for index, prompt in enumerate(prompts):
            if prompt.is_first or temperatures[(index + turn) % count] > 0:
                yield prompt, temperatures[(index + turn) % count]
    for turn in itertools.count() if sampled and prompts else ():
        for index, prompt in enumerate(prompts):
            yield prompt, sampled[(index + turn) % len(sampled)]


def _by_length(
    pairs: Iterator[tuple[GenerationPrompt, float]], size: int, generator: random.Random
) -> Iterator[tuple[GenerationPrompt, float]]:
    """Those of similar length next to one another, among `size` at a time, in parts in shuffled order."""
    while several := list(islice(pairs, size)):
        several.sort(key=lambda pair: len(pair[0].ids))
        parts = [several[start : start + PART] for start in range(0, len(several), PART)]
        generator.shuffle(parts)
        yield from itertools.chain(*parts)


def row_lengths(max_length: int, prompt_tokens: int) -> tuple[int, int]:
    """Lengths to which texts are continued: three in four to the first, the fourth to the second.

    Three stop half way, though not before SHORT_ROW tokens: attention over the first half costs a third of that over both, and greedy text
    of a small target begins to loop. The fourth is as long as a row, so that every position is trained.
    """
    short = min(max_length, max(SHORT_ROW, max_length // 2))
    return (short if short >= 2 * prompt_tokens else max_length), max_length
