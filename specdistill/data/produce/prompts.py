"""Make the prompts of a block from its own rows, and the tasks that answer them.

A prompt is the beginning of a conversation or of a text. A conversation gives a prompt for each
turn of the assistant: everything that came before the turn, as recorded, including results of
tools. A text gives a fixed number of tokens from its beginning. If more prompts are wanted than
there are texts, a text also gives prompts from the beginnings of its paragraphs, lines or words.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from specdistill.data.produce.blocks import Block
from specdistill.data.produce.sources import Source
from specdistill.data.rows.chat import list_turn_contexts, tokenize_prompt
from specdistill.data.rows.encoding import Row, hash_row
from specdistill.evaluation.suites.conversations import Message, Tools, is_unanswered
from specdistill.recipe.sections import DataConfig, ServerRegeneration

# Characters of a text that are tokenized for each token of a prompt. Tokens have fewer on average,
# so a snippet has enough tokens, and a long text need not be tokenized as a whole.
CHARACTERS_PER_TOKEN = 16
NUM_TEXTS_AT_ONCE = 64  # texts whose snippets are tokenized in one call
# Where a prompt may start within a text, the most natural places first: paragraphs, lines, words.
START_PATTERNS = (
    re.compile(r"(?<=\n\n)(?=[^\n]*\S)"),
    re.compile(r"(?<=\n)(?=[^\n]*\S)"),
    re.compile(r"(?<=\s)(?=\S)"),
)
# Share of the tokens that conversations give if a block has both conversations and texts. Answers
# are shorter than texts, so most documents are conversations even at this share.
CHAT_SHARE = 1 / 3
SHORT_ROW = 256  # texts are continued to at least so many tokens, prompt included, if a row allows
SHORT_ANSWER = 32  # tokens, fewer than an answer has on average, so that there are enough questions
# So many prompts are sorted by length together, so that the prompts of a batch have similar lengths
# and need little padding. Then parts of PART prompts are shuffled, so that lengths are mixed over
# the block.
NUM_SORTED_PROMPTS = 512
PART = 128


@dataclass(frozen=True)
class GenerationPrompt:
    """Token ids that the target is to continue, and for a conversation its messages.

    Attributes:
        ids: the token ids.
        row: a hash of the row that the prompt was made from.
        messages: the messages of a conversation; empty for a text.
        tools: the tools that the conversation may call.
        source: the number of the source in data.source.
        is_beginning: whether a text's prompt is the beginning of the text.
        is_first: False if several blocks have prompts of the same row, and this block is not the
            first of these blocks.
        asked: the text of a prompt that the target generated; None for other prompts.
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
    """A task of generation: a prompt and how it is answered.

    Attributes:
        name: a name that no other task of the block has.
        prompt: the prompt.
        temperature: the sampling temperature; 0 is greedy.
        seed: the seed of sampling.
        max_length: the most tokens of a context with its answer.
    """

    name: str
    prompt: GenerationPrompt
    temperature: float
    seed: int
    max_length: int


@dataclass(frozen=True)
class BlockPlan:
    """The sources and settings that a block is generated from.

    Attributes:
        block: the block.
        config: the `data:` section.
        sources: the sources.
        tokenizer: the target's tokenizer, used by one thread alone.
        end_ids: tokens that end a generation.
    """

    block: Block
    config: DataConfig
    sources: Sequence[Source]
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]

    def seed_of(self, name: str) -> int:
        """Return the sampling seed of a task: 31 bits, which every server accepts."""
        return random.Random(f"{self.config.seed} {self.block.number} {name}").getrandbits(31)


@dataclass
class Stream:
    """Tasks of one length, answered in order until they give a share of a block's tokens.

    Attributes:
        tasks: the tasks that are not answered yet.
        share: the share of the block's tokens.
    """

    tasks: list[GenerationTask]
    share: float


PlacedPrompt = tuple[float, GenerationPrompt]  # (its place among those of all sources, the prompt)


