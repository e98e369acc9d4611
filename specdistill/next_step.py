"""What to type next, from the runs in a folder: `specdistill` without a verb prints it."""

import shlex
from pathlib import Path
from typing import Any

from specdistill.recipe.load import consent, merged

# Where runs are: `train.output_dir`, as commands and recipes name it.
RUNS = ("*/run/recipe.yaml", "runs/*/run/recipe.yaml", "runs/*/*/run/recipe.yaml")
TO_START = [
    "specdistill demo                             # a draft for the target that ships: offline, minutes on a CPU",
    "specdistill plan target=path/to/model        # which draft a target of yours should get",
]


def next_step() -> tuple[str, list[str]]:
    """The state of the run here that was worked on last, in a sentence, and the commands that continue it.

    Raises UserError for a recipe or a report that cannot be read.
    """
    runs = {path.parent.parent for place in RUNS for path in Path().glob(place)}
    for run in sorted(runs, key=_worked_on, reverse=True):
        if "target" in (
            recipe := merged([f"recipe={run / 'run' / 'recipe.yaml'}"])
        ):  # else it trained a target
            return after(run, recipe)
    return "There is no run here yet.", TO_START


def after(run: Path, recipe: dict[str, Any]) -> tuple[str, list[str]]:
    """The same of a run with this recipe. Raises UserError for a report that cannot be read."""
    again = [f"recipe={run / 'run' / 'recipe.yaml'}", *(given := consent(recipe))]
    code = [argument for argument in given if argument.startswith("target.")]
    if recipe["train"]["output_dir"] != str(run):  # it was trained from another folder, or moved
        again.append(f"train.output_dir={run}")
    if not (run / "draft").is_dir():
        return f"Training of {run} is incomplete. Resume with (same launch=… as before):", [
            _command("train", *again)
        ]

    wanted = {"target": recipe["target"]["model"]}
    wanted |= {
        f"target.{key}": value
        for key in ("revision", "adapter")
        if (value := recipe["target"].get(key))
    }
    target = [f"{key}={value}" for key, value in wanted.items()]
    names_prompts = recipe["eval"].get("suite") or wanted["target"] == "pico"
    prompts = [] if names_prompts else ["eval.suite=path/to/prompts.jsonl"]
    if not (reports := _reports(run)):
        return f"{run} is trained and not measured. Next:", [_command("eval", *again, *prompts)]

    from specdistill.report import phrases  # here, and not above, because it is slow to import
    from specdistill.report.files import read_report

    report, _ = read_report(reports[-1])
    verdict = report["gate"]["verdict"]
    if report.get("incomplete"):
        return f"Measurement of {run} is incomplete. Next:", [_command("eval", *again, *prompts)]
    if verdict is None:
        return f"{run} has a report but no gate verdict. Next:", [
            _command("gate", f"report={run / 'report'}", "gates=default")
        ]
    if verdict == "failed":
        message = f"{run} failed its gate. {phrases.failed_rules(report)} Check the draft:"
        return message, [_command("doctor", f"draft={run / 'draft'}", *target, *code)]
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
        return f"The gate of {run} is inconclusive. {phrases.undecided(report)}", [
            _command("eval", *again, *more)
        ]
    repository = [] if recipe.get("publish", {}).get("repo") else ["repo=org/name"]
    return f"{run} passed its gate:", [
        _command(
            "export", f"draft={run / 'draft'}", "engine=vllm", *target, f"output_dir={run / 'vllm'}"
        ),
        _command("publish", f"run={run}", *repository, "baseline=none"),
    ]


def _reports(run: Path) -> list[Path]:
    """The reports that `eval` and `gate` wrote for a run, the oldest first."""
    return sorted([*run.glob("report/report.json"), *run.glob("report/*/report.json")], key=_age)


def _worked_on(run: Path) -> float:
    """When a run was trained, measured or judged last."""
    return max(
        map(_age, [run / "run" / "recipe.yaml", *run.glob("draft/config.json"), *_reports(run)])
    )


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _command(verb: str, *keys: Any) -> str:
    return shlex.join(["specdistill", verb, *keys])
