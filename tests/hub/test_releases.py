"""A second release after the first one, on a loopback Hub with the real client."""

import json
import shutil
from pathlib import Path

import pytest

from specdistill.cli.main import main
from tests.finished_runs import again, remake, slower, timed
from tests.hub.conftest import NAME, read_contents
from tests.loopback_hub import Hub
from tests.refusals import refused_key
from tests.scripts import evaluate

pytestmark = pytest.mark.long  # each measures, or publishes twice
GATE = (
    "- {metric: mean_acceptance_length, max_regression: 0.15}\n- {metric: speedup, max_regression:"
    " 0.15}\n"
)


@pytest.fixture(scope="module")
def other_run(measured_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with other weights, measured as the first one, and with a gate against regressions."""
    folder = tmp_path_factory.mktemp("further")
    (folder / "gate.yaml").write_text(GATE)
    return again(
        measured_run,
        folder / "run",
        {"gate: default": f"gate: {folder / 'gate.yaml'}", "max_length: 512": "max_length: 256"},
    )


@pytest.fixture
def first_run(measured_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured_run, tmp_path / "first")


@pytest.fixture
def second_run(other_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(other_run, tmp_path / "second")


def publish(run: Path, *arguments: str) -> int:
    return main(["publish", f"run={run}", f"repo={NAME}", *arguments])


def read_stderr(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# A release after another


def test_a_first_release_needs_baseline_none(
    lfs_hub: Hub, first_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first_run) == 2
    assert refused_key(read_stderr(capsys)) == "baseline"
    assert NAME not in lfs_hub.repositories
    assert publish(first_run, "baseline=none") == 0
    message = lfs_hub.repositories[NAME].tag_messages["v1"]
    assert message.startswith("Release v1")
    assert "Changes since" not in read_contents(lfs_hub, "v1")["README.md"].decode()
    assert (
        publish(first_run) == publish(first_run, "baseline=none") == 0
    )  # the release exists already
    assert lfs_hub.tags(NAME).keys() == {"v1"}


def test_the_card_of_a_release_lists_its_changes(
    lfs_hub: Hub, first_run: Path, second_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first_run, "baseline=none") == 0
    # a release without a baseline would avoid the gate
    assert publish(second_run, "baseline=none") == 2
    assert refused_key(read_stderr(capsys)) == "baseline"
    assert publish(second_run) == 0
    card, report = (
        read_contents(lfs_hub, "v2")["README.md"].decode(),
        json.loads(read_contents(lfs_hub, "v2")["report/report.json"]),
    )
    assert report["baseline"]["draft"] == {"model": NAME, "revision": "v1", "method": "draft_model"}
    rules = {
        rule["metric"]: rule
        for rule in report["gate"]["rules"]
        if "max_regression" in rule["requirement"]
    }
    assert rules.keys() == {"mean_acceptance_length", "speedup"} and report["gate"]["passed"]
    changes = card.partition("## Changes since v1\n")[2].partition("\n## What was measured")[0]
    assert f"Compared with {NAME}@v1, measured" in changes
    assert (
        "| acceptance length | 2.52 tokens | " in changes
        and "| acceptance length, b |" in changes
        and "| speedup |" in changes
    )
    assert f"Compared with {NAME}@v1, measured" in lfs_hub.repositories[NAME].tag_messages["v2"]


def test_a_regression_is_refused(
    lfs_hub: Hub, first_run: Path, second_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first_run, "baseline=none") == 0
    remake(second_run, lambda record: slower(record, 1.4))
    assert publish(second_run) == 1
    assert "refused: gate failed: speedup loss " in read_stderr(capsys)
    assert lfs_hub.tags(NAME).keys() == {"v1"}


def test_the_last_release_is_measured_again_with_other_settings(
    lfs_hub: Hub, first_run: Path, second_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last release is measured with the command of docs/release.md."""
    assert publish(first_run, "baseline=none") == 0
    shorter_run = again(
        second_run,
        second_run.parent / "shorter",
        {"num_speculative_tokens: 4": "num_speculative_tokens: 2"},
    )
    read_stderr(capsys)
    assert publish(shorter_run) == 1
    refusal, _ = read_stderr(capsys).splitlines()[-2:]
    assert (
        refusal
        == "refused: not compared: baseline: got num_speculative_tokens 4, expected 2, as in the"
        " report"
    )
    assert publish(shorter_run, "force=it has to be", "dry_run=true") == 0
    card = (shorter_run / "release/README.md").read_text()
    assert "not compared" in card
    evaluate(
        f"recipe={shorter_run / 'run/recipe.yaml'}",
        f"draft={NAME}@v1",
        f"output_dir={shorter_run / 'last-release'}",
    )
    remake(shorter_run, timed, report=shorter_run / "last-release")
    assert publish(shorter_run, f"baseline={shorter_run / 'last-release'}") == 0
    report = json.loads(read_contents(lfs_hub, "v2")["report/report.json"])
    assert report["baseline"]["draft"]["revision"] == "v1" and report["gate"]["passed"]
    assert publish(second_run, f"baseline={second_run / 'report'}") == 2
    assert refused_key(read_stderr(capsys)) == "baseline"


def test_a_last_release_that_was_edited_is_refused(
    lfs_hub: Hub, first_run: Path, second_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first_run, "baseline=none") == 0
    samples = read_contents(lfs_hub, "v1")["report/samples.jsonl"].splitlines()
    lfs_hub.commit(NAME, {"report/samples.jsonl": b"\n".join(samples[1:])})
    lfs_hub.repositories[NAME].git_tags.clear()
    lfs_hub.tag(NAME, "v1")
    assert publish(second_run) == 2
    assert refused_key(read_stderr(capsys)) == "repo"
