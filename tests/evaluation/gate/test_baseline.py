"""Where a baseline comes from: files here, and a Hub on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specdistill.common.errors import ResourceError
from specdistill.common.repositories import split_revision
from specdistill.evaluation.gate.decide import read_baseline
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.files import write_report
from tests.loopback_hub import Hub, fetched, loopback_hub
from tests.refusals import refused
from tests.simulated import simulate, simulated_report

DRAFT, TAG = "someone/tiny-draft", "v1.2"
BETTER = (0.95, 0.9, 0.9, 0.9)
RULES = load_gate("release")


@pytest.fixture(scope="module")
def release_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the report of a release that accepted more than today's draft."""
    records = simulate(24, conditional=BETTER)
    folder = tmp_path_factory.mktemp("released")
    write_report(folder, simulated_report(records), records)
    return folder


def test_a_baseline_is_read_from_a_file_or_its_folder(release_folder: Path) -> None:
    by_folder, by_file = (
        read_baseline(str(path), RULES) for path in (release_folder, release_folder / "report.json")
    )
    assert by_folder is not None and by_folder == by_file
    assert len(by_folder.records) == 24


def test_a_gate_that_compares_nothing_takes_no_baseline(release_folder: Path) -> None:
    for name in (str(release_folder), "none"):
        with refused("baseline", name):
            read_baseline(name, load_gate("default"))


def test_a_first_release_has_no_baseline() -> None:
    assert read_baseline("none", RULES) is None
    assert read_baseline(None, load_gate("default")) is None


@pytest.mark.parametrize(
    "name", ["nowhere", "./some/where", "runs/before/report", "before/report.json", "/nowhere@v1"]
)
def test_a_missing_path_that_is_no_hub_id_is_refused(name: str, in_empty_folder: Path) -> None:
    with refused("eval.baseline", name):
        read_baseline(name, RULES, "eval.baseline")


def test_a_revision_follows_the_last_at_sign(in_empty_folder: Path) -> None:
    assert split_revision("org/name@v1.2") == ("org/name", "v1.2")
    assert split_revision("org/name") == ("org/name", None)
    (in_empty_folder / "mine@home").mkdir()
    assert split_revision("mine@home") == ("mine@home", None)


# The Hub


@pytest.fixture
def hub(release_folder: Path, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with a draft whose tag has a report, and whose newest commit has none."""
    files = {f"report/{path.name}": path for path in release_folder.iterdir()}
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home", token=None):
        hub.create(DRAFT, {"config.json": b"{}", **files})
        hub.tag(DRAFT, TAG)
        hub.commit(DRAFT, dict.fromkeys(files))
        yield hub


def test_the_report_of_a_tag_is_fetched(hub: Hub, release_folder: Path, tmp_path: Path) -> None:
    assert read_baseline(f"{DRAFT}@{TAG}", RULES) == read_baseline(str(release_folder), RULES)
    assert fetched(tmp_path / "home") == {"report.json", "samples.jsonl"}


def test_a_revision_without_a_report_and_a_missing_tag_are_refused(hub: Hub) -> None:
    with refused("baseline", DRAFT):
        read_baseline(DRAFT, RULES)
    with pytest.raises(ResourceError, match=f"{DRAFT}@v9"):
        read_baseline(f"{DRAFT}@v9", RULES)
