"""Public targets and drafts, by config.json and tensors without content (see tests/public_pairs.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from specdistill.cli import main
from specdistill.planning import rows
from specdistill.planning.reading import read
from tests.public_pairs import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_EAGLE3,
    PAIRS,
    QWEN3_8B,
    QWEN35_9B,
    WRONG_PAIRS,
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


def planned(pair: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `specdistill plan` for a pair, without the seconds that a computed step takes, and its JSON."""
    monkeypatch.setattr(rows, "_account", lambda *described: None)
    target, draft = pair.write(folder)
    given = [f"draft={draft}"] if pair.draft else []
    code = main(["plan", f"target={target}", *given, "hub=false", f"output={folder / 'plan.json'}", *arguments])
    return code, json.loads((folder / "plan.json").read_text(encoding="utf-8")) if code == 0 else {}


# Of the draft: parameters, bytes of its KV cache for a token in 16 bits, c of a step; of the target: GB of weights.
PLANNED = {
    "llama-eagle": (251_662_336, 4096, 0.101, 16.1),
    "llama-eagle3": (424_689_664, 4096, 0.049, 16.1),
    "llama-1b": (1_235_814_400, 32 * 1024, 0.5, 16.1),
    "qwen3-eagle3": (399_523_840, 4096, 0.045, 16.4),
    "qwen3-dflash": (1_048_626_432, 20 * 1024, 0.218, 16.4),
    "deepseek-mtp": (11_610_067_968, 1152, 0.067, 677),
    "gpt-oss-20b-eagle3": (307_641_600, 2048, 0.151, 13.8),
    "gpt-oss-120b-eagle3": (215_481_600, 2048, 0.300, 65.2),
    "qwen3.5-mtp": (243_290_624, 4096, 0.158, 17.9),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRS)
def test_a_public_pair_is_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parameters are those of the checkpoint, but for vocabulary maps and copies of the target's tables."""
    pair, (parameters, cache, c, gigabytes) = PAIRS[name], PLANNED[name]
    code, plan = planned(pair, tmp_path / name, monkeypatch)
    assert code == 0
    (row,) = (row for row in plan["methods"] if row["method"] == pair.method)
    assert row["available"] and (pair.draft is None or row["draft"])
    assert (row["parameters"], row["kv_bytes"]) == (parameters, cache)
    assert row["step_ratio"] == pytest.approx(c, abs=6e-4)
    assert plan["target"]["bytes"] / 1e9 == pytest.approx(gigabytes, rel=5e-3)
    serving = row["serving"]
    assert serving["total"] == pytest.approx(sum(serving["parts"].values()), abs=8)
    if name == "deepseek-mtp":
        assert not serving["fits"] and serving["tensor_parallel"] == 16
    else:
        assert serving["fits"] and 0 < serving["cost"] < serving["room"]
    dear = [warning for warning in plan["warnings"] if "more than a tenth" in warning]
    assert bool(dear) == (c > 0.1 and pair.draft is not None and pair.method != "dflash")


# What `plan` says, which reads configs alone: a refusal, a warning, or the method that the draft is of. Tensors are the doctor's.
SAID = {
    "width": "draft for a width of 2,048, expected 4,096, the target's",
    "vocabulary": "with a vocabulary of 32,000, expected 128,256, the target's",
    "other-family": "with a vocabulary of 128,256, expected 151,936, the target's",
    "other-family-model": "with a vocabulary of 128,256, expected 151,936, the target's",
    "other-depth": "for a target of 80 layers, expected 32, the target's",
    "aux-layers": "which reads the target after layers 33, expected layers of its 24",
    "encoder-decoder": "a T5ForConditionalGeneration, expected the config.json of a causal language model",
    "eagle-as-eagle3": {"method": "eagle"},
    "eagle3-as-eagle": {"method": "eagle3"},
    "model-as-eagle3": {"method": "draft_model"},
    "dflash-as-eagle3": {"method": "dflash"},
    "no-mtp": {"note": "a fresh layer: the config has no"},
    "mtp-not-saved": {"warning": "its config.json says mtp_num_hidden_layers: 1, and its files have no such layer"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SAID)
def test_a_wrong_pair_is_refused_or_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said = SAID[name]
    code, plan = planned(WRONG_PAIRS[name], tmp_path / name, monkeypatch)
    if isinstance(said, str):
        assert code == 2 and said in capsys.readouterr().err
        return
    assert code == 0
    if "method" in said:
        assert [row["method"] for row in plan["methods"] if row["draft"]] == [said["method"]]
    if "note" in said:
        assert any(row["method"] == "mtp" and said["note"] in row["note"] for row in plan["methods"])
    if "warning" in said:
        assert said["warning"] in plan["warnings"] and plan["target"]["native_mtp"] is None


@pytest.mark.long
def test_serving_keys_reach_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    keys = ["serving.context=32768", "serving.batch_size=32", "serving.kv_cache_dtype=fp8", "serving.tensor_parallel=2"]
    code, plan = planned(PAIRS["llama-eagle3"], tmp_path, monkeypatch, *keys, "serving.memory_gb=48")
    assert code == 0
    (row,) = (row for row in plan["methods"] if row["method"] == "eagle3")
    assert row["serving"]["parts"]["KV cache"] == 32 * 32768 * 64 * 1024 // 2
    assert row["serving"]["parts"]["target"] == 16_060_522_496 // 2
    # Weights that a step reads, and the KV caches of 32 · 32,768 tokens in 8 bits: 64 KiB of each for the target, 2 KiB for the head
    tokens = 32 * 32768 * 1024
    assert row["step_ratio"] == pytest.approx((0.7487e9 + 2 * tokens) / (15.0098e9 + 64 * tokens), rel=1e-3)
    said = " ".join(capsys.readouterr().out.split())
    assert "Serving 32 sequences of 32,768 tokens in bfloat16 with a KV cache in float8_e4m3fn, on each of 2 devices" in said
    assert "fewer than alone" in said or "does not fit" in said
