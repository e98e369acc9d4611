"""Prepared rows as a person reads them: how much there is, and one document with the tokens that carry loss in colour."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdistill.data.packing import PADDING_DOCUMENT


def summary(halves: Mapping[str, Dataset]) -> Table:
    """Rows, documents and tokens of each half; `supervised` counts the tokens that carry loss, `filled` the share that is not padding."""
    table = Table("", "rows", "documents", "tokens", "supervised", "filled")
    for name, rows in halves.items():
        counts = dict.fromkeys(("documents", "tokens", "supervised", "slots"), 0)
        for row in rows.select_columns(["document_ids", "loss_mask"]).with_format("numpy"):
            kept = row["document_ids"] != PADDING_DOCUMENT
            counts["documents"] += int(row["document_ids"].max()) + 1
            counts["tokens"] += int(kept.sum())
            counts["supervised"] += int(row["loss_mask"].sum())
            counts["slots"] += kept.size
        numbers = (len(rows), counts["documents"], counts["tokens"], counts["supervised"])
        table.add_row(name, *(f"{number:,}" for number in numbers), f"{counts['tokens'] / counts['slots']:.1%}")
    return table


def document(row: Mapping[str, Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> Text:
    """The first document of a row; tokens that carry loss are green, the others dim."""
    text = Text()
    tokens = zip(row["input_ids"], row["loss_mask"], row["document_ids"], strict=True)
    first = [(token, supervised) for token, supervised, number in tokens if number == 0]
    for supervised, group in groupby(first, key=lambda pair: bool(pair[1])):
        text.append(str(tokenizer.decode([token for token, _ in group])), style="bold green" if supervised else "dim")
    return text
