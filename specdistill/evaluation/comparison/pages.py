"""Write the folder of a comparison: comparison.json, its pages, and the report of each candidate.

The report of a candidate is in a subfolder with the candidate's name.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from specdistill.common.terminal import Console
from specdistill.evaluation.comparison.compare import Comparison, Entry
from specdistill.evaluation.report import phrases, tables
from specdistill.evaluation.report.files import load_template, stage_files, write_report
from specdistill.evaluation.report.phrases import (
    ResultRow,
    format_bracketed_interval,
    format_duration,
    format_interval,
    format_number,
    format_percent,
    format_signed,
    format_size,
    format_times,
)
from specdistill.evaluation.report.tables import Cell, join_cell
from specdistill.evaluation.report.text import escape_markdown, format_cells
from specdistill.evaluation.statistics.records import PromptRecord

FILES = ("comparison.json", "comparison.md", "comparison.html")

# The columns that are printed to a terminal.
STDOUT_COLUMNS = ("candidate", "speedup", "to the best", "acceptance length", "lossless")
# The most candidates in the table by category. With its two columns for category and prompts, the
# table then has eight columns, as many as the widest of the other tables.
MAX_CANDIDATES_BY_CATEGORY = 6
# The columns of the two tables, at most eight in each. REASON_COLUMNS explains the differences.
MAIN = ("", "candidate", "K", "speedup", "to the best", "acceptance length", "weights", "lossless")
REASON_COLUMNS = ("candidate", "rate", "first", "c", "v", "predicted", "best K", "training")
FOOTNOTE = (
    "Every prompt was decoded with each candidate and once without, interleaved; intervals are 95"
    " %, from a bootstrap over prompts, and differences are paired. Rate: share of draft tokens"
    " that were accepted. First: share of drafts whose first token was accepted. c: a draft step,"
    " v: a verification, both in plain decoding steps. Predicted = acceptance length / (v + c·K)."
    " Weights: the draft's parameters."
)


def write_comparison(
    folder: Path, comparison: Comparison, records: Mapping[str, Sequence[PromptRecord]]
) -> None:
    """Write the report of each candidate to `<folder>/<name>`, then the files of the comparison.

    comparison.json, comparison.md and comparison.html are written together or not at all.

    Args:
        folder: the folder of the comparison.
        comparison: the document comparison.json.
        records: candidate name -> the records of its prompts.
    """
    for candidate in comparison["candidates"]:
        write_report(folder / candidate["name"], candidate["report"], records[candidate["name"]])
    texts = (
        json.dumps(comparison, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        render_comparison_markdown(comparison),
        render_comparison_html(comparison),
    )
    with stage_files(folder) as staging:
        for name, text in zip(FILES, texts, strict=True):
            (staging / name).write_text(text, encoding="utf-8")


def render_comparison_markdown(comparison: Comparison) -> str:
    """Return the text of comparison.md, short enough for the summary of a CI job.

    It has the headline, the tables, and the paragraph that explains the differences.
    """
    # Each candidate has a row, whose columns are divided over two tables: the results, and the
    # numbers that explain them. A suite of one category has no table by category.
    categories = format_by_category(comparison)
    ranked = list_rows(comparison)
    sections = [
        f"# {escape_markdown(format_comparison_title(comparison))}",
        escape_markdown(format_headline(comparison)),
        escape_markdown(format_shared_settings(comparison)),
        format_cells(_format_table(ranked, MAIN)),
        *(["## By category", format_cells(categories)] if categories else []),
        "## Why they differ",
        escape_markdown(format_paragraph(comparison)),
        format_cells(_format_table(ranked, REASON_COLUMNS)),
        escape_markdown(FOOTNOTE),
    ]
    return "\n\n".join(sections) + "\n"


def render_comparison_html(comparison: Comparison) -> str:
    """Return the text of comparison.html, a self-contained page.

    The template escapes every value, because names of models may contain HTML.
    """
    # Group the candidates by K, their number of draft tokens per round. The page has a chart of
    # speedups for each K. The first row of a report is about the whole suite.
    ranked = _rank_candidates(comparison)
    lines = list_rows(comparison)
    by_k: dict[int, list[tuple[str, ResultRow]]] = {}
    for candidate in ranked:
        report = candidate["report"]
        by_k.setdefault(report["settings"]["num_speculative_tokens"], []).append(
            (candidate["name"], report["results"][0])
        )

    # Fill the template. It writes the first two columns of its main table, rank and name, itself,
    # so MAIN[2:] leaves them out.
    return load_template("evaluation/comparison/comparison.html.j2").render(
        title=format_comparison_title(comparison),
        verdict=format_headline(comparison),
        settings=format_shared_settings(comparison),
        created=comparison["created"],
        report=ranked[0]["report"],
        best=comparison["ranking"][0],
        table=_format_table(lines, MAIN[2:]),
        details=_format_table(lines, REASON_COLUMNS),
        by_category=format_by_category(comparison),
        candidates=ranked,
        shape=phrases.describe_shape,
        why=comparison["why"],
        footnote=FOOTNOTE,
        by_k=by_k,
    )


def format_headline(comparison: Comparison) -> str:
    """Return a headline: which candidate is the fastest, or why none can be called the fastest.

    A candidate is named only if its outputs are the target's (lossless), and if it is significantly
    faster than plain decoding and than all other lossless candidates.
    """
    # The ranking puts lossless candidates first, so there are none if the first is not lossless.
    best, *remaining = comparison["ranking"]
    if not best["lossless"]:
        return "No lossless draft"

    # Compare the interval of the best speedup with 1, the speed of plain decoding. It is in the
    # report's first row, which is about the whole suite. Without an interval, the speedup itself is
    # compared.
    row = _rank_candidates(comparison)[0]["report"]["results"][0]
    low, high = row.get("speedup_ci95", (row["speedup"], row["speedup"]))
    if high < 1:
        return "Plain decoding is the fastest"
    if low <= 1:
        return "No draft is clearly faster than plain decoding"

    # A candidate that is not lossless does not count, however fast it is.
    is_unsure = any(
        candidate["lossless"] and not candidate["separable_from_best"] for candidate in remaining
    )
    return "No clear winner" if is_unsure else f"{best['name']} is the fastest"


def _format_table(ranked: Sequence[Mapping[str, Cell]], names: Sequence[str]) -> tables.Table:
    """Return a table with some of the columns of the rows.

    Args:
        ranked: the row of each candidate, column -> cell, best first.
        names: the columns that the table has.
    """
    table_rows = []
    for row in ranked:
        table_rows.append(tuple(row[name] for name in names))
    return tables.Table(tuple(names), table_rows)


def print_comparison(comparison: Comparison, folder: Path) -> None:
    """Print the ranking, the reasons for it and the path of the HTML page to stdout."""
    # Print a table with a line for each candidate. A cell has a value and perhaps notes, such as
    # its confidence interval. These are printed below the value, in brackets.
    console = Console()
    grid = Table(
        box=box.SIMPLE,
        pad_edge=False,
        title=Text(format_comparison_title(comparison)),
        title_justify="left",
    )
    for name in STDOUT_COLUMNS:
        grid.add_column(name, overflow="fold")
    for row in list_rows(comparison):
        texts = []
        for name in STDOUT_COLUMNS:
            value, *notes = row[name]
            lines = [value, *(f"({note})" for note in notes)]
            texts.append(Text("\n".join(lines)))
        grid.add_row(*texts)
    console.print(grid)

    # Let the terminal wrap long lines (soft_wrap), so that they can be copied without line breaks.
    console.print(Text(format_paragraph(comparison)), soft_wrap=True)
    console.print(Text(f"comparison: {folder / 'comparison.html'}", style="bold"), soft_wrap=True)


def format_comparison_title(comparison: Comparison) -> str:
    """Return the title of a comparison: how many drafts it compares, and for which target."""
    # All candidates have the same target.
    target = comparison["candidates"][0]["report"]["target"]["model"]
    return f"{len(comparison['candidates'])} drafts for {target}"


def format_shared_settings(comparison: Comparison) -> str:
    """Return as text the settings that are the same for all candidates."""
    return phrases.format_shared_settings(
        *(candidate["report"] for candidate in comparison["candidates"])
    )


def format_paragraph(comparison: Comparison) -> str:
    """Return the reasons why candidates differ, as one paragraph."""
    return " ".join(reason["message"] for reason in comparison["why"])


def _rank_candidates(comparison: Comparison) -> list[Entry]:
    """Return the candidates in the order of the ranking, best first."""
    by_name = {candidate["name"]: candidate for candidate in comparison["candidates"]}
    return [by_name[entry["name"]] for entry in comparison["ranking"]]


def list_rows(comparison: Comparison) -> list[dict[str, Cell]]:
    """Return the table row of each candidate, best first: column -> cell."""
    return [
        _format_cells(*pair)
        for pair in zip(comparison["ranking"], _rank_candidates(comparison), strict=True)
    ]


def format_by_category(comparison: Comparison) -> tables.Table | None:
    """Return a table of results by category: a row for each category, a column for each candidate.

    A cell has the speedup and the acceptance length of a candidate. Only the best
    MAX_CANDIDATES_BY_CATEGORY candidates have a column. The first row is about the whole suite.

    Returns:
        The table; None for a suite of one category.
    """
    # Take the rows of each candidate's report: the first is about the whole suite, each further one
    # about a category. A suite of one category has two rows with the same numbers, so it gets no
    # table.
    rows_by_candidate = [
        tables.select_main_rows(candidate["report"])
        for candidate in _rank_candidates(comparison)[:MAX_CANDIDATES_BY_CATEGORY]
    ]
    if min(map(len, rows_by_candidate)) < 3:
        return None

    # Transpose: a row of the table is a category, with a cell for each candidate.
    names = [entry["name"] for entry in comparison["ranking"][:MAX_CANDIDATES_BY_CATEGORY]]
    table_rows: list[tuple[Cell, ...]] = []
    for rows_of_category in zip(*rows_by_candidate, strict=True):
        first = rows_of_category[0]
        cells = map(_format_speedup_and_length, rows_of_category)
        table_rows.append(((phrases.name_row(first),), (str(first["num_prompts"]),), *cells))
    return tables.Table(("category", "prompts", *names), table_rows)


def _format_speedup_and_length(row: ResultRow) -> Cell:
    """Return the table cell for a report's row: speedup and acceptance length, with intervals."""
    length = format_number(row.get("mean_acceptance_length"))
    interval = format_bracketed_interval(row, "mean_acceptance_length")
    return join_cell(
        format_times(row.get("speedup")),
        format_interval(row, "speedup"),
        f"length {length}{interval}",
    )


