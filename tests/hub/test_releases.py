"""A second release after the first, on a Hub on loopback that the real client asks."""

import json
import shutil
from pathlib import Path

import pytest

from specdistill.cli.main import main
from tests.finished_runs import again, remake, slower, timed
from tests.hub.conftest import NAME, contents
from tests.loopback_hub import Hub
from tests.refusals import refused_key
from tests.scripts import evaluate

pytestmark = pytest.mark.long  # each measures, or publishes twice
GATE = (
    "- {metric: mean_acceptance_length, max_regression: 0.15}\n- {metric: speedup, max_regression:"
    " 0.15}\n"
)


@pytest.fixture(scope="module")
def trained_further(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of other weights, measured as the first was; its recipe has a gate that allows no
    regression."""
    folder = tmp_path_factory.mktemp("further")
    (folder / "gate.yaml").write_text(GATE)
    return again(
        measured,
        folder / "run",
        {"gate: default": f"gate: {folder / 'gate.yaml'}", "max_length: 512": "max_length: 256"},
    )


@pytest.fixture
def first(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "first")


@pytest.fixture
def second(trained_further: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_further, tmp_path / "second")


def publish(run: Path, *arguments: str) -> int:
    return main(["publish", f"run={run}", f"repo={NAME}", *arguments])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# A release after another


def test_a_first_release_is_one_by_name(
    lfs: Hub, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first) == 2
    assert refused_key(said(capsys)) == "baseline"
    assert NAME not in lfs.repositories
    assert publish(first, "baseline=none") == 0
    message = lfs.repositories[NAME].tag_messages["v1"]
    assert message.startswith("Release v1")
    assert "Changes since" not in contents(lfs, "v1")["README.md"].decode()
    assert publish(first) == publish(first, "baseline=none") == 0  # it is there already
    assert lfs.tags(NAME).keys() == {"v1"}


def test_a_release_says_what_changed(
    lfs: Hub, first: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first, "baseline=none") == 0
    # to be compared with nothing would be a way around the gate
    assert publish(second, "baseline=none") == 2
    assert refused_key(said(capsys)) == "baseline"
    assert publish(second) == 0
    card, report = (
        contents(lfs, "v2")["README.md"].decode(),
        json.loads(contents(lfs, "v2")["report/report.json"]),
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
    assert f"Compared with {NAME}@v1, measured" in lfs.repositories[NAME].tag_messages["v2"]


def test_a_regression_is_refused(
    lfs: Hub, first: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first, "baseline=none") == 0
    remake(second, lambda record: slower(record, 1.4))
    assert publish(second) == 1
    assert "refused: gate failed: speedup loss " in said(capsys)
    assert lfs.tags(NAME).keys() == {"v1"}


def test_the_last_release_is_measured_again_with_other_settings(
    lfs: Hub, first: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command of docs/release.md."""
    assert publish(first, "baseline=none") == 0
    shorter = again(
        second,
        second.parent / "shorter",
        {"num_speculative_tokens: 4": "num_speculative_tokens: 2"},
    )
    said(capsys)
    assert publish(shorter) == 1
    refusal, _ = said(capsys).splitlines()[-2:]
    assert (
        refusal
        == "refused: not compared: baseline: got num_speculative_tokens 4, expected 2, as in the"
        " report"
    )
    assert publish(shorter, "force=it has to be", "dry_run=true") == 0
    card = (shorter / "release/README.md").read_text()
    assert "not compared" in card
    evaluate(
        f"recipe={shorter / 'run/recipe.yaml'}",
        f"draft={NAME}@v1",
        f"output_dir={shorter / 'last-release'}",
    )
    remake(shorter, timed, report=shorter / "last-release")
    assert publish(shorter, f"baseline={shorter / 'last-release'}") == 0
    report = json.loads(contents(lfs, "v2")["report/report.json"])
    assert report["baseline"]["draft"]["revision"] == "v1" and report["gate"]["passed"]
    assert publish(second, f"baseline={second / 'report'}") == 2
    assert refused_key(said(capsys)) == "baseline"


def test_a_last_release_that_was_edited(
    lfs: Hub, first: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(first, "baseline=none") == 0
    samples = contents(lfs, "v1")["report/samples.jsonl"].splitlines()
    lfs.commit(NAME, {"report/samples.jsonl": b"\n".join(samples[1:])})
    lfs.repositories[NAME].git_tags.clear()
    lfs.tag(NAME, "v1")
    assert publish(second) == 2
    assert refused_key(said(capsys)) == "repo"
