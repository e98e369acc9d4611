"""The source `self`: prompts that the target generates from its own chat template."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdistill.data.self_prompts import MOST, Opening, room_for_prompts, self_prompts
from specdistill.data.training_data import training_documents
from specdistill.errors import UserError
from specdistill.recipe.sections import DataConfig, RegenerateConfig
from specdistill.targets.frozen import FrozenTarget
from tests.data.openai_server import Behaviour, running
from tests.data.templates import CHATML, DEEPSEEK, GEMMA, LLAMA3, MISTRAL, UNTAGGED, VICUNA
from tests.tiny import tiny_target_model, tiny_tokenizer

END = 3  # <|end|>, which ends a turn of pico's template


def opening(template: str | None = UNTAGGED, system: str | None = None) -> Opening:
    return Opening.of(tiny_tokenizer(template), system, [0], "data.source")


@pytest.mark.parametrize(
    ("template", "begins", "ends"),
    [
        (UNTAGGED, "<|user|>\n", "<|end|><|assistant|>"),
        (CHATML, "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant"),
        (
            LLAMA3,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>",
        ),
        (MISTRAL, "<s>[INST]", "[/INST]"),  # words bring the space before them
        (GEMMA, "<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model"),
        (DEEPSEEK, "<｜begin▁of▁sentence｜><｜User｜>", "<｜Assistant｜><think>"),
        (VICUNA, "USER:", "ASSISTANT:"),
    ],
)
def test_a_template_is_cut_off_where_the_words_begin(template: str, begins: str, ends: str) -> None:
    made = opening(template)
    assert tiny_tokenizer().decode(made.ids, skip_special_tokens=False) == begins and made.closing == ends
    assert made.end_ids == ({0, END} if template == UNTAGGED else {0}) and {0, 1, 2, END} <= made.special


def test_a_system_message_stands_before_the_words() -> None:
    assert tiny_tokenizer().decode(opening(CHATML, "Sums.").ids) == "<|im_start|>system\nSums.<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize(
    ("template", "system", "got"),
    [
        (None, None, "got self for a target whose tokenizer has no chat template, expected prompts of your own"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", None, "does not open a user's turn in"),
        ("{% for m in messages %}Q{{ m.content }}{{ m.content }}{% endfor %}", None, "does not open a user's turn in"),
        ("{{ messages[0].content }} A: ", None, "does not open a user's turn in"),
        (GEMMA, "Sums.", "System role not supported"),
    ],
)
def test_a_template_that_opens_no_turn_is_refused(template: str | None, system: str | None, got: str) -> None:
    with pytest.raises(UserError, match=r"^data\.source: got ") as error:
        opening(template, system)
    assert got in str(error.value) and "\n" not in str(error.value)


def test_a_prompt_has_half_a_row_and_some_room() -> None:
    made = opening()
    assert room_for_prompts([made], 200) == 100 - made.num_tokens and room_for_prompts([made], 4096) == 256
    with pytest.raises(UserError, match=rf"data\.max_length: got 32, expected {2 * (made.num_tokens + 16)} or more"):
        room_for_prompts([made], 32)


class Said:
    """A target that says these texts, by number, at most `at_once` tokens at a time. contexts: that it was given, text by text."""

    def __init__(self, texts: Callable[[int], str], at_once: int = 1000, opens: str = "<|user|>\n") -> None:
        self.texts, self.at_once, self.opens = texts, at_once, opens
        self.contexts: list[str] = []

    def __call__(self, contexts: Sequence[Sequence[int]], most: int, numbers: Sequence[int]) -> list[list[int]]:
        tokenizer, made = tiny_tokenizer(), []
        for context, number in zip(contexts, numbers, strict=True):
            self.contexts.append(tokenizer.decode(context, skip_special_tokens=False))
            begun = self.contexts[-1].rpartition(self.opens)[2]
            assert self.texts(number).startswith(begun)
            made.append(tokenizer(self.texts(number)[len(begun) :])["input_ids"][: min(most, self.at_once)])
        return made


def prompts(said: Said, count: int, template: str = UNTAGGED, longest: int = 60) -> list[str]:
    rows = list(self_prompts([opening(template)], count, longest, said, tiny_tokenizer()))
    assert all(row["text"] is None and [turn["role"] for turn in row["messages"]] == ["user"] for row in rows)
    return [row["messages"][0]["content"] for row in rows]


ASKED = [
    " Which bird sings at noon? <|end|>",
    "  \n<|end|>",
    "Which bird sings, and which one never does, and where is it that I could hear them<|end|>",
    "What is <|user|> a bird?<|end|>",
    "la" * 25 + "<|end|>",
    "Which bird sings at noon?!<|end|>",
    "How far can a swallow fly?<|endoftext|>",
]


def test_what_is_no_prompt_is_set_aside_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    kept = prompts(Said(lambda number: ASKED[number] if number < len(ASKED) else f"New question {number}<|end|>"), 7)
    assert kept[:2] == ["Which bird sings at noon?", "How far can a swallow fly?"]
    assert kept[2:] == [f"New question {number}" for number in range(7, 12)]
    table = capsys.readouterr().err
    for rule, count in {"empty": 1, "truncated": 1, "off_template": 1, "looping": 1, "duplicate": 1}.items():
        assert any(rule in line and f" {count} " in line for line in table.splitlines()), (rule, table)


def test_unfinished_prompts_are_continued_and_equal_whole_ones() -> None:
    whole = Said(lambda number: f"Is {number} a number with many words after it?<|end|>")
    cut = Said(whole.texts, at_once=7)
    assert prompts(whole, 5) == prompts(cut, 5) and len(cut.contexts) > len(whole.contexts)
    assert sorted(map(len, cut.contexts)) == list(map(len, cut.contexts))  # together, not one after the other


def test_a_turn_that_ends_in_plain_text_ends_the_prompt() -> None:
    said = Said(lambda number: f" What is {number}? ASSISTANT: {number}, of course. USER: And" + "?" * 80, opens="USER:")
    assert prompts(said, 2, VICUNA) == ["What is 0?", "What is 1?"]


def test_a_target_with_nothing_more_to_say_gives_fewer(caplog: pytest.LogCaptureFixture) -> None:
    said = Said(lambda number: "Always the same question to you?<|end|>")
    assert prompts(said, 4) == ["Always the same question to you?"]
    assert len(said.contexts) == MOST * 4 and "self gave 1 of 4 prompts" in caplog.text


def test_system_messages_share_the_prompts() -> None:
    said = Said(lambda number: f"question {number}<|end|>")
    openings = [opening(system=system) for system in ("Sums.", "Code.", "Song.")]
    list(self_prompts(openings, 6, 60, said, tiny_tokenizer()))
    assert [context.count(system) for context, system in zip(said.contexts, ("Sums.", "Code.", "Song.") * 2, strict=True)] == [
        1
    ] * 6


def talkative(ends: float = 4.0) -> Any:
    """A random target that ends its turns, by default after about twenty tokens."""
    model = tiny_target_model(num_layers=1)
    bias = torch.zeros(260)
    bias[:END], bias[END] = -100.0, ends
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


def config(folder: Path, source: Any = "self", **settings: Any) -> DataConfig:
    regenerate = RegenerateConfig(num_tokens=400, batch_size=8, temperatures=[0.8])
    defaults = {
        "max_length": 128,
        "validation_fraction": 0.3,
        "decontaminate": [],
        "cache_dir": str(folder),
        "regenerate": regenerate,
    }
    return DataConfig(**{"source": source, **defaults, **settings})


def documents(made: DataConfig, model: Any) -> list[list[dict[str, Any]]]:
    halves = training_documents(made, tiny_tokenizer(UNTAGGED), model, fingerprint="weights")
    return [half.to_list() for half in halves]


def asked(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The prompts of documents."""
    found = []
    for row in rows:
        head = [token for token, has_loss in zip(row["input_ids"], row["loss_mask"], strict=True) if not has_loss]
        found.append(tiny_tokenizer().decode(head, skip_special_tokens=False))
    return found


