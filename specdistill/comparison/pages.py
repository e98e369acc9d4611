"""A comparison's folder: comparison.json, its pages, and each candidate's report in a folder of its name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from specdistill.report import phrases, tables
from specdistill.report.files import staged, template, write_report
from specdistill.report.phrases import (
    ResultRow,
    between,
    duration,
    interval,
    number,
    percent,
    signed,
    size,
    times,
)
from specdistill.report.tables import Cell, cell
from specdistill.report.text import cells, plain
from specdistill.statistics.records import PromptRecord
from specdistill.terminal import Console

FILES = ("comparison.json", "comparison.md", "comparison.html")
Comparison = Mapping[str, Any]  # what `compare` returns

ON_STDOUT = ("candidate", "speedup", "to the best", "acceptance length", "lossless")
MOST_BY_CATEGORY = 6  # candidates
# At most eight columns a table. Why: what makes the difference.
MAIN = ("", "candidate", "K", "speedup", "to the best", "acceptance length", "weights", "lossless")
WHY = ("candidate", "rate", "first", "c", "v", "predicted", "best K", "training")
FOOTNOTE = (
    "Every prompt was decoded with each candidate and once without, interleaved; intervals are 95 %, from a bootstrap over prompts, and "
    "differences are paired. Per round: tokens per round where some rounds drafted nothing, which the acceptance length leaves out. First: "
    "share of drafts whose first token was accepted. c: a draft step, v: a verification, in plain decoding steps. "
    "Predicted = acceptance length / (v + c·K). Weights: the draft's parameters."
)


def write_comparison(
    folder: Path, comparison: Comparison, records: Mapping[str, Sequence[PromptRecord]]
) -> None:
    """Write each candidate's report to `<folder>/<name>`, then comparison.json, .md and .html, whole or not at all.

    records: candidate name -> the records of its prompts.
    """
    for candidate in comparison["candidates"]:
        write_report(folder / candidate["name"], candidate["report"], records[candidate["name"]])
    texts = (
        json.dumps(comparison, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        to_markdown(comparison),
        to_html(comparison),
    )
    with staged(folder) as staging:
        for name, text in zip(FILES, texts, strict=True):
            (staging / name).write_text(text, encoding="utf-8")


def to_markdown(comparison: Comparison) -> str:
    """comparison.md: the table and the paragraph, as a page that fits a CI job's summary."""
    categories, ranked = by_category(comparison), rows(comparison)
    sections = [
        f"# {plain(title(comparison))}",
        plain(headline(comparison)),
        plain(settings(comparison)),
        cells(_table(ranked, MAIN)),
        *(["## By category", cells(categories)] if categories else []),
        "## Why they differ",
        plain(paragraph(comparison)),
        cells(_table(ranked, WHY)),
        plain(FOOTNOTE),
    ]
    return "\n\n".join(sections) + "\n"


def to_html(comparison: Comparison) -> str:
    """comparison.html: one self-contained file. Every value is escaped: names come from outside."""
    ranked, lines = _ranked(comparison), rows(comparison)
    by_k: dict[int, list[tuple[str, ResultRow]]] = {}
    for candidate in ranked:
        report = candidate["report"]
        by_k.setdefault(report["settings"]["num_speculative_tokens"], []).append(
            (candidate["name"], report["results"][0])
        )
    return template("comparison/comparison.html.j2").render(
        title=title(comparison),
        verdict=headline(comparison),
        settings=settings(comparison),
        created=comparison["created"],
        report=ranked[0]["report"],
        best=comparison["ranking"][0],
        table=_table(lines, MAIN[2:]),
        details=_table(lines, WHY),
        by_category=by_category(comparison),
        candidates=ranked,
        shape=phrases.shape,
        why=comparison["why"],
        footnote=FOOTNOTE,
        by_k=by_k,
    )


def headline(comparison: Comparison) -> str:
    """The fastest candidate, where its lead is more than chance; it is not named best where it is not lossless."""
    best, *others = comparison["ranking"]
    unsure = any(other["lossless"] and not other["separable_from_best"] for other in others)
    return (
        "No lossless draft"
        if not best["lossless"]
        else "No clear winner"
        if unsure
        else f"{best['name']} is the fastest"
    )


def _table(ranked: Sequence[Mapping[str, Cell]], names: Sequence[str]) -> tables.Table:
    return tables.Table(tuple(names), [tuple(row[name] for name in names) for row in ranked])