def make_chat_prompts(
    plan: BlockPlan, rows: Iterable[Row], filtered: Counter[str]
) -> Iterator[GenerationPrompt]:
    """Yield a prompt for each turn of the assistant in some conversations, to be generated anew.

    A prompt is the conversation before the turn. A prompt with more than half the tokens of a row
    is left out, so that the row has room for an answer.

    Args:
        plan: the settings and the tokenizer of the block (a part of the generation) that the
            prompts are for.
        rows: rows of a source. Rows that are texts are skipped.
        filtered: counts by reason, to which this function adds. `long_prompt`: prompts that were
            left out. `follow_up`: answers that are lost, because they follow an answer that must be
            generated first, and only servers generate several answers to a prompt.
    """
    config = plan.config
    is_served = isinstance(config.regenerate, ServerRegeneration)
    for row in rows:
        if row["messages"] is None:
            continue
        tools = row.get("tools")
        for messages in list_turn_contexts(row["messages"]):
            ids = tokenize_prompt(plan.tokenizer, messages, tools, **config.generation.template)
            if len(ids) <= config.max_length // 2:
                yield GenerationPrompt(ids, hash_row(row, config.seed), tuple(messages), tools)
            else:
                filtered["long_prompt"] += 1

            # A prompt may have empty turns of the assistant, which the target has to generate, too.
            # For example, [user, empty, user] needs two answers: one in the empty turn, and one
            # after the last message. Servers generate all answers, one after the other. The model
            # in this process generates only the first one, so all further answers are lost. There
            # are as many of these as there are empty turns.
            num_follow_ups = sum(map(is_unanswered, messages))
            if num_follow_ups and not is_served:
                filtered["follow_up"] += num_follow_ups


def make_text_prompts(
    plan: BlockPlan,
    rows: Iterable[Row],
    per_text: int,
    generator: random.Random,
    part: tuple[int, int],
) -> Iterator[GenerationPrompt]:
    """Yield prompts from texts: pieces of `data.regenerate.prompt_tokens` tokens to be continued.

    Each text gives a prompt from its beginning and from up to `per_text` - 1 other places. A place
    with too few tokens after it gives no prompt.

    Args:
        plan: the settings and the tokenizer of the block (a part of the generation) that the
            prompts are for.
        rows: rows of a source. Rows that are conversations are skipped.
        per_text: the most prompts that this block takes from a text.
        generator: chooses the places at random.
        part: (i, n) if n blocks share the texts and this is the i-th of them, from 0.
    """
    # Take the texts in batches: a fast tokenizer can encode the snippets of one call in parallel.
    texts = (row for row in rows if row["text"] is not None)
    num_tokens = plan.config.generation.prompt_tokens
    first, step = part
    while batch := list(itertools.islice(texts, NUM_TEXTS_AT_ONCE)):
        # All blocks that share the texts choose the same places, `step` times as many as a block
        # needs. Each block takes every step-th place, beginning with a different one.
        starts = []
        for row in batch:
            shared_starts = _choose_starts(str(row["text"]), per_text * step, generator)
            starts += [(row, start) for start in shared_starts[first::step]]

        # Tokenize the text after each place, and keep the first tokens as a prompt.
        snippets = [
            str(row["text"])[start : start + num_tokens * CHARACTERS_PER_TOKEN]
            for row, start in starts
        ]
        tokens = plan.tokenizer(snippets, verbose=False)["input_ids"] if snippets else []
        for (row, start), ids in zip(starts, tokens, strict=True):
            if len(ids) >= num_tokens:
                yield GenerationPrompt(
                    list(ids[:num_tokens]), hash_row(row, plan.config.seed), is_beginning=start == 0
                )


def _choose_starts(text: str, count: int, generator: random.Random) -> list[int]:
    """Choose up to `count` positions in a text at which prompts start.

    The first is the beginning of the text. The others are chosen at random: beginnings of
    paragraphs, and if these are too few, beginnings of lines, and then of words.
    """
    chosen: list[int] = []
    for pattern in START_PATTERNS:
        missing = count - 1 - len(chosen)
        if missing <= 0:
            break
        places = sorted({match.start() for match in pattern.finditer(text)} - set(chosen))
        chosen += generator.sample(places, min(missing, len(places)))
    return [0, *chosen]


