"""Sizes of KV caches, compared with filled caches and with published sizes of large models."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from specdistill.advice.plan.reading import read_model_config
from specdistill.targets.cache_size import build_attention_cache_size, cache_size
from tests.public_pairs import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_8B,
    QWEN3_8B,
    QWEN35_9B,
    Repository,
)
from tests.targets.architectures import tiny_model

KINDS = ("llama", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3")


def count_cached_bytes(cache: DynamicCache) -> int:
    """Return the bytes of the tensors in a cache, without single numbers that control it."""
    entries = [
        part
        for layer in cache.layers
        for value in vars(layer).values()
        for part in (value.values() if isinstance(value, dict) else [value])
    ]
    return sum(part.nbytes for part in entries if isinstance(part, torch.Tensor) and part.ndim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch_size", "context"), [(1, 5), (3, 21)])
def test_a_size_is_that_of_the_librarys_own_cache_to_the_byte(
    kind: str, batch_size: int, context: int
):
    model = tiny_model(kind)
    size, cache = cache_size(model), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(
            input_ids=torch.zeros(batch_size, context, dtype=torch.long),
            past_key_values=cache,
            use_cache=True,
        )
    assert size is not None and size.num_bytes(context, batch_size, 4) == count_cached_bytes(cache)


@pytest.mark.parametrize(
    ("repository", "per_token"),
    [
        (LLAMA_8B, 128 * 1024),
        # the class and the sizes differ from others; half a second and more
        pytest.param(QWEN3_8B, 144 * 1024, marks=pytest.mark.long),
        # 70.272 kB (arXiv 2505.09343, table 1)
        pytest.param(DEEPSEEK_V3, 70_272, marks=pytest.mark.long),
        (GPT_OSS_20B, 24 * 1024),  # 12 of 24 layers have no window
        pytest.param(GPT_OSS_120B, 36 * 1024, marks=pytest.mark.long),
        # 8 of 32 layers attend
        pytest.param(QWEN35_9B, 32 * 1024, marks=pytest.mark.long),
    ],
)
def test_public_targets_have_their_published_bytes_per_token(
    tmp_path: Path, repository: Repository, per_token: int
):
    (tmp_path / "config.json").write_text(json.dumps(repository.config), encoding="utf-8")
    size = cache_size(read_model_config(str(tmp_path), key="target.model").model)
    assert size is not None and size.count_bytes_per_token(2) == per_token


def test_devices_share_heads_and_a_latent_is_on_each():
    grouped = build_attention_cache_size(32, 8, 128)
    assert [grouped.num_bytes(1000, 1, 2, devices) for devices in (1, 4, 16)] == [
        131_072_000,
        32_768_000,
        16_384_000,
    ]
    (latent,) = {
        build_attention_cache_size(1, 1, 288).num_bytes(1000, 2, 1, devices) for devices in (1, 8)
    }
    assert latent == 2 * 576_000


def test_a_window_stops_growing():
    size = build_attention_cache_size(2, 4, 16, window=128)
    assert size.num_bytes(127, 1, 2) == size.num_bytes(100_000, 1, 2) == 2 * 127 * 128 * 2
    assert size.count_bytes_per_token(2) == 0
