"""The CI workflow that judges and publishes drafts.

Its callers give inputs that it has, and every command in it is one that exists.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdistill.common.project import ROOT, SUITES
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.text import to_markdown
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import select_recipe_keys
from tests.scripts import load_script
from tests.simulated import simulate, simulated_report

FOLDER = ROOT / ".github" / "workflows"
GATE = yaml.safe_load((FOLDER / "release-gate.yml").read_text(encoding="utf-8"))
# YAML 1.1 reads the key `on` as true.
CALL = GATE[True]["workflow_call"]
(STEPS,) = (job["steps"] for job in GATE["jobs"].values())
# The callers: this repository, and the examples for others.
PAGE = (ROOT / "docs" / "github-actions.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```yaml\n(# \.github.*?)```", PAGE, re.DOTALL)
CALLERS = {
    "pico": yaml.safe_load((FOLDER / "pico.yml").read_text(encoding="utf-8")),
    "another repository": yaml.safe_load(EXAMPLE),
    "examples": yaml.safe_load(
        (ROOT / "examples" / "github-actions" / "release.yml").read_text(encoding="utf-8")
    ),
}
TRUST = "target.trust_remote_code=true"
PULL_REQUEST = "https://github.com/org/repo/pull/7"
# Stands in for every program: it writes down what the shell gave it.
RECORDER = """#!/usr/bin/env python3
import json, pathlib, sys
with open({record!r}, "a") as file:
    print(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), file=file)
"""


@dataclass(frozen=True)
class Event:
    """An event that starts the workflow, and the inputs of its caller."""

    caller_inputs: Mapping[str, Any]
    pull_request: bool
    tag: str = ""

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            name: self.caller_inputs.get(name, declared.get("default", ""))
            for name, declared in CALL["inputs"].items()
        }

    def is_true(self, condition: str) -> bool:
        """Return whether an `if` of a step is true, while no step has failed.

        One that is not listed here is an error.
        """
        from_here = "github.event.pull_request.head.repo.full_name == github.repository"
        return {
            "always()": True,
            "inputs.run == ''": self.inputs["run"] == "",
            f"always() && github.event_name == 'pull_request' && {from_here}": self.pull_request,
            "success() && github.ref_type == 'tag' && inputs.repo != ''": bool(
                self.tag and self.inputs["repo"]
            ),
        }[condition]

    def fill_in(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return an `env` section as GitHub would fill it in.

        An expression that is not listed here is an error.
        """
        values = {
            **{
                f"inputs.{name}": str(value).lower() if isinstance(value, bool) else str(value)
                for name, value in self.inputs.items()
            },
            f"inputs.trust_remote_code && '{TRUST}' || ''": TRUST
            if self.inputs["trust_remote_code"]
            else "",
            "inputs.run || 'runs/release-gate'": self.inputs["run"] or "runs/release-gate",
            "github.ref_name": self.tag or "7/merge",
            "github.token": "token",
            "github.event.pull_request.html_url": PULL_REQUEST,
            "github.server_url": "https://github.com",
            "github.repository": "org/repo",
            "github.run_id": "42",
            "secrets.HF_READ_TOKEN": "reads",
            "secrets.HF_TOKEN": "writes",
        }
        return {
            name: re.sub(r"\$\{\{ (.+?) \}\}", lambda found: values[found[1]], text)
            for name, text in environment.items()
        }


def run_steps(event: Event, folder: Path, report: str = "# Passed\n") -> list[list[str]]:
    """Run every step and return its commands: the program's name and its arguments.

    The arguments are as the shell passes them on. report: what `eval` left as report.md.
    """
    record = folder / "commands"
    for name in ("python", "gh", ".venv/bin/pip", ".venv/bin/specdistill"):
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(RECORDER.format(record=str(record)))
        program.chmod(0o755)
    (job,) = GATE["jobs"].values()
    variables = event.fill_in(job["env"])
    (folder / variables["RUN"] / "report").mkdir(parents=True)
    (folder / variables["RUN"] / "report" / "report.md").write_text(report, encoding="utf-8")
    variables |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    variables |= {"RUNNER_TEMP": str(folder)}
    for step in STEPS:
        if "run" in step and event.is_true(step.get("if", "always()")):
            surroundings = variables | event.fill_in(step.get("env", {}))
            shell = ["bash", "-euo", "pipefail", "-c", step["run"]]
            subprocess.run(shell, cwd=folder, check=True, env=surroundings, timeout=60)
    return [json.loads(line) for line in record.read_text().splitlines()]


