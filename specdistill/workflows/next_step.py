"""Suggest the next command for a run: train, eval, gate, doctor, export or publish.

`specdistill` without a verb prints the suggestion for the newest run, and `specdistill train`
prints it when a draft is trained.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdistill.recipe.load import list_consent_keys, merge_values

# Patterns of the file that each run writes first, `<train.output_dir>/run/recipe.yaml`. They cover
# the folders that the documentation and the bundled recipes use, below the working directory.
RUNS = ("*/run/recipe.yaml", "runs/*/run/recipe.yaml", "runs/*/*/run/recipe.yaml")
# What to type in a folder without runs. The commands are printed as they are, with their comments.
FIRST_COMMANDS = [
    (
        "specdistill demo                             # a draft for the target that ships: offline,"
        " minutes on a CPU"
    ),
    "specdistill plan target=path/to/model        # which draft a target of yours should get",
]


def describe_next_step() -> tuple[str, list[str]]:
    """Describe the newest run below the working directory, and how to continue it.

    Returns:
        A sentence about the state of the run, and the commands that continue it.

    Raises:
        UserError: for a recipe or a report that cannot be read.
    """
    # Find all runs, and take the one that was trained, measured or judged last.
    runs = set()
    for place in RUNS:
        for path in Path().glob(place):
            runs.add(path.parent.parent)
    for run in sorted(runs, key=_find_last_change, reverse=True):
        # A recipe without a target trained no draft, but the bundled target pico itself.
        if "target" in (recipe := merge_values([f"recipe={run / 'run' / 'recipe.yaml'}"])):
            return describe_after(run, recipe)
    return "There is no run here yet.", FIRST_COMMANDS


def describe_after(run: Path, recipe: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Describe the state of a run, and how to continue it.

    Args:
        run: the folder of the run.
        recipe: the content of the run's `recipe.yaml`.

    Returns:
        A sentence about the state of the run, and the commands that continue it.

    Raises:
        UserError: for a report that cannot be read.
    """
    # Some keys only act on the command line, because they allow code of others to run. The commands
    # repeat those that the run was started with. `doctor` takes only those of the target.
    command_keys = [
        f"recipe={run / 'run' / 'recipe.yaml'}",
        *(consent_keys := list_consent_keys(recipe)),
    ]
    code = [argument for argument in consent_keys if argument.startswith("target.")]
    # A run that was started from another folder, or moved, records another output folder.
    if recipe["train"]["output_dir"] != str(run):
        command_keys.append(f"train.output_dir={run}")

    # Without a draft the training has not finished.
    if not (run / "draft").is_dir():
        return f"Training of {run} is incomplete. Resume with (same launch=… as before):", [
            _format_command("train", *command_keys)
        ]

    # The keys that name the target in other commands, and a placeholder for the prompts if the
    # recipe names no suite. Only pico has a suite by default.
    expected_settings = {"target": recipe["target"]["model"]}
    expected_settings |= {
        f"target.{key}": value
        for key in ("revision", "adapter")
        if (value := recipe["target"].get(key))
    }
    target = [f"{key}={value}" for key, value in expected_settings.items()]
    names_prompts = recipe["eval"].get("suite") or expected_settings["target"] == "pico"
    prompts = [] if names_prompts else ["eval.suite=path/to/prompts.jsonl"]

    # Without a report the draft is trained, but not measured.
    reports = _find_reports(run)
    if not reports:
        return f"{run} is trained and not measured. Next:", [
            _format_command("eval", *command_keys, *prompts)
        ]

    # These modules import scipy, so they are imported only here.
    from specdistill.evaluation.report import (
        phrases,
    )
    from specdistill.evaluation.report.files import read_report

    # The verdict of the newest report decides what comes next.
    report, _ = read_report(reports[-1])
    verdict = report["gate"]["verdict"]
    if report.get("incomplete"):
        return f"Measurement of {run} is incomplete. Next:", [
            _format_command("eval", *command_keys, *prompts)
        ]
    if verdict is None:
        return f"{run} has a report but no gate verdict. Next:", [
            _format_command("gate", f"report={run / 'report'}", "gates=default")
        ]

    # After a failed gate, `doctor` looks for a fault of the draft.
    if verdict == "failed":
        return f"{run} failed its gate. {phrases.describe_failed_rules(report)} Check the draft:", [
            _format_command("doctor", f"draft={run / 'draft'}", *target, *code)
        ]

    # After an inconclusive gate, measure more prompts. Each rule estimates how many it needs. If
    # the suite has fewer prompts, or no estimate exists, another suite is needed.
    if verdict == "inconclusive":
        needed = [
            rule["prompts_needed"] for rule in report["gate"]["rules"] if rule["prompts_needed"]
        ]
        enough = bool(needed) and max(needed) <= report["suite"]["num_prompts"]
        more = (
            [*prompts, f"eval.num_prompts={max(needed)}"]
            if enough
            else ["eval.suite=path/to/more/prompts.jsonl"]
        )
        return f"The gate of {run} is inconclusive. {phrases.describe_undecided(report)}", [
            _format_command("eval", *command_keys, *more)
        ]

    # After a passed gate, the draft can be exported or published.
    repository = [] if recipe.get("publish", {}).get("repo") else ["repo=org/name"]
    return f"{run} passed its gate:", [
        _format_command(
            "export", f"draft={run / 'draft'}", "engine=vllm", *target, f"output_dir={run / 'vllm'}"
        ),
        _format_command("publish", f"run={run}", *repository, "baseline=none"),
    ]


def _find_reports(run: Path) -> list[Path]:
    """Return the reports of a run, the oldest first.

    `eval` writes `report/report.json`, and `gate` writes `report/NAME/report.json` for each gate.
    """
    return sorted(
        [*run.glob("report/report.json"), *run.glob("report/*/report.json")], key=_describe_age
    )


def _find_last_change(run: Path) -> float:
    """Return when a run was last trained, measured or judged, in seconds since the epoch."""
    return max(
        map(
            _describe_age,
            [run / "run" / "recipe.yaml", *run.glob("draft/config.json"), *_find_reports(run)],
        )
    )


def _describe_age(path: Path) -> float:
    """Return when a file was last written, in seconds since the epoch."""
    return path.stat().st_mtime


def _format_command(verb: str, *keys: str) -> str:
    """Return a command as a line that can be pasted into a shell."""
    return shlex.join(["specdistill", verb, *keys])
