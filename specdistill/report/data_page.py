"""The page of training data: what it holds, how long its documents are, where they come from, and some of them as text.

One self-contained file. Every value is escaped: documents come from outside.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdistill.errors import refusing
from specdistill.report.files import template
from specdistill.report.phrases import percent
from specdistill.report.tables import Table


def write_page(path: Path, key: str, *content: Any) -> None:
    """Write `to_html(*content)`. Raises UserError, naming `key`, for a file that cannot be written."""
    page = to_html(*content)
    with refusing(OSError, key, path, "a file that can be written"):
        path.write_text(page, encoding="utf-8")


def to_html(target: str, data: Any, manifest: Any, lengths: Any, documents: Sequence[Any]) -> str:
    """target: its name. data: the recipe's section. manifest: of the row set. The others are of `specdistill.produce.show`."""
    splits = (
        (name, it.rows, it.documents, it.tokens, it.loss_tokens, percent(manifest.filled[name]))
        for name, it in manifest.splits.items()
    )
    total = max(1, sum(it.loss_tokens for it in manifest.sources))
    sources = ((it.source, it.documents, it.tokens, it.loss_tokens, percent(it.loss_tokens / total)) for it in manifest.sources)
    return template("report/data_page.html.j2").render(
        title=f"Training data for {target}",
        settings=f"rows of {data.max_length:,} tokens",
        created=datetime.now(UTC).isoformat(),
        data=data,
        train=manifest.splits["train"],
        filled=manifest.filled["train"],
        table=_table(("", "rows", "documents", "tokens", "loss tokens", "filled"), splits),
        of_sources=_table(("source", "documents", "tokens", "loss tokens", "share of them"), sources),
        lengths=lengths,
        documents=documents,
    )


def _table(head: tuple[str, ...], rows: Iterable[Sequence[int | str]]) -> Table:
    """Counts with their thousands separated."""
    return Table(head, [tuple((f"{cell:,}" if isinstance(cell, int) else cell,) for cell in row) for row in rows])
