"""`specdistill table`: a row for each report, for a page; with `--json` its numbers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdistill.errors import ExitCode, UserError
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.report.files import REPORT, read_document
from specdistill.report.phrases import Report, between, is_lossless, number, times
from specdistill.report.text import plain, table
from specdistill.terminal import result

HEAD = (
    "method",
    "draft",
    "target",
    "suite",
    "K",
    "acceptance length",
    "speedup",
    "lossless",
    "verdict",
)


class TableOptions(Section):
    reports: list[str] = option(
        ..., "report.json files or their folders, or folders of these; also without reports="
    )


def print_table(given: Sequence[str]) -> int:
    places = [
        place
        for argument in given
        if "=" not in argument and argument[0] != "-"
        for place in argument.split(",")
    ]
    keys = [argument for argument in given if "=" in argument or argument[0] == "-"]
    options = load_recipe(
        TableOptions, [*keys, *([f"reports={json.dumps(places)}"] if places else [])]
    )
    reports = [
        read_document(path, "reports")
        for place in options.reports
        for path in _reports(Path(place))
    ]
    print(table(HEAD, ([plain(cell) for cell in _cells(report)] for report in reports)))
    result([*map(_numbers, reports)])
    return ExitCode.DONE


def _reports(place: Path) -> Sequence[Path]:
    """A report.json; that of a folder; those of its folders, e.g. of a run or a comparison."""
    found = (
        [place]
        if place.is_file() or (place / REPORT).is_file()
        else sorted(place.glob(f"*/{REPORT}"))
    )
    if not found:
        raise UserError(
            "reports", got=str(place), expected="a report.json, its folder or a folder of such"
        )
    return found


def _numbers(report: Report) -> dict[str, Any]:
    """Of the whole suite in the main configuration; None for what was not measured."""
    row, draft = report["results"][0], report["draft"]
    numbers = {"acceptance_length": "mean_acceptance_length", "speedup": "speedup"}
    values = {
        name: (row.get(metric), *row.get(f"{metric}_ci95", (None, None)))
        for name, metric in numbers.items()
    }
    return {
        "method": draft["method"],
        "draft": "@".join(filter(None, (draft["model"], draft["revision"]))) or draft["method"],
        "target": report["target"]["model"],
        "suite": row["suite"],
        "K": row["num_speculative_tokens"],
        **{
            f"{name}{end}": value
            for name, of in values.items()
            for end, value in zip(("", "_low", "_high"), of, strict=True)
        },
        "lossless": is_lossless(report),
        "verdict": report["gate"]["verdict"],
    }


def _cells(report: Report) -> list[str]:
    numbers, row = _numbers(report), report["results"][0]
    length = f"{number(row.get('mean_acceptance_length'))}{between(row, 'mean_acceptance_length')}"
    speedup = f"{times(row.get('speedup'))}{between(row, 'speedup')}"
    lossless = {True: "yes", False: "NO", None: "–"}[numbers["lossless"]]
    return [
        *(str(numbers[name]) for name in HEAD[:5]),
        length,
        speedup,
        lossless,
        numbers["verdict"] or "–",
    ]
