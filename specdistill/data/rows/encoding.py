"""Turn rows into documents: token ids with a loss mask, on the assistant's tokens or on all.

An `Encoder` depends on one row alone: a text, a conversation or token ids. `datasets` can therefore
map rows through it in any number of processes. The assistant's turns are found in the text that the
chat template renders (specdistill.data.rows.chat), which may give a conversation several documents.

A conversation longer than a row is cut at its turns. An exchange is a user's turn and what follows
it. As many whole exchanges as fit into a row make a document, and the rest is cut in the same way.
Each document begins with the system message and a user's turn, and the template renders it as a
conversation of its own. Of an exchange that no row can hold, the turns up to the last assistant's
turn that fits are kept.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import TypedDict

import numpy as np
from datasets import List, Value
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from specdistill.common.errors import UserError
from specdistill.data.rows.chat import Spans, answer_documents
from specdistill.evaluation.suites.conversations import (
    ALTERED,
    UNLEARNED,
    Message,
    Tools,
    is_learned,
    render_chat,
    shorten_text,
)

# The columns of a document. If no row can hold an exchange, a part of the exchange is filtered. An
# additional document without tokens then records it; `length` is the length of the exchange.
DOCUMENT_COLUMNS = {
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
    "length": Value("int32"),
    "source": Value("int32"),
}
# `row` and `hash` are the number and the `hash_row` of the source's row that a document comes from.
ENCODED_COLUMNS = {
    **DOCUMENT_COLUMNS,
    "is_text": Value("bool"),
    "row": Value("int64"),
    "hash": Value("int64"),
}
HASH_RANGE = 2**63  # Hashes of rows are below this, so that a column of int64 holds them.
Mask = NDArray[np.int8]


class Row(TypedDict, total=False):
    """A row of a source in one of the common forms; keys of the other forms are None or absent.

    Attributes:
        place: where the row stands in its source.
    """

    text: str | None
    messages: list[Message] | None
    tools: Tools
    input_ids: list[int] | None
    loss_mask: list[int]
    place: str


class Document(TypedDict, total=False):
    """The tokens of a document, and the row that they come from (see ENCODED_COLUMNS).

    Attributes:
        input_ids: [L] int32.
        loss_mask: [L] int8, 1 where a token carries loss.
        length: L. For a document without tokens, the tokens of the exchange that was filtered.
        source: number of the source.
        is_text: whether the row is no conversation.
        row: number of the row in its source.
        hash: `hash_row` of the row.
    """

    input_ids: NDArray[np.int32]
    loss_mask: Mask
    length: int
    source: int
    is_text: bool
    row: int
    hash: int


@dataclass(frozen=True)
class Encoder:
    """Converts rows in the common forms of `specdistill.data.produce.sources` to token ids.

    Attributes:
        tokenizer: the target's tokenizer.
        loss_mask: `assistant` or `all`, the tokens that carry loss.
        max_length: tokens of a packed row.
        key: name of the source in error messages.
        source: number of the source, which becomes a column.
        seed: seed of the rows' hashes.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_mask: str
    max_length: int
    key: str = "data.source"
    source: int = 0
    seed: int = 0

    def __call__(self, row: Row, number: int) -> list[Document]:
        """Tokenize a row, and return its documents with ENCODED_COLUMNS.

        Args:
            row: the row, in one of the common forms.
            number: its number in the source, from 0.

        Returns:
            The documents of the row.

        Raises:
            UserError: naming the row, for a conversation that the chat template rejects; with loss
                on the assistant's turns also if none or all of a document's tokens carry loss.
        """
        # A conversation goes through the chat template. Token ids are used as they are. A text is
        # tokenized, and the target's end-of-text token is appended if it is missing.
        messages = row["messages"]
        ids = row["input_ids"]
        if messages is not None:
            where = f"{self.key} {row.get('place') or f'row {number + 1}'}"
            documents = self.encode_conversation(messages, row["tools"], where)
        elif ids is not None and self.loss_mask == "all":
            documents = [_build_encoding_with_loss(ids)]
        elif ids is not None:
            documents = [_build_encoding(ids, row["loss_mask"])]
        else:
            ids = list(self.tokenizer(row["text"], verbose=False)["input_ids"])
            end_id = self.tokenizer.eos_token_id
            if end_id is not None and ids[-1:] != [end_id]:
                ids.append(end_id)
            documents = [_build_encoding_with_loss(ids)]

        # The hash decides later in which split the row's documents are.
        hash_of_row = hash_row(row, self.seed)
        return [
            {
                **document,
                "source": self.source,
                "is_text": messages is None,
                "row": number,
                "hash": hash_of_row,
            }
            for document in documents
        ]

    def encode_conversation(
        self, messages: Sequence[Message], tools: Tools, where: str
    ) -> list[Document]:
        """Tokenize a conversation, and cut it between its turns if it is longer than a row.

        Args:
            messages: the conversation.
            tools: the tools that the conversation may call.
            where: names the row in error messages.

        Returns:
            The documents, each with token ids and a loss mask. Each exchange (a user's turn and the
            messages up to the next one) that is too long for a row adds a document without tokens,
            whose `length` is the length of the exchange. It is there to be counted.
        """
        # A conversation of at most `max_length` tokens, the length of a row, is not cut.
        whole = self.encode_whole_conversation(messages, tools, where)
        if max(document["length"] for document in whole) <= self.max_length:
            return whole

        def count_tokens(turns: Sequence[Message]) -> int:
            """Return how many tokens some messages have, rendered by the chat template."""
            rendered = render_chat(self.tokenizer, turns, where=where, tools=tools)
            return len(self._tokenize([rendered])["input_ids"][0])

        # Cut the conversation into parts that fit, and encode each part as a conversation of its
        # own. With loss on the assistant's turns, a part without a turn to learn is left out.
        parts, filtered_lengths = cut_at_turns(messages, count_tokens, self.max_length)
        if self.loss_mask == "assistant":
            parts = [part for part in parts if any(map(is_learned, part))]
        documents = []
        for part in parts:
            documents.extend(self.encode_whole_conversation(part, tools, where))
        return documents + [
            {**_build_encoding([], []), "length": length} for length in filtered_lengths
        ]

    def encode_whole_conversation(
        self, messages: Sequence[Message], tools: Tools, where: str
    ) -> list[Document]:
        """Render a conversation with the chat template and tokenize it, without cutting it.

        Args:
            messages: the conversation.
            tools: the tools that the conversation may call.
            where: names the row in error messages.

        Returns:
            The documents, each with token ids and a loss mask. There are several if the template
            renders earlier turns differently once other turns follow them.
        """
        # Each document is a text, with the character spans of the turns to learn.
        documents = answer_documents(
            self.tokenizer, messages, tools, where, loss_mask=self.loss_mask
        )

        # Tokenize the texts. The characters of each token are only needed to find the tokens of
        # turns; with loss on all tokens they are not.
        by_turns = self.loss_mask == "assistant"
        encodings = self._tokenize(
            [rendered for rendered, _ in documents], return_offsets_mapping=by_turns
        )
        if not by_turns:
            return [_build_encoding_with_loss(ids) for ids in encodings["input_ids"]]

        # Only the tokens of the assistant's turns carry loss.
        return [
            _check_loss(_build_encoding(ids, build_loss_mask(spans, offsets)), text, where)
            for (text, spans), ids, offsets in zip(
                documents, encodings["input_ids"], encodings["offset_mapping"], strict=True
            )
        ]

    def _tokenize(self, rendered: Sequence[str], **options: bool) -> BatchEncoding:
        """Tokenize texts that the chat template rendered.

        The template has already written the special tokens, so the tokenizer adds none.

        Args:
            rendered: the texts.
            options: additional arguments of the tokenizer.
        """
        options = {**options, "return_attention_mask": False, "return_token_type_ids": False}
        encoding: BatchEncoding = self.tokenizer(
            list(rendered), add_special_tokens=False, verbose=False, **options
        )
        return encoding


