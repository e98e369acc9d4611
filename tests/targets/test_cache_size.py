"""Sizes of KV caches, against caches that small models have filled, and against what is published of large ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from specdistill.planning.reading import read
from specdistill.targets.cache_size import cache_size, of_attention
from tests.public_pairs import DEEPSEEK_V3, GPT_OSS_20B, GPT_OSS_120B, LLAMA_8B, QWEN3_8B, QWEN35_9B, Repository

SMALL = {"hidden_size": 64, "vocab_size": 100, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 24, "sliding_window": 9},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "num_local_experts": 4},
    "qwen3_next": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **MIXTURE,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **MIXTURE,
    },
}  # fmt: skip


def filled(cache: DynamicCache) -> int:
    """Bytes of all that a cache holds, but for single numbers that steer it."""
    held = [
        part
        for layer in cache.layers
        for value in vars(layer).values()
        for part in (value.values() if isinstance(value, dict) else [value])
    ]
    return sum(part.nbytes for part in held if isinstance(part, torch.Tensor) and part.ndim)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("batch_size", "context"), [(1, 5), (3, 21)])
def test_a_size_is_that_of_the_library_s_own_cache_byte_for_byte(kind: str, batch_size: int, context: int):
    config = CONFIG_MAPPING[kind](**SMALL, **MODELS[kind])
    with torch.device("meta"):
        size = cache_size(AutoModelForCausalLM.from_config(config))
    cache = DynamicCache(config=config)
    ids = torch.zeros(batch_size, context, dtype=torch.long)
    with torch.inference_mode():
        AutoModelForCausalLM.from_config(config).eval()(input_ids=ids, past_key_values=cache, use_cache=True)
    assert size is not None and size.num_bytes(context, batch_size, 4) == filled(cache)


@pytest.mark.parametrize(
    ("repository", "per_token"),
    [
        (LLAMA_8B, 128 * 1024),
        (QWEN3_8B, 144 * 1024),
        (DEEPSEEK_V3, 70_272),  # 70.272 kB (arXiv 2505.09343, table 1)
        (GPT_OSS_20B, 24 * 1024),  # 12 of 24 layers have no window
        (GPT_OSS_120B, 36 * 1024),
        (QWEN35_9B, 32 * 1024),  # 8 of 32 layers attend
    ],
)
def test_bytes_per_token_of_public_targets(tmp_path: Path, repository: Repository, per_token: int):
    (tmp_path / "config.json").write_text(json.dumps(repository.config), encoding="utf-8")
    size = cache_size(read(str(tmp_path), key="target.model").model)
    assert size is not None and size.per_token(2) == per_token


def test_devices_share_heads_and_a_latent_is_on_each():
    grouped = of_attention(32, 8, 128)
    assert [grouped.num_bytes(1000, 1, 2, devices) for devices in (1, 4, 16)] == [131_072_000, 32_768_000, 16_384_000]
    (latent,) = {of_attention(1, 1, 288).num_bytes(1000, 2, 1, devices) for devices in (1, 8)}
    assert latent == 2 * 576_000


def test_a_window_stops_growing():
    size = of_attention(2, 4, 16, window=128)
    assert size.num_bytes(127, 1, 2) == size.num_bytes(100_000, 1, 2) == 2 * 127 * 128 * 2
    assert size.per_token(2) == 0
