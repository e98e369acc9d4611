"""What a device holds while a target serves: sums by hand, against published sizes, and what is
refused."""

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


def described(folder: Path, repository: Repository) -> ModelConfigInfo:
    return read_model_config(str(repository.write(folder / repository.name)), key="target.model")


def budget_of(
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
    return described(tmp_path_factory.mktemp("llama"), LLAMA_8B)


def test_parts_add_up_and_say_what_memory_they_fit_in(llama: ModelConfigInfo):
    serving = {"context": 8192, "batch_size": 4, "memory_gb": 24.0, "gpu_memory_utilization": 0.9}
    made = budget_of(
        llama,
        850_000_000,
        build_attention_cache_size(1, 8, 128),
        num_speculative_tokens=4,
        **serving,
    )
    # A pass of 8,192 tokens: 6 · 4096 + 3 · 14336 numbers in bfloat16; 20 rows of float32 logits
    engine = GIB + 8192 * 2 * (6 * 4096 + 3 * 14336) + 4 * 20 * 128_256
    assert made.parts == {
        "target": 16_060_522_496,
        "KV cache": 4 * 8192 * 128 * 1024,
        "draft": 850_000_000,
        "draft's KV cache": 4 * 8192 * 4 * 1024,
        "engine": engine,
    }
    total = sum(made.parts.values())
    assert made.needs == int(total / 0.9) and made.fits == (total <= 0.9 * 24 * GIB)


def test_what_is_left_is_room_for_context(llama: ModelConfigInfo):
    serving = {"memory_gb": 24.0, "gpu_memory_utilization": 0.9}
    alone, drafted = (
        budget_of(llama, **serving),
        budget_of(llama, 850_000_000, build_attention_cache_size(1, 8, 128), **serving),
    )
    left = 0.9 * 24 * GIB - alone.parts["target"] - alone.parts["engine"]
    assert alone.room == int(left // (128 * 1024))
    assert drafted.room == int((left - 850_000_000) // (132 * 1024))
    several = budget_of(llama, batch_size=8, **serving)
    # logits of seven more
    assert alone.room - 200 < several.room <= alone.room and several.room % 8 == 0


@pytest.mark.parametrize(
    ("changed", "part", "size"),
    [
        ({"dtype": "float32"}, "target", 32_121_044_992),
        ({"dtype": "float32"}, "KV cache", 4096 * 256 * 1024),
        ({"kv_cache_dtype": "fp8"}, "KV cache", 4096 * 64 * 1024),
        ({"tensor_parallel": 4}, "KV cache", 4096 * 32 * 1024),
        ({"tensor_parallel": 16}, "KV cache", 4096 * 16 * 1024),  # eight heads: each on two devices
        ({"tensor_parallel": 4}, "target", 16_060_522_496 // 4),
        ({"tensor_parallel": 4}, "draft", 212_500_000),
        ({"tensor_parallel": 4}, "draft's KV cache", 4096 * 1024),
    ],
)
def test_dtypes_and_devices_change_what_each_holds(
    llama: ModelConfigInfo, changed: dict[str, Any], part: str, size: int
):
    assert (
        budget_of(llama, 850_000_000, build_attention_cache_size(1, 8, 128), **changed).parts[part]
        == size
    )


def test_what_does_not_fit_says_on_how_many_devices_it_would(llama: ModelConfigInfo):
    made = budget_of(llama, memory_gb=16.0)
    assert not made.fits and made.room == 0 and made.tensor_parallel == 2
    assert budget_of(llama, memory_gb=1.0).tensor_parallel is None


def test_quantised_weights_count_as_they_are_stored(tmp_path: Path):
    target = described(tmp_path, GPT_OSS_120B)
    assert count_weight_bytes(target) / 1e9 == pytest.approx(65.2, rel=0.01)
    assert count_weight_bytes(replace(target, stored_bytes=None)) == 2 * target.parameters


# of 131,072 positions and 32 heads
@pytest.mark.parametrize(("key", "got"), [("context", 200_000), ("tensor_parallel", 3)])
def test_what_no_engine_serves_is_refused(llama: ModelConfigInfo, key: str, got: int):
    with refused(f"serving.{key}", got):
        check_serving(ServingOptions(**{key: got}), llama)
    check_serving(ServingOptions(context=131_072, tensor_parallel=32), llama)


def test_a_dtype_is_refused_for_quantised_weights(tmp_path: Path):
    target = described(tmp_path, GPT_OSS_120B)
    with refused("serving.dtype", "float32"):
        check_serving(ServingOptions(dtype="float32"), target)
    check_serving(ServingOptions(), target)
