"""The doctor on public drafts and on wrong ones, by files alone (see tests/public_pairs.py)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli import main
from tests.public_pairs import PAIRS, WRONG_PAIRS


def examined(pair: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    target, draft = pair.write(folder)
    code = main(["doctor", f"draft={draft}", f"target={target}", "decode=false"])
    output = capsys.readouterr()
    return code, output.out + output.err


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "qwen3-dflash"])
def test_a_public_draft_is_sound(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, said = examined(PAIRS[name], tmp_path / name, capsys)
    assert code == 0, said
    assert f"method {PAIRS[name].method}" in said and "problem  " not in said


def test_a_method_that_is_not_decoded_here_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, said = examined(PAIRS["qwen3-dflash"], tmp_path, capsys)
    assert code == 1 and "a draft of method dflash, which is not decoded here yet" in said


SAID = {
    "width": "with target_hidden_size 2048, expected 4096",
    "vocabulary": "with vocab_size 32000, expected 128256",
    "other-family": "with vocab_size 128256, expected 151936",
    "other-family-model": "expected the target's tokenizer, or heterogeneous_vocab=true",
    "other-tokenizer": "expected the target's tokenizer, or heterogeneous_vocab=true",
    "other-depth": "with num_target_layers 80, expected 32",
    "aux-layers": "with auxiliary layers [2, 18, 33], expected 0..24",
    "missing-tensor": "without layers.0.mlp.down_proj.weight",
    "no-d2t": "without d2t, expected d2t of shape (32000,)",
    "d2t-range": "with a d2t of other numbers, expected offsets to ascending token ids below 128256",
    "lying-config": "with layers.0.mlp.gate_proj.weight of shape (14336, 4096)",
    "lying-vocabulary": "with lm_head.weight of shape (32000, 4096)",
    "zeros": "midlayer.mlp.gate_proj.weight is all zeros",
    "pickled": "d2t and t2d name different tokens",  # it reads plain pickles
    "no-weights": "and no weights",
    "encoder-decoder": "target.model: got ",
    "no-mtp": "whose files have no layer that predicts further tokens",
    "mtp-not-saved": "whose files have no layer that predicts further tokens",
    "dflash-as-eagle3": "a draft of method dflash, which is not decoded here yet",
}
NAMED = {"eagle-as-eagle3": "eagle", "eagle3-as-eagle": "eagle3", "model-as-eagle3": "draft_model"}


@pytest.mark.long
@pytest.mark.parametrize("name", SAID)
def test_a_wrong_draft_is_told(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, said = examined(WRONG_PAIRS[name], tmp_path / name, capsys)
    assert code == (2 if name == "encoder-decoder" else 1), said
    assert SAID[name] in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mtp.layers.0.mlp.down_proj.weight": None}, "without mtp.layers.0.mlp.down_proj.weight, expected a whole layer"),
        ({"mtp.fc.weight": ("BF16", (4096, 4096))}, "with mtp.fc.weight of shape (4096, 4096), expected (4096, 8192)"),
    ],
)
def test_a_target_s_own_layer_is_whole(changed: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pair = PAIRS["qwen3.5-mtp"]
    tensors = {name: tensor for name, tensor in (pair.target.tensors | changed).items() if tensor}
    code, shown = examined(replace(pair, target=replace(pair.target, tensors=tensors)), tmp_path / "pair", capsys)
    assert code == 1 and said in shown


def test_every_wrong_pair_is_told_by_one_or_the_other():
    """A draft that is called by another method's name is examined as what it is: its row among the public pairs."""
    assert SAID.keys() | NAMED.keys() == WRONG_PAIRS.keys()
    assert {pair.method for name, pair in PAIRS.items()} >= set(NAMED.values())