def load_command_recipe(command: list[str]) -> Recipe:
    """Return the recipe that a command's keys stand for.

    Raises UserError for one that is not accepted.
    """
    script = load_script("eval/run.py")
    return load_recipe(Recipe, select_recipe_keys(command, script.SHORTHANDS))


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
def test_a_caller_gives_the_inputs_and_rights_that_the_workflow_needs(
    caller: dict[Any, Any],
) -> None:
    assert caller["permissions"] == {"contents": "read", "pull-requests": "write"}
    kinds = {"string": str, "number": int, "boolean": bool}
    for job in caller["jobs"].values():
        assert re.fullmatch(
            r"(\.|<owner>/specdistill)/\.github/workflows/release-gate\.yml(@\w+)?", job["uses"]
        )
        assert job["with"].keys() <= CALL["inputs"].keys()
        assert job.get("secrets", {}).keys() <= CALL["secrets"].keys()
        for name, declared in CALL["inputs"].items():
            assert name in job["with"] or not declared.get("required")
            assert isinstance(
                job["with"].get(name, declared.get("default")), kinds[declared["type"]]
            )


def test_the_page_has_every_input_and_its_default() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", PAGE, re.MULTILINE)
    defaults = {}
    for name, declared in CALL["inputs"].items():
        default = declared.get("default", "required")
        shown = str(default).lower() if default != "" else "–"
        defaults[name] = shown if shown in ("required", "–") else f"`{shown}`"
    assert dict(rows) == defaults


def test_pico_is_trained_and_judged_in_one_folder_and_its_report_is_shown(tmp_path: Path) -> None:
    event = Event(CALLERS["pico"]["jobs"]["pico"]["with"], pull_request=True)
    ran = run_steps(event, tmp_path)
    assert [command[:2] for command in ran] == [
        ["python", "-m"],
        ["pip", "install"],
        ["specdistill", "train"],
        ["specdistill", "eval"],
        ["gh", "pr"],
    ]
    trained = load_command_recipe(ran[2][2:])
    assert (
        trained.train["output_dir"] == "runs/release-gate"
        and (SUITES / f"{trained.eval.suite}.yaml").is_file()
    )
    load_gate(trained.gate)
    assert ran[3][2:] == [
        "recipe=runs/release-gate/run/recipe.yaml",
        "train.output_dir=runs/release-gate",
    ]
    assert (ROOT / ran[1][ran[1].index("--constraint") + 1]).is_file() and ran[1][-1] == "."
    assert (
        ran[4][-2:] == ["--body-file", "runs/release-gate/report/report.md"]
        and PULL_REQUEST in ran[4]
    )
    assert (tmp_path / "summary.md").read_text() == "# Passed\n"
    uploads = [step["with"]["path"] for step in STEPS if "upload-artifact" in step.get("uses", "")]
    assert uploads == ["${{ env.RUN }}/report"]


def test_a_comment_is_cut_to_the_length_that_github_takes(tmp_path: Path) -> None:
    report = simulated_report(simulate(8))
    report["results"] += [
        {**report["results"][1], "category": f"catégorie {number}"} for number in range(2000)
    ]
    report["gate"] = {"verdict": "passed", "passed": True, "rules": []}
    whole = to_markdown(report)
    ran = run_steps(
        Event(CALLERS["pico"]["jobs"]["pico"]["with"], pull_request=True), tmp_path, whole
    )
    comment, last = Path(ran[-1][-1]).read_text(encoding="utf-8").split("\n\nCut here: ")
    assert (
        len(whole) > 100_000
        and 60_000 < len(comment.encode()) < 65_000
        and whole.startswith(f"{comment}\n")
    )
    assert (
        last
        == "the whole is in the summary and the artifact of https://github.com/org/repo/actions/runs/42\n"
    )
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == whole