def make_prompts(
    plan: BlockPlan, self_prompts: Mapping[int, Sequence[GenerationPrompt]], filtered: Counter[str]
) -> Iterator[tuple[list[GenerationPrompt], list[GenerationPrompt]]]:
    """Yield the prompts of a block in parts, each with prompts of all sources.

    The tokens to generate are divided into blocks. The first part of the prompts should be enough
    for the block. If answers are shorter than expected, more are needed, so more parts follow until
    every prompt was yielded once.

    Args:
        plan: the sources, settings and tokenizer of the block.
        self_prompts: for each source `self`, by the number of the source, the prompts that the
            target generated.
        filtered: counts by reason of the prompts that were left out, to which this function adds.

    Yields:
        (prompts of conversations, prompts of texts).
    """
    # A source's share of the prompts is its weight in the recipe times its number of rows. A source
    # `self` has no rows, because the target generates its prompts. The number of its prompts in all
    # blocks takes the place of the number of rows. Each block has about as many as this block.
    num_self_rows = {
        number: len(prompts) * plan.block.num_blocks for number, prompts in self_prompts.items()
    }
    weights = [
        source.entry.weight * num_self_rows.get(number, len(source.rows))
        for number, source in enumerate(plan.sources)
    ]

    # Divide the prompts of each source into parts. Those of a source `self` are all conversations,
    # and make one part.
    parts_by_source: list[Iterator[tuple[list[PlacedPrompt], list[PlacedPrompt]]]] = []
    for number, weight in enumerate(weights):
        if number in self_prompts:
            placed_prompts = _place_prompts(self_prompts[number], 0, weight)
            parts_by_source.append(iter([(placed_prompts, [])]))
        else:
            parts_by_source.append(_split_source(plan, number, weights, filtered))

    # Merge the first parts of all sources, then the second parts, and so on. Conversations and
    # texts are merged separately.
    for parts in itertools.zip_longest(*parts_by_source, fillvalue=([], [])):
        chats, texts = zip(*parts, strict=True)
        yield _merge_by_place(chats), _merge_by_place(texts)


def _merge_by_place(sources: Iterable[Sequence[PlacedPrompt]]) -> list[GenerationPrompt]:
    """Merge the prompts of several sources into one list, in the order of their places.

    The places (see `_place_prompts`) mix the sources by their weights: among the first prompts,
    however many of them are used, each source has its share.

    Args:
        sources: for each source, its prompts with their places.
    """
    placed = sorted(itertools.chain.from_iterable(sources), key=lambda pair: pair[0])
    return [prompt for _, prompt in placed]


