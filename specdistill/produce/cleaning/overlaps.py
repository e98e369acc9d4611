"""Rows of the sources that are not trained on: what they overlap is found once, listed in a file, and counted in a table."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset, Value
from datasets.config import HF_DATASETS_CACHE
from rich.console import Console
from rich.table import Table

from specdistill.errors import UserError
from specdistill.produce.cleaning.decontamination import SuiteIndex, load_suites
from specdistill.produce.cleaning.near_duplicates import NearDuplicates
from specdistill.produce.sources import Source
from specdistill.progress import progress
from specdistill.recipe.sections import DataConfig
from specdistill.rows.cache import Row, cached, quiet
from specdistill.suites.suite import Suite

logger = logging.getLogger(__name__)

# rule: contaminated or near_duplicate. of: the suite and prompt, or the earlier row, that the row is like. shared: what they share.
COLUMNS = {
    "source": Value("int32"),
    "row": Value("int64"),
    "rule": Value("string"),
    "of": Value("string"),
    "shared": Value("string"),
}
SHOWN = 20  # lines of the table


def cleaned(
    sources: Sequence[Source], config: DataConfig, measured_on: Sequence[str] = ()
) -> tuple[list[Source], Counter[str]]:
    """The sources without the rows that overlap a prompt of the suites, or an earlier row, and how many these are by the rule.

    Their fingerprints change with what is filtered. Prints how many rows are, and where they are listed. Raises UserError if all are.
    """
    suites = suites_at_hand(config.decontaminate, measured_on)
    num_rows = sum(len(source.rows) for source in sources)
    if not num_rows or (not suites and config.near_duplicates is None):
        return list(sources), Counter()
    inputs = [[source.rows._fingerprint for source in sources], [suite.sha256 for suite in suites], config.near_duplicates]
    found = cached(lambda: overlaps(sources, suites, config.near_duplicates), COLUMNS, ["overlaps", *inputs], config.cache_dir)
    if len(found) == 0:
        return list(sources), Counter()
    path = Path(config.cache_dir or HF_DATASETS_CACHE) / "filtered" / f"{found._fingerprint}.json"
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found.to_list(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        Console(stderr=True).print(table(found, num_rows), f"listed in {path}", sep="\n")
    gone = set(zip(found["source"], found["row"], strict=True))
    kept = [[row for row in range(len(source.rows)) if (number, row) not in gone] for number, source in enumerate(sources)]
    if not any(kept):
        expected = "rows that overlap no suite and no earlier row, or other data.decontaminate"
        raise UserError("data.source", got=f"{len(gone)} rows that are all filtered (see {path})", expected=expected)
    with quiet():
        return [
            source if len(rows) == len(source.rows) else replace(source, rows=source.rows.select(rows).flatten_indices())
            for source, rows in zip(sources, kept, strict=True)
        ], Counter(found["rule"])


def suites_at_hand(decontaminate: Sequence[str], measured_on: Sequence[str]) -> list[Suite]:
    """The suites that rows are compared with; says which could not be fetched."""
    suites, missing = load_suites(decontaminate, measured_on)
    if missing and is_first():
        logger.warning("data.decontaminate: %s could not be fetched, and no row is compared with them", ", ".join(missing))
    return suites


def overlaps(sources: Sequence[Source], suites: Sequence[Suite], near_duplicates: float | None) -> Iterator[Row]:
    """What is filtered, with the columns above; a row that is contaminated is no original of a near duplicate."""
    index = SuiteIndex(suites)
    earlier = None if near_duplicates is None else NearDuplicates(near_duplicates, lambda at: sources[at[0]].rows[at[1]])
    with progress("Comparing", sum(len(source.rows) for source in sources), "rows") as advance:
        for number, source in enumerate(sources):
            for position, row in enumerate(source.rows):
                place = {"source": number, "row": position}
                if overlap := index.overlap(row):
                    of = f"{overlap.suite}: {overlap.prompt}"
                    yield {**place, "rule": "contaminated", "of": of, "shared": overlap.words}
                elif earlier is not None and (found := earlier.original(row, (number, position))):
                    similarity, (other, original) = found
                    of = f"{sources[other].key} row {original}"
                    yield {**place, "rule": "near_duplicate", "of": of, "shared": f"{similarity:.2f}"}
                advance()


def table(found: Dataset, num_rows: int) -> Table:
    """The prompts that most rows overlap, and how many rows are near duplicates, of `num_rows` in all."""
    drawn = Table("filtered", "of", "rows", title=f"{len(found):,} of {num_rows:,} rows are filtered")
    drawn.add_column("for example", max_width=40)
    rows = found.to_list()
    groups = [(row["rule"], row["of"] if row["rule"] == "contaminated" else "earlier rows") for row in rows]
    examples = dict(zip(reversed(groups), reversed(rows), strict=True))
    counts = Counter(groups).most_common()
    for group, count in counts[:SHOWN]:
        row = examples[group]
        shared = row["shared"] if row["rule"] == "contaminated" else f"{row['of']}, {row['shared']}"
        drawn.add_row(*group, f"{count:,}", f"row {row['row']}: {shared}"[:80])
    if rest := counts[SHOWN:]:
        drawn.add_row("contaminated", f"{len(rest):,} prompts more", f"{sum(count for _, count in rest):,}", "")
    return drawn


def is_first() -> bool:
    """Of a machine's processes, which all come here."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
