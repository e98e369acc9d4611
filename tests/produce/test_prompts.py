"""Prompts: places in a block's own rows, and the tasks that they make in order."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from datasets import Dataset

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.produce.blocks import Block
from specdistill.produce.prompts import (
    CHAT_SHARE,
    BlockPlan,
    GenerationPrompt,
    chat_prompts,
    prompts_of,
    repeated,
    row_lengths,
    streams,
    text_prompts,
)
from specdistill.produce.sources import Source
from specdistill.recipe.data_sources import SourceEntry
from specdistill.recipe.sections import DataConfig, RegenerateConfig
from tests.produce.row_sets import chat
from tests.tiny import tiny_tokenizer

TEXTS = [
    "".join(f"def f{number}_{line}():\n    return {line}\n\n" for line in range(30))
    for number in range(6)
]
TOKENIZER = tiny_tokenizer(CHAT_TEMPLATE)


def rows_of(texts: Sequence[str], questions: Sequence[str] = ()) -> Dataset:
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "ok"}]
        for question in questions
    ]
    return Dataset.from_dict(
        {"text": [*texts, *[None] * len(chats)], "messages": [*[None] * len(texts), *chats]}
    )  # fmt: skip


def from_texts(
    rows: Dataset, num_tokens: int, per_text: int, part: tuple[int, int] = (0, 1)
) -> list[GenerationPrompt]:
    config = DataConfig(regenerate=RegenerateConfig(num_tokens=1, prompt_tokens=num_tokens))
    return list(
        text_prompts(
            BlockPlan(Block(0, 1, 1), config, [], TOKENIZER, ()),
            rows,
            per_text,
            random.Random(0),
            part,
        )
    )


def said(prompts: Sequence[GenerationPrompt]) -> list[str]:
    return [str(TOKENIZER.decode(prompt.ids)) for prompt in prompts]


def test_text_prompts_are_beginnings_and_paragraphs() -> None:
    prompts = from_texts(rows_of([*TEXTS, "short"]), 12, 7)
    assert len(prompts) == 42 and all(len(prompt.ids) == 12 for prompt in prompts)
    assert (
        sum(prompt.is_beginning for prompt in prompts)
        == 6
        == len({prompt.row for prompt in prompts})
    )
    for place, text in enumerate(said(prompts)):
        assert f"\n\n{text}" in f"\n\n{TEXTS[place // 7]}" and text.startswith("def")
    assert prompts == from_texts(rows_of([*TEXTS, "short"]), 12, 7)
    parts = [said(from_texts(rows_of(TEXTS[:1]), 12, 3, (number, 4))) for number in range(4)]
    assert (
        len({text for part in parts for text in part}) == 12
    )  # blocks that share a text have other places of it


def test_short_of_paragraphs_texts_are_entered_at_lines_and_then_at_words() -> None:
    text = "\n".join(
        f"line{line} " + " ".join(f"word{number}" for number in range(20)) for line in range(6)
    )
    starts = sorted(text[:5] for text in said(from_texts(rows_of([text]), 8, 10)))
    assert starts[:6] == [f"line{line}" for line in range(6)]
    assert len(starts) == 10 and all(start.startswith("word") for start in starts[6:])


def test_chat_prompts_end_before_the_answer_and_leave_room_for_it() -> None:
    filtered: Counter[str] = Counter()
    plan = BlockPlan(Block(0, 1, 1), DataConfig(max_length=80), [], TOKENIZER, ())
    prompts = list(chat_prompts(plan, rows_of(TEXTS[:1], ["one", "two", "x" * 90]), filtered))
    expected = [
        TOKENIZER.apply_chat_template(
            [{"role": "user", "content": it}], tokenize=False, add_generation_prompt=True
        )
        for it in ("one", "two")
    ]
    assert said(prompts) == expected and filtered == {"long_prompt": 1}


def test_every_turn_is_asked_for_from_what_was_recorded_and_questions_alone_one_after_the_other() -> (
    None
):
    recorded = chat("one", "1", "two", "2", "three")["messages"]
    questions = chat("one", None, "two", None, "three")["messages"]
    weighted = [{**turn, "weight": 0} if turn["content"] == "1" else turn for turn in recorded]
    for rows, served, expected in (
        (recorded, False, [1, 3, 5]),
        (weighted, False, [3, 5]),
        (questions, False, [5]),
        (questions, True, [5]),
    ):
        config = DataConfig(
            max_length=600,
            regenerate=RegenerateConfig(
                num_tokens=9, server=["http://127.0.0.1:1"] if served else []
            ),
        )
        filtered: Counter[str] = Counter()
        made = list(
            chat_prompts(
                BlockPlan(Block(0, 1, 1), config, [], TOKENIZER, ()),
                [{"text": None, "messages": rows}],
                filtered,
            )
        )
        assert [list(prompt.messages) for prompt in made] == [rows[:end] for end in expected]
        asked = [rows[:1] if rows is questions else rows[:end] for end in expected]
        assert said(made) == [
            TOKENIZER.apply_chat_template(it, tokenize=False, add_generation_prompt=True)
            for it in asked
        ]
        assert filtered == ({"follow_up": 2} if rows is questions and not served else {})
    nothing = [{"text": None, "messages": weighted[:2]}]
    assert not [
        *chat_prompts(BlockPlan(Block(0, 1, 1), config, [], TOKENIZER, ()), nothing, filtered)
    ]
    assert filtered == {"not_learned": 1}


def test_every_prompt_is_continued_at_every_temperature_and_then_sampled_again() -> None:
    prompts = [GenerationPrompt([index], index) for index in range(3)]
    pairs = [
        (prompt.row, temperature)
        for prompt, temperature in islice(repeated(prompts, [0.0, 0.5, 1.0]), 15)
    ]
    assert sorted(pairs[:9]) == sorted(
        (row, temperature) for row in range(3) for temperature in (0.0, 0.5, 1.0)
    )
    assert [temperature for _, temperature in pairs[:3]] == [0.0, 0.5, 1.0]
    assert {temperature for _, temperature in pairs[9:]} == {0.5, 1.0}
    assert len(list(repeated(prompts, [0.0]))) == 3  # greedy text would only repeat itself
    again = repeated([GenerationPrompt([1], is_first=False)], [0.0, 0.5])
    assert [temperature for _, temperature in islice(again, 3)] == [
        0.5
    ] * 3  # as another block's would


def test_three_texts_in_four_stop_half_way_but_not_before_a_short_row() -> None:
    assert [row_lengths(*given) for given in ((2048, 32), (512, 32))] == [(1024, 2048), (256, 512)]
    assert [row_lengths(*given) for given in ((200, 32), (512, 200))] == [
        (200, 200),
        (512, 512),
    ]  # all are as long as a row


def planned(texts: int, chats: int, count: int = 1, **settings: Any) -> list[list[Any]]:
    """The streams of each block, of sources with a row each."""
    config = DataConfig(
        max_length=512, regenerate=RegenerateConfig(num_tokens=6000, prompt_tokens=8, **settings)
    )
    rows = rows_of(
        [f"text {number:03d} of many" for number in range(texts)],
        [f"q{number:03d}" for number in range(chats)],
    )
    made = []
    for number in range(count):
        block = Block(number, count, 6000 // count)
        source = Source(rows, SourceEntry(source="x"), "data.source")
        plan = BlockPlan(block, config, [source], TOKENIZER, ())
        made.append(streams(plan, *prompts_of(plan, {}, Counter())))
    return made


@pytest.mark.parametrize(("texts", "chats"), [(40, 0), (0, 40), (40, 40)])
def test_streams_share_the_tokens_of_a_block(texts: int, chats: int) -> None:
    (made,) = planned(texts, chats)
    assert sum(stream.share for stream in made) == pytest.approx(1)
    tasks = [next(stream.tasks) for stream in made]
    assert [task.max_length for task in tasks] == ([512] if chats else []) + (
        [256, 512] if texts else []
    )
    if texts and chats:
        assert made[0].share == pytest.approx(CHAT_SHARE)
    if texts:
        short, whole = made[-2:]
        assert short.share / whole.share == pytest.approx(
            3 * 248 / 504
        )  # so that three rows in four are short


def test_blocks_have_rows_and_seeds_of_their_own() -> None:
    def tasks(streams: Sequence[Any]) -> list[Any]:
        return [task for stream in streams for task in islice(stream.tasks, 12)]

    made = [tasks(streams) for streams in planned(40, 40, count=4)]
    rows = [{task.prompt.row for task in own} for own in made]
    assert all(not one & other for one, other in itertools.combinations(rows, 2)) and all(rows)
    every = [task for own in made for task in own]
    assert len({task.seed for task in every}) == len(every)
    assert all(len({task.name for task in own}) == len(own) for own in made)
    assert made == [tasks(streams) for streams in planned(40, 40, count=4)]


def test_conversations_of_similar_length_stand_beside_one_another() -> None:
    config = DataConfig(
        max_length=256, regenerate=RegenerateConfig(num_tokens=9000, temperatures=[0.8])
    )
    chats = [
        GenerationPrompt(
            [7] * random.Random(number).randint(2, 90), number, ({"role": "user", "content": ""},)
        )
        for number in range(512)
    ]
    ((tasks, _),) = streams(BlockPlan(Block(0, 1, 9000), config, [], TOKENIZER, ()), chats, [])
    lengths = [len(task.prompt.ids) for task in islice(tasks, 512)]
    assert sorted(lengths) == sorted(len(prompt.ids) for prompt in chats) and lengths != sorted(
        lengths
    )
    assert all(
        part == sorted(part)
        for part in (lengths[start : start + 128] for start in range(0, 512, 128))
    )
