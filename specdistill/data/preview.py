"""Prepared rows for a reader: their numbers, and one document with its loss tokens in colour."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdistill.data.packing import PADDING_DOCUMENT


def summary(halves: Mapping[str, Dataset]) -> Table:
    """Rows, documents, tokens and loss tokens of each half; `filled` is the share that is not padding."""
    table = Table("", "rows", "documents", "tokens", "loss tokens", "filled")
    for name, rows in halves.items():
        counts = dict.fromkeys(("documents", "tokens", "loss_tokens", "slots"), 0)
        for row in rows.select_columns(["document_ids", "loss_mask"]).with_format("numpy"):
            is_token = row["document_ids"] != PADDING_DOCUMENT
            counts["documents"] += int(row["document_ids"].max()) + 1
            counts["tokens"] += int(is_token.sum())
            counts["loss_tokens"] += int(row["loss_mask"].sum())
            counts["slots"] += is_token.size
        numbers = (len(rows), counts["documents"], counts["tokens"], counts["loss_tokens"])
        table.add_row(name, *(f"{number:,}" for number in numbers), f"{counts['tokens'] / counts['slots']:.1%}")
    return table


def document(row: Mapping[str, Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> Text:
    """The first document of a row; loss tokens are green, the others dim."""
    text = Text()
    tokens = zip(row["input_ids"], row["loss_mask"], row["document_ids"], strict=True)
    first = [(token, has_loss) for token, has_loss, number in tokens if number == 0]
    for has_loss, group in groupby(first, key=lambda pair: bool(pair[1])):
        text.append(str(tokenizer.decode([token for token, _ in group])), style="bold green" if has_loss else "dim")
    return text
