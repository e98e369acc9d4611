"""Training on a GPU as a user runs it, with every method and option.

The tests are skipped where there is no GPU.
"""

import json
from pathlib import Path

import pytest
import torch

from specdistill.decoding.decoder import Decoder
from specdistill.methods.load import load_proposer
from specdistill.targets.frozen import FrozenTarget
from tests.refusals import refused
from tests.tiny import write_inputs
from tests.train.runs import train

pytestmark = pytest.mark.gpu
WAYS = {
    "eagle3": ("method=eagle3",),
    "eagle": ("method=eagle",),
    "mtp": ("method=mtp", "draft.init=scratch"),
    "draft model": ("method=draft_model",),
    "draft model, recomputed": ("method=draft_model", "train.activation_checkpointing=true"),
    "16 bits": ("method=eagle3", "target.dtype=bfloat16", "train.bf16=true"),
    "compiled": ("method=eagle3", "train.torch_compile=true"),
    "draft model, compiled": ("method=draft_model", "train.torch_compile=true"),
    "stored features": ("method=eagle3", "hidden_states.mode=hybrid"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_inputs(path)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_trains_and_decodes_what_its_target_does(
    folder: Path, tmp_path: Path, way: str
) -> None:
    keys = [
        *WAYS[way],
        *([f"hidden_states.path={tmp_path / 'features'}"] if way == "stored features" else []),
    ]
    assert train(folder, tmp_path / "run", *keys, "train.logging_steps=1").returncode == 0
    log = json.loads((tmp_path / "run" / "run" / "history.json").read_text())["log"]
    assert all(torch.tensor(entry["loss"]).isfinite() for entry in log if "loss" in entry)
    target = FrozenTarget.load(str(folder / "model"))
    method = WAYS[way][0].removeprefix("method=")
    drafted, plain = (
        Decoder(target, proposer).generate(
            [5, 9, 5, 9, 20], max_new_tokens=24, num_speculative_tokens=3 if proposer else 0
        )
        for proposer in (load_proposer(method, str(tmp_path / "run" / "draft"), target), None)
    )
    assert target.device.type == "cuda" and drafted.token_ids == plain.token_ids


def test_a_launch_of_one_process_trains(folder: Path, tmp_path: Path) -> None:
    assert (
        train(folder, tmp_path / "run", "method=eagle3", "launch=ddp", "num_processes=1").returncode
        == 0
    )
    assert (tmp_path / "run" / "draft").is_dir()


def test_a_target_in_fp8_gives_nearly_its_features(folder: Path) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        with refused("target.quantization", "fp8"):
            FrozenTarget.load(str(folder / "model"), dtype="bfloat16", quantization="fp8")
        return
    ids = torch.arange(5, 69, device="cuda").unsqueeze(0)
    whole, eighth = (
        FrozenTarget.load(str(folder / "model"), dtype="bfloat16", quantization=kind)
        for kind in (None, "fp8")
    )
    with torch.no_grad():
        expected, found = (target.features(ids, [1]) for target in (whole, eighth))
    assert 0 < (found.last_hidden - expected.last_hidden).norm() < 0.3 * expected.last_hidden.norm()
