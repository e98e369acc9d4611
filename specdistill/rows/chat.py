"""Conversations by the target's own chat template, and where the assistant's turns stand in what it renders.

A turn starts where the conversation before it, with the generation prompt, ends. Its content ends where a marker put there comes out. The
closing text of the turn belongs to it, since the target has to generate that too. Without the markers, the rendered text must be the
conversation, character for character.

`assistant_spans` renders each turn's beginnings to find this, whatever the template does.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdistill.errors import UserError, refusing
from specdistill.suites.suite import TEMPLATE_ERRORS

Message = dict[str, str]
Spans = list[tuple[int, int]]
MARKER = "[[specdistill-marks-this-place]]"
SHOWN_CHARACTERS = 240
MASKABLE = "a template with {% generation %} tags, or data.loss_mask=all"


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str = "data.source") -> list[int]:
    """The conversation up to its first assistant turn, with the generation prompt."""
    roles = [message["role"] for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    return list(tokenizer(render(tokenizer, messages[:end], True, where), add_special_tokens=False)["input_ids"])


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    generation_prompt: bool = False,
    where: str = "data.source",
    **template: Any,
) -> str:
    """template: more arguments of the chat template, e.g. enable_thinking."""
    if tokenizer.chat_template is None:
        got = "conversations for a target whose tokenizer has no chat template"
        expected = "text rows, or a chat_template.jinja next to the tokenizer, e.g. that of its instruct model"
        raise UserError(where, got=got, expected=expected)
    options: Any = {"tokenize": False, "add_generation_prompt": generation_prompt, **template}
    turns = f"turns {shortened(', '.join(message['role'] for message in messages))}"
    with refusing(TEMPLATE_ERRORS, where, turns, "a conversation that the target's chat template takes"):
        return str(tokenizer.apply_chat_template(list(messages), **options))


def opened_turn(tokenizer: PreTrainedTokenizerBase, system: str | None, where: str = "data.source") -> tuple[str, str]:
    """What the template writes before a user's content, and after it up to the assistant's.

    Raises UserError for a tokenizer without a template, and for a template that does not write the content as it is, once, after others.
    """
    expected = "prompts of your own, a file or a Hub id, or a target.model with a chat template that opens a user's turn"
    if tokenizer.chat_template is None:
        raise UserError(where, got="self for a target whose tokenizer has no chat template", expected=expected)
    first = [] if system is None else [{"role": "system", "content": system}]
    rendered = render(tokenizer, [*first, {"role": "user", "content": MARKER}], True, where)
    before, *after = rendered.split(MARKER)
    # Content brings its own space: as a token of its own before it that would be out of place.
    if len(after) != 1 or not before.strip():
        got = f"self with a chat template that does not open a user's turn in {shortened(rendered)!r}"
        raise UserError(where, got=got, expected=expected)
    return before.rstrip(" "), after[0]


def assistant_spans(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str = "data.source") -> Spans:
    """Character spans [start, end) of the assistant's turns in the rendered conversation, their closing text included."""

    def rendered(messages: Sequence[Message], generation_prompt: bool = False) -> str:
        return render(tokenizer, messages, generation_prompt, where)

    whole = rendered(messages)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    marked = [_marked(message, at_end=True) if index in turns else message for index, message in enumerate(messages)]
    ends = _marker_positions(rendered(marked), whole)
    starts = [_prefix_start(rendered, messages[:turn], whole) for turn in turns]
    if None in starts:  # the template renders the last turns of a conversation in another way than those before them
        opened = [_marked(message, at_end=False) if index in turns else message for index, message in enumerate(messages)]
        starts = list(_marker_positions(rendered(opened), whole))
    if not len(starts) == len(ends) == len(turns):
        got = f"a chat template that changes the assistant's content in {shortened(whole)!r}"
        raise UserError(where, got=got, expected=MASKABLE)
    spans = []
    for turn, start, content_end in zip(turns, starts, ends, strict=True):
        closing = rendered(marked[: turn + 1]).rpartition(MARKER)[2].rstrip()
        end = content_end + len(closing) if whole.startswith(closing, content_end) else content_end
        spans.append((min(start or 0, content_end), end))
    return spans


def _prefix_start(rendered: Callable[..., str], before: Sequence[Message], whole: str) -> int | None:
    """Where the next turn starts: after `before` and as much of the generation prompt as `whole` has.

    Some templates put more into the prompt (an empty thought) than they render in a finished turn. None if `whole` does not start with
    `before`.
    """
    if not before:
        return 0
    start = _alike(rendered(before, True), whole)
    return start if start >= len(rendered(before).rstrip()) else None


def _marked(message: Message, at_end: bool) -> Message:
    """A message with the marker at its end or start, inside surrounding white space, which a template may strip."""
    content = message["content"]
    body = content.strip()
    position = len(content.rstrip()) if at_end else content.find(body)
    return {**message, "content": content[:position] + MARKER + content[position:]}


def _marker_positions(rendered: str, whole: str) -> list[int]:
    """Positions in `whole` of the markers in `rendered`; none if the two differ in anything else."""
    pieces = rendered.split(MARKER)
    if "".join(pieces) != whole:
        return []
    return list(accumulate(len(piece) for piece in pieces[:-1]))


def _alike(first: str, second: str) -> int:
    """How many characters two strings begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def first_difference(first: str, second: str) -> tuple[str, str]:
    """What two strings hold from where they differ, with a few characters before."""
    start = max(0, _alike(first, second) - 20)
    return tuple(repr(text[start : start + 60]) for text in (first, second))  # type: ignore[return-value]


def shortened(text: str) -> str:
    """The beginning and the end of a text too long for an error message."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
