"""Prompts, which are cut from the rows of a block, and the order of their tasks."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from datasets import Dataset

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.data.produce.answer_rules import CheckedAnswer
from specdistill.data.produce.blocks import Answer, Block
from specdistill.data.produce.generate import MIN_FILL, BlockOutput, generate_block
from specdistill.data.produce.prompts import (
    CHAT_SHARE,
    BlockPlan,
    GenerationPrompt,
    GenerationTask,
    assign_temperatures,
    build_streams,
    choose_row_lengths,
    make_chat_prompts,
    make_prompts,
    make_text_prompts,
    plan_rounds,
)
from specdistill.data.produce.sources import Source
from specdistill.recipe.data_sources import SourceEntry
from specdistill.recipe.sections import DataConfig, LocalRegeneration, ServerRegeneration
from tests.data.produce.row_sets import chat
from tests.tiny import tiny_tokenizer

TEXTS = [
    "".join(f"def f{number}_{line}():\n    return {line}\n\n" for line in range(30))
    for number in range(6)
]
TOKENIZER = tiny_tokenizer(CHAT_TEMPLATE)


def make_rows(texts: Sequence[str], questions: Sequence[str] = ()) -> Dataset:
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "ok"}]
        for question in questions
    ]
    return Dataset.from_dict(
        {"text": [*texts, *[None] * len(chats)], "messages": [*[None] * len(texts), *chats]}
    )  # fmt: skip


def make_prompts_from_texts(
    rows: Dataset, num_tokens: int, per_text: int, part: tuple[int, int] = (0, 1)
) -> list[GenerationPrompt]:
    config = DataConfig(regenerate=LocalRegeneration(num_tokens=1, prompt_tokens=num_tokens))
    return list(
        make_text_prompts(
            BlockPlan(Block(0, 1, 1), config, [], TOKENIZER, ()),
            rows,
            per_text,
            random.Random(0),
            part,
        )
    )


def decode_prompts(prompts: Sequence[GenerationPrompt]) -> list[str]:
    return [str(TOKENIZER.decode(prompt.ids)) for prompt in prompts]


def test_text_prompts_are_beginnings_and_paragraphs() -> None:
    prompts = make_prompts_from_texts(make_rows([*TEXTS, "short"]), 12, 7)
    assert len(prompts) == 42 and all(len(prompt.ids) == 12 for prompt in prompts)
    assert (
        sum(prompt.is_beginning for prompt in prompts)
        == 6
        == len({prompt.row for prompt in prompts})
    )
    for place, text in enumerate(decode_prompts(prompts)):
        assert f"\n\n{text}" in f"\n\n{TEXTS[place // 7]}" and text.startswith("def")
    assert prompts == make_prompts_from_texts(make_rows([*TEXTS, "short"]), 12, 7)
    parts = [
        decode_prompts(make_prompts_from_texts(make_rows(TEXTS[:1]), 12, 3, (number, 4)))
        for number in range(4)
    ]
    # Blocks that share a text take different places in it.
    assert len({text for part in parts for text in part}) == 12


def test_prompts_begin_at_lines_and_then_at_words_where_paragraphs_run_out() -> None:
    text = "\n".join(
        f"line{line} " + " ".join(f"word{number}" for number in range(20)) for line in range(6)
    )
    starts = sorted(
        text[:5] for text in decode_prompts(make_prompts_from_texts(make_rows([text]), 8, 10))
    )
    assert starts[:6] == [f"line{line}" for line in range(6)]
    assert len(starts) == 10 and all(start.startswith("word") for start in starts[6:])


def test_chat_prompts_end_before_the_answer_and_leave_room_for_it() -> None:
    filtered: Counter[str] = Counter()
    config = DataConfig(max_length=80, regenerate=LocalRegeneration(num_tokens=1))
    plan = BlockPlan(Block(0, 1, 1), config, [], TOKENIZER, ())
    prompts = list(
        make_chat_prompts(plan, make_rows(TEXTS[:1], ["one", "two", "x" * 90]), filtered)
    )
    expected = [
        TOKENIZER.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in ("one", "two")
    ]
    assert decode_prompts(prompts) == expected and filtered == {"long_prompt": 1}


def test_a_recorded_answer_is_replaced_in_its_context_and_bare_questions_make_one_prompt() -> None:
    recorded = chat("one", "1", "two", "2", "three")["messages"]
    questions = chat("one", None, "two", None, "three")["messages"]
    weighted = [{**turn, "weight": 0} if turn["content"] == "1" else turn for turn in recorded]
    for rows, served, expected in (
        (recorded, False, [1, 3, 5]),
        (weighted, False, [3, 5]),
        (questions, False, [5]),
        (questions, True, [5]),
    ):
        regenerate = (
            ServerRegeneration(num_tokens=9, server=["http://127.0.0.1:1"])
            if served
            else LocalRegeneration(num_tokens=9)
        )
        config = DataConfig(max_length=600, regenerate=regenerate)
        filtered: Counter[str] = Counter()
        prompts = list(
            make_chat_prompts(
                BlockPlan(Block(0, 1, 1), config, [], TOKENIZER, ()),
                [{"text": None, "messages": rows}],
                filtered,
            )
        )
        assert [list(prompt.messages) for prompt in prompts] == [rows[:end] for end in expected]
        expected_messages = [rows[:1] if rows is questions else rows[:end] for end in expected]
        assert decode_prompts(prompts) == [
            TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in expected_messages
        ]
        assert filtered == ({"follow_up": 2} if rows is questions and not served else {})


def test_every_prompt_is_continued_at_every_temperature_and_then_sampled_again() -> None:
    prompts = [GenerationPrompt([index], index) for index in range(3)]

    def pairs(turn: int, *temperatures: float) -> list[tuple[int, float]]:
        return [
            (prompt.row, temperature)
            for prompt, temperature in assign_temperatures(prompts, temperatures, turn)
        ]

    turns = [pairs(turn, 0.0, 0.5, 1.0) for turn in range(5)]
    assert all([row for row, _ in turn] == [0, 1, 2] for turn in turns)
    assert sorted(turns[0] + turns[1] + turns[2]) == sorted(
        (row, temperature) for row in range(3) for temperature in (0.0, 0.5, 1.0)
    )
    assert [temperature for _, temperature in turns[0]] == [0.0, 0.5, 1.0]
    assert {temperature for _, temperature in turns[3] + turns[4]} == {0.5, 1.0}
    assert len(pairs(0, 0.0)) == 3 and not pairs(1, 0.0)  # greedy text would only repeat itself
    shared = [GenerationPrompt([1], is_first=False)]
    assert [[*assign_temperatures(shared, [0.0, 0.5], turn)] for turn in range(3)] == [
        [(shared[0], 0.5)]
    ] * 3  # only the first of the blocks that share a prompt answers it greedily


def test_texts_have_half_a_row_or_a_whole_one_unless_half_is_too_short() -> None:
    assert [choose_row_lengths(*arguments) for arguments in ((2048, 32), (512, 32))] == [
        (1024, 2048),
        (256, 512),
    ]
    # All texts are continued to a whole row.
    assert [choose_row_lengths(*arguments) for arguments in ((200, 32), (512, 200))] == [
        (200, 200),
        (512, 512),
    ]


def plan_streams(texts: int, chats: int, count: int = 1, **settings: Any) -> list[list[Any]]:
    """Return the streams of each block, from a source of this many texts and chats."""
    config = DataConfig(
        max_length=512, regenerate=LocalRegeneration(num_tokens=6000, prompt_tokens=8, **settings)
    )
    rows = make_rows(
        [f"text {number:03d} of many" for number in range(texts)],
        [f"q{number:03d}" for number in range(chats)],
    )
    streams = []
    for number in range(count):
        block = Block(number, count, 6000 // count)
        source = Source(rows, SourceEntry(source="x"), "data.source")
        plan = BlockPlan(block, config, [source], TOKENIZER, ())
        streams.append(next(plan_rounds(plan, make_prompts(plan, {}, Counter()))))
    return streams


def test_a_source_without_rows_gives_no_prompts() -> None:
    rows = Dataset.from_list([{"text": text, "messages": None} for text in TEXTS])
    sources = [
        Source(rows, SourceEntry(source="x"), "data.source"),
        Source(rows.select([]), SourceEntry(source="y"), "data.source"),
    ]
    config = DataConfig(source="x", max_length=512, regenerate=LocalRegeneration(num_tokens=6000))
    plan = BlockPlan(Block(0, 1, 6000), config, sources, TOKENIZER, ())
    parts = make_prompts(plan, {}, Counter())
    numbers = {prompt.source for chats, texts in parts for prompt in chats + texts}
    assert numbers == {0}


@pytest.mark.parametrize(("texts", "chats"), [(40, 0), (0, 40), (40, 40)])
def test_streams_share_the_tokens_of_a_block(texts: int, chats: int) -> None:
    (streams,) = plan_streams(texts, chats)
    assert sum(stream.share for stream in streams) == pytest.approx(1)
    tasks = [stream.tasks[0] for stream in streams]
    assert [task.max_length for task in tasks] == ([512] if chats else []) + (
        [256, 512] if texts else []
    )
    if texts and chats:
        assert streams[0].share == pytest.approx(CHAT_SHARE)
    if texts:
        short, whole = streams[-2:]
        # These shares of the tokens make three rows in four short.
        assert short.share / whole.share == pytest.approx(3 * 248 / 504)


def test_blocks_have_rows_and_seeds_of_their_own() -> None:
    def tasks(streams: Sequence[Any]) -> list[Any]:
        return [task for stream in streams for task in islice(stream.tasks, 12)]

    tasks_of_blocks = [tasks(streams) for streams in plan_streams(40, 40, count=4)]
    rows = [{task.prompt.row for task in block_tasks} for block_tasks in tasks_of_blocks]
    assert all(not one & other for one, other in itertools.combinations(rows, 2)) and all(rows)
    all_tasks = [task for block_tasks in tasks_of_blocks for task in block_tasks]
    assert len({task.seed for task in all_tasks}) == len(all_tasks)
    assert all(
        len({task.name for task in block_tasks}) == len(block_tasks)
        for block_tasks in tasks_of_blocks
    )
    assert tasks_of_blocks == [tasks(streams) for streams in plan_streams(40, 40, count=4)]


def test_conversations_of_similar_length_are_neighbours() -> None:
    config = DataConfig(
        max_length=256, regenerate=LocalRegeneration(num_tokens=9000, temperatures=[0.8])
    )
    chats = [
        GenerationPrompt(
            [7] * random.Random(number).randint(2, 90), number, ({"role": "user", "content": ""},)
        )
        for number in range(512)
    ]
    (stream,) = build_streams(
        BlockPlan(Block(0, 1, 9000), config, [], TOKENIZER, ()), chats, [], 0, Counter()
    )
    lengths = [len(task.prompt.ids) for task in stream.tasks]
    assert sorted(lengths) == sorted(len(prompt.ids) for prompt in chats) and lengths != sorted(
        lengths
    )
    assert all(
        part == sorted(part)
        for part in (lengths[start : start + 128] for start in range(0, 512, 128))
    )


class ShortAnswers:
    """A backend that gives short answers and, as servers do, takes more tasks than are needed."""

    def __init__(self, num_tokens: int, num_ahead: int) -> None:
        self.num_tokens, self.num_ahead = num_tokens, num_ahead
        self.prompts: list[tuple[int, int]] = []

    def generate_answers(
        self, tasks: Iterator[GenerationTask], known: Any, wanted: Any
    ) -> Iterator[tuple[GenerationTask, list[Answer]]]:
        while batch := list(islice(tasks, self.num_ahead)):
            for task in batch:
                self.prompts.append((task.prompt.source, task.prompt.row))
                yield task, [Answer(task.prompt.ids, [9] * self.num_tokens, "stop")]


@pytest.mark.parametrize("num_ahead", [1, 7])
@pytest.mark.parametrize(
    "sizes",
    [
        [(60, 0)],
        [(0, 60)],
        [(2, 0)],
        [(0, 2)],
        [(30, 30)],
        [(50, 5)],
        [(5, 50)],
        [(40, 0), (9, 3), (0, 30)],
    ],
)
def test_no_prompt_is_answered_again_before_all_were(
    sizes: Sequence[tuple[int, int]], num_ahead: int
) -> None:
    """Blocks may need fewer answers than there are prompts, or several times as many.

    Each row gives one prompt. The sources have weights 1, 2, …
    """
    sources = []
    for number, (num_chats, num_texts) in enumerate(sizes):
        texts = [f"{number}text{place:03d}_without_a_space" for place in range(num_texts)]
        rows = make_rows(texts, [f"{number}question{place:03d}" for place in range(num_chats)])
        sources.append(Source(rows, SourceEntry(source="x", weight=number + 1.0), "data.source"))
    num_prompts = sum(map(sum, sizes))
    config = DataConfig(
        max_length=512,
        regenerate=LocalRegeneration(num_tokens=1, prompt_tokens=8, temperatures=[0.0, 0.8]),
    )
    for num_answers in (num_prompts // 2, num_prompts - 1, num_prompts + 1, 5 * num_prompts):
        for num_blocks in (1, 2):
            answered: Counter[tuple[int, int]] = Counter()
            for number in range(num_blocks):
                # Answers have three tokens, and are expected to have at least 32.
                plan = BlockPlan(
                    Block(number, num_blocks, 3 * -(-num_answers // num_blocks)),
                    config,
                    sources,
                    TOKENIZER,
                    (),
                )
                backend = ShortAnswers(3, num_ahead)
                output = BlockOutput(
                    {},
                    lambda task, answer: CheckedAnswer(answer, "", False, frozenset()),
                    False,
                    lambda _: None,
                )
                parts = make_prompts(plan, {}, Counter())
                generate_block(
                    plan.block.num_tokens, plan_rounds(plan, parts), backend, None, output
                )
                answers_of_prompts = Counter(backend.prompts[: len(output.rows)])
                num_block_prompts = sum(
                    len(Block(number, num_blocks, 1).select_rows(range(sum(size)))[0])
                    for size in sizes
                )
                assert output.tokens >= MIN_FILL * plan.block.num_tokens
                # As many different prompts as possible are answered.
                assert len(answers_of_prompts) == min(num_block_prompts, len(output.rows))
                assert (
                    max(answers_of_prompts.values())
                    - min(
                        answers_of_prompts.values()
                        if len(answers_of_prompts) == num_block_prompts
                        else [0]
                    )
                    <= 1
                )
                answered += answers_of_prompts
            assert len(answered) <= num_prompts