def hash_row(row: Row, seed: int) -> int:
    """Hash the content of a row, to decide whether the row is held out for validation.

    A text is hashed as a whole. Of a conversation the assistant's turns are left out, so that rows
    with other answers to the same questions have equal hashes and come into the same split.

    Args:
        row: the row.
        seed: part of the hash, so that another seed holds out other rows.

    Returns:
        An integer from 0 to HASH_RANGE - 1.
    """
    if row["text"] is not None:
        content = ["text", row["text"]]
    else:
        content = []
        for turn in row["messages"] or ():
            if turn["role"] != "assistant":
                content.extend((turn["role"], turn["content"]))
    digest = hashlib.blake2b("\0".join([str(seed), *content]).encode(), digest_size=8)
    return int.from_bytes(digest.digest()) % HASH_RANGE


def build_loss_mask(spans: Spans, offsets: Sequence[tuple[int, int]]) -> Mask:
    """Return the loss mask of a text: 1 for tokens with at least one character inside a span.

    Args:
        spans: character spans [start, end) of the text that carry loss.
        offsets: the characters [left, right) of each token, in order, as the tokenizer returns
            them.

    Returns:
        The mask, with a 1 or 0 for each token.
    """
    mask = np.zeros(len(offsets), np.int8)
    for start, end in spans:
        # Mark from the first token that ends after the span's start to the last token that starts
        # before the span's end. The offsets are sorted, so bisection finds both tokens.
        first_token = bisect_right(offsets, start, key=itemgetter(1))
        after_token = bisect_left(offsets, end, key=itemgetter(0))
        mask[first_token:after_token] = 1
    return mask


