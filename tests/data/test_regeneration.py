"""Regeneration: prompts from the source, continued by the target, as documents with the right loss mask."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.data.answers import Answers, digest
from specdistill.data.regeneration import (
    CHAT_SHARE,
    Order,
    Prompt,
    chat_prompts,
    end_token_ids,
    generated_rows,
    generating,
    repeated,
    row_lengths,
    text_prompts,
)
from tests.tiny import tiny_target_model, tiny_tokenizer

TEXTS = ["".join(f"def f{number}_{line}():\n    return {line}\n\n" for line in range(30)) for number in range(6)]


def rows_of(texts: Sequence[str], questions: Sequence[str] = ()) -> Dataset:
    chats = [[{"role": "user", "content": question}, {"role": "assistant", "content": "ok"}] for question in questions]
    return Dataset.from_dict(
        {"text": [*texts, *[None] * len(chats)], "messages": [*[None] * len(texts), *chats]}
    )  # fmt: skip


@dataclass
class CrewOf:
    """A crew of several processes, in one. orders: that it was given, in turn."""

    work: Callable[..., Any]
    size: int = 1
    orders: list[Order] = field(default_factory=list)

    def __call__(self, items: Sequence[Order], **own: Any) -> list[Any]:
        assert 0 < len(items) <= self.size
        self.orders += items
        return [self.work(item) for item in items]


def rows_of_target(folder: Path, model: Any, *asked: Any, **more: Any) -> list[dict[str, Any]]:
    with generating(model, torch.float32) as work, Answers(folder) as answers:
        return list(generated_rows(CrewOf(work), answers, *asked, **more, end_ids=[0]))  # type: ignore[arg-type]


def test_text_prompts_are_beginnings_first_and_then_paragraphs() -> None:
    tokenizer = tiny_tokenizer()
    prompts = text_prompts(rows_of([*TEXTS, "short"]), tokenizer, num_tokens=12, limit=40, seed=0)
    assert len(prompts) >= 40 and all(len(prompt.ids) == 12 and not prompt.is_chat for prompt in prompts)
    assert [prompt.is_beginning for prompt in prompts] == [True] * 6 + [False] * (len(prompts) - 6)
    for prompt in prompts:
        text = tokenizer.decode(prompt.ids)
        assert f"\n\n{text}" in f"\n\n{TEXTS[prompt.row]}" and text.startswith("def")
    assert len({tuple(prompt.ids) for prompt in prompts}) > 30
    assert prompts == text_prompts(rows_of([*TEXTS, "short"]), tokenizer, num_tokens=12, limit=40, seed=0)


def test_short_of_paragraphs_texts_are_entered_at_lines_and_then_at_words() -> None:
    text = "\n".join(f"line{line} " + " ".join(f"word{number}" for number in range(20)) for line in range(6))
    prompts = text_prompts(rows_of([text]), tiny_tokenizer(), num_tokens=8, limit=5, seed=0)
    starts = sorted(tiny_tokenizer().decode(prompt.ids)[:5] for prompt in prompts)
    assert starts[:6] == [f"line{line}" for line in range(6)]
    assert len(starts) == 10 and all(start.startswith("word") for start in starts[6:])


def test_chat_prompts_end_before_the_answer_and_leave_room_for_it(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    prompts = chat_prompts(rows_of(TEXTS[:1], ["one", "two", "x" * 90]), tokenizer, max_tokens=40, limit=9, seed=0)
    assert sorted(tokenizer.decode(prompt.ids) for prompt in prompts) == [
        "<|user|>\none<|end|><|assistant|>\n",
        "<|user|>\ntwo<|end|><|assistant|>\n",
    ]
    assert all(prompt.is_chat for prompt in prompts)
    assert "1 conversations, beside 2 that are answered, ask in more than 40 tokens" in caplog.text
    assert len(chat_prompts(rows_of([], ["one", "two"]), tokenizer, max_tokens=40, limit=1, seed=0)) == 1


def test_every_prompt_is_continued_at_every_temperature_and_then_sampled_again() -> None:
    prompts = [Prompt([index], index, False) for index in range(3)]
    pairs = [(prompt.row, temperature) for prompt, temperature in islice(repeated(prompts, [0.0, 0.5, 1.0]), 15)]
    assert sorted(pairs[:9]) == sorted((row, temperature) for row in range(3) for temperature in (0.0, 0.5, 1.0))
    assert [temperature for _, temperature in pairs[:3]] == [0.0, 0.5, 1.0]
    assert {temperature for _, temperature in pairs[9:]} == {0.5, 1.0}
    assert len(list(repeated(prompts, [0.0]))) == 3  # greedy text would only repeat itself


def test_three_batches_in_four_stop_half_way_but_not_before_a_short_row() -> None:
    assert row_lengths(2048, 32) == [1024, 1024, 1024, 2048]
    assert row_lengths(512, 32) == [256, 256, 256, 512]
    assert set(row_lengths(200, 32)) == {200}
    assert row_lengths(512, 200) == [512]


def test_generated_rows_hold_the_prompt_and_its_greedy_continuation(tmp_path: Path) -> None:
    model, tokenizer = tiny_target_model(num_layers=2), tiny_tokenizer(CHAT_TEMPLATE)
    source = rows_of(TEXTS, [f"question {number}" for number in range(8)])
    prompts = text_prompts(source, tokenizer, 8, 12, seed=0) + chat_prompts(source, tokenizer, 32, 8, seed=0)
    rows = rows_of_target(tmp_path, model, prompts, 400, [0.0], 64, batch_size=4, seed=0)
    known = {tuple(prompt.ids): prompt for prompt in prompts}
    generated = {False: 0, True: 0}
    for row in rows:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == row["length"] <= 64
        length = next(length for length in range(1, row["length"]) if tuple(row["input_ids"][:length]) in known)
        prompt = known[tuple(row["input_ids"][:length])]
        assert row["loss_mask"] == [0 if prompt.is_chat else 1] * length + [1] * (row["length"] - length)
        ids = torch.tensor([prompt.ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=row["length"] - length,
            eos_token_id=[0],
            pad_token_id=0,
        )
        assert row["input_ids"] == expected[0].tolist()
        assert row["length"] == 64 or row["input_ids"][-1] == 0 or prompt.is_chat
        generated[prompt.is_chat] += row["length"] - length
    assert 398 <= sum(generated.values()) < 400 + 64
    assert abs(generated[True] / sum(generated.values()) - CHAT_SHARE) < 0.25


def test_used_up_greedy_prompts_end_generation_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [Prompt([5, 6, 7], 0, False), Prompt([8, 9, 10], 0, False)]
    rows = rows_of_target(tmp_path, tiny_target_model(num_layers=1), prompts, 10_000, [0.0], 16, batch_size=8, seed=0)
    assert len(rows) == 2
    count = sum(row["length"] - 3 for row in rows)
    assert f"the prompts of data.source were used up after {count} of 10000 tokens" in caplog.text


def test_temperature_and_seed_change_what_is_generated(tmp_path: Path) -> None:
    model, places = tiny_target_model(num_layers=1), itertools.count()
    prompts = [Prompt([5, 6, 7], 0, False)] * 4

    def generate_all(temperature: float, seed: int) -> list[list[int]]:
        rows = rows_of_target(tmp_path / str(next(places)), model, prompts, 100, [temperature], 32, batch_size=4, seed=seed)
        return [row["input_ids"] for row in rows]

    greedy = generate_all(0.0, 0)
    assert all(row == greedy[0] for row in greedy) and greedy == generate_all(0.0, 1)
    warm = generate_all(1.0, 0)
    assert len({tuple(row) for row in warm}) == len(warm) == 4 and warm == generate_all(1.0, 0) != generate_all(1.0, 1)


def given(order: Order) -> list[list[int]]:
    """Continuations of lengths that only the order says, a third of what they may be at least."""
    draw = random.Random(repr(order)).randint
    return [[5] * draw(order.max_new_tokens // 3, order.max_new_tokens) for _ in order.prompts]


@pytest.mark.parametrize("kinds", [(False,), (True,), (False, True)])
def test_rows_do_not_depend_on_the_number_of_processes(kinds: tuple[bool, ...], tmp_path: Path) -> None:
    """Nor on which of them knew which batch before; hardly anything is generated that is not needed."""
    lengths = random.Random(1)
    prompts = [Prompt([7, number % 250], number, False) for number in range(300) if False in kinds]
    prompts += [Prompt([8] * lengths.randint(2, 30), number, True) for number in range(900) if True in kinds]
    made = {}
    for size in (1, 2, 8):
        crew = CrewOf(given, size)
        with Answers(tmp_path / str(size)) as answers:
            asked: Any = crew, answers, prompts, 20_000, [0.0, 0.8], 64, 8, 3, [0]
            made[size] = list(generated_rows(*asked))
        assert len(crew.orders) == len({digest(order) for order in crew.orders})
        needed = len(made[size]) / 8
        assert len(crew.orders) <= 1.3 * needed + size
        again = CrewOf(given, 3)
        with Answers(tmp_path / str(size)) as answers:
            assert list(generated_rows(again, *asked[:0], answers, *asked[2:])) == made[size] and not again.orders  # type: ignore[arg-type]
    assert made[1] == made[2] == made[8]
    assert sum(row["length"] for row in made[1]) >= 0.99 * 20_000 and {row["input_ids"][0] for row in made[1]} == {
        7 + k for k in kinds
    }


def test_everything_that_ends_a_text_is_an_end_token() -> None:
    model, tokenizer = tiny_target_model(num_layers=1), tiny_tokenizer()
    model.generation_config.eos_token_id, model.config.eos_token_id = [3, 4], None
    assert end_token_ids(model, tokenizer) == [0, 3, 4]
