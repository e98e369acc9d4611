"""Rows as documents: token ids with a loss mask, of the assistant's tokens or of all of them.

An `Encoder` is a function of a row alone, a text, a conversation or token ids: `datasets` can map rows through it in any number of
processes. The assistant's turns are found in what the chat template renders (specdistill.rows.chat),
which may give a conversation several documents.

A conversation longer than a row is cut at its turns. As many whole exchanges, each a user's turn and what follows it, as fit into a row
are a document, and the rest is cut alike: each document begins with the system message and a user's turn, and the template renders it as
a conversation of its own. Of an exchange that no row holds the turns up to the assistant's last one that fits are kept.
"""

import hashlib
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
from specdistill.rows.chat import Spans, turn_documents
from specdistill.suites.conversations import (
    Message,
    Tools,
    is_learned,
    is_unanswered,
    render,
    shortened,
)

# row, hash: number and `row_hash` of the source's row that a document comes from. An exchange that is filtered in part, because no row
# holds it, is a document without tokens, of the length that it would have.
DOCUMENT_COLUMNS = {
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
    "length": Value("int32"),
    "source": Value("int32"),
}
ENCODED_COLUMNS = {
    **DOCUMENT_COLUMNS,
    "is_text": Value("bool"),
    "row": Value("int64"),
    "hash": Value("int64"),
}
HASH_RANGE = 2**63  # of hashes of rows: what a column of signed integers holds
Mask = NDArray[np.int8]
# input_ids [L] int32; loss_mask [L] int8, 1 where a token carries loss; length: L, or of what is filtered
Document = dict[str, Any]


@dataclass(frozen=True)
class Encoder:
    """Documents of rows with the columns of `sources`. loss_mask: `assistant` or `all`. key, source: name and number of the
    source, for error messages and as a column. seed: of the rows' hashes.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_mask: str
    max_length: int
    key: str = "data.source"
    source: int = 0
    seed: int = 0

    def __call__(self, row: Mapping[str, Any], number: int) -> list[Document]:
        """The documents of a row, with ENCODED_COLUMNS.

        Raises UserError naming the row that the chat template does not take, or in which it marks none or all of the tokens.
        """
        messages, ids = row["messages"], row["input_ids"]
        if messages is not None:
            documents = self.conversation(messages, row["tools"], f"{self.key} row {number}")
        elif ids is not None:
            documents = [
                _all_with_loss(ids) if self.loss_mask == "all" else _encoded(ids, row["loss_mask"])
            ]
        else:  # as the target reads a text, with its end-of-text token
            end, ids = (
                self.tokenizer.eos_token_id,
                self.tokenizer(row["text"], verbose=False)["input_ids"],
            )
            documents = [_all_with_loss(ids if end is None or ids[-1:] == [end] else [*ids, end])]
        of_row = {
            "source": self.source,
            "is_text": messages is None,
            "row": number,
            "hash": row_hash(row, self.seed),
        }
        return [{**document, **of_row} for document in documents]

    def conversation(self, messages: Sequence[Message], tools: Tools, where: str) -> list[Document]:
        """The documents of a conversation. One longer than a row is cut at its turns; what is filtered of it comes without tokens."""
        made = self.chat(messages, tools, where)
        if max(it["length"] for it in made) <= self.max_length:
            return made

        def length(turns: Sequence[Message]) -> int:
            return len(
                self._tokens([render(self.tokenizer, turns, False, where, tools)])["input_ids"][0]
            )

        parts, filtered = cut_at_turns(messages, length, self.max_length)
        if self.loss_mask == "assistant":
            parts = [part for part in parts if any(map(is_learned, part))]
        kept = [encoded for part in parts for encoded in self.chat(part, tools, where)]
        return kept + [{**_encoded([], []), "length": tokens} for tokens in filtered]

    def chat(self, messages: Sequence[Message], tools: Tools, where: str) -> list[Document]:
        """A conversation by the chat template, however long it is."""
        by_turns = self.loss_mask == "assistant"
        if (by_turns and all(message["role"] != "assistant" for message in messages)) or any(
            map(is_unanswered, messages)
        ):
            expected = "an answer, or data.regenerate.num_tokens above 0, so that the target gives one (or data.loss_mask=all)"
            raise UserError(
                where,
                got=f"a prompt without an answer, {shortened(messages[-1]['content'])!r}",
                expected=expected,
            )
        documents = turn_documents(self.tokenizer, messages, tools, where, checks_turns=by_turns)
        if by_turns:
            documents = [it for it in documents if it[1]] or documents[-1:]
        made = self._tokens(
            [rendered for rendered, _ in documents], return_offsets_mapping=by_turns
        )
        if not by_turns:
            return [_all_with_loss(ids) for ids in made["input_ids"]]
        each = zip(documents, made["input_ids"], made["offset_mapping"], strict=True)
        return [
            _checked(_encoded(ids, mask_of(spans, offsets)), text, where)
            for (text, spans), ids, offsets in each
        ]

    def _tokens(self, rendered: Sequence[str], **options: bool) -> Any:
        options = {**options, "return_attention_mask": False, "return_token_type_ids": False}
        return self.tokenizer(list(rendered), add_special_tokens=False, verbose=False, **options)


def row_hash(row: Mapping[str, Any], seed: int) -> int:
    """0 … HASH_RANGE - 1, of a text, or of a conversation without the assistant's turns: equal for all answers to the same questions."""
    if row["text"] is not None:
        content = ["text", row["text"]]
    else:
        content = [
            part
            for turn in row["messages"]
            if turn["role"] != "assistant"
            for part in (turn["role"], turn["content"])
        ]
    digest = hashlib.blake2b("\0".join([str(seed), *content]).encode(), digest_size=8)
    return int.from_bytes(digest.digest()) % HASH_RANGE


