"""From a run to the Hub and back: what was published and acquired again is sound, and drafts as it did; and how CI publishes."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specdistill.cli import main
from specdistill.project import ROOT
from specdistill.report.files import read_report
from tests.hub.conftest import NAME
from tests.loopback_hub import loopback_hub


@pytest.mark.long  # measures twice
def test_what_is_acquired_drafts_as_it_did_before_it_was_published(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is measured by the command on its card, which another machine would type."""
    run, target = shutil.copytree(measured, tmp_path / "run"), measured.parent / "target"
    with loopback_hub(tmp_path / "hub", "xet") as hub:
        with hub.client(tmp_path / "publisher"):
            assert (
                main(["publish", f"run={run}", f"repo={NAME}", "baseline=none", "private=false"])
                == 0
            )
        with hub.client(tmp_path / "reader", token=None):
            capsys.readouterr()
            assert (
                main(["acquire", "method=draft_model", f"target={target}", f"draft={NAME}@v1"]) == 0
            )
            folder = Path(capsys.readouterr().out.strip())
            assert (
                main(
                    [
                        "doctor",
                        f"draft={folder}",
                        f"target={target}",
                        f"suite={measured.parent / 'suite.jsonl'}",
                    ]
                )
                == 0
            )

            card = hub.files(NAME, "v1")["README.md"].read_text()
            (command,) = re.findall(
                r"## Measuring it again\n\n```bash\nspecdistill eval (.*?)\n```", card, re.DOTALL
            )
            places = {"TARGET": str(target), "SUITE": str(measured.parent / "suite.jsonl")}
            words = [
                re.sub("TARGET|SUITE", lambda found: places[found[0]], word)
                for word in shlex.split(command.replace("\\\n", ""))
            ]
            asked = len(hub.requests)
            with pytest.raises(SystemExit):
                main(["eval", *words, f"eval.output_dir={tmp_path / 'again'}"])
            assert not [
                request
                for request in hub.requests[asked:]
                if request.route in ("resolve", "download")
            ]

    (before, old), (after, new) = read_report(measured / "report"), read_report(tmp_path / "again")
    assert [(record.id, record.rounds, record.text) for record in new] == [
        (record.id, record.rounds, record.text) for record in old
    ]
    assert (
        after["draft"]["weights"] == before["draft"]["weights"]
        and after["target"]["weights"] == before["target"]["weights"]
    )
    row, old_row = after["results"][0], before["results"][0]
    assert row["mean_acceptance_length"] == old_row["mean_acceptance_length"]


@pytest.mark.long  # a shell and its process
def test_a_tag_of_the_repository_is_a_tag_on_the_hub(measured: Path, tmp_path: Path) -> None:
    """By the step of the CI workflow that publishes: its shell runs the real command."""
    workflow = yaml.safe_load(
        (ROOT / ".github/workflows/release-gate.yml").read_text(encoding="utf-8")
    )
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
