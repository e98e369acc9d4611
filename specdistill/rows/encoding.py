"""Rows as documents: token ids with a loss mask, of the assistant's tokens or of all of them.

An `Encoder` takes rows by the batch, a text or a conversation each, and is a function of each row alone: `datasets` can map them
through it in any number of processes. If the chat template marks the assistant's turns (`{% generation %}`), its marks are the mask;
otherwise the turns are found in what it renders (specdistill.rows.chat).

A conversation longer than a row is cut at its turns. As many whole exchanges, each a user's turn and what follows it, as fit into a row
are a document, and the rest is cut alike: each document begins with the system message and a user's turn, and the template renders it as
a conversation of its own. Of an exchange that no row holds the turns up to the assistant's last one that fits are kept.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import Any

import numpy as np
from datasets import List, Value
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specdistill.errors import UserError
from specdistill.rows.chat import MASKABLE, Message, assistant_spans, render, shortened

# row: the number of the source's row that a document comes from. An exchange that is filtered in part, because no row holds it, is a
# document without tokens, of the length that it would have.
DOCUMENT_COLUMNS = {
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
    "length": Value("int32"),
    "source": Value("int32"),
}
ENCODED_COLUMNS = {**DOCUMENT_COLUMNS, "is_text": Value("bool"), "row": Value("int64")}
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
Ids = NDArray[np.int32]
Mask = NDArray[np.int8]


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, 1 where it carries loss. length: of the ids, or of what is filtered."""

    input_ids: Ids
    loss_mask: Mask
    length: int


@dataclass(frozen=True)
class Encoder:
    """Documents of rows {text, messages} as columns. loss_mask: `assistant` or `all`. key, source: name and number of the source, for error
    messages and as a column.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_mask: str
    max_length: int
    key: str = "data.source"
    source: int = 0

    def __call__(self, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        """The documents of rows, in their order; `numbers` are the rows' own.

        Raises UserError naming the row that the chat template does not take, or in which it marks none or all of the tokens.
        """
        texts = [(number, text) for number, text in zip(numbers, rows["text"], strict=True) if text is not None]
        chats = [(number, turns) for number, turns in zip(numbers, rows["messages"], strict=True) if turns is not None]
        documents = [(number, True, encoded) for number, encoded in self.texts(texts)]
        for (number, turns), encoded in zip(chats, self.chats(chats), strict=True):
            parts = [encoded] if encoded.length <= self.max_length else self.parts(number, turns)
            documents += [(number, False, part) for part in parts]
        columns: dict[str, list[Any]] = {name: [] for name in ENCODED_COLUMNS}
        for number, is_text, encoded in sorted(documents, key=itemgetter(0)):
            for name, value in {**vars(encoded), "source": self.source, "is_text": is_text, "row": number}.items():
                columns[name].append(value)
        return columns

    def texts(self, texts: Sequence[tuple[int, str]]) -> list[tuple[int, Encoded]]:
        """Texts as the target reads them, each with its end-of-text token; every token carries loss."""
        end = self.tokenizer.eos_token_id
        ids = self.tokenizer([text for _, text in texts], verbose=False)["input_ids"] if texts else []
        ended = (those if end is None or those[-1:] == [end] else [*those, end] for those in ids)
        return [(number, _all_with_loss(those)) for (number, _), those in zip(texts, ended, strict=True)]

    def chats(self, chats: Sequence[tuple[int | None, Sequence[Message]]]) -> list[Encoded]:
        """Conversations, each with the number of its row if it has one, by the chat template; however long they are."""
        if not chats:
            return []
        rendered = [render(self.tokenizer, turns, where=self._where(number)) for number, turns in chats]
        if self.loss_mask == "all":
            return [_all_with_loss(ids) for ids in self._tokens(rendered)["input_ids"]]
        is_tagged = GENERATION_TAG.search(self.tokenizer.get_chat_template())
        encoded = self._by_tags(chats) if is_tagged else self._by_spans(chats, rendered)
        for (number, turns), whole, made in zip(chats, rendered, encoded, strict=True):
            _check(made, turns, whole, self._where(number))
        return encoded

    def parts(self, number: int, messages: Sequence[Message]) -> list[Encoded]:
        """A conversation longer than a row cut at its turns, and what is filtered, without tokens."""

        def length(turns: Sequence[Message]) -> int:
            return len(self._tokens([render(self.tokenizer, turns, where=self._where(number))])["input_ids"][0])

        parts, filtered = cut_at_turns(messages, length, self.max_length)
        empty = np.empty(0, np.int32), np.empty(0, np.int8)
        return self.chats([(number, part) for part in parts]) + [Encoded(*empty, tokens) for tokens in filtered]

    def prove(self) -> None:
        """Try the template on a conversation made for it. Raises UserError where not the assistant's turns, and they alone, carry loss."""
        if self.loss_mask == "all":
            return
        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": f"What {role} {number} says."} for number, role in enumerate(roles)]
        try:
            whole = render(self.tokenizer, messages, where=self.key)
        except UserError:  # a template of single turns, or of other roles: the rows themselves will tell
            return
        (encoded,) = self.chats([(None, messages)])
        offsets = self._tokens([whole], return_offsets_mapping=True)["offset_mapping"][0]
        marked = "".join(whole[left:right] for (left, right), flag in zip(offsets, encoded.loss_mask, strict=True) if flag)
        for message in messages:
            is_marked = "".join(message["content"].split()) in "".join(marked.split())
            if is_marked != (message["role"] == "assistant"):
                got = f"a chat template that marks {shortened(marked)!r} as the assistant's in {shortened(whole)!r}"
                raise UserError(self.key, got=got, expected=MASKABLE)

    def _where(self, number: int | None) -> str:
        return self.key if number is None else f"{self.key} row {number}"

    def _tokens(self, rendered: Sequence[str], **options: bool) -> Any:
        options = {**options, "return_attention_mask": False, "return_token_type_ids": False}
        return self.tokenizer(list(rendered), add_special_tokens=False, verbose=False, **options)

    def _by_tags(self, chats: Sequence[tuple[int | None, Sequence[Message]]]) -> list[Encoded]:
        options: Any = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        made: Any = self.tokenizer.apply_chat_template([list(turns) for _, turns in chats], tokenize=True, **options)
        return [_encoded(ids, mask) for ids, mask in zip(made["input_ids"], made["assistant_masks"], strict=True)]

    def _by_spans(self, chats: Sequence[tuple[int | None, Sequence[Message]]], rendered: Sequence[str]) -> list[Encoded]:
        made = self._tokens(rendered, return_offsets_mapping=True)
        each = zip(chats, made["input_ids"], made["offset_mapping"], strict=True)
        return [
            _encoded(ids, mask_of(assistant_spans(self.tokenizer, turns, self._where(number)), offsets))
            for (number, turns), ids, offsets in each
        ]


