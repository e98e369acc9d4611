"""How training data looks to a reader: documents with their loss tokens marked, and what each half and each source holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdistill.data.cache import array


class Half(NamedTuple):
    """What training or validation holds. filled: the share of its rows that is not padding."""

    rows: int
    documents: int
    tokens: int
    loss_tokens: int
    filled: float


@dataclass(frozen=True)
class Lengths:
    """Arrays [D] over documents, in tokens. source: a document's place among the sources."""

    tokens: np.ndarray
    loss_tokens: np.ndarray
    source: np.ndarray


class Part(NamedTuple):
    """What one source gave."""

    source: str
    documents: int
    tokens: int
    loss_tokens: int


@dataclass(frozen=True)
class Shown:
    """A document as text, in pieces that carry loss and pieces that do not. tokens, loss_tokens: of the whole document."""

    source: str
    tokens: int
    loss_tokens: int
    pieces: list[tuple[str, bool]]

    def coloured(self) -> Text:
        """Loss tokens are green, the others dim."""
        return Text.assemble(*((text, "bold green" if has_loss else "dim") for text, has_loss in self.pieces))


def half(num_rows: int, of: Lengths, max_length: int) -> Half:
    """num_rows: of `max_length` tokens, that hold the documents."""
    tokens = int(of.tokens.sum())
    return Half(num_rows, len(of.tokens), tokens, int(of.loss_tokens.sum()), tokens / (num_rows * max_length))


def lengths(documents: Dataset) -> Lengths:
    """Of documents that are not packed yet."""
    columns = documents.with_format("numpy")
    loss_tokens = [int(mask.sum()) for batch in columns.iter(batch_size=1024) for mask in batch["loss_mask"]]
    return Lengths(array(documents, "length"), np.asarray(loss_tokens), array(documents, "source"))


def mixture(of: Lengths, names: Sequence[str]) -> list[Part]:
    """What each source gave, those that gave nothing left out."""
    parts = []
    for number in np.unique(of.source):
        own = of.source == number
        parts.append(Part(names[number], int(own.sum()), int(of.tokens[own].sum()), int(of.loss_tokens[own].sum())))
    return parts


def shown(
    documents: Dataset, names: Sequence[str], count: int, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Shown]:
    """`count` of the documents, the first `max_length` tokens of each: of every source in turn, evenly over what it has."""
    sources = array(documents, "source")
    own = [np.flatnonzero(sources == source) for source in np.unique(sources)]
    evenly = [places[np.linspace(0, len(places) - 1, min(count, len(places))).astype(int)] for places in own]
    chosen = [int(place) for turn in zip_longest(*evenly) for place in turn if place is not None][:count]
    return [_shown(documents[place], names, tokenizer, max_length) for place in chosen]


def _shown(document: Mapping[str, Any], names: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Shown:
    ids, mask = document["input_ids"], document["loss_mask"]
    pieces = [
        (str(tokenizer.decode([token for token, _ in group])), has_loss)
        for has_loss, group in groupby(zip(ids[:max_length], mask, strict=False), key=lambda pair: bool(pair[1]))
    ]
    cut = [(f" … and {len(ids) - max_length:,} tokens", False)] if len(ids) > max_length else []
    return Shown(names[document["source"]], len(ids), sum(mask), pieces + cut)


def table_of_halves(halves: Mapping[str, Half]) -> Table:
    made = Table("", "rows", "documents", "tokens", "loss tokens", "filled")
    for name, it in halves.items():
        made.add_row(name, *(f"{number:,}" for number in it[:-1]), f"{it.filled:.1%}")
    return made


def table_of_sources(parts: Sequence[Part]) -> Table:
    made = Table("of training", "documents", "tokens", "share", "loss tokens", "share")
    tokens, loss_tokens = (max(1, sum(numbers)) for numbers in list(zip(*parts, strict=True))[2:])
    for it in parts:
        shares = f"{it.tokens / tokens:.1%}", f"{it.loss_tokens / loss_tokens:.1%}"
        made.add_row(it.source, f"{it.documents:,}", f"{it.tokens:,}", shares[0], f"{it.loss_tokens:,}", shares[1])
    return made


def print_data(halves: Mapping[str, Half], mixture: Sequence[Part], documents: Sequence[Shown]) -> None:
    """To stdout."""
    console = Console(highlight=False)
    console.print(table_of_halves(halves))
    if len(mixture) > 1:
        console.print(table_of_sources(mixture))
    console.print("\nDocuments to train on; tokens that carry loss are green:")
    for it in documents:
        console.print(Text(f"\n{it.source} ({it.tokens:,} tokens, {it.loss_tokens:,} with loss)", style="italic"))
        console.print(it.coloured())
