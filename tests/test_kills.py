"""Commands that write a folder or a release survive kills at random moments.

Nothing half looks whole, and the repeated command runs to the same end.
"""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi, snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.finished_runs import finished_run
from tests.hub.conftest import NAME
from tests.kills import check_survives_kills, read_files
from tests.loopback_hub import loopback_hub
from tests.scripts import specdistill
from tests.tiny import SMALL, write_inputs

pytestmark = pytest.mark.long  # each command runs some thirty times


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for what commands write, next to a file of somebody else."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.tex").write_text("mine")
    return tmp_path / "here"


def read_if_there(folder: Path) -> dict[str, bytes]:
    return read_files(folder) if folder.exists() else {}


def test_kills_leave_exports_whole(run: Path, folder: Path) -> None:
    words = ["export", f"draft={run / 'draft'}", "engine=vllm", f"output_dir={folder / 'out'}"]
    check_survives_kills(words, folder, lambda: read_if_there(folder / "out"))
    AutoModelForCausalLM.from_pretrained(folder / "out")


def test_kills_leave_releases_whole(run: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run, folder / "run")
    words = ["publish", f"run={folder / 'run'}", f"repo={NAME}", "baseline=none", "exports=[vllm]"]
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):

        def restore() -> None:
            hub.create(NAME, {"notes.txt": b"of the team"}, private=True)
            shutil.copytree(tmp_path / "earlier", folder / "run/release")

        def read_release() -> dict[str, bytes]:
            files = {name: path.read_bytes() for name, path in hub.files(NAME).items()}
            assert files.pop("notes.txt") == b"of the team"
            assert (
                set(hub.tags(NAME).values()) <= {hub.commits(NAME)[0]}
                and len(hub.commits(NAME)) <= 2
            )
            return files

        assert (
            specdistill(*words, "dry_run=true", f"output_dir={tmp_path / 'earlier'}").returncode
            == 0
        )
        check_survives_kills(
            words,
            folder,
            read_release,
            lambda: read_if_there(folder / "run/release"),
            reset=restore,
        )
        assert hub.tags(NAME).keys() == {"v1"}
        downloaded = Path(snapshot_download(NAME, revision="v1"))
        assert not HfApi().verify_repo_checksums(NAME, revision="v1").mismatches
        AutoModelForCausalLM.from_pretrained(downloaded)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_kills_leave_feature_stores_whole(inputs: list[str], folder: Path) -> None:
    store_keys = [
        "hidden_states.mode=hybrid",
        f"hidden_states.path={folder / 'store'}",
        "hidden_states.shard_tokens=256",
    ]
    words = ["data", "features", *inputs, "method=eagle3", "draft.ttt_steps=2", *SMALL, *store_keys]
    read_shards = lambda: {  # noqa: E731
        path.name: path.read_bytes() for path in (folder / "store").glob("*.safetensors")
    }
    check_survives_kills(words, folder, read_shards, in_parts=True)
    for name in read_shards():
        with safe_open(folder / "store" / name, framework="pt") as file:
            assert file.get_tensor("features").isfinite().all()


def test_kills_leave_trained_drafts_whole(inputs: list[str], folder: Path) -> None:
    words = [
        "train",
        *inputs,
        "method=draft_model",
        "draft.num_layers=2",
        *SMALL,
        "train.save_steps=1",
        "train.eval_steps=1",
    ]
    check_survives_kills(
        [*words, f"train.output_dir={folder / 'run'}"],
        folder,
        lambda: read_if_there(folder / "run/draft"),
    )
    AutoModelForCausalLM.from_pretrained(folder / "run" / "draft")