def _format_cells(entry: Entry, candidate: Entry) -> dict[str, Cell]:
    """Return the table row of a candidate: column -> cell.

    Args:
        entry: the candidate's entry in the ranking.
        candidate: the candidate, with its report.
    """
    # The numbers come from the report's first row, which is about the whole suite, from the cost
    # model in the report (theory), and from the ranking. A method without weights has no training.
    # `c` is the cost of drafting a token and `v` that of verifying a round, both in steps of plain
    # decoding. `first` is the share of drafts whose first token was accepted.
    report = candidate["report"]
    training = candidate["training"]
    row = report["results"][0]
    theory = report.get("theory", {})
    draft = report["draft"]
    return {
        "": (str(entry["rank"]),),
        "candidate": join_cell(entry["name"], phrases.describe_shape(report["settings"])),
        "K": (str(report["settings"]["num_speculative_tokens"]),),
        "speedup": join_cell(format_times(row["speedup"]), format_interval(row, "speedup")),
        "to the best": _format_difference_to_best(entry),
        "acceptance length": join_cell(
            format_number(row.get("mean_acceptance_length")),
            format_interval(row, "mean_acceptance_length"),
        ),
        "rate": (format_percent(row.get("acceptance_rate")),),
        "first": (format_percent(entry["parts"]["first_position_rate"]),),
        "c": (format_number(theory.get("c"), 3),),
        "v": (format_number(theory.get("v")),),
        "predicted": (format_times(row.get("predicted_speedup")),),
        "best K": (str(theory.get("best_k", "–")),),
        "weights": (f"{draft['parameters']:,}", format_size(draft["bytes"])),
        "training": (
            (format_duration(training["seconds"]), f"{training['steps']:,} steps")
            if training
            else ("–",)
        ),
        "lossless": ("yes" if entry["lossless"] else "NO",),
    }


def _format_difference_to_best(entry: Entry) -> Cell:
    """Return the table cell with the difference in speed between a candidate and the best one.

    Args:
        entry: the candidate's entry in the ranking.
    """
    if entry["rank"] == 1:
        return ("best",)
    difference = entry["difference_to_best"]["speedup"]
    change = format_signed(difference["change"])
    interval = " to ".join(map(format_signed, difference["ci95"] or ()))
    return (
        change if entry["separable_from_best"] else "not separable",
        interval or "too few prompts",
    )
