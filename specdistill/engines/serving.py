"""SERVE.md: how to serve what was exported, and which acceptance to expect."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import specdistill
from specdistill.engines.engine import Engine, Served
from specdistill.errors import UserError

DEFAULT_NUM_TOKENS = 3  # drafted in a round, where no report says how many were measured


def serve_md(engine: Engine, served: Served, report: Mapping[str, Any] | None) -> str:
    """The whole file. `report`: a report.json of the draft, if there is one."""
    return f"""# How to serve this draft

Method {served.method}, written by specdistill {specdistill.__version__} for {engine.title} ({engine.versions}).
Paths and names are those of the machine it was written on{"" if served.target else "; TARGET stands for the draft's target"}.

```bash
{engine.serve_command(served)}
```

## What to expect

{expectation(report)}

{engine.counters}
"""


def expectation(report: Mapping[str, Any] | None) -> str:
    """The acceptance that was measured, and under which settings."""
    if report is None:
        return "Not measured: no report.json was named by `report=` or lay in `../report` beside the draft. `specdistill eval` writes one."
    row, settings = report["results"][0], report["settings"]
    length = row.get("mean_acceptance_length")
    if length is None:
        return "Not measured: the report has no acceptance length."
    low, high = row.get("mean_acceptance_length_ci95") or (length, length)
    positions = " / ".join(f"{rate:.0%}" for rate in row["acceptance_rate_per_position"])
    drafted = f"{settings['num_speculative_tokens']} draft tokens in a chain at temperature {settings['temperature']:g}"
    where = f"{row['num_prompts']} prompts of suite {row['suite']}"
    target = f"{report['target']['model']} in {report['target']['dtype']}"
    return f"""Acceptance length **{length:.2f}** (95 % interval {low:.2f} to {high:.2f}), the target's own token included; accepted by
position: {positions}. Measured in transformers with {drafted}, on {where},
target {target}. Other prompts and temperatures give other numbers, and trees more."""


def find_report(draft: Path, report: Path | None, method: str) -> dict[str, Any] | None:
    """A draft's report.json: the file or folder that was named, or `<run>/report` of `<run>/draft`; None where there is none.

    Raises UserError when it was named and is not there, cannot be read, or is the report of a draft of another method.
    """
    path = report or draft.absolute().parent / "report"
    path = path / "report.json" if path.is_dir() else path
    if report is None and not path.is_file():
        return None
    expected = f"the report.json of a draft of method {method}"
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        measured = read["draft"]["method"]
        expectation(read)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError("report", got=f"{path} ({error or type(error).__name__})", expected=expected) from error
    if measured != method:
        raise UserError("report", got=f"{path}, of a draft of method {measured}", expected=expected)
    return read
