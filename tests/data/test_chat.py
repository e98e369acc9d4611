"""Chat templates and loss masks: what the assistant writes, token for token, however a template marks it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specdistill.data.chat import GENERATION_TAG, assistant_spans, encode_chat, encode_text, prompt_ids, render
from specdistill.data.sources import normalise
from specdistill.errors import UserError
from specdistill.pico.corpus import CHAT_TEMPLATE as TAGGED
from tests.tiny import tiny_tokenizer

UNTAGGED = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", TAGGED)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello — you?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye, assistant!\n"},
]


def test_the_mask_of_two_turns_is_what_one_writes_by_hand() -> None:
    encoded = encode_chat(tiny_tokenizer(TAGGED), TWO_TURNS, "assistant")
    pieces = [
        ("<|user|>\nBe brief.<|end|><|user|>\nHi<|end|><|assistant|>\n", 0),
        ("Hello — you?<|end|>", 1),
        ("<|user|>\nBye<|end|><|assistant|>\n", 0),
        ("Bye, assistant!\n<|end|>", 1),
    ]
    assert encoded.input_ids == [token for text, _ in pieces for token in ids_of(text)]
    assert encoded.loss_mask == [flag for text, flag in pieces for _ in ids_of(text)]


@pytest.mark.parametrize(
    "messages",
    [
        TWO_TURNS,
        TWO_TURNS[1:3],
        [{"role": "user", "content": "say it again: Hi"}, {"role": "assistant", "content": "Hi"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
        [
            {"role": "user", "content": " "},
            {"role": "assistant", "content": "  \n indented\n"},
            {"role": "tool", "content": "{}"},
        ],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}],
    ],
)
def test_spans_and_generation_tags_agree(messages: Sequence[dict[str, str]]) -> None:
    assert GENERATION_TAG.search(TAGGED) and not GENERATION_TAG.search(UNTAGGED)
    tagged, untagged = (encode_chat(tiny_tokenizer(template), messages, "assistant") for template in (TAGGED, UNTAGGED))
    assert tagged == untagged


def test_a_template_that_trims_and_adds_a_thought_to_the_last_turn() -> None:
    """The prompt opens the thought, so that the assistant writes what follows; turns before the last have none."""
    assert spans_of(CHATML, TWO_TURNS[1:]) == ["Hello — you?<|im_end|>", "\n</think>\n\nBye, assistant!<|im_end|>"]


def test_a_template_without_turn_ends_has_no_loss_at_the_next_header() -> None:
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert spans_of(plain, TWO_TURNS) == ["Hello — you?", "Bye, assistant!"]


def test_a_template_that_rewrites_the_beginning_when_the_conversation_grows() -> None:
    """The system text moves to the last question, as Mistral's templates have it: no prefix of the conversation renders as such."""
    moving = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}{% endif %}"
        "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.index == ns.last %}SYS {% endif %}"
        "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert spans_of(moving, TWO_TURNS) == ["Hello — you?</s>", "Bye, assistant!\n</s>"]


def test_a_template_that_drops_the_assistants_content_is_refused() -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}|{% else %}…|{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="changes the assistant's content in 'Hi…"):
        encode_chat(tiny_tokenizer(silent.replace("|", "")), TWO_TURNS[1:3], "assistant")


def test_masks_of_none_or_all_show_the_rendered_text() -> None:
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match=r"0 of 2 tokens from the assistant in 'Hi', expected"):
        encode_chat(tokenizer, [{"role": "user", "content": "Hi"}], "assistant")
    with pytest.raises(UserError, match=r"2 of 2 tokens from the assistant in 'Hi'"):
        encode_chat(tokenizer, [{"role": "assistant", "content": "Hi"}], "assistant")
    with pytest.raises(UserError, match=r"'x{120} … x{120}'"):
        encode_chat(tokenizer, [{"role": "user", "content": "x" * 1000}], "assistant")
    assert encode_chat(tokenizer, [{"role": "user", "content": "Hi"}], "all").loss_mask == [1, 1]


def test_conversations_need_a_template_that_takes_them() -> None:
    with pytest.raises(UserError, match="tokenizer has no chat template"):
        encode_chat(tiny_tokenizer(None), TWO_TURNS, "assistant")
    strict = tiny_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}")
    with pytest.raises(UserError, match="turns system, user, assistant, user, assistant: no system role"):
        encode_chat(strict, TWO_TURNS, "assistant")


def test_texts_end_with_the_end_token_and_carry_loss_everywhere() -> None:
    encoded = encode_text(tiny_tokenizer(), "abc")
    assert encoded.input_ids == [*ids_of("abc"), 0] and encoded.loss_mask == [1] * 4
    assert encode_text(tiny_tokenizer(), "abc<|endoftext|>").input_ids == encoded.input_ids


def test_a_prompt_stops_where_the_assistant_is_to_begin() -> None:
    assert prompt_ids(tiny_tokenizer(TAGGED), TWO_TURNS) == ids_of(
        "<|user|>\nBe brief.<|end|><|user|>\nHi<|end|><|assistant|>\n"
    )


@pytest.mark.parametrize("name", ["fastchat_dummy_conversation.json", "glaive_toolcall_en_demo.json"])
def test_real_conversations_with_a_real_tokenizer(shared_data: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "models" / "stories260K-hf")
    rows = json.loads((shared_data / "train" / "conversations" / name).read_text())[:25]
    conversations = [made["messages"] for row in rows for made in normalise(row, name)]
    masks = []
    for template in (TAGGED, UNTAGGED):
        tokenizer.chat_template = template
        masks.append([encode_chat(tokenizer, messages, "assistant") for messages in conversations])
    assert masks[0] == masks[1]
    for messages, encoded in zip(conversations, masks[0], strict=True):
        kept = [token for token, flag in zip(encoded.input_ids, encoded.loss_mask, strict=True) if flag]
        answers = "".join(message["content"] for message in messages if message["role"] == "assistant")
        assert "".join(tokenizer.decode(kept).replace("<|end|>", "").split()) == "".join(answers.split())


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


def spans_of(template: str, messages: Sequence[dict[str, str]]) -> list[str]:
    tokenizer = tiny_tokenizer(template)
    whole = render(tokenizer, messages)
    return [
        whole[start:end] for start, end in assistant_spans(lambda turns, prompt: render(tokenizer, turns, prompt), messages)
    ]
