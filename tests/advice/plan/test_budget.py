"""The memory of a device that serves a target is compared with sums by hand and published sizes.

Unsupported options are refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdistill.advice.plan.budget import Budget, check_serving, compute_budget, count_weight_bytes
from specdistill.advice.plan.options import ServingOptions
from specdistill.advice.plan.reading import read_model_config
from specdistill.methods.sizes import ModelConfigInfo
from specdistill.targets.cache_size import build_attention_cache_size
from tests.public_pairs import GPT_OSS_120B, LLAMA_8B, Repository
from tests.refusals import refused

GIB = 2**30


def read_config(folder: Path, repository: Repository) -> ModelConfigInfo:
    return read_model_config(str(repository.write(folder / repository.name)), key="target.model")


def compute_target_budget(
    target: ModelConfigInfo, *draft: Any, num_speculative_tokens: int = 0, **options: Any
) -> Budget:
    return compute_budget(
        target,
        check_serving(ServingOptions(**options), target),
        *draft,
        num_speculative_tokens=num_speculative_tokens,
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelConfigInfo:
    return read_config(tmp_path_factory.mktemp("llama"), LLAMA_8B)


def test_the_parts_of_a_budget_add_up_to_the_memory_that_it_needs(llama: ModelConfigInfo):
    serving = {"context": 8192, "batch_size": 4, "memory_gb": 24.0, "gpu_memory_utilization": 0.9}
    budget = compute_target_budget(
        llama,
        850_000_000,
        build_attention_cache_size(1, 8, 128),
        num_speculative_tokens=4,
        **serving,
    )
    # A pass of 8,192 tokens has 6 · 4096 + 3 · 14336 bfloat16 numbers for each token, and there are
    # 20 rows of float32 logits.
    engine = GIB + 8192 * 2 * (6 * 4096 + 3 * 14336) + 4 * 20 * 128_256
    assert budget.parts == {
        "target": 16_060_522_496,
        "KV cache": 4 * 8192 * 128 * 1024,
        "draft": 850_000_000,
        "draft's KV cache": 4 * 8192 * 4 * 1024,
        "engine": engine,
    }
    total = sum(budget.parts.values())
    assert budget.needs == int(total / 0.9) and budget.fits == (total <= 0.9 * 24 * GIB)


def test_the_remaining_memory_is_room_for_context(llama: ModelConfigInfo):
    serving = {"memory_gb": 24.0, "gpu_memory_utilization": 0.9}
    alone, drafted = (
        compute_target_budget(llama, **serving),
        compute_target_budget(llama, 850_000_000, build_attention_cache_size(1, 8, 128), **serving),
    )
    left = 0.9 * 24 * GIB - alone.parts["target"] - alone.parts["engine"]
    assert alone.room == int(left // (128 * 1024))
    assert drafted.room == int((left - 850_000_000) // (132 * 1024))
    several = compute_target_budget(llama, batch_size=8, **serving)
    # Seven more requests need memory for their logits.
    assert alone.room - 200 < several.room <= alone.room and several.room % 8 == 0


@pytest.mark.parametrize(
    ("changed", "part", "size"),
    [
        ({"dtype": "float32"}, "target", 32_121_044_992),
        ({"dtype": "float32"}, "KV cache", 4096 * 256 * 1024),
        ({"kv_cache_dtype": "fp8"}, "KV cache", 4096 * 64 * 1024),
        ({"tensor_parallel": 4}, "KV cache", 4096 * 32 * 1024),
        # Each of eight heads is on two devices.
        ({"tensor_parallel": 16}, "KV cache", 4096 * 16 * 1024),
        ({"tensor_parallel": 4}, "target", 16_060_522_496 // 4),
        ({"tensor_parallel": 4}, "draft", 212_500_000),
        ({"tensor_parallel": 4}, "draft's KV cache", 4096 * 1024),
    ],
)
def test_dtypes_and_devices_change_the_size_of_each_part(
    llama: ModelConfigInfo, changed: dict[str, Any], part: str, size: int
):
    assert (
        compute_target_budget(
            llama, 850_000_000, build_attention_cache_size(1, 8, 128), **changed
        ).parts[part]
        == size
    )


def test_a_budget_that_does_not_fit_names_the_number_of_devices(llama: ModelConfigInfo):
    budget = compute_target_budget(llama, memory_gb=16.0)
    assert not budget.fits and budget.room == 0 and budget.tensor_parallel == 2
    assert compute_target_budget(llama, memory_gb=1.0).tensor_parallel is None


def test_quantised_weights_count_as_they_are_stored(tmp_path: Path):
    target = read_config(tmp_path, GPT_OSS_120B)
    assert count_weight_bytes(target) / 1e9 == pytest.approx(65.2, rel=0.01)
    assert count_weight_bytes(replace(target, stored_bytes=None)) == 2 * target.parameters


# The target has 131,072 positions and 32 heads.
@pytest.mark.parametrize(("key", "got"), [("context", 200_000), ("tensor_parallel", 3)])
def test_serving_options_that_no_engine_supports_are_refused(
    llama: ModelConfigInfo, key: str, got: int
):
    with refused(f"serving.{key}", got):
        check_serving(ServingOptions(**{key: got}), llama)
    check_serving(ServingOptions(context=131_072, tensor_parallel=32), llama)


def test_a_dtype_is_refused_for_quantised_weights(tmp_path: Path):
    target = read_config(tmp_path, GPT_OSS_120B)
    with refused("serving.dtype", "float32"):
        check_serving(ServingOptions(dtype="float32"), target)
    check_serving(ServingOptions(), target)
