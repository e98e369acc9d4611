"""The doctor examines the files of public and wrong drafts (see tests/public_pairs.py)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli.main import main
from tests.public_pairs import PAIRS, WRONG_PAIRS, one_a_method


def run_doctor(pair: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    target, draft = pair.write(folder)
    code = main(["doctor", f"draft={draft}", f"target={target}", "decode=false"])
    output = capsys.readouterr()
    return code, output.out + output.err


# The doctor reads the weights: gigabytes of four pairs, and 23 GB of deepseek-mtp, take minutes.
@pytest.mark.parametrize(
    "name",
    one_a_method(
        sorted(PAIRS.keys() - {"deepseek-mtp"}),
        but=("llama-1b", "llama-eagle", "qwen3-dflash", "qwen3-pard"),
    ),
)
def test_a_public_draft_is_sound(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, printed = run_doctor(PAIRS[name], tmp_path / name, capsys)
    assert code == 0, printed
    assert f"method {PAIRS[name].method}" in printed and "problem  " not in printed


SAID = {
    "width": "target_hidden_size 2048",
    "vocabulary": "vocab_size 32000",
    "other-family": "vocab_size 128256",
    "other-family-model": "heterogeneous_vocab",
    "other-tokenizer": "heterogeneous_vocab",
    "other-depth": "num_target_layers 80",
    "aux-layers": "[2, 18, 33]",
    "missing-tensor": "layers.0.mlp.down_proj.weight",
    "pard-without-a-row": "pard_token 151936",
    "no-d2t": "d2t of shape (32000,)",
    "d2t-range": "d2t",
    "lying-config": "layers.0.mlp.gate_proj.weight of shape (14336, 4096)",
    "lying-vocabulary": "lm_head.weight of shape (32000, 4096)",
    "zeros": "midlayer.mlp.gate_proj.weight",
    "pickled": "t2d",  # the doctor reads plain pickles
    "no-weights": "no weights",
    "encoder-decoder": "target: got ",
    "no-mtp": "no layer",
    "mtp-not-saved": "no layer",
}
NAMED = {
    "eagle-as-eagle3": "eagle",
    "eagle3-as-eagle": "eagle3",
    "model-as-eagle3": "draft_model",
    "dflash-as-eagle3": "dflash",
    "pard-as-draft-model": "pard",
}


@pytest.mark.long  # many cases
@pytest.mark.parametrize("name", SAID)
def test_a_wrong_draft_is_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, printed = run_doctor(WRONG_PAIRS[name], tmp_path / name, capsys)
    assert code == (2 if name == "encoder-decoder" else 1), printed
    assert SAID[name] in printed


@pytest.mark.long  # reading the target's tensors takes four seconds
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mtp.layers.0.mlp.down_proj.weight": None}, "mtp.layers.0.mlp.down_proj.weight"),
        ({"mtp.fc.weight": ("BF16", (4096, 4096))}, "(4096, 8192)"),
    ],
)
def test_an_incomplete_native_layer_is_reported(
    changed: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pair = PAIRS["qwen3.5-mtp"]
    tensors = {name: tensor for name, tensor in (pair.target.tensors | changed).items() if tensor}
    code, printed = run_doctor(
        replace(pair, target=replace(pair.target, tensors=tensors)), tmp_path / "pair", capsys
    )
    assert code == 1 and said in printed


def test_every_wrong_pair_has_an_expected_finding_or_method():
    """A draft that has another method's name is examined as the method that it is.

    The public pairs have a draft of each such method.
    """
    assert SAID.keys() | NAMED.keys() == WRONG_PAIRS.keys()
    assert {pair.method for name, pair in PAIRS.items()} >= set(NAMED.values())
