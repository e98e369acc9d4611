"""The source `self`: prompts that the target generates from its own chat template."""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.data.produce import blocks
from specdistill.data.produce.answer_rules import AnswerCounts
from specdistill.data.produce.blocks import Answer, Block
from specdistill.data.produce.prompts import BlockPlan, GenerationTask
from specdistill.data.produce.self_prompts import (
    MAX_PROMPTS_PER_WANTED,
    NEAR_DUPLICATE_SIMILARITY,
    NearDuplicates,
    Opening,
    compute_max_prompt_length,
    generate_self_prompts,
)
from specdistill.data.produce.sources import Source
from specdistill.data.rows.row_set import RowTarget, read_rows
from specdistill.recipe.data_sources import SourceEntry
from specdistill.recipe.sections import DataConfig, LocalRegeneration, ServerRegeneration
from specdistill.targets.frozen import FrozenTarget
from tests.data.produce.openai_server import Behaviour, running
from tests.data.produce.row_sets import killed, opened, row_target, texts_in
from tests.data.rows.templates import CHATML, DEEPSEEK, GEMMA, MISTRAL, UNTAGGED, VICUNA
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer

END = 3  # <|end|>, which ends a turn of pico's template


def opening(template: str | None = UNTAGGED, system: str | None = None) -> Opening:
    return Opening.from_template(tiny_tokenizer(template), system, [0], "data.source")


@pytest.mark.parametrize(
    ("template", "begins", "ends"),
    [
        (UNTAGGED, "<|user|>\n", "<|end|><|assistant|>"),
        (CHATML, "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant"),
        (MISTRAL, "<s>[INST]", "[/INST]"),  # words bring the space before them
        (GEMMA, "<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model"),
        (DEEPSEEK, "<｜begin▁of▁sentence｜><｜User｜>", "<｜Assistant｜><think>"),
        (VICUNA, "USER:", "ASSISTANT:"),
    ],
)
def test_a_template_is_cut_off_where_the_words_begin(template: str, begins: str, ends: str) -> None:
    made = opening(template)
    assert (
        tiny_tokenizer().decode(made.ids, skip_special_tokens=False) == begins
        and made.closing == ends
    )
    assert (
        made.end_ids == ({0, END} if template == UNTAGGED else {0})
        and {0, 1, 2, END} <= made.special
    )


def test_a_system_message_stands_before_the_words() -> None:
    assert (
        tiny_tokenizer().decode(opening(CHATML, "Sums.").ids)
        == "<|im_start|>system\nSums.<|im_end|>\n<|im_start|>user\n"
    )


@pytest.mark.parametrize(
    ("template", "system", "got"),
    [
        (None, None, "self for a target whose tokenizer has no chat template"),
        (
            "{% for m in messages %}Q{{ m.content }}{{ m.content }}{% endfor %}",
            None,
            "writes no text before the user's message, or",
        ),
        ("{{ messages[0].content }} A: ", None, "writes no text before the user's message, or"),
        (GEMMA, "Sums.", "System role not supported"),
    ],
)
def test_a_template_that_opens_no_turn_is_refused(
    template: str | None, system: str | None, got: str
) -> None:
    with refused("data.source", holds=got):
        opening(template, system)


def test_a_prompt_has_half_a_row_and_some_room() -> None:
    made = opening()
    assert (
        compute_max_prompt_length([made], 200) == 100 - made.num_tokens
        and compute_max_prompt_length([made], 4096) == 256
    )
    with refused("data.max_length", 32):
        compute_max_prompt_length([made], 32)


