"""How a row set looks to a reader: documents with their loss tokens marked, and what each half and each source holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdistill.rows.packing import PADDING_DOCUMENT
from specdistill.rows.row_set import Manifest
from specdistill.terminal import Console


@dataclass(frozen=True)
class DocumentText:
    """A document as text, in pieces that carry loss and pieces that do not."""

    name: str
    tokens: int
    loss_tokens: int
    pieces: list[tuple[str, bool]]

    def coloured(self) -> Text:
        """Loss tokens are green, the others dim."""
        return Text.assemble(
            *((text, "bold green" if has_loss else "dim") for text, has_loss in self.pieces)
        )


def lengths(rows: Dataset) -> np.ndarray:
    """[D, 2]: tokens of each document in packed rows, a long text's rows each one of their own, and the row that it is in."""
    found = []
    for number, row in enumerate(rows.select_columns(["document_ids"]).with_format("numpy")):
        tokens = np.bincount(row["document_ids"][row["document_ids"] != PADDING_DOCUMENT])
        found.append(np.column_stack([tokens, np.full(len(tokens), number)]))
    return np.concatenate(found)


def shown(
    rows: Dataset, of: np.ndarray, count: int, tokenizer: PreTrainedTokenizerBase
) -> list[DocumentText]:
    """`count` of the documents, evenly over all of them. of: their `lengths`."""
    found = []
    for place in np.unique(np.linspace(0, len(of) - 1, min(count, len(of))).astype(int)).tolist():
        row = rows[int(of[place, 1])]
        number = place - np.searchsorted(
            of[:, 1], of[place, 1]
        )  # in its row, whose documents follow one another
        parts = zip(row["input_ids"], row["loss_mask"], row["document_ids"], strict=True)
        tokens = [
            (token, bool(has_loss)) for token, has_loss, document in parts if document == number
        ]
        pieces = [
            (str(tokenizer.decode([token for token, _ in group])), has_loss)
            for has_loss, group in groupby(tokens, key=lambda pair: pair[1])
        ]
        found.append(
            DocumentText(
                f"document {place:,}", len(tokens), sum(has_loss for _, has_loss in tokens), pieces
            )
        )
    return found


def table_of_splits(manifest: Manifest) -> Table:
    made = Table("", "rows", "documents", "tokens", "loss tokens", "filled")
    for name, it in manifest.splits.items():
        counts = (f"{number:,}" for number in (it.rows, it.documents, it.tokens, it.loss_tokens))
        made.add_row(name, *counts, f"{it.tokens / (it.rows * manifest.fit.max_length):.1%}")
    return made


def table_of_sources(parts: Sequence[Any]) -> Table:
    made = Table("of training", "documents", "tokens", "share", "loss tokens", "share")
    tokens, loss_tokens = (
        max(1, sum(getattr(it, name) for it in parts)) for name in ("tokens", "loss_tokens")
    )
    for it in parts:
        shares = f"{it.tokens / tokens:.1%}", f"{it.loss_tokens / loss_tokens:.1%}"
        made.add_row(
            it.source,
            f"{it.documents:,}",
            f"{it.tokens:,}",
            shares[0],
            f"{it.loss_tokens:,}",
            shares[1],
        )
    return made


def print_data(manifest: Manifest, of: np.ndarray, documents: Sequence[DocumentText]) -> None:
    console, (half, most, longest) = Console(), np.quantile(of[:, 0], (0.5, 0.9, 1))
    console.print(table_of_splits(manifest))
    if len(manifest.sources) > 1:
        console.print(table_of_sources(manifest.sources))
    if manifest.filtered:
        console.print(
            f"filtered: {', '.join(f'{count:,} {rule}' for rule, count in manifest.filtered.items())}"
        )
    console.print(
        f"tokens of a document: median {half:,.0f}, nine in ten at most {most:,.0f}, longest {longest:,.0f}"
    )
    console.print("\nDocuments to train on; tokens that carry loss are green:")
    for it in documents:
        console.print(
            Text(
                f"\n{it.name} ({it.tokens:,} tokens, {it.loss_tokens:,} with loss)", style="italic"
            )
        )
        console.print(it.coloured())
