"""Texts and conversations as token ids, with a loss mask: the assistant's tokens, or all of them.

A conversation is rendered by the target's own chat template. If the template marks the assistant's turns (`{% generation %}`), its marks
are the mask. Otherwise the assistant's spans are found by rendering. A turn starts where the conversation before it, with the generation
prompt, ends. Its content ends where a marker put there comes out. The closing text of the turn belongs to it, since the target has to
generate that too. Without the markers, the rendered text must be the conversation, character for character.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specdistill.errors import UserError

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKER = "[[specdistill-marks-this-place]]"
SHOWN_CHARACTERS = 240


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, 1 where it carries loss."""

    input_ids: list[int]
    loss_mask: list[int]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """A text as the target reads it, with its end-of-text token; every token carries loss."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return Encoded(ids, [1] * len(ids))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], loss_mask: str, where: str = "data.source"
) -> Encoded:
    """A conversation by the target's chat template; `loss_mask` is `assistant` or `all`.

    Raises UserError, with the rendered text, where the assistant's tokens come out as none or as all of them.
    """
    rendered = render(tokenizer, messages, where=where)
    encoding = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoding["input_ids"])
    if loss_mask == "all":
        return Encoded(ids, [1] * len(ids))
    if GENERATION_TAG.search(tokenizer.get_chat_template()):
        options: Any = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        marked: Any = tokenizer.apply_chat_template(list(messages), tokenize=True, **options)
        mask = list(marked["assistant_masks"])
    else:
        spans = assistant_spans(lambda turns, prompt: render(tokenizer, turns, prompt, where), messages, where)
        mask = [int(any(left < end and start < right for start, end in spans)) for left, right in encoding["offset_mapping"]]
    if sum(mask) in (0, len(mask)):
        got = f"{sum(mask)} of {len(mask)} tokens from the assistant in {shortened(rendered)!r}"
        expected = "a conversation with turns of the assistant and of others (or data.loss_mask=all)"
        raise UserError(where, got=got, expected=expected)
    return Encoded(ids, mask)


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
        raise UserError(where, got=got, expected="text rows, or a target.model with a chat template")
    try:
        options: Any = {"tokenize": False, "add_generation_prompt": generation_prompt, **template}
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except TemplateError as error:
        got = f"turns {', '.join(message['role'] for message in messages)}: {error}"
        raise UserError(where, got=got, expected="a conversation that the target's chat template takes") from error


def assistant_spans(render: Render, messages: Sequence[Message], where: str = "data.source") -> list[tuple[int, int]]:
    """Character spans [start, end) of the assistant's turns in `render(messages, False)`, their closing text included."""
    whole = render(messages, False)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    marked = [_marked(message, at_end=True) for message in messages]
    ends = _marker_positions(render(marked, False), whole)
    starts = [_prefix_start(render, messages[:turn], whole) for turn in turns]
    if None in starts:  # the template renders the last turns of a conversation in another way than those before them
        opened = [_marked(message, at_end=False) for message in messages]
        starts = list(_marker_positions(render(opened, False), whole))
    if not len(starts) == len(ends) == len(turns):
        got = f"a chat template that changes the assistant's content in {shortened(whole)!r}"
        raise UserError(where, got=got, expected="a template with {% generation %} tags, or data.loss_mask=all")
    spans = []
    for turn, start, content_end in zip(turns, starts, ends, strict=True):
        closing = render(marked[: turn + 1], False).rpartition(MARKER)[2].rstrip()
        end = content_end + len(closing) if whole.startswith(closing, content_end) else content_end
        spans.append((min(start or 0, content_end), end))
    return spans


def _prefix_start(render: Render, before: Sequence[Message], whole: str) -> int | None:
    """Where the next turn starts: after `before` and as much of the generation prompt as `whole` has.

    Some templates put more into the prompt (an empty thought) than they render in a finished turn. None if `whole` does not start with
    `before`.
    """
    if not before:
        return 0
    prompted = render(before, True)
    start = next(
        (index for index, (a, b) in enumerate(zip(prompted, whole, strict=False)) if a != b), min(len(prompted), len(whole))
    )
    return start if start >= len(render(before, False).rstrip()) else None


def _marked(message: Message, at_end: bool) -> Message:
    """An assistant's message with the marker at its end or start, inside surrounding white space, which a template may strip."""
    if message["role"] != "assistant":
        return message
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


def shortened(text: str) -> str:
    """The beginning and the end of a text too long for an error message."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