class ScriptedBackend:
    """A backend of a target that says these texts, by number, at most `at_once` tokens at a time.
    contexts: that it was given."""

    def __init__(
        self, texts: Callable[[int], str], at_once: int = 1000, opens: str = "<|user|>\n"
    ) -> None:
        self.texts, self.at_once, self.opens = texts, at_once, opens
        self.contexts: list[str] = []

    def generate_answers(
        self, tasks: Iterator[GenerationTask], known: object, wanted: object
    ) -> Generator[tuple[GenerationTask, list[Answer]]]:
        for task in tasks:
            context, number = task.prompt.ids, int(task.name.split("-")[1])
            self.contexts.append(tiny_tokenizer().decode(context, skip_special_tokens=False))
            begun, most = (
                self.contexts[-1].rpartition(self.opens)[2],
                min(task.max_length - len(context), self.at_once),
            )
            assert self.texts(number).startswith(begun)
            yield (
                task,
                [
                    Answer(
                        context,
                        tiny_tokenizer()(self.texts(number)[len(begun) :])["input_ids"][:most],
                        "length",
                    )
                ],
            )


def prompts(
    backend: ScriptedBackend, count: int, template: str = UNTAGGED, number_of: int = 1, **entry: Any
) -> tuple[list[str], AnswerCounts]:
    """The prompts of the last of some blocks, with rows of twice 60 tokens and the template."""
    source = Source(
        Dataset.from_dict({}), SourceEntry(source="self", num_prompts=count, **entry), "data.source"
    )
    tokenizer = tiny_tokenizer(template)
    made = DataConfig(
        max_length=2 * (60 + opening(template).num_tokens),
        regenerate=LocalRegeneration(num_tokens=1),
    )
    block = Block(number_of - 1, number_of, 100)
    plan = BlockPlan(block, made, [source], tokenizer, [0])
    kept, counts = generate_self_prompts(plan, 0, backend, None, {})  # type: ignore[arg-type]
    for prompt in kept:
        asked = [{"role": "user", "content": prompt.asked}]
        assert (
            prompt.ids
            == tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        )  # type: ignore[call-overload]
        assert list(prompt.messages) == asked
    return [str(prompt.asked) for prompt in kept], counts


ASKED = [
    " Which bird sings at noon? <|end|>",
    "  \n<|end|>",
    "Which bird sings, and which one never does, and where is it that I could hear them<|end|>",
    "What is <|user|> a bird?<|end|>",
    "la" * 25 + "<|end|>",
    "Which bird sings at noon?!<|end|>",
    "How far can a swallow fly?<|endoftext|>",
]


def test_what_is_no_prompt_is_filtered_and_counted() -> None:
    kept, counts = prompts(
        ScriptedBackend(
            lambda number: ASKED[number] if number < len(ASKED) else f"New question {number}<|end|>"
        ),
        7,
    )
    assert kept[:2] == ["Which bird sings at noon?", "How far can a swallow fly?"]
    assert kept[2:] == [f"New question {number}" for number in range(7, 12)]
    rules = ("empty", "truncated", "off_template", "looping", "near_duplicate")
    assert counts.filtered == dict.fromkeys(rules, 1) and counts.kept == 7


def test_unfinished_prompts_are_continued_and_equal_whole_ones() -> None:
    whole = ScriptedBackend(lambda number: f"Is {number} a number with many words after it?<|end|>")
    cut = ScriptedBackend(whole.texts, at_once=7)
    assert prompts(whole, 5) == prompts(cut, 5) and len(cut.contexts) > len(whole.contexts)
    # together, not one after the other
    assert sorted(map(len, cut.contexts)) == list(map(len, cut.contexts))


def test_a_turn_that_ends_in_plain_text_ends_the_prompt() -> None:
    backend = ScriptedBackend(
        lambda number: f" What is {number}? ASSISTANT: {number}, of course. USER: And" + "?" * 80,
        opens="USER:",
    )
    assert prompts(backend, 2, VICUNA)[0] == ["What is 0?", "What is 1?"]


def test_a_target_with_nothing_more_to_say_gives_fewer() -> None:
    backend = ScriptedBackend(lambda number: "Always the same question to you?<|end|>")
    kept, counts = prompts(backend, 4)
    assert kept == ["Always the same question to you?"]
    assert len(backend.contexts) == MAX_PROMPTS_PER_WANTED * 4 and counts.filtered == {
        "near_duplicate": MAX_PROMPTS_PER_WANTED * 4 - 1
    }


