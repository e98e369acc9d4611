"""Skip rows that cannot be used, and count them by what is wrong with them.

People's files hold rows of kinds that no draft can learn from: an unknown role, an image, a line
that was cut short, turns that the target's chat template rejects. By default such rows are skipped.
If they are more than `data.max_bad_rows` allows, that is an error, because the remaining rows may
not be what the user meant. `data.on_bad_row=stop` ends the command at the first bad row.
"""

from collections.abc import Mapping, Sequence

from datasets import Dataset, Value
from rich.table import Table

from specdistill.common.errors import UserError, logger
from specdistill.data.rows.row_set import BadRows, SourceCounts
from specdistill.recipe.sections import DataConfig

# Columns of a prepared row that stands for a row that cannot be used; None in all other rows.
FAULT_COLUMNS = {
    "fault": Value("string"),
    "fault_example": Value("string"),
    "fault_row": Value("int64"),
}
EMPTY = "empty row"  # There may be any number of such rows: data sets of texts have many.
MAX_KINDS_SHOWN = 3  # kinds of faults that a message lists


def describe_fault(error: UserError, place: str, number: int) -> dict[str, object]:
    """Return a record of what is wrong with a row, which takes the place of that row.

    The record has the columns of FAULT_COLUMNS: the kind of fault, an example for the user, and the
    number of the row.

    Args:
        error: the error that the row raised when it was read. Its `kind` is the kind of fault by
            which rows are counted. Its `got` says what is wrong with this row.
        place: where the row stands in its source, as a message names it.
        number: the row's number in the source, from 0.
    """
    return {"fault": error.kind, "fault_example": f"{place}: {error.got}", "fault_row": number}


def split_faults(rows: Dataset) -> tuple[Dataset, dict[str, BadRows], int | None]:
    """Separate the rows that can be used from the records of bad rows, and count the bad rows.

    Args:
        rows: the rows of a source. A bad row was replaced by a record of its fault in the columns
            FAULT_COLUMNS (see `describe_fault`); in usable rows these columns are None.

    Returns:
        The usable rows without FAULT_COLUMNS; the counts of the bad rows, by kind of fault; and the
        number in the source of the first bad row that is not just empty, or None if there is none.
    """
    # Count the bad rows by kind. `merge_counts` keeps the first row of each kind as an example, so
    # the text of later rows is not read.
    bad_rows: dict[str, BadRows] = {}
    usable = []
    first_row = None
    for number, fault in enumerate(rows.with_format(None)["fault"]):
        if fault is None:
            usable.append(number)
            continue
        example = "" if fault in bad_rows else rows[number]["fault_example"]
        bad_rows = merge_counts(bad_rows, {fault: BadRows(count=1, first=example)})
        if first_row is None and fault != EMPTY:
            first_row = rows[number]["fault_row"]

    # Leave out the bad rows, and the columns that only bad rows use.
    if bad_rows:
        rows = rows.select(usable)
    return rows.remove_columns(list(FAULT_COLUMNS)), bad_rows, first_row


def merge_counts(*parts: Mapping[str, BadRows]) -> dict[str, BadRows]:
    """Add up counts of bad rows by the kind of fault.

    Args:
        parts: counts of bad rows, each a mapping from the kind of fault. If several parts have a
            kind, the example row of the first one is kept.
    """
    total: dict[str, BadRows] = {}
    for part in parts:
        for kind, rows in part.items():
            kind_rows = total.get(kind, BadRows(count=0, first=rows.first))
            total[kind] = BadRows(count=kind_rows.count + rows.count, first=kind_rows.first)
    return total


def check_share(
    bad_rows: Mapping[str, BadRows], num_rows: int, source: str, key: str, config: DataConfig
) -> None:
    """Warn that the bad rows of a source are skipped; raise UserError if they are too many.

    Args:
        bad_rows: counts of the bad rows, by kind of fault.
        num_rows: all rows of the source, bad rows included.
        source: the name of the source.
        key: the recipe key that messages name.
        config: the `data:` section.

    Raises:
        UserError: if more than the share `data.max_bad_rows` of all rows are bad. Empty rows do not
            count, because data sets of texts have many.
    """
    if not bad_rows:
        return

    # Raise an error for too many bad rows, not counting the empty ones.
    most_frequent = sorted(bad_rows.items(), key=lambda item: -item[1].count)
    faulty = [(kind, rows) for kind, rows in most_frequent if kind != EMPTY]
    count = sum(rows.count for _, rows in faulty)
    if count > config.max_bad_rows * num_rows:
        problem = (
            f"{count:,} of {num_rows:,} rows of {source} ({count / num_rows:.1%}) cannot be used"
        )
        raise UserError(
            key,
            got=problem,
            text=f"{key}: {problem}, more than data.max_bad_rows={config.max_bad_rows:g} allows."
            " Correct them, or raise data.max_bad_rows to skip them; data.on_bad_row=stop shows the"
            f" first one in full. Most frequent: {_list_kinds(faulty)}",
        )

    # A tolerable number of bad rows is a warning.
    logger.warning(
        "%s: skipped %d of %d rows of %s: %s",
        key,
        sum(rows.count for rows in bad_rows.values()),
        num_rows,
        source,
        _list_kinds(most_frequent),
    )


def _list_kinds(bad_rows: Sequence[tuple[str, BadRows]]) -> str:
    """List the first MAX_KINDS_SHOWN kinds of bad rows for a message.

    Each kind comes with the number of its rows and with its first row as an example.
    """
    return "; ".join(
        f"{rows.count:,} × {kind} ({rows.first})" for kind, rows in bad_rows[:MAX_KINDS_SHOWN]
    )


def format_bad_rows(sources: Sequence[SourceCounts]) -> Table:
    """Return a table of the rows that were skipped in all sources together, by kind of fault.

    Args:
        sources: the counts of each source, from the manifest of a row set.
    """
    table = Table("skipped rows", "number", "share")
    table.add_column("the first of them", overflow="fold")
    num_rows = sum(source.rows_read for source in sources)
    total = merge_counts(*(source.bad_rows for source in sources))
    for kind, rows in sorted(total.items(), key=lambda item: -item[1].count):
        table.add_row(kind, f"{rows.count:,}", f"{rows.count / max(1, num_rows):.1%}", rows.first)
    return table
