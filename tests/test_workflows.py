"""The CI workflow that judges releases: it is YAML, and every command in it is one that exists, with keys that are accepted."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdistill.cli import VERBS
from specdistill.command import spell_out
from specdistill.gate.rules import load_gate
from specdistill.methods.recipe import Recipe
from specdistill.project import ROOT, SUITES
from specdistill.recipe.load import load_recipe
from tests.scripts import load_script

PATH = ROOT / ".github" / "workflows" / "release-gate.yml"
WORKFLOW = yaml.safe_load(PATH.read_text(encoding="utf-8"))
VALUES = {
    "vars.RELEASE_TARGET": "org/target",
    "vars.RELEASE_METHOD": "eagle3",
    "inputs.draft || vars.RELEASE_DRAFT": "org/draft@v2",
    "vars.RELEASE_SUITE || 'spec-bench'": "spec-bench",
    "inputs.baseline || vars.RELEASE_BASELINE": "org/draft@v1",
    "secrets.HF_TOKEN": "secret",
    "github.token": "token",
    "github.event.pull_request.html_url": "https://github.com/org/repo/pull/7",
}
# Stands in for every program: it writes down what the shell gave it.
RECORDER = """#!/usr/bin/env python3
import json, pathlib, sys
with open({record!r}, "a") as file:
    print(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), file=file)
"""
PROGRAMS = ("make", "gh", ".venv/bin/specdistill")


def filled_in(environment: dict[str, str]) -> dict[str, str]:
    """An `env` section as GitHub would fill it in; an expression that is not in VALUES is an error here."""
    return {name: re.sub(r"\$\{\{ (.+?) \}\}", lambda found: VALUES[found[1]], value) for name, value in environment.items()}


def commands(job: dict[str, Any], folder: Path) -> list[list[str]]:
    """What every step of a job runs, as the shell passes it on: the program's name and its arguments."""
    record = folder / "commands"
    for name in PROGRAMS:
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(RECORDER.format(record=str(record)))
        program.chmod(0o755)
    for report in ("runs/gate/report", "runs/release"):
        (folder / report).mkdir(parents=True)
        (folder / report / "report.md").write_text("# Passed\n")
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    for step in job["steps"]:
        if "run" in step:
            environment = path | filled_in(job.get("env", {})) | filled_in(step.get("env", {}))
            subprocess.run(["bash", "-euo", "pipefail", "-c", step["run"]], cwd=folder, check=True, env=environment)
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[str]]]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in WORKFLOW["jobs"]}
    return {name: (folders[name], commands(job, folders[name])) for name, job in WORKFLOW["jobs"].items()}


def recipe_of(command: list[str]) -> Recipe:
    """The recipe that a command's keys stand for; raises UserError for one that is not accepted."""
    script = load_script("eval/run.py")
    first = [] if any(key.startswith("recipe=") for key in command) else ["train.output_dir=runs/eval"]
    return load_recipe(Recipe, [*first, *(spell_out(key, script.SHORTHANDS) for key in command)])


def test_every_command_exists_and_takes_its_keys(run: dict[str, tuple[Path, list[list[str]]]]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = [command for _, job in run.values() for command in job]
    assert {command[0] for command in ran} == {"make", "gh", "specdistill"}
    for program, verb, *keys in ran:
        if program == "make":
            assert verb in targets
        elif program == "specdistill":
            assert verb in VERBS
            recipe = recipe_of(keys)
            load_gate(recipe.gate)
            assert (SUITES / f"{recipe.eval.suite}.yaml").is_file()


def test_pico_is_trained_and_judged_in_one_folder_and_its_report_is_shown(run: dict[str, tuple[Path, list[list[str]]]]) -> None:
    folder, ran = run["pico"]
    train, measure = (recipe_of(command[2:]) for command in ran if command[0] == "specdistill")
    assert train == measure and train.gate == "pico"
    report = f"{train.train['output_dir']}/report"
    assert (folder / "summary.md").read_text() == "# Passed\n"
    (comment,) = (command for command in ran if command[0] == "gh")
    assert comment[-2:] == ["--body-file", f"{report}/report.md"] and VALUES["github.event.pull_request.html_url"] in comment
    uploads = [step["with"]["path"] for step in WORKFLOW["jobs"]["pico"]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert uploads == [report]


def test_a_release_is_judged_against_the_one_before(run: dict[str, tuple[Path, list[list[str]]]]) -> None:
    folder, ran = run["release"]
    (recipe,) = (recipe_of(command[2:]) for command in ran if command[0] == "specdistill")
    assert (recipe.eval.draft, recipe.eval.baseline, recipe.gate) == ("org/draft@v2", "org/draft@v1", "release")
    assert (recipe.target.model, recipe.method, recipe.eval.suite) == ("org/target", "eagle3", "spec-bench")
    assert recipe.eval.output_dir == "runs/release"
    assert (folder / "summary.md").read_text() == "# Passed\n"


def test_what_people_type_reaches_the_shell_as_variables_only() -> None:
    """`${{ … }}` inside a script would be run as code."""
    for job in WORKFLOW["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")


def test_the_report_is_shown_also_when_the_gate_fails() -> None:
    for job in WORKFLOW["jobs"].values():
        steps = job["steps"]
        judged = next(number for number, step in enumerate(steps) if step.get("name") == "Measure and judge")
        assert len(steps) > judged + 2
        assert all(step["if"].startswith("always()") for step in steps[judged + 1 :])