def test_system_messages_and_blocks_share_the_prompts() -> None:
    backend = ScriptedBackend(lambda number: f"question {number}<|end|>")
    prompts(backend, 12, number_of=2, system=["Sums.", "Code.", "Song."])
    given = [
        next(it for it in ("Sums.", "Code.", "Song.") if it in context)
        for context in backend.contexts
    ]
    assert given == ["Code.", "Song.", "Sums."] * 2


def talkative(ends: float = 4.0) -> Any:
    """A random target that ends its turns, by default after about twenty tokens."""
    model = tiny_target_model(num_layers=1)
    bias = torch.zeros(260)
    bias[:END], bias[END] = -100.0, ends
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


def config(folder: Path, source: Any = "self", **settings: Any) -> DataConfig:
    regenerate = LocalRegeneration(num_tokens=400, batch_size=8, temperatures=[0.8])
    defaults = {
        "max_length": 128,
        "validation_fraction": 0.3,
        "decontaminate": [],
        "cache_dir": str(folder),
    }
    return DataConfig(**{"source": source, "regenerate": regenerate, **defaults, **settings})


def documents(made: DataConfig, model: Any) -> list[Dataset]:
    """Of every block."""
    opened(made, row_target(model, UNTAGGED))
    return [
        Dataset.from_file(str(path))
        for path in sorted(Path(str(made.cache_dir)).glob("rows/*.blocks/*.arrow"))
    ]


def asked(parts: Sequence[Dataset]) -> list[str]:
    """The prompts of documents, decoded."""
    found = []
    for row in (row for part in parts for row in part):
        head = [
            token
            for token, has_loss in zip(row["input_ids"], row["loss_mask"], strict=True)
            if not has_loss
        ]
        found.append(tiny_tokenizer().decode(head, skip_special_tokens=False))
    return found


@pytest.mark.long  # makes the rows three times
def test_the_target_asks_and_answers_once_for_equal_inputs(tmp_path: Path) -> None:
    """Also where it was killed after a few batches; rows of the same prompt are on one side."""
    model, source = talkative(), [{"source": "self", "num_prompts": 12}]
    made = config(tmp_path / "a", source)
    whole = documents(made, model)
    train_and_validation = opened(made, row_target(model, UNTAGGED))
    halves = [
        {text.partition("<|assistant|>")[0] for text in texts_in(half)}
        for half in train_and_validation
    ]
    assert all(halves) and not halves[0] & halves[1]
    assert all(
        prompt.startswith("<|user|>\n") and prompt.endswith("<|end|><|assistant|>\n")
        for prompt in asked(whole)
    )
    assert 0 < len(set(asked(whole))) <= 12

    killed(lambda: documents(config(tmp_path / "b", source), model), 2)
    again = documents(config(tmp_path / "b", source), model)
    assert [part.to_list() for part in again] == [part.to_list() for part in whole]
    hotter = [{"source": "self", "num_prompts": 12, "temperature": 1.5}]
    assert asked(documents(config(tmp_path / "c", hotter), model)) != asked(whole)


def test_prompts_of_self_and_rows_of_others_and_without_their_system_messages(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n'
    )
    source = [
        {"source": "self", "num_prompts": 6, "system": ["Sums."], "weight": 0.5},
        {"source": str(tmp_path / "rows.jsonl"), "weight": 3},
    ]
    made = documents(config(tmp_path, source), talkative())
    assert {row["source"] for part in made for row in part} == {0, 1}
    assert not any("Sums." in prompt for prompt in asked(made))


def similar_prompts(count: int, generator: random.Random) -> list[str]:
    """Sixty words each; a third are an earlier one with some words changed."""
    made: list[list[str]] = []
    for number in range(count):
        said = [f"word{generator.randrange(500)}" for _ in range(60)]
        if number % 3 == 2:
            said = list(made[generator.randrange(number)])
            for place in generator.sample(range(60), generator.randrange(15)):
                said[place] = "other"
        made.append(said)
    return [" ".join(said) for said in made]


