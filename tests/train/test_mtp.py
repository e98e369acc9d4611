"""train/mtp.py, by which train/eagle.py trains a layer: a fresh one, a native one and its way back into the checkpoint, wrong input."""

import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from specdistill.cli import main
from specdistill.methods.mtp.checkpoint import load_mtp
from specdistill.project import ROOT
from specdistill.targets.files import Shards
from specdistill.targets.frozen import FrozenTarget
from tests.mtp_targets import write_checkpoint
from tests.refusals import refused_key
from tests.tiny import input_keys, write_inputs

SCRIPT = str(ROOT / "train" / "mtp.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without such a layer, one with it, and a text file."""
    path = tmp_path_factory.mktemp("target")
    write_inputs(path)
    write_checkpoint("qwen3_next", path / "native", sharded=True)
    return path


def launch(monkeypatch: pytest.MonkeyPatch, folder: Path, output_dir: Path, *extra: str) -> int:
    """A run of three steps; a recipe in `extra` comes first, so that what is small here stays small."""
    recipe = [argument for argument in extra if argument.startswith("recipe=")]
    arguments = [
        "method=mtp",
        *input_keys(folder),
        "data.regenerate=null",
        "draft.ttt_steps=3",
        f"train.output_dir={output_dir}",
        "train.max_steps=3",
        "train.per_device_train_batch_size=4",
        "train.learning_rate=1e-3",
        "train.eval_strategy=steps",
        "train.eval_steps=3",
        "train.save_steps=3",
        "train.load_best_model_at_end=true",
        "train.metric_for_best_model=acceptance_length",
        "train.bf16=false",
        "train.report_to=none",
        *(argument for argument in extra if argument not in recipe),
    ]
    monkeypatch.setattr(sys, "argv", ["train/mtp.py", *recipe, *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(SCRIPT, run_name="__main__")
    return int(caught.value.code or 0)


@pytest.mark.parametrize("recipe", [(), ("recipe=pico/mtp",)])
def test_a_fresh_layer_is_trained(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: tuple[str, ...]
) -> None:
    assert launch(monkeypatch, folder, tmp_path / "run", *recipe, "draft.init=scratch") == 0
    load_mtp(tmp_path / "run" / "draft", FrozenTarget.load(str(folder / "model")))
    assert (tmp_path / "run" / "training_curve.png").exists()


def test_a_native_layer_is_trained_and_goes_back_into_the_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = f"target.model={folder / 'native'}"
    assert launch(monkeypatch, folder, tmp_path / "run", native, "data.packing=false") == 0
    arguments = [f"target={folder / 'native'}", f"draft={tmp_path / 'run' / 'draft'}", f"output_dir={tmp_path / 'out'}"]
    assert main(["export", "engine=vllm", *arguments]) == 0
    trained = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    before, after = (Shards.open(path, "target.model") for path in (folder / "native", tmp_path / "out"))
    assert before.file_of.keys() == after.file_of.keys()
    changed = [name for name in before.file_of if not (before.load([name])[name] == after.load([name])[name]).all()]
    assert changed and all(name.startswith("mtp.") for name in changed)
    assert all((after.load([name])[name] == trained[name]).all() for name in changed if name in trained)
    FrozenTarget.load(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ("draft.num_layers=2", "draft.num_layers"),
        ("draft.init=null", "draft.init"),
        ("draft.intermediate_size=8", "draft.intermediate_size"),
        ("draft.sliding_window=8", "draft.sliding_window"),
        ("draft.init=nowhere/at", "draft.init"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], extra: str, key: str
) -> None:
    assert launch(monkeypatch, folder, tmp_path / "run", "draft.init=scratch", extra) == 2
    assert refused_key(capfd.readouterr().err) == key
    assert not (tmp_path / "run").exists()


def test_rows_of_a_recurrent_target_hold_one_document(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(monkeypatch, folder, tmp_path / "run", f"target.model={folder / 'native'}") == 2
    assert refused_key(capfd.readouterr().err) == "data.packing"