def cut_at_turns(
    messages: Sequence[Message], count_tokens: Callable[[Sequence[Message]], int], max_length: int
) -> tuple[list[list[Message]], list[int]]:
    """Cut a conversation between its messages into shorter conversations of limited length.

    An exchange is a user's turn with the messages that follow it, up to the next user's turn. Each
    shorter conversation has the system messages and as many whole exchanges as fit. Of an exchange
    that is too long by itself, only the beginning is kept.

    Args:
        messages: the conversation.
        count_tokens: returns how many tokens a conversation has.
        max_length: the most tokens of a shorter conversation.

    Returns:
        The shorter conversations, and the length in tokens of each exchange that was too long.
    """
    # `rest` is the part of the conversation that is still to be cut. Messages after the assistant's
    # last turn are dropped, because nothing is learned from them.
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    last_answer = max(
        (index for index, message in enumerate(messages) if message["role"] == "assistant"),
        default=len(messages),
    )
    rest = list(messages[len(system) : last_answer + 1])

    def find_largest_fit(ends: Sequence[int]) -> int:
        """Return how many messages of `rest` to keep: the largest of `ends` that fits `max_length`.

        Each number in `ends`, in ascending order, stands for the system messages followed by that
        many messages of `rest`. The result is 0 if not even the smallest number fits.
        """
        # Longer parts have more tokens, so bisection needs to count only few of them.
        num_fitting = bisect_right(
            ends, max_length, key=lambda end: count_tokens([*system, *rest[:end]])
        )
        return ends[num_fitting - 1] if num_fitting else 0

    parts = []
    filtered_lengths = []
    while rest:
        # Keep as many whole exchanges as fit. An exchange ends where a user's turn follows a
        # message of another role.
        roles = [message["role"] for message in rest]
        exchange_ends = [
            place
            for place in range(1, len(rest))
            if roles[place] == "user" and roles[place - 1] != "user"
        ]
        exchange_ends.append(len(rest))
        num_kept = find_largest_fit(exchange_ends)
        num_done = num_kept

        # If not even the first exchange fits, keep its beginning up to a turn of the assistant.
        if not num_kept:
            num_done = exchange_ends[0]
            filtered_lengths.append(count_tokens([*system, *rest[:num_done]]))
            turn_ends = [place + 1 for place in range(num_done) if roles[place] == "assistant"]
            num_kept = find_largest_fit(turn_ends)
        if num_kept:
            parts.append([*system, *rest[:num_kept]])
        rest = rest[num_done:]
    return parts, filtered_lengths


def _check_loss(encoded: Document, text: str, where: str) -> Document:
    """Return a document unchanged, after checking that some but not all of its tokens carry loss.

    A document without loss teaches nothing. Loss on every token means that the assistant's turns
    could not be told apart from the rest of the text.

    Args:
        encoded: the document.
        text: the rendered conversation, for the error.
        where: names the row in the error.

    Raises:
        UserError: if none or all of the tokens carry loss.
    """
    # Rows that cannot be used are counted by reason (`kind`). For loss on all tokens the reason is
    # ALTERED, "altered by the chat template".
    num_marked = int(encoded["loss_mask"].sum())
    num_tokens = encoded["length"]
    if num_marked in (0, num_tokens):
        raise UserError(
            where,
            got=f"a conversation with loss on {'none' if num_marked == 0 else 'all'} of its"
            f" {num_tokens} tokens, {shorten_text(text)!r}",
            expected="loss on some of the tokens, those of the assistant's turns; check that"
            f" {'these turns are not empty' if num_marked == 0 else 'there are other turns, too'}"
            " (or type data.loss_mask=all for loss on all tokens)",
            kind=UNLEARNED if num_marked == 0 else ALTERED,
        )
    return encoded


def _build_encoding(ids: Sequence[int], mask: Sequence[int] | Mask) -> Document:
    """Return a document with these token ids and this loss mask, as numpy arrays."""
    return {
        "input_ids": np.array(ids, np.int32),
        "loss_mask": np.asarray(mask, np.int8),
        "length": len(ids),
    }


def _build_encoding_with_loss(ids: Sequence[int]) -> Document:
    """Return a document whose tokens all carry loss."""
    return _build_encoding(ids, np.ones(len(ids), np.int8))