def test_nearly_all_prompts_that_are_alike_are_found_and_no_others() -> None:
    near, alike, found = NearDuplicates(), 0, 0
    kept: list[set[tuple[str, ...]]] = []
    for prompt in similar_prompts(400, random.Random(0)):
        said = prompt.split()
        own = {tuple(said[place : place + 5]) for place in range(len(said) - 4)}
        nearest = max((len(own & other) / len(own | other) for other in kept), default=0.0)
        is_new = near.add(prompt)
        assert is_new or nearest >= NEAR_DUPLICATE_SIMILARITY
        kept += [own] * is_new
        alike, found = alike + (nearest >= NEAR_DUPLICATE_SIMILARITY), found + (not is_new)
    assert alike > 5 and found >= 0.95 * alike


def test_short_prompts_and_prompts_without_words() -> None:
    near = NearDuplicates()
    assert [*map(near.add, ("Is it?", "is it", "Is this?", "Is this one?", "IS IT", "?", "!"))] == [
        1,
        0,
        1,
        1,
        0,
        1,
        1,
    ]


def test_what_servers_generate_and_near_duplicates_of_other_blocks_are_filtered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MIN_BLOCK_TOKENS", 100)
    monkeypatch.setattr(blocks, "SMALL_JOB_BLOCKS", 8)

    def say(digest: str) -> str:
        return f"say {digest}" if digest > "4" else "say it again and again, as you did before"

    with running(Behaviour(text=say)) as server:
        regenerate = ServerRegeneration(
            num_tokens=800, batch_size=2, temperatures=[0.8], server=[server.address]
        )
        made = config(tmp_path, [{"source": "self", "num_prompts": 40}], regenerate=regenerate)
        parts = documents(made, None)
    own = [set(asked([part])) for part in parts]
    (alike,) = {prompt for prompt in own[0] | own[1] | own[2] if "again" in prompt}
    assert len(parts) == 8 and sum(alike in prompts for prompts in own) > 1
    rows = opened(made, row_target(None, UNTAGGED))  # though the server is gone
    kept = [
        text
        for half in rows
        for text in texts_in(half)
        if text.startswith("<|user|>\nsay it again")
    ]
    manifest = read_rows(next(path.parent for path in tmp_path.glob("rows/*/manifest.json")))[2]
    total = sum(prompt == alike for prompt in asked(parts))
    assert 0 < len(kept) < total and manifest.filtered["near_duplicate"] >= total - len(kept)


@pytest.mark.parametrize(
    ("source", "settings", "key", "got"),
    [
        ("self", {"regenerate": None}, "data.source", "self with data.regenerate.num_tokens=0"),
        ("self", {}, "data.source", "self, but every prompt that the target generated was dropped"),
        (
            "self",
            {"columns": {"text": "body"}},
            "data.columns",
            "{'text': 'body'} with self as the only source",
        ),
        ([{"source": "self", "where": {"a": 1}}], {}, "data.source[0].where", "{a: 1}"),
    ],
)
def test_settings_that_cannot_be_used(
    tmp_path: Path, source: Any, settings: dict[str, Any], key: str, got: str
) -> None:
    made = config(tmp_path, source, **settings)
    with refused(key, got):
        opened(made, row_target(talkative(ends=-100.0), UNTAGGED))


@pytest.mark.long  # pico generates
def test_pico_asks_for_python(tmp_path: Path) -> None:
    target = FrozenTarget.load("pico")
    settings = config(tmp_path, [{"source": "self", "num_prompts": 6}], max_length=96)
    train, _ = opened(settings, RowTarget.from_target(target))
    prompts = {str(target.tokenizer.decode(row["input_ids"])) for row in train}
    assert sum("Write `" in prompt for prompt in prompts) > len(prompts) / 2
