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
from tests.data.produce.row_sets import decode_texts, opened, row_target, run_until_killed
from tests.data.rows.templates import CHATML, DEEPSEEK, GEMMA, MISTRAL, UNTAGGED, VICUNA
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer

END = 3  # <|end|>, which ends a turn of pico's template


def build_opening(template: str | None = UNTAGGED, system: str | None = None) -> Opening:
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
def test_an_opening_ends_where_the_words_of_the_user_begin(
    template: str, begins: str, ends: str
) -> None:
    opening = build_opening(template)
    assert (
        tiny_tokenizer().decode(opening.ids, skip_special_tokens=False) == begins
        and opening.closing == ends
    )
    assert (
        opening.end_ids == ({0, END} if template == UNTAGGED else {0})
        and {0, 1, 2, END} <= opening.special
    )


def test_an_opening_begins_with_the_system_message() -> None:
    assert (
        tiny_tokenizer().decode(build_opening(CHATML, "Sums.").ids)
        == "<|im_start|>system\nSums.<|im_end|>\n<|im_start|>user\n"
    )


@pytest.mark.parametrize(
    ("template", "system", "got"),
    [
        (None, None, "self for a target whose tokenizer has no chat template"),
        (
            "{% for m in messages %}Q{{ m.content }}{{ m.content }}{% endfor %}",
            None,
            "changes, repeats or leaves out the user's message",
        ),
        ("{{ messages[0].content }} A: ", None, "writes no text before the user's message"),
        (GEMMA, "Sums.", "System role not supported"),
    ],
)
def test_a_template_that_opens_no_turn_is_refused(
    template: str | None, system: str | None, got: str
) -> None:
    with refused("data.source", holds=got):
        build_opening(template, system)


def test_a_prompt_has_at_most_half_a_row_and_never_more_than_256_tokens() -> None:
    opening = build_opening()
    assert (
        compute_max_prompt_length([opening], 200) == 100 - opening.num_tokens
        and compute_max_prompt_length([opening], 4096) == 256
    )
    with refused("data.max_length", 32):
        compute_max_prompt_length([opening], 32)


class ScriptedBackend:
    """A backend of a target that says the scripted text of each task number.

    Attributes:
        at_once: the most tokens of an answer.
        contexts: the contexts of the tasks so far, decoded.
    """

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
            prefix, limit = (
                self.contexts[-1].rpartition(self.opens)[2],
                min(task.max_length - len(context), self.at_once),
            )
            assert self.texts(number).startswith(prefix)
            yield (
                task,
                [
                    Answer(
                        context,
                        tiny_tokenizer()(self.texts(number)[len(prefix) :])["input_ids"][:limit],
                        "length",
                    )
                ],
            )


def generate_prompts(
    backend: ScriptedBackend,
    count: int,
    template: str = UNTAGGED,
    num_blocks: int = 1,
    **entry: Any,
) -> tuple[list[str], AnswerCounts]:
    """Return the prompts of the last of `num_blocks` blocks and the counts of answers.

    A prompt has room for 60 tokens besides the template.
    """
    source = Source(
        Dataset.from_dict({}), SourceEntry(source="self", num_prompts=count, **entry), "data.source"
    )
    tokenizer = tiny_tokenizer(template)
    data_config = DataConfig(
        max_length=2 * (60 + build_opening(template).num_tokens),
        regenerate=LocalRegeneration(num_tokens=1),
    )
    block = Block(num_blocks - 1, num_blocks, 100)
    plan = BlockPlan(block, data_config, [source], tokenizer, [0])
    kept, counts = generate_self_prompts(plan, 0, backend, None, {})  # type: ignore[arg-type]
    for prompt in kept:
        messages = [{"role": "user", "content": prompt.asked}]
        assert (
            prompt.ids
            == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )  # type: ignore[call-overload]
        assert list(prompt.messages) == messages
    return [str(prompt.asked) for prompt in kept], counts


GENERATED_TEXTS = [
    " Which bird sings at noon? <|end|>",
    "  \n<|end|>",
    "Which bird sings, and which one never does, and where is it that I could hear them<|end|>",
    "What is <|user|> a bird?<|end|>",
    "la" * 25 + "<|end|>",
    "Which bird sings at noon?!<|end|>",
    "How far can a swallow fly?<|endoftext|>",
]


