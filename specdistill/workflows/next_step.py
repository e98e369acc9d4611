"""Suggest the next command for a run: train, eval, gate, doctor, export or publish.

`specdistill` without a verb prints the suggestion for the newest run, and `specdistill train`
prints it when a draft is trained.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdistill.common.errors import UserError
from specdistill.methods import METHODS
from specdistill.recipe.load import list_consent_keys, merge_values
from specdistill.serving.engines import ENGINES

# Patterns of the file that each run writes first, `<train.output_dir>/run/recipe.yaml`. They cover
# the folders that the documentation and the bundled recipes use, below the working directory.
RECIPE_PATTERNS = ("*/run/recipe.yaml", "runs/*/run/recipe.yaml", "runs/*/*/run/recipe.yaml")
# Patterns of the report of a lookup, which has no run: `eval method=ngram output_dir=runs/lookup`.
LOOKUP_PATTERNS = ("*/report.json", "runs/*/report.json")
# What to type in a folder without runs. The commands are printed as they are, with their comments.
FIRST_COMMANDS = [
    (
        "specdistill demo                             # train a draft for the bundled target:"
        " offline, minutes on a CPU"
    ),
    "specdistill plan target=path/to/model        # choose a draft for your own target",
]

# A sentence about the state of a run, and the commands that continue it.
NextStep = tuple[str, list[str]]


def describe_next_step() -> NextStep:
    """Describe the newest run below the working directory, and how to continue it.

    Without a run of a draft, the newest measurement of a lookup is described. A lookup, such as
    `ngram`, is a method that is not trained, so it leaves no run.

    Returns:
        A sentence about the state of the run, and the commands that continue it. If there is no run
        and no measurement, the commands to begin with.

    Raises:
        UserError: for a recipe or a report that cannot be read.
    """
    # Find all runs by their file RUN/run/recipe.yaml. Take the run of a draft that was trained,
    # measured or judged last.
    runs = set()
    for pattern in RECIPE_PATTERNS:
        for path in Path().glob(pattern):
            runs.add(path.parent.parent)
    for run in sorted(runs, key=_find_last_change, reverse=True):
        recipe = merge_values([f"recipe={run / 'run' / 'recipe.yaml'}"])
        # A recipe without a target trained no draft, but the bundled target pico itself.
        if "target" in recipe:
            return describe_after(run, recipe)
    return _describe_measured_lookup() or ("There is no run here yet.", FIRST_COMMANDS)


def _describe_measured_lookup() -> NextStep | None:
    """Describe the newest measurement of a lookup; return None if no lookup was measured."""
    reports: set[Path] = set()
    for pattern in LOOKUP_PATTERNS:
        reports.update(Path().glob(pattern))
    if not reports:
        return None

    # This module imports scipy, so it is imported only here.
    from specdistill.evaluation.report.files import read_document

    # Take the newest finished report of a method that is not trained, which is a lookup.
    for path in sorted(reports, key=_read_modification_time, reverse=True):
        try:
            report = read_document(path)
        except UserError:
            continue  # Other programs write files of this name, too.
        method = report["draft"]["method"]
        if method in METHODS and not METHODS[method].is_trained and not report.get("incomplete"):
            return _describe_lookup(path.parent, report)
    return None


def _describe_lookup(folder: Path, report: dict[str, Any]) -> NextStep:
    """Describe the measurement of a lookup, with commands to serve it or to beat it.

    Args:
        folder: the folder of the report.
        report: the content of report.json.
    """
    # This module imports scipy, so it is imported only here.
    from specdistill.evaluation.report import phrases

    # The report names the target as `MODEL + ADAPTER` if it has an adapter, and the engine if one
    # was measured.
    model, _, adapter = report["target"]["model"].partition(" + ")
    revision = report["target"]["revision"]
    target = {"model": model, "revision": revision, "adapter": adapter}
    target_keys = _list_target_keys({"target": target})
    measured_engine = report.get("engine", {}).get("name")
    method = report["draft"]["method"]

    # Export the lookup for the measured engine if it can serve the method, and for vLLM otherwise.
    engine = "vllm"
    if measured_engine in ENGINES:
        # The keys of `serving()` are the engines that the method can be exported for. llama.cpp is
        # listed there under another name, `gguf`. The field `layouts` of an engine holds this other
        # name. It is empty for engines that are listed under their own name.
        export_name = ENGINES[measured_engine].layouts or measured_engine
        can_export = export_name in METHODS[method].serving()
        engine = measured_engine if can_export else "vllm"
    # `export` reads from the report how tokens are looked up (`drafting`). If the measured server
    # was running already, the report has no such key, because a server does not say how it looks
    # tokens up. `export` refuses such a report.
    report_keys = [f"report={folder}"] if "drafting" in report["settings"] else []
    row = report["results"][0]
    gain = phrases.format_gain(row) if "speedup" in row else "no speedup measured"
    return f"{folder} measured {method} lookup: {gain}. Serve it, or train a draft to beat it:", [
        _format_command(
            "export",
            f"method={method}",
            f"engine={engine}",
            *target_keys,
            *report_keys,
            f"output_dir={folder}-{engine}",
        ),
        # A plan is made for the target without an adapter.
        _format_command("plan", *_list_target_keys({"target": {**target, "adapter": None}})),
    ]


def describe_after(run: Path, recipe: Mapping[str, Any]) -> NextStep:
    """Describe the state of a run, and how to continue it.

    Args:
        run: the folder of the run.
        recipe: the content of the run's `recipe.yaml`.

    Returns:
        A sentence about the state of the run, and the commands that continue it.

    Raises:
        UserError: for a report that cannot be read.
    """
    # Collect the keys that every command for this run has to repeat. Consent keys, such as
    # target.trust_remote_code, allow code of others to run. A recipe file alone cannot set them, so
    # they have to be typed again. If the run was moved, or started in another folder, its recipe
    # names another output folder, so the folder has to be typed too.
    consent_keys = list_consent_keys(recipe)
    run_keys = [f"recipe={run / 'run' / 'recipe.yaml'}", *consent_keys]
    if recipe["train"]["output_dir"] != str(run):
        run_keys.append(f"train.output_dir={run}")

    # Without a draft the training has not finished.
    if not (run / "draft").is_dir():
        return f"Training of {run} is incomplete. Resume with (same launch=… as before):", [
            _format_command("train", *run_keys)
        ]

    # Without a report the draft is trained, but not measured. `eval` needs prompts if the recipe
    # names none. Only pico has a suite by default.
    has_prompts = recipe["eval"].get("suite") or recipe["target"]["model"] == "pico"
    eval_keys = run_keys if has_prompts else [*run_keys, "eval.suite=path/to/prompts.jsonl"]
    reports = _find_reports(run)
    if not reports:
        return f"{run} is trained and not measured. Next:", [_format_command("eval", *eval_keys)]

    # The newest report decides what comes next. This module imports scipy, so it is imported only
    # here.
    from specdistill.evaluation.report.files import read_report

    report, _ = read_report(reports[-1])
    verdict = report["gate"]["verdict"]
    if report.get("incomplete"):
        return f"Measurement of {run} is incomplete. Next:", [_format_command("eval", *eval_keys)]
    if verdict is None:
        return f"{run} has a report but no gate verdict. Next:", [
            _format_command("gate", f"report={run / 'report'}", "gates=default")
        ]
    if verdict == "failed":
        return _describe_failed_run(run, recipe, report)
    if verdict == "inconclusive":
        return _describe_inconclusive_run(run, report, run_keys, eval_keys)
    return _describe_passed_run(run, recipe)


def _describe_failed_run(run: Path, recipe: Mapping[str, Any], report: dict[str, Any]) -> NextStep:
    """Describe a run that failed its gate, with the command that looks for a fault in its draft."""
    # This module imports scipy, so it is imported only here.
    from specdistill.evaluation.report import phrases

    # Of the keys that allow code of others to run (consent keys), `doctor` has only the target's.
    consent_keys = [key for key in list_consent_keys(recipe) if key.startswith("target.")]
    command = _format_command(
        "doctor", f"draft={run / 'draft'}", *_list_target_keys(recipe), *consent_keys
    )
    reasons = phrases.describe_failed_rules(report)
    return f"{run} failed its gate. {reasons} Check the draft:", [command]


def _describe_inconclusive_run(
    run: Path, report: dict[str, Any], run_keys: list[str], eval_keys: list[str]
) -> NextStep:
    """Describe a run whose gate cannot decide, because too few prompts were measured.

    Args:
        run: the folder of the run.
        report: the newest report of the run.
        run_keys: the `key=value` arguments that name the run in any command.
        eval_keys: the same arguments for `eval`. If the recipe names no prompts, they also hold a
            placeholder for the path of a file of prompts.
    """
    # This module imports scipy, so it is imported only here.
    from specdistill.evaluation.report import phrases

    # A quick look is followed by the whole measurement. Otherwise, a rule of the gate that cannot
    # decide may have an estimate of how many prompts would be enough. If the suite has as many,
    # measure that many of them. If it has fewer, or if no rule has an estimate, the user needs a
    # larger suite.
    rules = report["gate"]["rules"]
    estimates = [rule["prompts_needed"] for rule in rules if rule["prompts_needed"]]
    if report["settings"].get("quick"):
        command = _format_command("eval", *eval_keys, "eval.quick=false")
    elif estimates and max(estimates) <= report["suite"]["num_prompts"]:
        command = _format_command("eval", *eval_keys, f"eval.num_prompts={max(estimates)}")
    else:
        command = _format_command("eval", *run_keys, "eval.suite=path/to/more/prompts.jsonl")
    return f"The gate of {run} is inconclusive. {phrases.describe_undecided(report)}", [command]


def _describe_passed_run(run: Path, recipe: Mapping[str, Any]) -> NextStep:
    """Describe a run that passed its gate, with the commands that export or publish its draft."""
    export_command = _format_command(
        "export",
        f"draft={run / 'draft'}",
        "engine=vllm",
        *_list_target_keys(recipe),
        f"output_dir={run / 'vllm'}",
    )
    # If the recipe names no Hub repository to publish to, the user has to replace a placeholder.
    # `baseline=none` says that this is the first release of the repository, so there is no earlier
    # one to compare with. If there is one, `publish` refuses `none`.
    repository_keys = [] if recipe.get("publish", {}).get("repo") else ["repo=org/name"]
    publish_command = _format_command("publish", f"run={run}", *repository_keys, "baseline=none")
    return f"{run} passed its gate:", [export_command, publish_command]


def _list_target_keys(recipe: Mapping[str, Any]) -> list[str]:
    """Return the `key=value` arguments that name the target of a recipe.

    Commands that are typed without `recipe=`, such as `doctor`, need these arguments.
    """
    target = recipe["target"]
    keys = [f"target={target['model']}"]
    for name in ("revision", "adapter"):
        if target.get(name):
            keys.append(f"target.{name}={target[name]}")
    return keys


def _find_reports(run: Path) -> list[Path]:
    """Return the reports of a run, the oldest first.

    `eval` writes `report/report.json`, and `gate` writes `report/NAME/report.json` for each gate.
    """
    paths = [*run.glob("report/report.json"), *run.glob("report/*/report.json")]
    return sorted(paths, key=_read_modification_time)


def _find_last_change(run: Path) -> float:
    """Return when a run was last trained, measured or judged, in seconds since the epoch."""
    paths = [run / "run" / "recipe.yaml", *run.glob("draft/config.json"), *_find_reports(run)]
    return max(map(_read_modification_time, paths))


def _read_modification_time(path: Path) -> float:
    """Return when a file was last written, in seconds since the epoch."""
    return path.stat().st_mtime


def _format_command(verb: str, *keys: str) -> str:
    """Return a command as a line that can be pasted into a shell."""
    return shlex.join(["specdistill", verb, *keys])
