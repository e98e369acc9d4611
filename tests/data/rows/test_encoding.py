"""Rows to documents: loss masks however a template marks the assistant's turns, prompts, and
conversations cut at their turns."""

import itertools
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdistill.common.errors import UserError
from specdistill.data.produce.sources import COLUMNS, normalize_row
from specdistill.data.rows.chat import build_turn_documents, tokenize_prompt
from specdistill.data.rows.encoding import Encoder
from tests.data.produce.row_sets import chat
from tests.data.rows.templates import (
    CHATML,
    GEMMA,
    MOVING,
    TAGGED,
    THOUGHT_AT_THE_END,
    TWO_TURNS,
    UNTAGGED,
    UNTAGGED_TEMPLATES,
    WITHOUT_TURN_ENDS,
    Conversation,
    make_conversations,
)
from tests.refusals import refused
from tests.tiny import tiny_tokenizer

LONG = 10_000


def encode(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Any],
    loss_mask: str = "assistant",
    max_length: int = LONG,
) -> list[dict[str, Any]]:
    """Return the documents of rows, each of which is a text or a conversation."""
    forms = [
        (
            {"text": row}
            if isinstance(row, str)
            else {"messages": row}
            if isinstance(row, list)
            else row
        )
        for row in rows
    ]
    encoder, nothing = Encoder(tokenizer, loss_mask, max_length), dict.fromkeys(COLUMNS)
    documents = [
        document
        for number, form in enumerate(forms)
        for document in encoder({**nothing, **form}, number)
    ]
    return [
        {
            name: getattr(value, "tolist", lambda value=value: value)()
            for name, value in document.items()
        }
        for document in documents
    ]


def decode_loss_tokens(tokenizer: PreTrainedTokenizerBase, document: dict[str, Any]) -> str:
    """Return the tokens that carry loss as a text."""
    pairs = zip(document["input_ids"], document["loss_mask"], strict=True)
    return str(tokenizer.decode([token for token, flag in pairs if flag]))


def tokenize(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


def test_the_mask_of_two_turns_equals_a_hand_written_one() -> None:
    (encoded,) = encode(tiny_tokenizer(TAGGED), [TWO_TURNS])
    pieces = [
        ("<|user|>\nBe brief.<|end|><|user|>\nHi<|end|><|assistant|>\n", 0),
        ("Hello — you?<|end|>", 1),
        ("<|user|>\nBye<|end|><|assistant|>\n", 0),
        ("Bye, assistant!\n<|end|>", 1),
    ]
    assert encoded["input_ids"] == [token for text, _ in pieces for token in tokenize(text)]
    assert encoded["loss_mask"] == [flag for text, flag in pieces for _ in tokenize(text)]
    assert (
        encoded["length"] == len(encoded["input_ids"])
        and not encoded["is_text"]
        and encoded["row"] == 0
    )


@pytest.mark.parametrize("name", UNTAGGED_TEMPLATES)
def test_a_token_carries_loss_where_it_overlaps_a_turn_of_the_assistant(name: str) -> None:
    tokenizer, num_checked = tiny_tokenizer(UNTAGGED_TEMPLATES[name]), 0
    for messages in make_conversations(60):
        try:
            documents = build_turn_documents(tokenizer, messages)
        except UserError:  # roles that this template does not take, or a thought that it drops
            continue
        if not all(
            any(start < end for start, end in spans) for _, spans in documents
        ):  # an empty answer, and nothing that ends it
            continue
        for encoded, (whole, spans) in zip(encode(tokenizer, [messages]), documents, strict=True):
            offsets = tokenizer(whole, return_offsets_mapping=True)["offset_mapping"]
            assert encoded["loss_mask"] == [
                int(any(left < end and start < right for start, end in spans))
                for left, right in offsets
            ]
        num_checked += 1
    assert num_checked >= 15


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        # The prompt opens the thought, so that the assistant writes what follows. Turns before the
        # last have none.
        (
            THOUGHT_AT_THE_END,
            TWO_TURNS[1:],
            ["\n</think>\n\nHello — you?<|im_end|>", "\n</think>\n\nBye, assistant!<|im_end|>"],
        ),
        # no loss at the next header
        (WITHOUT_TURN_ENDS, TWO_TURNS, ["Hello — you?", "Bye, assistant!"]),
        # No prefix of the conversation renders as such, and the target writes the empty thought.
        (
            MOVING,
            TWO_TURNS[1:],
            ["<think></think>Hello — you?</s>", "<think></think>Bye, assistant!\n</s>"],
        ),
    ],
)
def test_the_assistant_s_turns_are_found(
    template: str, messages: Conversation, expected: list[str]
) -> None:
    tokenizer = tiny_tokenizer(template)
    documents = build_turn_documents(tokenizer, messages)
    assert [whole[start:end] for whole, spans in documents for start, end in spans] == expected


