"""The step of the CI workflow that publishes: its shell runs the real command, and the Hub has the tag."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specdistill.project import ROOT
from tests.hub.conftest import NAME
from tests.loopback_hub import loopback_hub


@pytest.mark.long  # a shell and its process
def test_a_tag_of_the_repository_is_a_tag_on_the_hub(measured: Path, tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release-gate.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    (step,) = (step for step in job["steps"] if step.get("name") == "Publish")
    run = shutil.copytree(measured, tmp_path / "a run")
    command = tmp_path / ".venv/bin/specdistill"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m specdistill "$@"\n')
    command.chmod(0o755)
    with loopback_hub(tmp_path / "hub") as hub:
        given = {"RUN": str(run), "REPO": NAME, "TAG": "v3", "FIRST": "true"}
        assert given.keys() - {"RUN"} == step["env"].keys() - {"HF_TOKEN"}
        environment = {**hub.environment(tmp_path / "home"), **given}
        shell = ["bash", "-euo", "pipefail", "-c", step["run"]]
        subprocess.run(shell, cwd=tmp_path, check=True, env=environment, timeout=300)
        assert hub.tags(NAME) == {"v3": hub.commits(NAME)[0]} and len(hub.commits(NAME)) == 2
