"""Print a row set for a reader: documents with their loss tokens marked, and counts.

The counts say what each split and each source holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdistill.common.terminal import Console
from specdistill.data.rows.bad_rows import format_bad_rows
from specdistill.data.rows.packing import PADDING_DOCUMENT
from specdistill.data.rows.row_set import Manifest, SourceCounts


@dataclass(frozen=True)
class DocumentText:
    """A document as text, in pieces that carry loss and pieces that do not.

    Attributes:
        name: the heading above the document.
        tokens: how many tokens it has.
        loss_tokens: how many of them carry loss.
        pieces: (text, whether it carries loss) in order.
    """

    name: str
    tokens: int
    loss_tokens: int
    pieces: list[tuple[str, bool]]

    def format_colored(self) -> Text:
        """Return the text for the terminal: tokens with loss in green, and the other tokens dim."""
        return Text.assemble(
            *((text, "bold green" if has_loss else "dim") for text, has_loss in self.pieces)
        )


def measure_lengths(rows: Dataset) -> np.ndarray:
    """Count the tokens of each document in packed rows.

    A text that is longer than a row was cut, and its pieces are in several rows. Each piece counts
    as a document.

    Args:
        rows: packed rows.

    Returns:
        An array [D, 2] for D documents: the tokens of each document, and the number of its row.
    """
    # Count how often each document id occurs in a row. Padding has an id of its own, which is left
    # out.
    lengths = []
    for number, row in enumerate(rows.select_columns(["document_ids"]).with_format("numpy")):
        document_ids = row["document_ids"]
        num_tokens = np.bincount(document_ids[document_ids != PADDING_DOCUMENT])
        lengths.append(np.column_stack([num_tokens, np.full(len(num_tokens), number)]))
    return np.concatenate(lengths)


def decode_documents(
    rows: Dataset, lengths: np.ndarray, count: int, tokenizer: PreTrainedTokenizerBase
) -> list[DocumentText]:
    """Decode some documents of packed rows as examples for the terminal, evenly spaced.

    Args:
        rows: packed rows.
        lengths: [D, 2] from `measure_lengths`: the tokens of each document and its row's number.
        count: how many documents to return, or all documents if there are fewer.
        tokenizer: the target's tokenizer.

    Returns:
        The text of each chosen document, in pieces with and without loss.
    """
    documents = []
    num_documents = len(lengths)
    places = np.linspace(0, num_documents - 1, min(count, num_documents)).astype(int)
    for place in np.unique(places).tolist():
        # The documents of a row have the ids 0, 1, 2, …. So the id of this document is its number
        # minus the number of the first document in the same row, which bisection finds.
        row = rows[int(lengths[place, 1])]
        document_id = place - np.searchsorted(lengths[:, 1], lengths[place, 1])
        tokens = [
            (token, bool(has_loss))
            for token, has_loss, document in zip(
                row["input_ids"], row["loss_mask"], row["document_ids"], strict=True
            )
            if document == document_id
        ]

        # Decode each run of consecutive tokens with loss, or without, as one piece.
        pieces = []
        for has_loss, group in groupby(tokens, key=lambda pair: pair[1]):
            pieces.append((str(tokenizer.decode([token for token, _ in group])), has_loss))
        documents.append(
            DocumentText(
                name=f"document {place:,}",
                tokens=len(tokens),
                loss_tokens=sum(has_loss for _, has_loss in tokens),
                pieces=pieces,
            )
        )
    return documents


def format_splits(manifest: Manifest) -> Table:
    """Return a table of the rows, documents and tokens of each split.

    Its last column says how much of the rows is filled with tokens, the rest being padding.
    """
    table = Table("", "rows", "documents", "tokens", "loss tokens", "filled")
    for name, counts in manifest.splits.items():
        table.add_row(
            name,
            f"{counts.rows:,}",
            f"{counts.documents:,}",
            f"{counts.tokens:,}",
            f"{counts.loss_tokens:,}",
            f"{counts.tokens / (counts.rows * manifest.fit.max_length):.1%}",
        )
    return table


def format_sources(parts: Sequence[SourceCounts]) -> Table:
    """Return a table of the documents and tokens of each source in the training split."""
    table = Table("of training", "documents", "tokens", "share", "loss tokens", "share")
    tokens = max(1, sum(part.tokens for part in parts))
    loss_tokens = max(1, sum(part.loss_tokens for part in parts))
    for part in parts:
        table.add_row(
            part.source,
            f"{part.documents:,}",
            f"{part.tokens:,}",
            f"{part.tokens / tokens:.1%}",
            f"{part.loss_tokens:,}",
            f"{part.loss_tokens / loss_tokens:.1%}",
        )
    return table


def print_data(manifest: Manifest, lengths: np.ndarray, documents: Sequence[DocumentText]) -> None:
    """Print what a row set contains: its counts, document lengths and some example documents.

    Args:
        manifest: the manifest of the row set.
        lengths: [D, 2] from `measure_lengths`: the tokens of each document and its row's number.
        documents: the documents to print.
    """
    console = Console()

    # The counts of the splits and of the sources.
    console.print(format_splits(manifest))
    if len(manifest.sources) > 1:
        console.print(format_sources(manifest.sources))

    # If answers were generated: how many of them reached the length limit. Then the rows that were
    # left out, by the reason.
    generation = manifest.generation or {}
    if generation.get("answers"):
        num_cut = generation["cut_answers"]
        num_answers = generation["answers"]
        console.print(
            f"answers: {num_answers:,}, of these {num_cut:,} ({num_cut / num_answers:.1%}) cut at"
            " data.max_length"
        )
    if any(source.bad_rows for source in manifest.sources):
        console.print(format_bad_rows(manifest.sources))
    if manifest.filtered:
        counts = ", ".join(f"{count:,} {rule}" for rule, count in manifest.filtered.items())
        console.print(f"filtered: {counts}")

    # The lengths, and some documents in full.
    median, ninth_decile, longest = np.quantile(lengths[:, 0], (0.5, 0.9, 1))
    console.print(
        f"tokens of a document: median {median:,.0f}, nine in ten at most {ninth_decile:,.0f},"
        f" longest {longest:,.0f}"
    )
    console.print("\nDocuments to train on; tokens that carry loss are green:")
    for document in documents:
        heading = (
            f"\n{document.name} ({document.tokens:,} tokens, {document.loss_tokens:,} with loss)"
        )
        console.print(Text(heading, style="italic"))
        console.print(document.format_colored())