def test_a_prompt_ends_where_the_assistant_begins() -> None:
    tokenizer, rendered = (
        tiny_tokenizer(TAGGED),
        "<|user|>\nBe brief.<|end|><|user|>\nHi<|end|><|assistant|>\n",
    )
    assert tokenize_prompt(tokenizer, TWO_TURNS[:2]) == tokenizer(rendered)["input_ids"]


@pytest.mark.parametrize(
    "messages",
    [
        TWO_TURNS,
        [{"role": "user", "content": "say it again: Hi"}, {"role": "assistant", "content": "Hi"}],
        *make_conversations(20, seed=1),
    ],
)
def test_masks_equal_those_that_transformers_takes_from_generation_tags(
    messages: Conversation,
) -> None:
    (encoded,) = encode(tiny_tokenizer(TAGGED), [messages])
    options: Any = {"return_dict": True, "return_assistant_tokens_mask": True}
    tagged: Any = tiny_tokenizer(TAGGED).apply_chat_template(messages, **options)
    assert (encoded["input_ids"], encoded["loss_mask"]) == (
        tagged["input_ids"],
        tagged["assistant_masks"],
    )


SILENT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}…{% endif %}{%"
    " endfor %}"
)
SHOUTING = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
FOUR_TURNS = [
    {"role": role, "content": f"What {role} {place} says."}
    for place, role in enumerate(("user", "assistant") * 2)
]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (SILENT, r"changes the assistant's content in 'What user 0 says\.…'"),
        (SHOUTING, "changes the assistant's content in .*WHAT ASSISTANT 1 SAYS"),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused(template: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^data.source row 1: got a chat template that {message}"):
        encode(tiny_tokenizer(template), [FOUR_TURNS])
    encode(tiny_tokenizer(template), [FOUR_TURNS], "all")


def test_a_template_that_takes_single_questions_only_is_accepted() -> None:
    single = (
        "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}" + CHATML
    )
    assert (
        decode_loss_tokens(tiny_tokenizer(), encode(tiny_tokenizer(single), [TWO_TURNS[1:3]])[0])
        == "Hello — you?<|im_end|>"
    )


@pytest.mark.parametrize(
    "wrong", ["{{ -messages }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"]
)
def test_a_template_that_fails_is_refused(wrong: str) -> None:
    with refused("data.source row 1", "turns user"):
        encode(tiny_tokenizer(wrong), [TWO_TURNS[1:3]])


def test_a_mask_of_no_or_every_token_is_refused_with_the_rendered_text() -> None:
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with refused("data.source row 1", "a prompt without an answer, 'Hi'"):
        encode(tokenizer, [[{"role": "user", "content": "Hi"}]])
    with refused("data.source row 2", "a conversation with loss on all of its 2 tokens, 'Hi'"):
        encode(tokenizer, ["text", [{"role": "assistant", "content": "Hi"}]])
    with pytest.raises(UserError, match=r"'x{120} … x{120}'"):
        encode(tokenizer, [[{"role": "assistant", "content": "x" * 1000}]])
    assert encode(tokenizer, [[{"role": "user", "content": "Hi"}]], "all")[0]["loss_mask"] == [1, 1]


def test_conversations_need_a_template_that_takes_them() -> None:
    with refused("data.source row 1", holds="no chat template"):
        encode(tiny_tokenizer(None), [TWO_TURNS])
    with refused(
        "data.source row 2", "turns system, user, assistant", holds="System role not supported"
    ):
        encode(tiny_tokenizer(GEMMA), [TWO_TURNS[1:], TWO_TURNS])


def test_texts_end_with_the_end_token_and_carry_loss_everywhere() -> None:
    first, second = encode(tiny_tokenizer(), ["abc", "abc<|endoftext|>"])
    assert (
        first["input_ids"] == [*tokenize("abc"), 0] == second["input_ids"]
        and first["loss_mask"] == [1] * 4
    )
    assert first["is_text"] and (first["row"], second["row"]) == (0, 1)


def test_a_conversation_longer_than_a_row_is_cut_between_exchanges() -> None:
    """Each document begins with the system message, and each answer is in one document."""
    tokenizer = tiny_tokenizer(CHATML)
    system = [{"role": "system", "content": "Be brief."}]
    turns = chat(*(f"{kind} {number}" for number in range(10) for kind in ("question", "answer")))[
        "messages"
    ]
    documents = encode(
        tokenizer,
        ["short", [*system, *turns, {"role": "user", "content": "and?"}], "last"],
        max_length=400,
    )
    assert [document["row"] for document in documents] == [0, 1, 1, 1, 2]
    parts, start = documents[1:4], "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq"
    assert all(
        300 < document["length"] == len(document["input_ids"]) <= 400 for document in parts[:2]
    )
    assert all(tokenizer.decode(document["input_ids"]).startswith(start) for document in parts)
    assert "".join(decode_loss_tokens(tokenizer, part) for part in parts) == "".join(
        f"answer {number}<|im_end|>" for number in range(10)
    )
    whole = encode(tokenizer, [system + turns])[0]["length"]
    assert len(encode(tokenizer, [system + turns], max_length=whole)) == 1


def test_an_exchange_longer_than_a_row_is_cut_after_a_turn_of_the_assistant_or_filtered() -> None:
    """A document without tokens stands for each exchange that is filtered."""
    tokenizer = tiny_tokenizer(CHATML)
    pairs = ("one", "1"), ("look", "call"), ("long", "y" * 400), ("two", "2")
    one, call, long, two = (chat(*pair)["messages"] for pair in pairs)
    tools = [
        *call,
        {"role": "tool", "content": "x" * 400},
        {"role": "assistant", "content": "done"},
    ]
    turns = [*one, *tools, *long, *two]
    documents = encode(tokenizer, [turns], max_length=200)
    kept = [document for document in documents if document["input_ids"]]
    assert [decode_loss_tokens(tokenizer, document) for document in kept] == [
        "1<|im_end|>",
        "call<|im_end|>",
        "2<|im_end|>",
    ]
    filtered = [document["length"] for document in documents if not document["input_ids"]]
    assert filtered == [encode(tokenizer, [part])[0]["length"] for part in (tools, long)]


@pytest.mark.parametrize("template", [CHATML, MOVING])
def test_a_turn_of_weight_0_is_read_and_not_learned(template: str) -> None:
    tokenizer, raw = tiny_tokenizer(template), chat("one", "1", "two", "2", "three", "3")
    for turn, weight in zip(raw["messages"], (None, 0, None, 1, None, None), strict=True):
        turn["weight"] = weight
    (row,) = normalize_row(raw, "row 0", tokenizer)
    unweighted = encode(tokenizer, [chat("one", "1", "two", "2", "three", "3")])
    for max_length in (LONG, unweighted[-1]["length"] - 1):  # whole, and cut
        documents = encode(tokenizer, [row], max_length=max_length)
        assert re.findall(
            r"\d", "".join(decode_loss_tokens(tokenizer, document) for document in documents)
        ) == ["2", "3"]
    assert encode(tokenizer, [row])[-1]["input_ids"] == unweighted[-1]["input_ids"]
    assert sum(encode(tokenizer, [row], "all")[-1]["loss_mask"]) == unweighted[-1]["length"]
    with refused(
        "data.source row 1", "a conversation in which no turn of the assistant is to be learned"
    ):
        encode(tokenizer, [row["messages"][:2]])


@pytest.mark.parametrize("name", UNTAGGED_TEMPLATES)
def test_no_document_of_a_conversation_is_longer_than_a_row(name: str) -> None:
    """All answers that fit are kept in their order, whatever the template."""
    tokenizer = tiny_tokenizer(UNTAGGED_TEMPLATES[name])
    pairs = [(f"q {number} " + "?" * 3 * number, f"answer {number};") for number in range(12)]
    turns = chat(*itertools.chain(*pairs))["messages"]
    documents = encode(tokenizer, [turns], max_length=200)
    assert len(documents) >= 3 and all(document["length"] <= 200 for document in documents)
    answers = "".join(decode_loss_tokens(tokenizer, document) for document in documents)
    assert re.findall(r"answer (\d+);", answers) == [str(number) for number in range(12)]


def test_real_conversations_are_masked_alike_with_and_without_tags(shared_data: Path) -> None:
    name = "fastchat_dummy_conversation.json"
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "models" / "stories260K-hf")
    rows = json.loads((shared_data / "train" / "conversations" / name).read_text())[:25]
    chats = [turns["messages"] for row in rows for turns in normalize_row(row, name, tokenizer)]
    encoded = []
    for template in (TAGGED, UNTAGGED):
        tokenizer.chat_template = template
        encoded.append(encode(tokenizer, chats))
    assert encoded[0] == encoded[1]
    for messages, document in zip(chats, encoded[0], strict=True):
        answers = "".join(
            message["content"] for message in messages if message["role"] == "assistant"
        )
        assert "".join(
            decode_loss_tokens(tokenizer, document).replace("<|end|>", "").split()
        ) == "".join(answers.split())


def test_token_rows_keep_their_tokens_and_masks_among_others() -> None:
    rows: list[Any] = [
        "text",
        {"text": "567", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        TWO_TURNS,
    ]
    for loss_mask, expected in (("assistant", [0, 1, 1]), ("all", [1, 1, 1])):
        encoded = encode(tiny_tokenizer(CHATML), rows, loss_mask)[1]
        assert (encoded["input_ids"], encoded["loss_mask"], encoded["row"]) == (
            [5, 6, 7],
            expected,
            1,
        )


def test_documents_are_the_same_in_any_batches() -> None:
    encoder = partial(encode, tiny_tokenizer(CHATML), max_length=200)
    rows = [
        f"text {number}" if number % 3 == 0 else turns
        for number, turns in enumerate(make_conversations(30))
    ]
    together, alone = (
        encoder(rows),
        [
            {**document, "row": number}
            for number, row in enumerate(rows)
            for document in encoder([row])
        ],
    )
    assert (
        together == alone
        and {document["row"] for document in together} == set(range(30))
        and len(together) > 30
    )
