"""Where the assistant's turns stand in what the target's chat template renders, found by trying.

A turn starts where the conversation before it, with the generation prompt, ends, and it ends where the conversation up to it does: its
reasoning, its calls of tools and the closing text belong to it, since the target has to generate them too.

Some templates render a turn differently once others follow, e.g. without its reasoning. What was generated is the turn as the last one:
where a conversation does not begin with what it was up to a turn, that is a document of its own.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdistill.errors import UserError
from specdistill.suites.conversations import (
    REASONING,
    Message,
    Tools,
    check_expressed,
    is_learned,
    is_unanswered,
    render,
    shortened,
)

Spans = list[tuple[int, int]]
MARKER = "[[specdistill-marks-this-place]]"
MASKABLE = "a template that renders it as it is (data.chat_template), or data.loss_mask=all"


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools = None,
    **template: Any,
) -> list[int]:
    """The conversation up to its first turn that is yet to be generated, with the generation prompt."""
    known = list(takewhile(lambda message: not is_unanswered(message), messages))
    rendered = render(tokenizer, known, True, tools=tools, **template)
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def turn_documents(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools = None,
    where: str = "data.source",
    *,
    checks_turns: bool = True,
) -> list[tuple[str, Spans]]:
    """What the target read and generated: documents as text, each with the character spans [start, end) of the assistant's turns that
    are to be learned in it. One, unless the template renders earlier turns differently.

    Raises UserError for a conversation, or with checks_turns a turn of it, that the template does not render whole.
    """
    check_expressed(tokenizer, messages, tools, where)
    documents: list[tuple[str, Spans]] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            rendered, span = _turn(tokenizer, messages[: number + 1], tools, where, checks_turns)
            spans = (
                documents.pop()[1] if documents and _continues(rendered, documents[-1][0]) else []
            )
            documents.append((rendered, [*spans, span] if is_learned(message) else spans))
    whole = render(tokenizer, messages, False, where, tools)
    if not documents or _continues(whole, documents[-1][0]):
        documents[-1:] = [(whole, documents[-1][1] if documents else [])]
    return documents


def inner_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that the target generates within its turns, around reasoning and calls of tools: of its template, but no sign of a fault."""
    tool = {
        "type": "function",
        "function": {"name": "f", "arguments": {}, "parameters": {}},
    }  # as a call, and as its schema
    turns: list[tuple[Message, Tools]] = [
        ({"role": "assistant", "content": "a", REASONING[0]: "b"}, None),
        ({"role": "assistant", "content": None, "tool_calls": [tool]}, [tool]),
    ]
    found: set[int] = set()
    for turn, tools in turns:
        try:
            text, spans = turn_documents(
                tokenizer, [{"role": "user", "content": "c"}, turn], tools, checks_turns=False
            )[-1]
        except UserError:  # a template without them
            continue
        start, end = spans[-1]
        found.update(tokenizer(text[start:end], add_special_tokens=False)["input_ids"][:-1])
    return found


def _turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools,
    where: str,
    is_checked: bool,
) -> tuple[str, tuple[int, int]]:
    """The conversation as text, and the span of its last turn. Where the template renders what came before differently once the turn
    follows it, the text is what the target read, followed by the turn.
    """
    *before, turn = messages
    rendered, start = render(tokenizer, messages, False, where, tools), 0
    if before:
        prompt, asked = (
            render(tokenizer, before, is_prompt, where, tools) for is_prompt in (True, False)
        )
        start = max(
            alike(prompt, rendered), len(asked.rstrip()) if _continues(rendered, asked) else 0
        )
        # Some templates put more into the prompt (an empty thought) than they render in a finished turn.
        if start < len(prompt) and not _continues(rendered, asked):
            opening, marked = (
                prompt.removeprefix(asked),
                render(tokenizer, [*before, _marked(turn)], False, where, tools),
            )
            place = marked.partition(MARKER)[0].rfind(opening)
            rendered, start = (
                prompt + rendered[place + len(opening) if place >= 0 else len(rendered) :],
                len(prompt),
            )
    calls = [call["function"]["name"] for call in turn.get("tool_calls", ())]
    parts = [(turn["content"] or "").strip(), turn.get(REASONING[0], "").strip(), *calls]
    if is_checked and not all(part in rendered[start:] for part in parts):
        got = f"a chat template that changes the assistant's content in {shortened(rendered)!r}"
        raise UserError(where, got=got, expected=MASKABLE)
    return rendered, (start, max(start, len(rendered.rstrip())))


def _marked(turn: Message) -> Message:
    """With the marker in place of what the turn begins with."""
    if REASONING[0] in turn or turn["content"]:
        return {**turn, REASONING[0] if REASONING[0] in turn else "content": MARKER}
    calls = [
        {**call, "function": {**call["function"], "name": MARKER}}
        for call in turn.get("tool_calls", ())
    ]
    return {**turn, "tool_calls": calls}


def _continues(longer: str, shorter: str) -> bool:
    """But for white space after the last turn, which nobody generates."""
    return longer.startswith(shorter.rstrip())


def alike(first: str, second: str) -> int:
    """How many characters two strings begin with alike."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