def print_comparison(comparison: Comparison, folder: Path) -> None:
    """The ranking, the paragraph and where the pages are, to stdout."""
    console = Console()
    grid = Table(
        box=box.SIMPLE, pad_edge=False, title=Text(title(comparison)), title_justify="left"
    )
    for name in ON_STDOUT:
        grid.add_column(name, overflow="fold")
    for row in rows(comparison):
        cells_shown = (row[name] for name in ON_STDOUT)
        grid.add_row(
            *(
                Text("\n".join((value, *(f"({note})" for note in notes))))
                for value, *notes in cells_shown
            )
        )
    console.print(grid)
    console.print(Text(paragraph(comparison)), soft_wrap=True)
    console.print(Text(f"comparison: {folder / 'comparison.html'}", style="bold"), soft_wrap=True)


def title(comparison: Comparison) -> str:
    target = comparison["candidates"][0]["report"]["target"]["model"]
    return f"{len(comparison['candidates'])} drafts for {target}"


def settings(comparison: Comparison) -> str:
    return phrases.shared_settings(*(candidate["report"] for candidate in comparison["candidates"]))


def paragraph(comparison: Comparison) -> str:
    return " ".join(reason["message"] for reason in comparison["why"])


def _ranked(comparison: Comparison) -> list[Mapping[str, Any]]:
    """The candidates, best first."""
    by_name = {candidate["name"]: candidate for candidate in comparison["candidates"]}
    return [by_name[entry["name"]] for entry in comparison["ranking"]]


def rows(comparison: Comparison) -> list[dict[str, Cell]]:
    """The table, best first: head -> cell."""
    return [_cells(*pair) for pair in zip(comparison["ranking"], _ranked(comparison), strict=True)]


def by_category(comparison: Comparison) -> tables.Table | None:
    """A row for the whole suite and each category: speedup and acceptance length of the first six candidates. None of one category."""
    of_each = [
        tables.main_rows(candidate["report"])
        for candidate in _ranked(comparison)[:MOST_BY_CATEGORY]
    ]
    if min(map(len, of_each)) < 3:
        return None
    head = (
        "category",
        "prompts",
        *(entry["name"] for entry in comparison["ranking"][:MOST_BY_CATEGORY]),
    )
    lines = (
        (
            (phrases.row_name(of_all[0]),),
            (str(of_all[0]["num_prompts"]),),
            *map(_speedup_and_length, of_all),
        )
        for of_all in zip(*of_each, strict=True)
    )
    return tables.Table(head, [*lines])


def _speedup_and_length(row: ResultRow) -> Cell:
    length = f"length {number(row.get('mean_acceptance_length'))}{between(row, 'mean_acceptance_length')}"
    return cell(times(row.get("speedup")), interval(row, "speedup"), length)


def _cells(entry: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, Cell]:
    report, training = candidate["report"], candidate["training"]
    row, theory, draft = report["results"][0], report.get("theory", {}), report["draft"]
    length = (
        number(row.get("mean_acceptance_length")),
        interval(row, "mean_acceptance_length"),
        phrases.per_round(row),
        phrases.online_length(row),
    )
    return {
        "": (str(entry["rank"]),),
        "candidate": cell(entry["name"], phrases.shape(report["settings"])),
        "K": (str(report["settings"]["num_speculative_tokens"]),),
        "speedup": cell(times(row["speedup"]), interval(row, "speedup")),
        "to the best": _to_best(entry),
        "acceptance length": cell(*length),
        "rate": (percent(row.get("acceptance_rate")),),
        "first": (percent(entry["parts"]["first_position_rate"]),),
        "c": (number(theory.get("c"), 3),),
        "v": (number(theory.get("v")),),
        "predicted": (times(row.get("predicted_speedup")),),
        "best K": (str(theory.get("best_k", "–")),),
        "weights": (f"{draft['parameters']:,}", size(draft["bytes"])),
        "training": (duration(training["seconds"]), f"{training['steps']:,} steps")
        if training
        else ("–",),
        "lossless": ("yes" if entry["lossless"] else "NO",),
    }


def _to_best(entry: Mapping[str, Any]) -> Cell:
    if entry["rank"] == 1:
        return ("best",)
    difference = entry["difference_to_best"]["speedup"]
    note = " to ".join(map(signed, difference["ci95"])) if difference["ci95"] else "too few prompts"
    return (signed(difference["change"]) if entry["separable_from_best"] else "not separable", note)
