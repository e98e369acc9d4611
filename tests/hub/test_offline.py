"""Every command reads a draft and its target from the cache when the Hub cannot be reached."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from huggingface_hub import close_session, constants

from specdistill.methods.load import locate
from specdistill.targets.frozen import FrozenTarget
from tests.hub.conftest import read_files
from tests.loopback_hub import Hub, loopback_hub
from tests.refusals import refused_key
from tests.scripts import specdistill

pytestmark = pytest.mark.xdist_group("measured run")  # one worker measures

TARGET, DRAFT = "someone/target", "someone/head"
RELEASE = f"{DRAFT}@v1"
NOBODY = "http://127.0.0.1:1"
MISSING = "report/report.json report/samples.jsonl"


@pytest.fixture
def hub(
    saved_models: dict[str, Path],
    measured_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Hub]:
    """A Hub with target and draft; both have a card, and the draft's release has a report."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    report = {
        f"report/{name}": content for name, content in read_files(measured_run / "report").items()
    }
    with loopback_hub(tmp_path / "hub") as loopback:
        loopback.create(TARGET, read_files(saved_models["target"]), card="The target.")
        loopback.create(DRAFT, {**read_files(saved_models["draft"]), **report}, card="The draft.")
        loopback.tag(DRAFT, "v1")
        yield loopback


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def filled_cache(hub: Hub, home: Path) -> None:
    """Fill the cache with the files that a measurement of the release reads."""
    with hub.client(home):
        locate(RELEASE)
        locate(DRAFT)
        FrozenTarget.load(TARGET)


@pytest.fixture(params=["unreachable", "HF_HUB_OFFLINE"])
def offline(
    request: pytest.FixtureRequest, hub: Hub, home: Path, filled_cache: None
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """A function that runs a command while the Hub does not answer or must not be asked.

    It returns the exit code, stdout and stderr.
    """
    is_set = request.param == "HF_HUB_OFFLINE"
    with ExitStack() as stack:
        stack.enter_context(hub.client(home))
        stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", is_set))
        for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):  # where nobody listens
            address = getattr(constants, name).replace(hub.address, NOBODY)
            stack.enter_context(mock.patch.object(constants, name, address))
        stack.enter_context(mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": str(int(is_set))}))
        close_session()

        def run(*arguments: str) -> tuple[int, str, str]:
            process = specdistill(*arguments)
            return process.returncode, process.stdout, process.stderr

        yield run


Offline = Callable[..., tuple[int, str, str]]


def test_acquire_takes_what_a_measurement_has_fetched(offline: Offline, home: Path) -> None:
    code, out, err = offline("acquire", "method=eagle3", f"target={TARGET}", f"draft={RELEASE}")
    assert (code, out.count("\n")) == (0, 1), err
    folder = Path(out.strip())
    assert home in folder.parents and (folder / "model.safetensors").is_file()
    assert f"{RELEASE}: a draft of method eagle3 that fits {TARGET}" in err
    code, out, err = offline("acquire", "method=eagle3", f"target={TARGET}", "draft=someone/else")
    assert (code, out, refused_key(err)) == (3, "", "draft")


@pytest.mark.parametrize("draft", [RELEASE, DRAFT])
def test_the_gate_says_what_the_cache_lacks_and_how_to_fetch_it(
    offline: Offline, measured_run: Path, draft: str, tmp_path: Path
) -> None:
    code, out, err = offline(
        "gate", f"report={measured_run / 'report'}", "gates=release", f"baseline={draft}"
    )
    assert (code, out, refused_key(err)) == (3, "", "baseline"), err
    assert f"the Hub's cache holds {draft} without {MISSING.replace(' ', ', ')}" in err
    revision = " --revision v1" if draft == RELEASE else ""
    assert err.rstrip().endswith(f"run: hf download {DRAFT} {MISSING}{revision}")


def test_the_command_that_the_gate_prints_fetches_the_report(
    offline: Offline, hub: Hub, home: Path, measured_run: Path, tmp_path: Path
) -> None:
    gate = (
        "gate",
        f"report={measured_run / 'report'}",
        "gates=release",
        f"baseline={RELEASE}",
        f"output_dir={tmp_path / 'out'}",
    )
    _, _, err = offline(*gate)
    command = shlex.split(err.rpartition("run: ")[2])
    assert shutil.which(command[0])
    subprocess.run(command, check=True, capture_output=True, env=hub.environment(home))
    code, _, err = offline(*gate)
    assert code in (0, 1, 4), err
    assert (tmp_path / "out" / "report.json").is_file()


@pytest.mark.long  # a plan counts a training step of every method
def test_a_plan_reads_draft_and_target_and_says_why_it_does_not_search(offline: Offline) -> None:
    code, out, err = offline("plan", f"target={TARGET}", f"draft={RELEASE}")
    assert code == 0, err
    assert f"not asked: {NOBODY} cannot be reached" in " ".join(out.split())


def test_doctor_and_export_read_draft_and_target(offline: Offline, tmp_path: Path) -> None:
    code, out, err = offline("doctor", f"draft={RELEASE}", f"target={TARGET}", "decode=false")
    assert (code, "method eagle3" in out) == (0, True), err
    code, _, err = offline(
        "export",
        "engine=vllm",
        f"draft={RELEASE}",
        f"target={TARGET}",
        f"output_dir={tmp_path / 'out'}",
    )
    assert code == 0 and (tmp_path / "out" / "SERVE.md").is_file(), err


def test_a_first_release_is_tried_without_the_hub(offline: Offline, run: Path) -> None:
    code, out, err = offline(
        "publish", f"run={run}", "repo=someone/new", "baseline=none", "dry_run=true"
    )
    assert "someone/new is treated as a new repository" in err
    assert code == 0 and "README.md" in out, err


def test_a_repository_that_was_never_fetched_is_not_reported_as_cached(offline: Offline) -> None:
    for line in (
        "plan target=someone/other",
        "doctor draft=someone/other@v2",
        f"compare target={TARGET} drafts=ngram,a/b output_dir=o",
    ):
        code, out, err = offline(*line.split())
        assert (
            (code, out) == (3, "")
            and "is no folder here" in err
            and "cache" not in err.rpartition("error: ")[2]
        ), err