def _split_source(
    plan: BlockPlan, number: int, weights: Sequence[float], filtered: Counter[str]
) -> Iterator[tuple[list[PlacedPrompt], list[PlacedPrompt]]]:
    """Yield the prompts that a block makes from one source, in parts.

    The tokens to generate are divided into blocks. Each part has as many prompts as the block is
    expected to need from this source. Later parts are only needed if answers are shorter than
    expected.

    Args:
        plan: the sources, settings and tokenizer of the block.
        number: the number of the source.
        weights: for each source, its weight in the recipe times its number of rows.
        filtered: counts by reason of the prompts that were left out, to which this function adds.

    Yields:
        (prompts of conversations, prompts of texts), each prompt with its place among the prompts
        of all sources.
    """
    # Estimate how many prompts give this source's share of the block's tokens. Too many are better
    # than too few, so assume that each prompt gives few tokens. An answer in a conversation is
    # assumed to have SHORT_ANSWER tokens. Texts may be continued to two lengths, usually half a row
    # and a whole row (see `choose_row_lengths`). The estimate assumes the shorter one for all.
    block = plan.block
    config = plan.config
    source = plan.sources[number]
    weight = weights[number]
    prompt_tokens = config.generation.prompt_tokens
    short_length, _ = choose_row_lengths(config.max_length, prompt_tokens)
    tokens_per_text = short_length - prompt_tokens
    num_chats = math.ceil(block.num_tokens / SHORT_ANSWER * weight / sum(weights))
    num_texts = math.ceil(block.num_tokens / tokens_per_text * weight / sum(weights))
    if not len(source.rows):  # decontamination dropped them all
        return

    # All blocks shuffle the rows in the same way, and each takes its own rows. If there are more
    # blocks than rows, `num_sharing` blocks share a row, and `first` is the index of this one.
    order = list(range(len(source.rows)))
    random.Random(config.seed).shuffle(order)
    selected_rows, first, num_sharing = block.select_rows(order)

    # Blocks that share a row need the same generator, because they divide the places within it.
    block_rows = Dataset.select(source.rows, selected_rows)
    generator_seed = selected_rows[0] if num_sharing > 1 else block.number
    generator = random.Random(f"{config.seed} {number} {generator_seed}")
    count = sum(row is not None for row in block_rows.with_format(None)["text"])
    per_text = -(-2 * num_texts // max(1, count))  # twice the need, because some texts are short

    # Take prompts until the rows have no more. Of each part, use the prompts from the beginnings of
    # texts first, and those from places within texts in random order after them.
    all_chats = make_chat_prompts(plan, block_rows, filtered)
    all_texts = make_text_prompts(plan, block_rows, per_text, generator, (first, num_sharing))
    num_chats_before = 0
    num_texts_before = 0
    while True:
        chats = [
            replace(prompt, source=number, is_first=first == 0)
            for prompt in itertools.islice(all_chats, num_chats)
        ]
        texts = [
            replace(prompt, source=number) for prompt in itertools.islice(all_texts, 2 * num_texts)
        ]
        if not chats and not texts:
            return
        generator.shuffle(texts)
        texts.sort(key=lambda prompt: not prompt.is_beginning)
        yield (
            _place_prompts(chats, num_chats_before, weight),
            _place_prompts(texts, num_texts_before, weight),
        )
        num_chats_before += len(chats)
        num_texts_before += len(texts)


def _place_prompts(
    prompts: Sequence[GenerationPrompt], num_before: int, weight: float
) -> list[PlacedPrompt]:
    """Give each prompt of a source a number, by which the prompts of all sources are sorted.

    The n-th prompt (from 0) of a source with weight w gets the number (n + 0.5) / w, its place. A
    source with twice the weight then has twice as many prompts below any number.

    Args:
        prompts: prompts of one source.
        num_before: how many prompts of the source already have places.
        weight: the weight of the source.
    """
    return [((place + 0.5) / weight, prompt) for place, prompt in enumerate(prompts, num_before)]


def plan_rounds(
    plan: BlockPlan, parts: Iterable[tuple[list[GenerationPrompt], list[GenerationPrompt]]]
) -> Iterator[list[Stream]]:
    """Yield the tasks of a block (prompts to answer) in rounds, to be answered one after the other.

    The tokens to generate are divided into blocks. The first rounds use every prompt once. If the
    block needs more tokens, each later round uses all prompts again, at another temperature or with
    other random numbers.

    Args:
        plan: the settings of the block.
        parts: the prompts of the block in several parts (see `make_prompts`). Each part is a pair:
            (prompts of conversations, prompts of texts).

    Yields:
        The tasks of a round, divided into streams. Each stream is to give a fraction of the block's
        tokens (see `build_streams`).
    """
    chats: list[GenerationPrompt] = []
    texts: list[GenerationPrompt] = []
    num_tasks: Counter[str] = Counter()

    # Use each prompt once, with one round for each part.
    for more_chats, more_texts in parts:
        chats += more_chats
        texts += more_texts
        yield build_streams(plan, more_chats, more_texts, 0, num_tasks)

    # Use all prompts again and again. This ends if the recipe has only temperature 0, at which a
    # prompt gives nothing new.
    for turn in itertools.count(1):
        repeats = build_streams(plan, chats, texts, turn, num_tasks)
        if not any(stream.tasks for stream in repeats):
            return
        yield repeats


def build_streams(
    plan: BlockPlan,
    chats: Sequence[GenerationPrompt],
    texts: Sequence[GenerationPrompt],
    turn: int,
    num_tasks: Counter[str],
) -> list[Stream]:
    """Divide prompts among up to three streams, each with its share of the tokens to generate.

    A stream is a list of tasks (prompts to answer). The streams are: conversations; texts that are
    continued to about half a row; and texts that are continued to a whole row. The shares add up to
    1.

    Args:
        plan: the settings of the block.
        chats: prompts of conversations.
        texts: prompts of texts.
        turn: how often each of the prompts was used before.
        num_tasks: how many tasks the block has so far, by kind of task. The new tasks are added.
    """
    # Conversations get the share CHAT_SHARE of the tokens, or everything if there are no texts.
    prompt_tokens = plan.config.generation.prompt_tokens
    short, long = choose_row_lengths(plan.config.max_length, prompt_tokens)
    text_share = 1 - CHAT_SHARE if chats else 1.0
    chat_share = 1 - text_share if texts else 1.0
    planned = [("chat", chats, chat_share, long)]

    # Divide the texts by the length to which they are continued. A short text is continued to about
    # half a row, and a long text to a whole row.
    if short == long or len(texts) < 2:
        planned.append((f"text{long}", texts, text_share, long))
    else:
        # Every fourth text is long, and the other three are short. If there are only two or three
        # texts, the last one is long, and the others are short.
        long_texts = texts[3::4] or texts[-1:]
        short_texts = [text for number, text in enumerate(texts) if number % 4 != 3]
        if len(texts) <= 3:
            short_texts = short_texts[:-1]

        # Divide the texts' share of the tokens so that three short texts are generated for each
        # long one. The first `prompt_tokens` tokens of a text are its prompt, and not generated.
        short_weight = 3 * (short - prompt_tokens)
        long_weight = long - prompt_tokens
        total_weight = short_weight + long_weight
        planned += [
            (f"text{short}", short_texts, text_share * short_weight / total_weight, short),
            (f"text{long}", long_texts, text_share * long_weight / total_weight, long),
        ]

    return [
        Stream(_build_tasks(plan, kind, prompts, turn, length, num_tasks), share)
        for kind, prompts, share, length in planned
        if prompts
    ]


def _build_tasks(
    plan: BlockPlan,
    kind: str,
    prompts: Sequence[GenerationPrompt],
    turn: int,
    length: int,
    num_tasks: Counter[str],
) -> list[GenerationTask]:
    """Make a task of each prompt of a stream: the prompt with a name, a temperature and a seed.

    Args:
        plan: the settings of the block.
        kind: the kind of task, with which its name begins: `chat`, or `text` and a length.
        prompts: the prompts of the stream.
        turn: how often each of the prompts was used before.
        length: the most tokens of a prompt together with its answer.
        num_tasks: how many tasks the block has so far, by kind. The new tasks are added.
    """
    # Generate prompts of similar length together, which needs less padding. The prompts of texts
    # all have the same length, so only conversations are sorted.
    pairs = assign_temperatures(prompts, plan.config.generation.temperatures, turn)
    if kind == "chat":
        pairs = _sort_by_length(
            pairs,
            min(NUM_SORTED_PROMPTS, len(prompts)),
            random.Random(f"{plan.config.seed} {plan.block.number}"),
        )
    # Number the tasks of each kind, and go on from the last number: every name in the block must be
    # unique.
    tasks = []
    for prompt, temperature in pairs:
        name = f"{kind}-{num_tasks[kind]}"
        num_tasks[kind] += 1
        tasks.append(GenerationTask(name, prompt, temperature, plan.seed_of(name), length))
    return tasks


def assign_temperatures(
    prompts: Sequence[GenerationPrompt], temperatures: Sequence[float], turn: int
) -> Iterator[tuple[GenerationPrompt, float]]:
    """Yield each prompt with the temperature at which it is answered this time.

    A prompt gets every temperature of the recipe once, one in each turn. After that it gets only
    temperatures above 0, because at temperature 0 the answer would be the same again. If none is
    above 0, the prompt is not yielded.

    Args:
        prompts: the prompts. If several blocks have the same prompt, `is_first` is true in one of
            them only, and only that block answers it at temperature 0.
        temperatures: the temperatures of the recipe.
        turn: how often each of the prompts was used before.
    """
    # Neighbouring prompts get different temperatures, so that a turn mixes all temperatures.
    sampled = [temperature for temperature in temperatures if temperature > 0]
    for index, prompt in enumerate(prompts):
        choices = temperatures if prompt.is_first and turn < len(temperatures) else sampled
        if choices:
            yield prompt, choices[(index + turn) % len(choices)]


def _sort_by_length(
    pairs: Iterator[tuple[GenerationPrompt, float]], size: int, generator: random.Random
) -> Iterator[tuple[GenerationPrompt, float]]:
    """Reorder prompts so that prompts of similar length follow one another in groups.

    A batch of prompts then needs little padding, while the lengths are still mixed over the block.

    Args:
        pairs: the prompts with their temperatures.
        size: how many prompts are sorted together.
        generator: shuffles the groups.
    """
    # Take `size` prompts at a time, sort them by length, cut them into groups of PART, and shuffle
    # the groups.
    while chunk := list(itertools.islice(pairs, size)):
        chunk.sort(key=lambda pair: len(pair[0].ids))
        parts = [chunk[start : start + PART] for start in range(0, len(chunk), PART)]
        generator.shuffle(parts)
        yield from itertools.chain(*parts)


def choose_row_lengths(max_length: int, prompt_tokens: int) -> tuple[int, int]:
    """Return the two lengths, in tokens, to which texts are continued: (half a row, a whole row).

    Three texts in four are continued to half a row. Short texts are cheaper, because attention over
    the first half of a row costs a third of attention over the second half. Also, long greedy texts
    of a small target begin to loop. Every fourth text is continued to a whole row, so that the
    draft is trained at every position.

    Args:
        max_length: tokens of a row.
        prompt_tokens: tokens of a prompt, which are a part of both lengths.
    """
    # Half a row is at least SHORT_ROW tokens. If the prompt would fill more than half of it, all
    # texts are continued to a whole row.
    short = min(max_length, max(SHORT_ROW, max_length // 2))
    return (short if short >= 2 * prompt_tokens else max_length), max_length
