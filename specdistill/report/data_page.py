"""The page of training data: what it holds, how long its documents are, where they come from, and some of them as text.

One self-contained file. Every value is escaped: documents come from outside.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.report.files import template
from specdistill.report.phrases import percent
from specdistill.report.tables import Table

REPEATED = re.compile(r"(.{1,160}?)\1{3,}", re.DOTALL)  # the same four times or more
SHORTEST_LOOP = 32  # characters: less is no loop but indentation or a rule of dashes


def write_page(path: Path, key: str, *content: Any) -> None:
    """Write `to_html(*content)`. Raises UserError, naming `key`, for a file that cannot be written."""
    page = to_html(*content)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(key, got=f"{path} ({error.strerror})", expected="a file that can be written") from error


def to_html(
    target: str, data: Any, halves: Mapping[str, Any], mixture: Sequence[Any], lengths: Any, documents: Sequence[Any]
) -> str:
    """target: its name. data: the recipe's section. The others are of `specdistill.produce.show`."""
    return template("report/data_page.html.j2").render(
        title=f"Training data for {target}",
        settings=f"rows of {data.max_length:,} tokens",
        created=datetime.now(UTC).isoformat(),
        data=data,
        train=halves["train"],
        table=_of_halves(halves),
        of_sources=_of_sources(mixture),
        lengths=lengths,
        documents=documents,
        collapsed=collapsed,
    )


def collapsed(text: str) -> Iterator[tuple[str, int]]:
    """Pieces of a text and how often each stands there in a row: a loop is one of them."""
    end = 0
    for found in REPEATED.finditer(text):
        unit = found[1]
        if unit.strip() and len(found[0]) >= SHORTEST_LOOP:
            yield from ((text[end : found.start()], 1), (unit, len(found[0]) // len(unit)))
            end = found.end()
    yield text[end:], 1


def _of_halves(halves: Mapping[str, Any]) -> Table:
    rows = ((name, it.rows, it.documents, it.tokens, it.loss_tokens, percent(it.filled)) for name, it in halves.items())
    return _table(("", "rows", "documents", "tokens", "loss tokens", "filled"), rows)


def _of_sources(mixture: Sequence[Any]) -> Table:
    total = max(1, sum(it.loss_tokens for it in mixture))
    rows = ((it.source, it.documents, it.tokens, it.loss_tokens, percent(it.loss_tokens / total)) for it in mixture)
    return _table(("source", "documents", "tokens", "loss tokens", "share of them"), rows)


def _table(head: tuple[str, ...], rows: Iterable[Sequence[int | str]]) -> Table:
    """Counts with their thousands separated."""
    return Table(head, [tuple((f"{cell:,}" if isinstance(cell, int) else cell,) for cell in row) for row in rows])
