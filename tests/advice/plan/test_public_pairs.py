"""`specdistill plan` for public targets and drafts, whose tensors have no content.

tests/public_pairs.py writes them.
"""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli.main import main
from tests.public_pairs import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_1B,
    LLAMA_8B,
    PAIRS,
    QWEN3_8B,
    WRONG_PAIRS,
    Repository,
    one_a_method,
)
from tests.refusals import refused_key

pytestmark = pytest.mark.usefixtures("given_training_step")


@pytest.mark.parametrize(
    ("repository", "num_tensors", "num_bytes"),
    [
        (LLAMA_8B, 291, 16_060_522_496),
        (LLAMA_1B, 146, 2_471_628_800),
        (QWEN3_8B, 399, 16_381_470_720),
        (GPT_OSS_20B, 459, 13_761_264_768),
        (GPT_OSS_120B, 687, 65_248_815_744),
    ],
)
def test_the_fixtures_have_the_published_sizes(
    repository: Repository, num_tensors: int, num_bytes: int
):
    """The published size is `total_size` of the index, or the size of the one file."""
    assert (len(repository.tensors), repository.num_bytes) == (num_tensors, num_bytes)


def run_plan(pair: Any, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `specdistill plan` for a pair and return its exit code and its JSON."""
    target, draft = pair.write(folder)
    draft_keys = [f"draft={draft}"] if pair.draft else []
    with redirect_stdout(io.StringIO()) as printed:
        code = main(["plan", f"target={target}", *draft_keys, "hub=false", "--json", *arguments])
    return code, json.loads(printed.getvalue()) if code == 0 else {}


# The draft's parameters, its bytes of KV cache for each token in 16 bits, and the cost c of its
# step; then the target's GB of weights.
PLANNED = {
    "llama-eagle": (251_662_336, 4096, 0.101, 16.1),
    "llama-eagle3": (424_689_664, 4096, 0.049, 16.1),
    "llama-1b": (1_235_814_400, 32 * 1024, 0.5, 16.1),
    "qwen3-eagle3": (399_523_840, 4096, 0.045, 16.4),
    "qwen3-pard": (596_049_920, 56 * 1024 * 2, 0.778, 16.4),
    "deepseek-mtp": (11_610_067_968, 1152, 0.067, 677),
    "gpt-oss-20b-eagle3": (307_641_600, 2048, 0.151, 13.8),
    "gpt-oss-120b-eagle3": (215_481_600, 2048, 0.300, 65.2),
    "qwen3.5-mtp": (243_290_624, 4096, 0.158, 17.9),
}


# Trying the layers of a target of public size takes seconds.
@pytest.mark.parametrize("name", one_a_method(PLANNED, but=PAIRS.keys() - {"llama-eagle3"}))
def test_a_public_pair_is_planned(name: str, tmp_path: Path):
    """Parameters are those of the checkpoint, without vocabulary maps and copies of the target's
    tables."""
    pair, (parameters, cache, c, gigabytes) = PAIRS[name], PLANNED[name]
    code, plan = run_plan(pair, tmp_path / name)
    assert code == 0
    (row,) = (row for row in plan["methods"] if row["method"] == pair.method)
    assert row["available"] and (pair.draft is None or row["draft"])
    assert (row["parameters"], row["kv_bytes"]) == (parameters, cache)
    assert row["step_ratio"] == pytest.approx(c, abs=6e-4)
    assert plan["target"]["bytes"] / 1e9 == pytest.approx(gigabytes, rel=5e-3)
    serving = row["serving"]
    if name == "deepseek-mtp":
        assert not serving["fits"] and serving["tensor_parallel"] == 16
    else:
        assert serving["fits"] and 0 < serving["cost"] < serving["room"]


# `plan` reads configs alone: the refused key, and text of its message. The doctor reads tensors.
REFUSED = {
    "other-depth": ("draft", "80 layers"),
    "aux-layers": ("draft", "33"),
    "encoder-decoder": ("target", "T5ForConditionalGeneration"),
}


@pytest.mark.long  # many cases
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_pair_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    key, got = REFUSED[name]
    code, _ = run_plan(WRONG_PAIRS[name], tmp_path / name)
    error = capsys.readouterr().err
    assert (code, refused_key(error)) == (2, key) and got in error


@pytest.mark.long  # writes a checkpoint of many tensors
def test_a_layer_that_is_stated_and_not_saved_is_warned_of(tmp_path: Path):
    _, plan = run_plan(WRONG_PAIRS["mtp-not-saved"], tmp_path / "pair")
    assert (
        any("mtp_num_hidden_layers" in warning for warning in plan["warnings"])
        and plan["target"]["native_mtp"] is None
    )


@pytest.mark.long  # plans a pair
def test_serving_keys_reach_the_plan(tmp_path: Path):
    keys = [
        "serving.context=32768",
        "serving.batch_size=32",
        "serving.kv_cache_dtype=fp8",
        "serving.tensor_parallel=2",
    ]
    code, plan = run_plan(PAIRS["llama-eagle3"], tmp_path, *keys, "serving.memory_gb=48")
    assert code == 0
    (row,) = (row for row in plan["methods"] if row["method"] == "eagle3")
    assert row["serving"]["parts"]["KV cache"] == 32 * 32768 * 64 * 1024 // 2
    assert row["serving"]["parts"]["target"] == 16_060_522_496 // 2
    # A step reads weights, and the KV caches of 32 · 32,768 tokens in 8 bits: 64 KiB for each token
    # of the target, 2 KiB of the head.
    tokens = 32 * 32768 * 1024
    assert row["step_ratio"] == pytest.approx(
        (0.7487e9 + 2 * tokens) / (15.0098e9 + 64 * tokens), rel=1e-3
    )
