"""Conversations by the target's own chat template, and where the assistant's turns stand in what it renders.

A turn starts where the conversation before it, with the generation prompt, ends. Its content ends where a marker put there comes out. The
closing text of the turn belongs to it, since the target has to generate that too. Without the markers, the rendered text must be the
conversation, character for character.

`assistant_spans` renders each turn's beginnings to find this, whatever the template does. What stands around a turn is nearly always the
same, so a `Frame` learns it once, and finds the turns of a conversation from two renderings.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specdistill.errors import UserError

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
Spans = list[tuple[int, int]]
MARKER = "[[specdistill-marks-this-place]]"
SHOWN_CHARACTERS = 240
MASKABLE = "a template with {% generation %} tags, or data.loss_mask=all"
# Roles of the conversations that a template is tried with; not every template takes the second.
TRIALS = (("user", "assistant", "user", "assistant"), ("user", "assistant", "tool", "assistant", "tool", "assistant"))


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
    """template: more arguments of the chat template, as enable_thinking."""
    if tokenizer.chat_template is None:
        got = "conversations for a target whose tokenizer has no chat template"
        raise UserError(
            where, got=got, expected="text rows, or a chat_template.jinja beside the tokenizer, as of its instruct model"
        )
    try:
        options: Any = {"tokenize": False, "add_generation_prompt": generation_prompt, **template}
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except TemplateError as error:
        got = f"turns {shortened(', '.join(message['role'] for message in messages))}: {error}"
        raise UserError(where, got=got, expected="a conversation that the target's chat template takes") from error


def opened_turn(tokenizer: PreTrainedTokenizerBase, system: str | None, where: str = "data.source") -> tuple[str, str]:
    """What the template writes before a user's first words, and after them up to the assistant's.

    Raises UserError for a tokenizer without a template, and for a template that does not write the words as they are, once, after others.
    """
    expected = "prompts of your own, a file or a Hub id, or a target.model with a chat template that opens a user's turn"
    if tokenizer.chat_template is None:
        raise UserError(where, got="self for a target whose tokenizer has no chat template", expected=expected)
    told = [] if system is None else [{"role": "system", "content": system}]
    rendered = render(tokenizer, [*told, {"role": "user", "content": MARKER}], True, where)
    before, *after = rendered.split(MARKER)
    # Words bring their own space: as a token of its own before them it would be out of place.
    if len(after) != 1 or not before.strip():
        got = f"self with a chat template that does not open a user's turn in {shortened(rendered)!r}"
        raise UserError(where, got=got, expected=expected)
    return before.rstrip(" "), after[0]


def assistant_spans(render: Render, messages: Sequence[Message], where: str = "data.source") -> Spans:
    """Character spans [start, end) of the assistant's turns in `render(messages, False)`, their closing text included."""
    whole = render(messages, False)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    marked = _ends_marked(messages, turns)
    ends = _marker_positions(render(marked, False), whole)
    starts = [_prefix_start(render, messages[:turn], whole) for turn in turns]
    if None in starts:  # the template renders the last turns of a conversation in another way than those before them
        opened = [_marked(message, at_end=False) if index in turns else message for index, message in enumerate(messages)]
        starts = list(_marker_positions(render(opened, False), whole))
    if not len(starts) == len(ends) == len(turns):
        got = f"a chat template that changes the assistant's content in {shortened(whole)!r}"
        raise UserError(where, got=got, expected=MASKABLE)
    spans = []
    for turn, start, content_end in zip(turns, starts, ends, strict=True):
        closing = _closing(render, marked[: turn + 1])
        end = content_end + len(closing) if whole.startswith(closing, content_end) else content_end
        spans.append((min(start or 0, content_end), end))
    return spans


