"""A comparison's folder: comparison.json, the pages made of it, and each candidate's own report in a folder of its name."""

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
from specdistill.report import charts, wording
from specdistill.report.files import staged, write_report
from specdistill.report.html import environment
from specdistill.report.markdown import plain, table
from specdistill.report.wording import between, number, percent, times
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
        f"# {plain(title(comparison))}",
        plain(wording.shared_settings(report)),
        table(HEAD, ([plain(" ".join(cell)) for cell in row["cells"]] for row in rows(comparison))),
        "## Why they differ",
        plain(paragraph(comparison)),
        plain(FOOTNOTE),
    ]
    return "\n\n".join(sections) + "\n"


def to_html(comparison: Mapping[str, Any]) -> str:
    """comparison.html: one file that needs nothing else. Names come from outside and are escaped."""
    reports = [(entry["name"], entry["report"]) for entry in _ranked(comparison)]
    html: str = (
        environment("specdistill.comparison")
        .get_template("comparison.html.j2")
        .render(
            comparison=comparison,
            report=reports[0][1],
            row=reports[0][1]["results"][0],
            words=wording,
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
            width=charts.WIDTH,
        )
    )
    return html


def print_comparison(comparison: Mapping[str, Any], folder: Path) -> None:
    """The ranking from left to right, the paragraph, and where the pages are. Text goes to stdout.

    A candidate is a column as wide as its longest interval, so that three fit 80 characters; the others follow below.
    """
    console, ranked = Console(highlight=False), rows(comparison)
    across = max(1, (console.width - 17) // 21)
    console.print(Text(title(comparison), style="italic"))
    for start in range(0, len(ranked), across):
        shown = ranked[start : start + across]
        grid = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
        grid.add_column(no_wrap=True, style="dim")
        for row in shown:
            grid.add_column(Text(row["name"]), overflow="fold")
        for name in ("speedup", "to the best", "acceptance length", "c", "weights", "training", "lossless"):
            grid.add_row(name, *(Text("\n".join(row["cells"][HEAD.index(name)])) for row in shown))
        console.print(grid, "")
    console.print(Text(paragraph(comparison)), soft_wrap=True)
    console.print(Text(f"comparison: {folder / 'comparison.html'}", style="bold"), soft_wrap=True)


FOOTNOTE = (
    "Every prompt was decoded with each candidate and once without, in turn; intervals are 95 %, from a bootstrap over prompts, and "
    "differences are paired. A round: the tokens that a round yields where some drafted nothing, which the acceptance length leaves "
    "out. First: share of drafts whose first token was accepted. c: a draft step, v: a verification, in plain "
    "decoding steps. Predicted = acceptance length / (v + c·K). Weights: the draft's parameters."
)


def title(comparison: Mapping[str, Any]) -> str:
    target = comparison["candidates"][0]["report"]["target"]["model"]
    return f"{len(comparison['candidates'])} drafts for {target}"


def paragraph(comparison: Mapping[str, Any]) -> str:
    return " ".join(reason["message"] for reason in comparison["why"])


def rows(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table, best first. A cell is its value and, where there is one, its interval; `link` leads to the candidate's report."""
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


def _cells(entry: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[tuple[str, ...]]:
    report, training = candidate["report"], candidate["training"]
    row, theory, draft = report["results"][0], report.get("theory", {}), report["draft"]
    return [
        (str(entry["rank"]),),
        (entry["name"],),
        _with_interval(times(row["speedup"]), row, "speedup"),
        _to_best(entry),
        (
            *_with_interval(number(row.get("mean_acceptance_length")), row, "mean_acceptance_length"),
            *filter(None, [wording.a_round(row)]),
        ),
        (percent(row.get("acceptance_rate")),),
        (percent(entry["parts"]["first_position_rate"]),),
        (number(theory.get("c"), 3),),
        (number(theory.get("v")),),
        (times(row.get("predicted_speedup")),),
        (str(theory.get("best_k", "–")),),
        (f"{draft['parameters']:,}", f"({wording.size(draft['bytes'])})"),
        (wording.duration(training["seconds"]), f"({training['steps']:,} steps)") if training else ("–",),
        _context(row),
        ("yes" if entry["lossless"] else "NO",),
    ]


def _with_interval(shown: str, row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    ends = between(row, name).strip()
    return (shown, ends) if ends else (shown,)


def _context(row: Mapping[str, Any]) -> tuple[str, ...]:
    ends = row.get("context_ratio_ci95")
    shown = percent(row.get("context_ratio"))
    return (shown, f"({percent(ends[0])} to {percent(ends[1])})") if ends else (shown,)


def _to_best(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if entry["rank"] == 1:
        return ("best",)
    difference = entry["difference_to_best"]["speedup"]
    if not entry["separable_from_best"]:
        return ("not separable", _percents(difference["ci95"]) if difference["ci95"] else "too few prompts")
    return (f"{difference['change']:+.1%}", _percents(difference["ci95"]))


def _percents(ends: Sequence[float]) -> str:
    return f"({ends[0]:+.1%} to {ends[1]:+.1%})"


def _topics(comparison: Mapping[str, Any]) -> list[str]:
    """The paragraph in the pieces that a page sets apart: who is fastest, then each other candidate with its cause, then the rest."""
    pieces: list[str] = []
    joined = {"cause": "gap", "coverage": "coverage", "context": "context", "lossless": "lossless"}
    before = ""
    for reason in comparison["why"]:
        if joined.get(reason["name"]) == before:
            pieces[-1] = f"{pieces[-1]} {reason['message']}"
        else:
            pieces.append(reason["message"])
        before = reason["name"]
    return pieces
