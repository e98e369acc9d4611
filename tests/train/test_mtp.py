"""train/mtp.py trains a fresh layer or a native one, which goes back into the checkpoint."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from specdistill.cli.main import main
from specdistill.methods.mtp.checkpoint import load_mtp
from specdistill.targets.files import Shards
from specdistill.targets.frozen import FrozenTarget
from tests.mtp_targets import write_checkpoint
from tests.refusals import refused_key
from tests.tiny import write_inputs
from tests.train.runs import train

MTP = ("method=mtp", "data.regenerate=null", "train.bf16=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target without an MTP layer, one with it, and a text file."""
    path = tmp_path_factory.mktemp("target")
    write_inputs(path)
    write_checkpoint("qwen3_next", path / "native", sharded=True)
    return path


def test_a_fresh_layer_is_trained(folder: Path, tmp_path: Path) -> None:
    assert (
        train(
            folder,
            tmp_path / "run",
            *MTP,
            "recipe=pico/mtp",
            "draft.init=scratch",
            "eval.suite=null",
        ).returncode
        == 0
    )
    load_mtp(tmp_path / "run" / "draft", FrozenTarget.load(str(folder / "model")))
    assert (tmp_path / "run" / "training_curve.png").exists()


@pytest.mark.long  # trains, exports and reads the checkpoint again
def test_a_native_layer_is_trained_and_goes_back_into_the_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    native = f"target.model={folder / 'native'}"
    assert train(folder, tmp_path / "run", *MTP, native, "data.packing=false").returncode == 0
    arguments = [
        f"target={folder / 'native'}",
        f"draft={tmp_path / 'run' / 'draft'}",
        f"output_dir={tmp_path / 'out'}",
    ]
    assert main(["export", "engine=vllm", *arguments]) == 0
    trained = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    before, after = (
        Shards.open(path, "target.model") for path in (folder / "native", tmp_path / "out")
    )
    assert before.file_of.keys() == after.file_of.keys()
    changed = [
        name
        for name in before.file_of
        if not (before.load([name])[name] == after.load([name])[name]).all()
    ]
    assert changed and all(name.startswith("mtp.") for name in changed)
    assert all(
        (after.load([name])[name] == trained[name]).all() for name in changed if name in trained
    )
    FrozenTarget.load(str(tmp_path / "out"))


def test_rows_of_a_recurrent_target_hold_one_document(folder: Path, tmp_path: Path) -> None:
    refused = train(folder, tmp_path / "run", *MTP, f"target.model={folder / 'native'}")
    assert refused.returncode == 2 and refused_key(refused.stderr) == "data.packing"