def mask_of(spans: Spans, offsets: Sequence[tuple[int, int]]) -> Mask:
    """1 for the tokens, with characters [left, right) each in order, of which a character is in a span."""
    mask = np.zeros(len(offsets), np.int8)
    for start, end in spans:
        mask[
            bisect_right(offsets, start, key=itemgetter(1)) : bisect_left(
                offsets, end, key=itemgetter(0)
            )
        ] = 1
    return mask


def cut_at_turns(
    messages: Sequence[Message], length: Callable[[Sequence[Message]], int], max_length: int
) -> tuple[list[list[Message]], list[int]]:
    """Conversations of at most `max_length` tokens, and the lengths of the exchanges of which something is filtered.

    What follows the assistant's last turn is filtered, too, and not counted: nothing is learned there.
    """
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    last = max(
        (index for index, message in enumerate(messages) if message["role"] == "assistant"),
        default=len(messages),
    )
    rest = list(messages[len(system) : last + 1])

    def fitting(ends: Sequence[int]) -> int:
        """The largest of these numbers of messages with which the conversation fits; 0 for none."""
        count = bisect_right(ends, max_length, key=lambda end: length([*system, *rest[:end]]))
        return ends[count - 1] if count else 0

    parts, filtered = [], []
    while rest:
        roles = [message["role"] for message in rest]
        exchanges = [
            place for place in range(1, len(rest)) if roles[place] == "user" != roles[place - 1]
        ] + [len(rest)]
        kept = after = fitting(exchanges)
        if not kept:
            after = exchanges[0]
            filtered.append(length([*system, *rest[:after]]))
            kept = fitting([place + 1 for place in range(after) if roles[place] == "assistant"])
        if kept:
            parts.append([*system, *rest[:kept]])
        rest = rest[after:]
    return parts, filtered


def _checked(encoded: Document, whole: str, where: str) -> Document:
    """Raises UserError for a document in which none or all of the tokens carry loss."""
    num_marked, num_tokens = int(encoded["loss_mask"].sum()), encoded["length"]
    if num_marked in (0, num_tokens):
        got = f"{num_marked} of {num_tokens} tokens from the assistant in {shortened(whole)!r}"
        expected = "a conversation with turns of the assistant that are learned, and of others (or data.loss_mask=all)"
        raise UserError(where, got=got, expected=expected)
    return encoded


def _encoded(ids: Sequence[int], mask: Sequence[int] | Mask) -> Document:
    return {
        "input_ids": np.array(ids, np.int32),
        "loss_mask": np.asarray(mask, np.int8),
        "length": len(ids),
    }


def _all_with_loss(ids: Sequence[int]) -> Document:
    return _encoded(ids, np.ones(len(ids), np.int8))
