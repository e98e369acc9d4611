"""`specdistill table`: a row for each report, for a paper, a spreadsheet or a page."""

import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from specdistill.errors import ExitCode, UserError
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.report.files import REPORT, read_document
from specdistill.report.phrases import Report, between, is_lossless, number, times
from specdistill.report.text import plain, table
from specdistill.terminal import result

HEAD = ("method", "draft", "target", "suite", "K", "acceptance length", "speedup", "lossless", "verdict")
LATEX = {**{letter: f"\\{letter}" for letter in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
LATEX |= {"^": r"\textasciicircum{}", "×": r"$\times$", "–": "--"}


class TableOptions(Section):
    reports: list[str] = option(..., "report.json files or their folders, or folders of these; also without reports=")
    format: Literal["markdown", "csv", "latex"] = option("markdown", "csv: numbers and bounds in columns; latex: for booktabs")


def print_table(given: Sequence[str]) -> int:
    places = [place for argument in given if "=" not in argument and argument[0] != "-" for place in argument.split(",")]
    keys = [argument for argument in given if "=" in argument or argument[0] == "-"]
    options = load_recipe(TableOptions, [*keys, *([f"reports={json.dumps(places)}"] if places else [])])
    reports = [read_document(path, "reports") for place in options.reports for path in _reports(Path(place))]
    rows = [_numbers(report) for report in reports]
    if options.format == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif options.format == "latex":
        print(_latex([_cells(report) for report in reports]))
    else:
        print(table(HEAD, ([plain(cell) for cell in _cells(report)] for report in reports)))
    result(rows)
    return ExitCode.DONE


def _reports(place: Path) -> Iterator[Path]:
    """A report.json; that of a folder; those of its folders, e.g. of a run or a comparison."""
    found = [place] if place.is_file() or (place / REPORT).is_file() else sorted(place.glob(f"*/{REPORT}"))
    if not found:
        raise UserError("reports", got=str(place), expected="a report.json, its folder or a folder of such")
    yield from found


def _cells(report: Report) -> list[str]:
    row, numbers = report["results"][0], _numbers(report)
    shown = {True: "yes", False: "NO", None: "–"}
    length = number(row.get("mean_acceptance_length")) + between(row, "mean_acceptance_length")
    identity = [str(numbers[name]) for name in HEAD[:5]]
    faster = times(row.get("speedup")) + between(row, "speedup")
    return [*identity, length, faster, shown[numbers["lossless"]], numbers["verdict"] or "–"]


def _numbers(report: Report) -> dict[str, Any]:
    """Of the whole suite in the main configuration; None for what was not measured."""
    row, draft = report["results"][0], report["draft"]
    values = {"acceptance_length": "mean_acceptance_length", "speedup": "speedup"}
    ends = {name: row.get(f"{metric}_ci95", (None, None)) for name, metric in values.items()}
    return {
        "method": draft["method"],
        "draft": "@".join(filter(None, (draft["model"], draft["revision"]))) or draft["method"],
        "target": report["target"]["model"],
        "suite": row["suite"],
        "K": row["num_speculative_tokens"],
        **{
            key: number
            for name, metric in values.items()
            for key, number in zip((name, f"{name}_low", f"{name}_high"), (row.get(metric), *ends[name]), strict=True)
        },
        "lossless": is_lossless(report),
        "verdict": report["gate"]["verdict"],
    }


def _latex(rows: Sequence[Sequence[str]]) -> str:
    lines = [
        " & ".join(re.sub(r"[&%$#_{}\\~^×–]", lambda letter: LATEX[letter[0]], cell) for cell in row) for row in (HEAD, *rows)
    ]
    head, *body = (f"{line} \\\\" for line in lines)
    return "\n".join((r"\begin{tabular}{llllrllll}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"))
