"""A comparison's folder: comparison.json, its pages, and each candidate's report in a folder of its name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdistill.comparison.schema import validate_comparison
from specdistill.report import charts, markdown, phrases, tables
from specdistill.report.files import staged, write_report
from specdistill.report.html import environment
from specdistill.report.numbers import duration, interval, number, percent, size, times
from specdistill.report.tables import Cell, cell
from specdistill.statistics.records import PromptRecord

COMPARISON = "comparison.json"
HEAD = (
    "", "candidate", "speedup", "to the best", "acceptance length", "rate", "first", "c", "v", "predicted", "best K",
    "weights", "training", "long context", "lossless",
)  # fmt: skip


def write_comparison(folder: Path, comparison: Mapping[str, Any], records: Mapping[str, Sequence[PromptRecord]]) -> None:
    """Write each candidate's report to `<folder>/<name>`, then comparison.json, .md and .html, whole or not at all.

    records: candidate name -> the records of its prompts.
    """
    validate_comparison(comparison)
    for candidate in comparison["candidates"]:
        write_report(folder / candidate["name"], candidate["report"], records[candidate["name"]])
    with staged(folder) as staging:
        text = json.dumps(comparison, indent=2, ensure_ascii=False) + "\n"
        (staging / COMPARISON).write_text(text, encoding="utf-8")
        (staging / "comparison.md").write_text(to_markdown(comparison), encoding="utf-8")
        (staging / "comparison.html").write_text(to_html(comparison), encoding="utf-8")


def to_markdown(comparison: Mapping[str, Any]) -> str:
    """comparison.md: the table and the paragraph, as a page that fits a CI job's summary."""
    report = comparison["candidates"][0]["report"]
    sections = [
        f"# {markdown.plain(title(comparison))}",
        markdown.plain(phrases.shared_settings(report)),
        markdown.cells(tables.Table(HEAD, [row["cells"] for row in rows(comparison)])),
        "## Why they differ",
        markdown.plain(paragraph(comparison)),
        markdown.plain(FOOTNOTE),
    ]
    return "\n\n".join(sections) + "\n"


def to_html(comparison: Mapping[str, Any]) -> str:
    """comparison.html: one self-contained file. Every value is escaped: names come from outside."""
    reports = [(entry["name"], entry["report"]) for entry in _ranked(comparison)]
    html: str = (
        environment("specdistill.comparison")
        .get_template("comparison.html.j2")
        .render(
            comparison=comparison,
            report=reports[0][1],
            title=title(comparison),
            best=comparison["ranking"][0],
            head=HEAD[2:],
            rows=rows(comparison),
            topics=_topics(comparison),
            footnote=FOOTNOTE,
            speedups=charts.speedup_by_candidate(reports),
            pareto=charts.acceptance_against_cost(comparison["ranking"], dict(reports)),
            curves=charts.acceptance_while_training(_ranked(comparison)),
            breakdown=charts.time_per_token_by_candidate(reports),
        )
    )
    return html


def print_comparison(comparison: Mapping[str, Any], folder: Path) -> None:
    """The ranking, the paragraph and where the pages are, to stdout: a column for each candidate, three to 80 characters."""
    console, ranked = Console(highlight=False), rows(comparison)
    across = max(1, (console.width - 17) // 21)  # a column is as wide as its longest interval
    console.print(Text(title(comparison), style="italic"))
    for start in range(0, len(ranked), across):
        shown = ranked[start : start + across]
        grid = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
        grid.add_column(no_wrap=True, style="dim")
        for row in shown:
            grid.add_column(Text(row["name"]), overflow="fold")
        for name in ("speedup", "to the best", "acceptance length", "c", "weights", "training", "lossless"):
            grid.add_row(name, *(Text(_in_lines(row["cells"][HEAD.index(name)])) for row in shown))
        console.print(grid, "")
    console.print(Text(paragraph(comparison)), soft_wrap=True)
    console.print(Text(f"comparison: {folder / 'comparison.html'}", style="bold"), soft_wrap=True)


FOOTNOTE = (
    "Every prompt was decoded with each candidate and once without, interleaved; intervals are 95 %, from a bootstrap over prompts, and "
    "differences are paired. A round: tokens a round where some rounds drafted nothing, which the acceptance length leaves out. First: "
    "share of drafts whose first token was accepted. c: a draft step, v: a verification, in plain decoding steps. "
    "Predicted = acceptance length / (v + c·K). Weights: the draft's parameters."
)


def title(comparison: Mapping[str, Any]) -> str:
    target = comparison["candidates"][0]["report"]["target"]["model"]
    return f"{len(comparison['candidates'])} drafts for {target}"


def paragraph(comparison: Mapping[str, Any]) -> str:
    return " ".join(reason["message"] for reason in comparison["why"])


def rows(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table, best first; `link` leads to the candidate's report."""
    return [
        {
            "name": candidate["name"],
            "method": candidate["report"]["draft"]["method"],
            "link": f"{quote(candidate['name'])}/report.html",
            "best": entry["rank"] == 1,
            "cells": _cells(entry, candidate),
        }
        for entry, candidate in zip(comparison["ranking"], _ranked(comparison), strict=True)
    ]


def _ranked(comparison: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    by_name = {candidate["name"]: candidate for candidate in comparison["candidates"]}
    return [by_name[entry["name"]] for entry in comparison["ranking"]]


def _cells(entry: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[Cell, ...]:
    report, training = candidate["report"], candidate["training"]
    row, theory, draft = report["results"][0], report.get("theory", {}), report["draft"]
    length, context = number(row.get("mean_acceptance_length")), row.get("context_ratio_ci95")
    return (
        (str(entry["rank"]),),
        (entry["name"],),
        cell(times(row["speedup"]), interval(row, "speedup")),
        _to_best(entry),
        cell(length, interval(row, "mean_acceptance_length"), phrases.a_round(row)),
        (percent(row.get("acceptance_rate")),),
        (percent(entry["parts"]["first_position_rate"]),),
        (number(theory.get("c"), 3),),
        (number(theory.get("v")),),
        (times(row.get("predicted_speedup")),),
        (str(theory.get("best_k", "–")),),
        (f"{draft['parameters']:,}", size(draft["bytes"])),
        (duration(training["seconds"]), f"{training['steps']:,} steps") if training else ("–",),
        cell(percent(row.get("context_ratio")), " to ".join(map(percent, context)) if context else ""),
        ("yes" if entry["lossless"] else "NO",),
    )


def _to_best(entry: Mapping[str, Any]) -> Cell:
    if entry["rank"] == 1:
        return ("best",)
    difference = entry["difference_to_best"]["speedup"]
    note = " to ".join(f"{bound:+.1%}" for bound in difference["ci95"]) if difference["ci95"] else "too few prompts"
    return (f"{difference['change']:+.1%}" if entry["separable_from_best"] else "not separable", note)


def _in_lines(cell: Cell) -> str:
    return "\n".join((cell[0], *(f"({note})" for note in cell[1:])))


def _topics(comparison: Mapping[str, Any]) -> list[str]:
    """The paragraph in pieces: which is fastest, each other candidate's gap with its cause, then the rest by topic."""
    pieces: list[str] = []
    joined = {"cause": "gap", "coverage": "coverage", "context": "context", "lossless": "lossless"}  # with the topic before
    previous = ""
    for reason in comparison["why"]:
        if joined.get(reason["name"]) == previous:
            pieces[-1] = f"{pieces[-1]} {reason['message']}"
        else:
            pieces.append(reason["message"])
        previous = reason["name"]
    return pieces