def test_a_tag_is_published_and_a_pull_request_is_not(tmp_path: Path) -> None:
    # The page shows a first release. The second names the first as its baseline.
    shown = CALLERS["another repository"]["jobs"]["draft"]["with"]
    given = {**shown, "first": False, "baseline": "org/name@v1"}
    for number, (tag, last) in enumerate({"": "gh", "v2": "specdistill"}.items()):
        folder = tmp_path / str(number)
        # An absolute folder of the runner stands here inside the test's.
        event = Event({**given, "run": str(folder / "my run")}, pull_request=not tag, tag=tag)
        ran = [
            command for command in run_steps(event, folder) if command[0] in ("specdistill", "gh")
        ]
        assert ran[0] == [
            *(
                "specdistill",
                "eval",
                f"recipe={folder}/my run/run/recipe.yaml",
                f"train.output_dir={folder}/my run",
            ),
            "eval.baseline=org/name@v1",
        ]
        assert len(ran) == 2 and ran[1][0] == last
    assert ran[1] == ["specdistill", "publish", f"run={folder}/my run", "repo=org/name", "tag=v2"]
    first = Event({**shown, "run": str(tmp_path / "first")}, pull_request=False, tag="v1")
    assert run_steps(first, tmp_path / "first")[-1][-2:] == ["tag=v1", "baseline=none"]


def test_every_command_that_reads_the_recipe_gets_the_consent_of_the_caller(tmp_path: Path) -> None:
    """These commands would refuse a recipe that trusts code without it."""
    given = {"recipe": "mine.yaml", "install": ".", "repo": "org/name", "trust_remote_code": True}
    event = Event({**given, "engine_command": "/opt/my vllm serve"}, pull_request=False, tag="v2")
    trained, measured, published = [
        command for command in run_steps(event, tmp_path) if command[0] == "specdistill"
    ]
    for command in (trained, measured):
        assert command[-2:] == [TRUST, "eval.engine_command=/opt/my vllm serve"]
    assert published == [
        "specdistill",
        "publish",
        "run=runs/release-gate",
        "repo=org/name",
        "tag=v2",
    ]


def test_typed_inputs_reach_the_shell_as_variables_only() -> None:
    """`${{ … }}` inside a script would be run as code."""
    for step in STEPS:
        assert "${{" not in step.get("run", "")


def test_only_the_step_that_publishes_has_the_token_that_may_write() -> None:
    tokens = {
        step["name"]: step["env"]["HF_TOKEN"] for step in STEPS if "HF_TOKEN" in step.get("env", {})
    }
    reads, writes = "${{ secrets.HF_READ_TOKEN }}", "${{ secrets.HF_TOKEN }}"
    assert tokens == {"Train": reads, "Measure and judge": reads, "Publish": writes}
    (job,) = GATE["jobs"].values()
    assert "secrets" not in str(job["env"])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_states_its_rights_and_pins_its_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    for job in workflow["jobs"].values():
        assert {"contents": "read"}.items() <= (
            job.get("permissions") or workflow["permissions"]
        ).items()
        for step in job.get("steps", []):
            if "uses" in step:
                assert re.fullmatch(r"(actions|pypa)/[\w-]+@[0-9a-f]{40}", step["uses"])
                assert "checkout" not in step["uses"] or step["with"] == {
                    "persist-credentials": False
                }


def test_a_job_that_may_publish_runs_nothing_of_the_repository() -> None:
    """Only jobs that hand on what another job built get an identity token."""
    for path in FOLDER.glob("*.yml"):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            if "id-token" in job.get("permissions", {}):
                assert job["needs"] and all(
                    "uses" in step and "checkout" not in step["uses"] for step in job["steps"]
                ), path


def test_ci_runs_the_script_that_any_machine_runs() -> None:
    (job,) = yaml.safe_load((FOLDER / "ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"] and os.access(
        ROOT / ".ci/run", os.X_OK
    )


def test_a_failed_gate_still_shows_the_report_and_publishes_nothing() -> None:
    names = [step.get("name", step.get("uses")) for step in STEPS]
    after = STEPS[names.index("Measure and judge") + 1 :]
    assert len(after) == 4
    assert [step["if"].split(" ")[0] for step in after] == [
        "success()",
        "always()",
        "always()",
        "always()",
    ]
