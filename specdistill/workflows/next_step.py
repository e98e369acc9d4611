"""Say what to type next, from the runs in a folder; `specdistill` without a verb prints it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdistill.recipe.load import list_consent_keys, merge_values

# Where runs are: `train.output_dir`, as commands and recipes name it, below the working directory.
RUNS = ("*/run/recipe.yaml", "runs/*/run/recipe.yaml", "runs/*/*/run/recipe.yaml")
FIRST_COMMANDS = [
    (
        "specdistill demo                             # a draft for the target that ships: offline,"
        " minutes on a CPU"
    ),
    "specdistill plan target=path/to/model        # which draft a target of yours should get",
]


def describe_next_step() -> tuple[str, list[str]]:
    """Describe the run in this folder that was worked on last, and how to continue it.

    Returns:
        A sentence about the state of the run, and the commands that continue it.

    Raises:
        UserError: for a recipe or a report that cannot be read.
    """
    runs = set()
    for place in RUNS:
        for path in Path().glob(place):
            runs.add(path.parent.parent)
    for run in sorted(runs, key=_find_last_change, reverse=True):
        # A recipe without a target trained a target itself, such as pico.
        if "target" in (recipe := merge_values([f"recipe={run / 'run' / 'recipe.yaml'}"])):
            return describe_after(run, recipe)
    return "There is no run here yet.", FIRST_COMMANDS


def describe_after(run: Path, recipe: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Describe a run with this recipe, and how to continue it.

    Returns:
        A sentence about the state of the run, and the commands that continue it.

    Raises:
        UserError: for a report that cannot be read.
    """
    # Code of others runs only if the user consented on the command line.
    command_keys = [
        f"recipe={run / 'run' / 'recipe.yaml'}",
        *(consent_keys := list_consent_keys(recipe)),
    ]
    code = [argument for argument in consent_keys if argument.startswith("target.")]
    # The run was trained from another folder, or moved.
    if recipe["train"]["output_dir"] != str(run):
        command_keys.append(f"train.output_dir={run}")

    # A run without a draft is to be resumed.
    if not (run / "draft").is_dir():
        return f"Training of {run} is incomplete. Resume with (same launch=… as before):", [
            _format_command("train", *command_keys)
        ]

    # Name the target, and the prompts if the recipe names none.
    expected_settings = {"target": recipe["target"]["model"]}
    expected_settings |= {
        f"target.{key}": value
        for key in ("revision", "adapter")
        if (value := recipe["target"].get(key))
    }
    target = [f"{key}={value}" for key, value in expected_settings.items()]
    names_prompts = recipe["eval"].get("suite") or expected_settings["target"] == "pico"
    prompts = [] if names_prompts else ["eval.suite=path/to/prompts.jsonl"]

    # A trained run is to be measured.
    reports = _find_reports(run)
    if not reports:
        return f"{run} is trained and not measured. Next:", [
            _format_command("eval", *command_keys, *prompts)
        ]

    # Imported here, and not above, because it is slow to import.
    from specdistill.evaluation.report import (
        phrases,
    )
    from specdistill.evaluation.report.files import read_report

    # The report that was written last says what comes next.
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

    # A run that failed is to be examined.
    if verdict == "failed":
        return f"{run} failed its gate. {phrases.describe_failed_rules(report)} Check the draft:", [
            _format_command("doctor", f"draft={run / 'draft'}", *target, *code)
        ]

    # An inconclusive run needs more prompts.
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

    # A run that passed is to be published.
    repository = [] if recipe.get("publish", {}).get("repo") else ["repo=org/name"]
    return f"{run} passed its gate:", [
        _format_command(
            "export", f"draft={run / 'draft'}", "engine=vllm", *target, f"output_dir={run / 'vllm'}"
        ),
        _format_command("publish", f"run={run}", *repository, "baseline=none"),
    ]


def _find_reports(run: Path) -> list[Path]:
    """Find the reports that `eval` and `gate` wrote for a run, the oldest first."""
    return sorted(
        [*run.glob("report/report.json"), *run.glob("report/*/report.json")], key=_describe_age
    )


def _find_last_change(run: Path) -> float:
    """Return when a run was last trained, measured or judged, as a time of its files."""
    return max(
        map(
            _describe_age,
            [run / "run" / "recipe.yaml", *run.glob("draft/config.json"), *_find_reports(run)],
        )
    )


def _describe_age(path: Path) -> float:
    return path.stat().st_mtime


def _format_command(verb: str, *keys: str) -> str:
    return shlex.join(["specdistill", verb, *keys])
