"""Public targets and drafts, by config.json and tensors without content (see tests/public_pairs.py)."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from specdistill.planning.reading import read
from tests.public_pairs import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_EAGLE3,
    QWEN3_8B,
    QWEN35_9B,
    Repository,
)


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
def test_the_fixtures_are_as_large_as_what_is_published(repository: Repository, num_tensors: int, num_bytes: int):
    """`total_size` of the index, or the one file's."""
    assert (len(repository.tensors), repository.num_bytes) == (num_tensors, num_bytes)


def test_deepseek_and_qwen35_have_their_layers():
    assert len(DEEPSEEK_V3.tensors) == 91_991 and round(DEEPSEEK_V3.num_parameters / 1e9) == 685
    assert sum(name.startswith("mtp.") for name in QWEN35_9B.tensors) == 15
    assert sum(name.startswith("model.layers.61.") for name in DEEPSEEK_V3.tensors) > 1536


def test_a_fixture_is_read_by_the_real_reader(tmp_path: Path):
    folder = LLAMA_EAGLE3.write(tmp_path / "head")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("fc.weight").get_shape() == [4096, 12288]
        d2t = weights.get_tensor("d2t")
        assert int(d2t[-1]) == 128255 - 31999
    assert (folder / "model.safetensors").stat().st_blocks * 512 < 2**20 < (folder / "model.safetensors").stat().st_size
    target = LLAMA_8B.write(tmp_path / "target")
    index = json.loads((target / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == LLAMA_8B.num_bytes and len(set(index["weight_map"].values())) == 4
    assert read(str(target), key="target.model").parameters == LLAMA_8B.num_parameters
