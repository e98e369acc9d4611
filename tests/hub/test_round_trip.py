"""From a run to the Hub and back: what was published and acquired again is sound, and drafts as it
did."""

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
            code = main(["eval", *words, f"eval.output_dir={tmp_path / 'again'}"])
            assert code in EXIT_CODES.values()
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
