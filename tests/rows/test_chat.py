"""Chat templates: where the assistant's turns stand, and prompts."""

import pytest

from specdistill.rows.chat import assistant_spans, prompt_ids, render
from tests.rows.templates import MOVING, TAGGED, THOUGHT_AT_THE_END, TWO_TURNS, WITHOUT_TURN_ENDS, Conversation
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        # The prompt opens the thought, so that the assistant writes what follows; turns before the last have none.
        (THOUGHT_AT_THE_END, TWO_TURNS[1:], ["Hello — you?<|im_end|>", "\n</think>\n\nBye, assistant!<|im_end|>"]),
        (WITHOUT_TURN_ENDS, TWO_TURNS, ["Hello — you?", "Bye, assistant!"]),  # no loss at the next header
        # No prefix of the conversation renders as such.
        (MOVING, TWO_TURNS, ["Hello — you?</s>", "Bye, assistant!\n</s>"]),
    ],
)
def test_the_assistant_s_turns_are_found(template: str, messages: Conversation, expected: list[str]) -> None:
    tokenizer = tiny_tokenizer(template)
    whole = render(tokenizer, messages)
    spans = assistant_spans(tokenizer, messages)
    assert [whole[start:end] for start, end in spans] == expected


def test_a_prompt_stops_where_the_assistant_is_to_begin() -> None:
    tokenizer, said = tiny_tokenizer(TAGGED), "<|user|>\nBe brief.<|end|><|user|>\nHi<|end|><|assistant|>\n"
    assert prompt_ids(tokenizer, TWO_TURNS) == tokenizer(said)["input_ids"]