def test_generated_texts_that_are_no_prompts_are_filtered_and_counted() -> None:
    kept, counts = generate_prompts(
        ScriptedBackend(
            lambda number: (
                GENERATED_TEXTS[number]
                if number < len(GENERATED_TEXTS)
                else f"New question {number}<|end|>"
            )
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
    assert generate_prompts(whole, 5) == generate_prompts(cut, 5) and len(cut.contexts) > len(
        whole.contexts
    )
    # All prompts are continued together, not one after the other.
    assert sorted(map(len, cut.contexts)) == list(map(len, cut.contexts))


def test_a_turn_that_ends_in_plain_text_ends_the_prompt() -> None:
    backend = ScriptedBackend(
        lambda number: f" What is {number}? ASSISTANT: {number}, of course. USER: And" + "?" * 80,
        opens="USER:",
    )
    assert generate_prompts(backend, 2, VICUNA)[0] == ["What is 0?", "What is 1?"]


def test_a_target_that_repeats_itself_gives_fewer_prompts() -> None:
    backend = ScriptedBackend(lambda number: "Always the same question to you?<|end|>")
    kept, counts = generate_prompts(backend, 4)
    assert kept == ["Always the same question to you?"]
    assert len(backend.contexts) == MAX_PROMPTS_PER_WANTED * 4 and counts.filtered == {
        "near_duplicate": MAX_PROMPTS_PER_WANTED * 4 - 1
    }


def test_blocks_take_the_system_messages_in_turn() -> None:
    backend = ScriptedBackend(lambda number: f"question {number}<|end|>")
    generate_prompts(backend, 12, num_blocks=2, system=["Sums.", "Code.", "Song."])
    messages = [
        next(message for message in ("Sums.", "Code.", "Song.") if message in context)
        for context in backend.contexts
    ]
    assert messages == ["Code.", "Song.", "Sums."] * 2


def build_talkative_target(ends: float = 4.0) -> Any:
    """Return a random target that ends its turns, by default after about twenty tokens."""
    model = tiny_target_model(num_layers=1)
    bias = torch.zeros(260)
    bias[:END], bias[END] = -100.0, ends
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


def make_config(folder: Path, source: Any = "self", **settings: Any) -> DataConfig:
    regenerate = LocalRegeneration(num_tokens=400, batch_size=8, temperatures=[0.8])
    defaults = {
        "max_length": 128,
        "validation_fraction": 0.3,
        "decontaminate": [],
        "cache_dir": str(folder),
    }
    return DataConfig(**{"source": source, "regenerate": regenerate, **defaults, **settings})


def make_documents(data_config: DataConfig, model: Any) -> list[Dataset]:
    """Make the rows and return the documents of each block."""
    opened(data_config, row_target(model, UNTAGGED))
    return [
        Dataset.from_file(str(path))
        for path in sorted(Path(str(data_config.cache_dir)).glob("rows/*.blocks/*.arrow"))
    ]


def decode_prompts(parts: Sequence[Dataset]) -> list[str]:
    """Return the prompts of documents as texts."""
    prompts = []
    for row in (row for part in parts for row in part):
        head = [
            token
            for token, has_loss in zip(row["input_ids"], row["loss_mask"], strict=True)
            if not has_loss
        ]
        prompts.append(tiny_tokenizer().decode(head, skip_special_tokens=False))
    return prompts


@pytest.mark.long  # makes the rows three times
def test_equal_inputs_and_interrupted_runs_give_the_same_prompts_and_answers(
    tmp_path: Path,
) -> None:
    """The interrupted run is killed after two batches. All rows of a prompt are on one side."""
    model, source = build_talkative_target(), [{"source": "self", "num_prompts": 12}]
    data_config = make_config(tmp_path / "a", source)
    whole = make_documents(data_config, model)
    train_and_validation = opened(data_config, row_target(model, UNTAGGED))
    halves = [
        {text.partition("<|assistant|>")[0] for text in decode_texts(half)}
        for half in train_and_validation
    ]
    assert all(halves) and not halves[0] & halves[1]
    assert all(
        prompt.startswith("<|user|>\n") and prompt.endswith("<|end|><|assistant|>\n")
        for prompt in decode_prompts(whole)
    )
    assert 0 < len(set(decode_prompts(whole))) <= 12

    run_until_killed(lambda: make_documents(make_config(tmp_path / "b", source), model), 2)
    again = make_documents(make_config(tmp_path / "b", source), model)
    assert [part.to_list() for part in again] == [part.to_list() for part in whole]
    hotter = [{"source": "self", "num_prompts": 12, "temperature": 1.5}]
    assert decode_prompts(
        make_documents(make_config(tmp_path / "c", hotter), model)
    ) != decode_prompts(whole)


def test_self_mixes_with_other_sources_and_documents_have_no_system_messages(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n'
    )
    source = [
        {"source": "self", "num_prompts": 6, "system": ["Sums."], "weight": 0.5},
        {"source": str(tmp_path / "rows.jsonl"), "weight": 3},
    ]
    parts = make_documents(make_config(tmp_path, source), build_talkative_target())
    assert {row["source"] for part in parts for row in part} == {0, 1}
    assert not any("Sums." in prompt for prompt in decode_prompts(parts))


def make_similar_prompts(count: int, generator: random.Random) -> list[str]:
    """Return prompts of sixty words; a third repeat an earlier one with some words changed."""
    prompts: list[list[str]] = []
    for number in range(count):
        words = [f"word{generator.randrange(500)}" for _ in range(60)]
        if number % 3 == 2:
            words = list(prompts[generator.randrange(number)])
            for place in generator.sample(range(60), generator.randrange(15)):
                words[place] = "other"
        prompts.append(words)
    return [" ".join(words) for words in prompts]


def test_nearly_all_near_duplicates_are_found_and_no_other_prompts() -> None:
    near, num_alike, num_found = NearDuplicates(), 0, 0
    kept: list[set[tuple[str, ...]]] = []
    for prompt in make_similar_prompts(400, random.Random(0)):
        words = prompt.split()
        ngrams = {tuple(words[place : place + 5]) for place in range(len(words) - 4)}
        nearest = max((len(ngrams & other) / len(ngrams | other) for other in kept), default=0.0)
        is_new = near.add(prompt)
        assert is_new or nearest >= NEAR_DUPLICATE_SIMILARITY
        kept += [ngrams] * is_new
        num_alike, num_found = (
            num_alike + (nearest >= NEAR_DUPLICATE_SIMILARITY),
            num_found + (not is_new),
        )
    assert num_alike > 5 and num_found >= 0.95 * num_alike


def test_short_prompts_are_compared_by_words_and_prompts_without_words_are_kept() -> None:
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


def test_near_duplicates_of_prompts_of_other_blocks_are_filtered_with_servers(
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
        data_config = make_config(
            tmp_path, [{"source": "self", "num_prompts": 40}], regenerate=regenerate
        )
        parts = make_documents(data_config, None)
    prompts_of_blocks = [set(decode_prompts([part])) for part in parts]
    (duplicate,) = {
        prompt
        for prompt in prompts_of_blocks[0] | prompts_of_blocks[1] | prompts_of_blocks[2]
        if "again" in prompt
    }
    assert len(parts) == 8 and sum(duplicate in prompts for prompts in prompts_of_blocks) > 1
    rows = opened(data_config, row_target(None, UNTAGGED))  # no server runs any more
    kept = [
        text
        for half in rows
        for text in decode_texts(half)
        if text.startswith("<|user|>\nsay it again")
    ]
    manifest = read_rows(next(path.parent for path in tmp_path.glob("rows/*/manifest.json")))[2]
    total = sum(prompt == duplicate for prompt in decode_prompts(parts))
    assert 0 < len(kept) < total and manifest.filtered["near_duplicate"] >= total - len(kept)


@pytest.mark.parametrize(
    ("source", "settings", "key", "got"),
    [
        ("self", {"regenerate": None}, "data.source", "self with data.regenerate.num_tokens=0"),
        (
            "self",
            {},
            "data.source",
            "self, but no prompt that the target generated was kept with its answer",
        ),
        (
            "self",
            {"columns": {"text": "body"}},
            "data.columns",
            "{'text': 'body'} with self as the only source",
        ),
        ([{"source": "self", "where": {"a": 1}}], {}, "data.source[0].where", "{a: 1}"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, source: Any, settings: dict[str, Any], key: str, got: str
) -> None:
    data_config = make_config(tmp_path, source, **settings)
    with refused(key, got):
        opened(data_config, row_target(build_talkative_target(ends=-100.0), UNTAGGED))


@pytest.mark.long  # pico generates
def test_pico_asks_for_python(tmp_path: Path) -> None:
    target = FrozenTarget.load("pico")
    settings = make_config(tmp_path, [{"source": "self", "num_prompts": 6}], max_length=96)
    train, _ = opened(settings, RowTarget.from_target(target))
    prompts = {str(target.tokenizer.decode(row["input_ids"])) for row in train}
    assert sum("Write `" in prompt for prompt in prompts) > len(prompts) / 2
