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
NUM_TEXTS_AT_ONCE = 64  # texts whose snippets are tokenized in one call, which is faster
# Where a prompt may start within a text, the most natural places first: paragraphs, lines, words.
START_PATTERNS = (
    re.compile(r"(?<=\n\n)(?=[^\n]*\S)"),
    re.compile(r"(?<=\n)(?=[^\n]*\S)"),
    re.compile(r"(?<=\s)(?=\S)"),
)
# Share of the tokens that conversations give if a block has both conversations and texts. Answers
# are shorter than texts, so most documents are conversations even at this share.
CHAT_SHARE = 1 / 3
SHORT_ROW = 256  # tokens of a text, prompt and continuation, that are always worth generating
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
        is_first: False if other blocks have prompts of the same row, and this block is not the
            first of them.
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
    """Yield a prompt for each turn of the assistant that is to be learned.

    A prompt has at most half the tokens of a row. Longer prompts are counted as `long_prompt`
    instead. If a conversation has several turns that are yet to be generated, servers generate all
    of them. In this process only the first is generated, and the turns after it are counted as
    `follow_up`.

    Args:
        plan: what the block is generated from.
        rows: the rows; texts are skipped.
        filtered: the counts by reason, which this function adds to.
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

            # Only the first unanswered turn is generated in this process.
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
    """Yield prompts of `prompt_tokens` tokens from texts.

    Each text gives a prompt from its beginning, and from up to `per_text` - 1 places within it.
    Places with fewer tokens after them give none.

    Args:
        plan: what the block is generated from.
        rows: the rows; conversations are skipped.
        per_text: the most prompts that this block takes from a text.
        generator: chooses the places.
        part: this block's place among the blocks that share the texts, and how many they are.
    """
    texts = (row for row in rows if row["text"] is not None)
    num_tokens = plan.config.generation.prompt_tokens
    first, step = part
    while batch := list(itertools.islice(texts, NUM_TEXTS_AT_ONCE)):
        # Blocks that share the texts choose the same places, and each takes every step-th of them.
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
    """Choose where prompts of a text start: its beginning and up to `count` - 1 other places."""
    # Take places at random, those before paragraphs first, then lines, then words.
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
    """Yield the prompts of a block's rows in parts, until every prompt was yielded once.

    Each source gives its weighted share of a part. The first part has more prompts than are
    expected to be needed. The next part is only needed if answers are shorter than expected.

    Args:
        plan: what the block is generated from.
        self_prompts: the prompts that the target generated, by the number of the source.
        filtered: the counts by reason, for the parts that were taken so far.

    Yields:
        (prompts of conversations, prompts of texts).
    """
    # Weights are per row, so a source counts with its weight times its rows. The rows of a source
    # `self` are the prompts that the target generates in all blocks.
    num_self_rows = {
        number: len(prompts) * plan.block.num_blocks for number, prompts in self_prompts.items()
    }
    weights = [
        source.entry.weight * num_self_rows.get(number, len(source.rows))
        for number, source in enumerate(plan.sources)
    ]

    # The parts of each source. A source `self` has one part, with all its prompts.
    parts: list[Iterator[tuple[list[PlacedPrompt], list[PlacedPrompt]]]] = []
    for number, weight in enumerate(weights):
        if number in self_prompts:
            parts.append(iter([(_place_prompts(self_prompts[number], 0, weight), [])]))
        else:
            parts.append(_split_source(plan, number, weights, filtered))

    # Merge the parts of all sources, conversations and texts separately.
    for source_parts in itertools.zip_longest(*parts, fillvalue=([], [])):
        chats, texts = zip(*source_parts, strict=True)
        yield _merge_by_place(chats), _merge_by_place(texts)


def _merge_by_place(sources: Iterable[Sequence[PlacedPrompt]]) -> list[GenerationPrompt]:
    """Merge the prompts of several sources in the order of their places.

    However many of the first prompts are then answered, each source has its weighted share of them.
    """
    placed = sorted(itertools.chain.from_iterable(sources), key=lambda pair: pair[0])
    return [prompt for _, prompt in placed]


def _split_source(
    plan: BlockPlan, number: int, weights: Sequence[float], filtered: Counter[str]
) -> Iterator[tuple[list[PlacedPrompt], list[PlacedPrompt]]]:
    """Yield the prompts of a block's rows of one source in parts.

    A part has as many prompts as are expected to be needed.

    Args:
        plan: what the block is generated from.
        number: the number of the source.
        weights: the weights of all sources, times their rows.
        filtered: the counts by reason.

    Yields:
        (prompts of conversations, prompts of texts), each with its place among all sources.
    """
    # Estimate how many prompts the source's share of the block needs, if every answer has
    # SHORT_ANSWER tokens and every text is continued to the shorter length.
    block = plan.block
    config = plan.config
    source = plan.sources[number]
    weight = weights[number]
    prompt_tokens = config.generation.prompt_tokens
    tokens_per_text = choose_row_lengths(config.max_length, prompt_tokens)[0] - prompt_tokens
    num_chats = math.ceil(block.num_tokens / SHORT_ANSWER * weight / sum(weights))
    num_texts = math.ceil(block.num_tokens / tokens_per_text * weight / sum(weights))
    if not len(source.rows):  # decontamination dropped them all
        return

    # All blocks shuffle the rows in the same way, and each takes its own part.
    order = list(range(len(source.rows)))
    random.Random(config.seed).shuffle(order)
    selected_rows, first, num_sharing = block.select_rows(order)

    # Blocks that share a row need the same generator, because they divide the places within it.
    block_rows = Dataset.select(source.rows, selected_rows)
    generator_seed = selected_rows[0] if num_sharing > 1 else block.number
    generator = random.Random(f"{config.seed} {number} {generator_seed}")
    count = sum(row is not None for row in block_rows.with_format(None)["text"])
    per_text = -(-2 * num_texts // max(1, count))  # twice the need, because some texts are short

    # Take prompts until the rows have no more. Each part has the beginnings of texts first, and
    # places within texts in random order after them.
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
    """Give the prompts of a source their places among the prompts of all sources.

    The n-th prompt of a source of weight w has the place (n + 0.5) / w, so a source of twice the
    weight has twice as many prompts before any place.

    Args:
        prompts: prompts of one source.
        num_before: how many prompts of this source come before them.
        weight: the weight of the source; prompts of a greater weight are closer together.
    """
    return [((place + 0.5) / weight, prompt) for place, prompt in enumerate(prompts, num_before)]


def plan_rounds(
    plan: BlockPlan, parts: Iterable[tuple[list[GenerationPrompt], list[GenerationPrompt]]]
) -> Iterator[list[Stream]]:
    """Yield the tasks of a block in rounds, each of which is a list of streams.

    All tasks of a round are answered before those of the next round. The first rounds have one part
    of `make_prompts` each, so every prompt comes once before any comes again. Each later round has
    all prompts again, at another temperature.

    Args:
        plan: what the block is generated from.
        parts: the prompts of conversations and of texts, in parts.
    """
    chats: list[GenerationPrompt] = []
    texts: list[GenerationPrompt] = []
    num_tasks: Counter[str] = Counter()

    # Use each prompt once.
    for more_chats, more_texts in parts:
        chats += more_chats
        texts += more_texts
        yield build_streams(plan, more_chats, more_texts, 0, num_tasks)

    # Repeat all prompts, until no temperature is left at which they give anything new.
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
    """Return the streams of a round: conversations, short texts, and texts as long as a row.

    A stream has the tasks of one kind. Short texts stop half way (see `choose_row_lengths`). The
    shares of the streams add up to 1.

    Args:
        plan: what the block is generated from.
        chats: prompts of conversations.
        texts: prompts of texts.
        turn: how often each of the prompts was used before.
        num_tasks: how many tasks the block has so far, by the first part of their names. The new
            tasks are added.
    """
    # Divide the tokens between conversations and texts.
    prompt_tokens = plan.config.generation.prompt_tokens
    short, long = choose_row_lengths(plan.config.max_length, prompt_tokens)
    text_share = 1 - CHAT_SHARE if chats else 1.0
    chat_share = 1 - text_share if texts else 1.0
    planned = [("chat", chats, chat_share, long)]

    # Divide the texts by the length to which they are continued. The share of each length is in
    # proportion to the tokens that its texts give.
    if short == long or len(texts) < 2:
        planned.append((f"text{long}", texts, text_share, long))
    else:
        # Every fourth text is as long as a row, and at least one.
        long_texts = texts[3::4] or texts[-1:]
        short_texts = [text for number, text in enumerate(texts) if number % 4 != 3]
        if len(texts) <= 3:
            short_texts = short_texts[:-1]
        weights = 3 * (short - prompt_tokens), long - prompt_tokens
        planned += [
            (f"text{short}", short_texts, text_share * weights[0] / sum(weights), short),
            (f"text{long}", long_texts, text_share * weights[1] / sum(weights), long),
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
    """Return the tasks of one stream, each with its name, temperature and seed.

    Args:
        plan: what the block is generated from.
        kind: the first part of the tasks' names: `chat`, or `text` and a length.
        prompts: the prompts of the stream.
        turn: how often each of the prompts was used before.
        length: the most tokens of a prompt with its answer.
        num_tasks: how many tasks the block has so far, by the first part of their names. The new
            tasks are added.
    """
    # Prompts of texts all have the same length, so only conversations are sorted by length.
    pairs = assign_temperatures(prompts, plan.config.generation.temperatures, turn)
    if kind == "chat":
        pairs = _sort_by_length(
            pairs,
            min(NUM_SORTED_PROMPTS, len(prompts)),
            random.Random(f"{plan.config.seed} {plan.block.number}"),
        )
    tasks = []
    for prompt, temperature in pairs:
        name = f"{kind}-{num_tasks[kind]}"
        num_tasks[kind] += 1
        tasks.append(GenerationTask(name, prompt, temperature, plan.seed_of(name), length))
    return tasks


def assign_temperatures(
    prompts: Sequence[GenerationPrompt], temperatures: Sequence[float], turn: int
) -> Iterator[tuple[GenerationPrompt, float]]:
    """Yield each prompt with the temperature at which it is answered in a turn.

    In the first turns a prompt gets every temperature once. In later turns it gets the temperatures
    above 0 again, because sampling generates something new each time, and greedy generation does
    not. If other blocks have the same row, only the first of them uses temperature 0.

    Args:
        prompts: the prompts.
        temperatures: the temperatures of the recipe.
        turn: number of the turn, from 0.
    """
    sampled = [temperature for temperature in temperatures if temperature > 0]
    for index, prompt in enumerate(prompts):
        choices = temperatures if prompt.is_first and turn < len(temperatures) else sampled
        if choices:
            yield prompt, choices[(index + turn) % len(choices)]


def _sort_by_length(
    pairs: Iterator[tuple[GenerationPrompt, float]], size: int, generator: random.Random
) -> Iterator[tuple[GenerationPrompt, float]]:
    """Reorder prompts so that prompts of similar length follow one another.

    Of every `size` prompts, the prompts are sorted by length and divided into parts of PART, and
    the parts are shuffled.
    """
    while chunk := list(itertools.islice(pairs, size)):
        chunk.sort(key=lambda pair: len(pair[0].ids))
        parts = [chunk[start : start + PART] for start in range(0, len(chunk), PART)]
        generator.shuffle(parts)
        yield from itertools.chain(*parts)


def choose_row_lengths(max_length: int, prompt_tokens: int) -> tuple[int, int]:
    """Return the two lengths in tokens to which texts are continued.

    Three texts in four are continued to the first length, and the fourth to the second. The first
    length is half a row, though not below SHORT_ROW tokens, because short texts are cheaper:
    attention over the first half costs a third of attention over the second. Long greedy texts of a
    small target also begin to loop. The second length is a whole row, so that every position is
    trained.

    Args:
        max_length: tokens of a row.
        prompt_tokens: tokens of a prompt. If the first length is less than twice this, all texts
            are continued to a whole row.
    """
    short = min(max_length, max(SHORT_ROW, max_length // 2))
    return (short if short >= 2 * prompt_tokens else max_length), max_length