@dataclass(frozen=True)
class Frame:
    """What a template writes around the assistant's turns.

    before: for the role of the message before a turn, what stands between its content and the turn: as much as is always there, and all
    that the generation prompt has. closing: what follows the content of a turn.
    """

    before: Mapping[str, tuple[str, str]]
    closing: str

    def spans(self, render: Render, messages: Sequence[Message], whole: str) -> Spans | None:
        """As `assistant_spans` finds them, where `whole` is `render(messages, False)`; None where anything is not as it was learned."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if any(turn and messages[turn - 1]["role"] not in self.before for turn in turns):
            return None
        places = sorted({place for turn in turns for place in (turn - 1, turn) if place >= 0})
        positions = _marker_positions(render(_ends_marked(messages, places), False), whole)
        ends, spans = dict(zip(places, positions, strict=len(places) == len(positions))), []
        for turn in turns if len(ends) == len(places) else ():
            start = 0 if turn == 0 else self._start(messages[turn - 1], ends[turn - 1], whole)
            closed = _follows(self.closing, messages[turn], ends[turn], whole)
            if start is None or closed is None:
                return None
            spans.append((min(start, ends[turn]), closed + len(self.closing) if self.closing else ends[turn]))
        return spans if len(spans) == len(turns) else None

    def _start(self, message: Message, end: int, whole: str) -> int | None:
        """Where the turn after a message starts, whose content ends at `end`: after as much of the generation prompt as is there."""
        least, prompt = self.before[message["role"]]
        begin = _follows(least, message, end, whole)
        return None if begin is None else begin + _alike(prompt, whole[begin : begin + len(prompt)])


def _follows(text: str, message: Message, end: int, whole: str) -> int | None:
    """Where `text` stands after the content of a message that ends at `end`, or after the white space that ends the message."""
    space = message["content"][len(message["content"].rstrip()) :]
    return next((place for place in (end, end + len(space)) if whole.startswith(text, place)), None)


def trial(roles: Sequence[str]) -> list[Message]:
    """A conversation to try a template with."""
    return [{"role": role, "content": f"What {role} {number} says."} for number, role in enumerate(roles)]


def learn(render: Render, where: str = "data.source") -> Frame | None:
    """The frame of a template, learned from conversations made for it; None where they show no fixed one, so that each is to be searched.

    Raises UserError for a template whose assistant's turns cannot be found at all.
    """
    prompts: dict[str, set[str]] = {}
    least: dict[str, str] = {}
    closings: set[str] = set()
    tried: list[tuple[list[Message], str, Spans]] = []
    for roles in TRIALS:
        messages = trial(roles)
        try:
            whole = render(messages, False)
        except UserError:  # a role that the template does not take: a row that has it is refused
            continue
        try:
            spans = assistant_spans(render, messages, where)
        except UserError:
            if "tool" in roles:  # matters only to rows with tools
                continue
            raise
        marked = _ends_marked(messages, range(len(messages)))
        ends = _marker_positions(render(marked, False), whole)
        if len(ends) != len(messages):
            continue
        tried.append((messages, whole, spans))
        for turn in range(1, len(roles), 2):
            role, prompt = roles[turn - 1], render(marked[:turn], True).rpartition(MARKER)[2]
            there = prompt[: _alike(prompt, whole[ends[turn - 1] :])]
            least[role] = min(least.get(role, there), there, key=len)
            prompts.setdefault(role, set()).add(prompt)
            closings.add(_closing(render, marked[: turn + 1]))
    if len(closings) != 1 or any(len(several) > 1 for several in prompts.values()):
        return None
    frame = Frame({role: (least[role], min(found)) for role, found in prompts.items()}, min(closings))
    return frame if all(frame.spans(render, messages, whole) == spans for messages, whole, spans in tried) else None


def _closing(render: Render, marked: Sequence[Message]) -> str:
    """What follows the last message's content, but for white space."""
    return render(marked, False).rpartition(MARKER)[2].rstrip()


def _prefix_start(render: Render, before: Sequence[Message], whole: str) -> int | None:
    """Where the next turn starts: after `before` and as much of the generation prompt as `whole` has.

    Some templates put more into the prompt (an empty thought) than they render in a finished turn. None if `whole` does not start with
    `before`.
    """
    if not before:
        return 0
    start = _alike(render(before, True), whole)
    return start if start >= len(render(before, False).rstrip()) else None


def _marked(message: Message, at_end: bool) -> Message:
    """A message with the marker at its end or start, inside surrounding white space, which a template may strip."""
    content = message["content"]
    body = content.strip()
    position = len(content.rstrip()) if at_end else content.find(body)
    return {**message, "content": content[:position] + MARKER + content[position:]}


def _ends_marked(messages: Sequence[Message], places: Container[int]) -> list[Message]:
    return [_marked(message, at_end=True) if index in places else message for index, message in enumerate(messages)]


def _marker_positions(rendered: str, whole: str) -> list[int]:
    """Positions in `whole` of the markers in `rendered`; none if the two differ in anything else."""
    pieces = rendered.split(MARKER)
    if "".join(pieces) != whole:
        return []
    return list(accumulate(len(piece) for piece in pieces[:-1]))


def _alike(first: str, second: str) -> int:
    """How many characters two strings begin with alike."""
    if second.startswith(first):
        return len(first)
    differ = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


def first_difference(first: str, second: str) -> tuple[str, str]:
    """What two strings hold from where they differ, with a few characters before."""
    start = max(0, _alike(first, second) - 20)
    return tuple(repr(text[start : start + 60]) for text in (first, second))  # type: ignore[return-value]


def shortened(text: str) -> str:
    """The beginning and the end of a text too long for an error message."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