def mask_of(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> Mask:
    """1 for the tokens, with characters [left, right) each in order, of which a character is in a span."""
    mask = np.zeros(len(offsets), np.int8)
    for start, end in spans:
        mask[bisect_right(offsets, start, key=itemgetter(1)) : bisect_left(offsets, end, key=itemgetter(0))] = 1
    return mask


def cut_at_turns(
    messages: Sequence[Message], length: Callable[[Sequence[Message]], int], max_length: int
) -> tuple[list[list[Message]], list[int]]:
    """Conversations of at most `max_length` tokens, and the lengths of the exchanges of which something is filtered.

    What follows the assistant's last turn is filtered, too, and not counted: nothing is learned there.
    """
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    rest = list(messages[len(system) : last + 1])

    def fitting(ends: Sequence[int]) -> int:
        """The largest of these numbers of messages with which the conversation fits; 0 for none."""
        count = bisect_right(ends, max_length, key=lambda end: length([*system, *rest[:end]]))
        return ends[count - 1] if count else 0

    parts, filtered = [], []
    while rest:
        roles = [message["role"] for message in rest]
        exchanges = [place for place in range(1, len(rest)) if roles[place] == "user" != roles[place - 1]] + [len(rest)]
        kept = after = fitting(exchanges)
        if not kept:
            after = exchanges[0]
            filtered.append(length([*system, *rest[:after]]))
            kept = fitting([place + 1 for place in range(after) if roles[place] == "assistant"])
        if kept:
            parts.append([*system, *rest[:kept]])
        rest = rest[after:]
    return parts, filtered


def _check(encoded: Encoded, messages: Sequence[Message], whole: str, where: str) -> None:
    """Refuse a conversation in which none or all of the tokens carry loss."""
    if not any(message["role"] == "assistant" for message in messages):
        expected = "an answer, or data.regenerate.num_tokens above 0, so that the target gives one (or data.loss_mask=all)"
        raise UserError(where, got=f"a prompt without an answer, {shortened(whole)!r}", expected=expected)
    num_marked, num_tokens = int(encoded.loss_mask.sum()), len(encoded.loss_mask)
    if num_marked in (0, num_tokens):
        got = f"{num_marked} of {num_tokens} tokens from the assistant in {shortened(whole)!r}"
        expected = "a conversation with turns of the assistant and of others (or data.loss_mask=all)"
        raise UserError(where, got=got, expected=expected)


def _encoded(ids: Sequence[int], mask: Sequence[int] | Mask) -> Encoded:
    return Encoded(np.array(ids, np.int32), np.asarray(mask, np.int8), len(ids))


def _all_with_loss(ids: Sequence[int]) -> Encoded:
    return _encoded(ids, np.ones(len(ids), np.int8))