def test_the_target_asks_and_answers_once_for_equal_inputs(tmp_path: Path) -> None:
    model, calls = talkative(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    source = [{"source": "self", "num_prompts": 12}]
    train, validation = documents(config(tmp_path, source), model)
    prompts = [set(asked(half)) for half in (train, validation)]
    assert all(prompts) and not prompts[0] & prompts[1]
    assert all(prompt.startswith("<|user|>\n") and prompt.endswith("<|end|><|assistant|>\n") for prompt in prompts[0])
    assert len(prompts[0] | prompts[1]) <= 12

    calls.clear()
    assert documents(config(tmp_path, source), model) == [train, validation] and not calls
    for folder in ("generator", "prepared"):  # what a kill leaves are the batches that were done
        shutil.rmtree(tmp_path / folder)
    assert documents(config(tmp_path, source), model) == [train, validation] and not calls
    assert documents(config(tmp_path, source, seed=1), model) != [train, validation] and calls
    hotter = [{"source": "self", "num_prompts": 12, "temperature": 1.5}]
    assert documents(config(tmp_path, hotter), model) != [train, validation]


def test_beside_rows_of_others_and_without_their_system_messages(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    source = [
        {"source": "self", "num_prompts": 6, "system": ["Sums."], "weight": 0.5},
        {"source": str(tmp_path / "rows.jsonl"), "weight": 3},
    ]
    train, validation = documents(config(tmp_path, source), talkative())
    assert {row["source"] for row in [*train, *validation]} == {0, 1}
    assert not any("Sums." in prompt for prompt in asked([*train, *validation]))


def test_what_servers_generate_and_nothing_else(tmp_path: Path) -> None:
    with running(Behaviour(text=lambda digest: f"say {digest}")) as server:
        regenerate = RegenerateConfig(num_tokens=400, batch_size=2, temperatures=[0.8], server=[server.address])
        made = config(tmp_path, regenerate=regenerate)
        train, validation = documents(made, tiny_target_model(num_layers=1))
    assert all("say " in prompt for prompt in asked([*train, *validation]))
    assert len(set(asked([*train, *validation]))) == 400 // 64 + 1
    assert documents(made, tiny_target_model(num_layers=1)) == [train, validation]  # though the server is gone


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (
            "self",
            {"regenerate": None},
            r"data\.source: got self with data\.regenerate\.num_tokens=0, expected data\.regenerate\.num_tokens",
        ),
        ("self", {"regenerate": None, "streaming": True}, r"data\.source: got self with data\.streaming=true"),
        ("self", {"max_length": 40}, r"data\.max_length: got 40, expected "),
        (
            "self",
            {},
            r"data\.source: got self, which gave 0 prompts that are kept, expected a target that generates a user's turn",
        ),
        ("self", {"columns": {"text": "body"}}, r"data\.columns: got {'text': 'body'} with the source self alone"),
        (
            [{"source": "self", "where": {"a": 1}}],
            {},
            r"data\.source\[0\]\.where: got \{a: 1\}, expected \{\}: it is read only of rows",
        ),
        ([{"source": "pico", "system": ["Sums."]}], {}, r"data\.source\[0\]\.system: got .* it is read only with source: self"),
        ([{"source": "self", "temperature": 0}], {}, r"data\.source\[0\]\.temperature: got 0, expected float, above 0"),
        ("slef", {}, r"data\.source: got slef, .* did you mean self\?"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path: Path, source: Any, settings: dict[str, Any], message: str) -> None:
    made = config(tmp_path, source, **settings)
    with pytest.raises(UserError, match=f"^{message}"):
        training_documents(made, tiny_tokenizer(UNTAGGED), talkative(ends=-100.0), fingerprint="weights")


@pytest.mark.long  # pico generates
def test_pico_asks_for_python(tmp_path: Path) -> None:
    target = FrozenTarget.load("pico")
    settings = config(tmp_path, [{"source": "self", "num_prompts": 6}], max_length=96)
    train, _ = training_documents(settings, target.tokenizer, target.model, fingerprint=target.identity.weights)
    prompts = {str(target.tokenizer.decode(row["input_ids"])) for row in train}
    assert sum("Write `" in prompt for prompt in prompts) > len(prompts) / 2
