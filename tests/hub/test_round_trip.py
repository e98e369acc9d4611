"""A draft that is published and acquired again is sound, and drafts as before."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from specdistill.cli.main import main
from specdistill.evaluation.gate.decide import EXIT_CODES
from specdistill.evaluation.report.files import read_report
from tests.hub.conftest import NAME
from tests.loopback_hub import loopback_hub


@pytest.mark.long  # measures twice
def test_an_acquired_draft_drafts_as_before_it_was_published(
    measured_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command on the card measures the draft, as on another machine."""
    run, target = shutil.copytree(measured_run, tmp_path / "run"), measured_run.parent / "target"
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
                        f"suite={measured_run.parent / 'suite.jsonl'}",
                    ]
                )
                == 0
            )

            card = hub.files(NAME, "v1")["README.md"].read_text()
            (command,) = re.findall(
                r"## Measuring it again\n\n```bash\nspecdistill eval (.*?)\n```", card, re.DOTALL
            )
            paths = {"TARGET": str(target), "SUITE": str(measured_run.parent / "suite.jsonl")}
            words = [
                re.sub("TARGET|SUITE", lambda match: paths[match[0]], word)
                for word in shlex.split(command.replace("\\\n", ""))
            ]
            num_requests = len(hub.requests)
            code = main(["eval", *words, f"eval.output_dir={tmp_path / 'again'}"])
            assert code in EXIT_CODES.values()
            assert not [
                request
                for request in hub.requests[num_requests:]
                if request.route in ("resolve", "download")
            ]

    (before, old), (after, new) = (
        read_report(measured_run / "report"),
        read_report(tmp_path / "again"),
    )
    assert [(record.id, record.rounds, record.text) for record in new] == [
        (record.id, record.rounds, record.text) for record in old
    ]
    assert (
        after["draft"]["weights"] == before["draft"]["weights"]
        and after["target"]["weights"] == before["target"]["weights"]
    )
    row, old_row = after["results"][0], before["results"][0]
    assert row["mean_acceptance_length"] == old_row["mean_acceptance_length"]
