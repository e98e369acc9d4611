"""Chat templates: where the assistant's turns stand, and prompts."""

from collections.abc import Sequence

from specdistill.rows.chat import assistant_spans, prompt_ids, render
from tests.rows.templates import TAGGED, THOUGHT_AT_THE_END, WITHOUT_TURN_ENDS
from tests.tiny import tiny_tokenizer

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello — you?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye, assistant!\n"},
]


def test_a_template_that_trims_and_adds_a_thought_to_the_last_turn() -> None:
    """The prompt opens the thought, so that the assistant writes what follows; turns before the last have none."""
    assert spans_of(THOUGHT_AT_THE_END, TWO_TURNS[1:]) == ["Hello — you?<|im_end|>", "\n</think>\n\nBye, assistant!<|im_end|>"]


def test_a_template_without_turn_ends_has_no_loss_at_the_next_header() -> None:
    assert spans_of(WITHOUT_TURN_ENDS, TWO_TURNS) == ["Hello — you?", "Bye, assistant!"]


def test_a_template_that_rewrites_the_beginning_when_the_conversation_grows() -> None:
    """The system text moves to the last question, as Mistral's templates have it: no prefix of the conversation renders as such."""
    moving = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}{% endif %}"
        "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.index == ns.last %}SYS {% endif %}"
        "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert spans_of(moving, TWO_TURNS) == ["Hello — you?</s>", "Bye, assistant!\n</s>"]


def test_a_prompt_stops_where_the_assistant_is_to_begin() -> None:
    assert prompt_ids(tiny_tokenizer(TAGGED), TWO_TURNS) == ids_of(
        "<|user|>\nBe brief.<|end|><|user|>\nHi<|end|><|assistant|>\n"
    )


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


def spans_of(template: str, messages: Sequence[dict[str, str]]) -> list[str]:
    tokenizer = tiny_tokenizer(template)
    whole = render(tokenizer, messages)
    return [
        whole[start:end] for start, end in assistant_spans(lambda turns, prompt: render(tokenizer, turns, prompt), messages)
    ]
