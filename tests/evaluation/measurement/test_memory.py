"""The memory that generation takes: an estimate that holds, batches that fit, no float32 logits
of all rows, a heap that shrinks."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache

from specdistill.targets import batch_generate, memory
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.batch_generate import (
    BatchPlan,
    generate_batch,
    plan_batch,
    prepare_generation,
    sample,
)
from specdistill.targets.memory import (
    LARGE_VOCABULARY,
    estimate_row_bytes,
    map_large_tensors,
    measure_free_memory,
)
from specdistill.training.losses.head_loss import compute_head_loss
from tests.tiny import tiny_target_model

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class LargestTensorMode(TorchDispatchMode):
    """A dispatch mode that records the bytes of the largest floating-point tensor."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_iter(outputs):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return outputs


def draw_tokens(logits_BV: Tensor) -> list[int]:
    temperatures = torch.tensor([0.0, 0.7, 1.0]).repeat(len(logits_BV))[: len(logits_BV)]
    return sample(logits_BV, temperatures, torch.Generator().manual_seed(3)).tolist()


def test_tokens_are_drawn_a_few_rows_at_a_time_and_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits_BV = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    together = draw_tokens(logits_BV)
    monkeypatch.setattr(batch_generate, "SAMPLING_BYTES", 5 * 4 * 500, raising=False)
    with LargestTensorMode() as largest:
        assert draw_tokens(logits_BV) == together
    assert largest.num_bytes <= 5 * 4 * 500


@pytest.mark.long  # three seconds of operations without content
def test_the_loss_of_a_large_vocabulary_holds_no_gigabytes() -> None:
    """The logits of 2,048 rows at 4 positions would be 4.3 GB in bfloat16. Nothing is computed:
    tensors have no content."""
    size, hidden = 2**18, 4
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), LargestTensorMode() as largest:
        rows_KRH = torch.randn(4, 2048, hidden, requires_grad=True)
        probs = torch.full((1, size), 1 / size)

        def compute_loss(logits_rW: Tensor, _: Tensor, k: int) -> tuple[Tensor, Tensor]:
            losses_r = -(probs * logits_rW.float().log_softmax(-1)).sum(-1)
            return losses_r, losses_r.detach().unsqueeze(0)

        total, _ = compute_head_loss(
            rows_KRH,
            torch.ones(4, 2048),
            LogitsHead(nn.Linear(hidden, size, bias=False)),
            lambda rows: probs,
            compute_loss,
        )
        total.backward()
    assert largest.num_bytes <= 512 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's record of a process's peak")
def test_generation_with_a_large_vocabulary_takes_what_was_estimated() -> None:
    """The 32 rows have a vocabulary of 131,072, whose head takes 17 MB.

    A copy of the head for each row would take 537 MB.
    """
    # The weights of a target need no gradients.
    model = tiny_target_model(num_layers=1, vocab_size=2**17).requires_grad_(False)
    prompts = [[1, 2, 3]] * 32
    with prepare_generation(model, torch.bfloat16) as prepared:
        generate_batch(
            prepared, prompts[:2], [0.0, 0.8], max_new_tokens=2, end_ids=[], seed=0, num_parts=1
        )
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = read_memory_bytes("VmHWM")
        generate_batch(
            prepared, prompts, [0.0, 0.8] * 16, max_new_tokens=2, end_ids=[], seed=0, num_parts=1
        )
        taken = read_memory_bytes("VmHWM") - before
    assert taken < 32 * estimate_row_bytes(model, 5) + batch_generate.SAMPLING_BYTES * 3


def read_memory_bytes(name: str) -> int:
    """Return the kernel's figure for this process; VmHWM is its peak of resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def test_a_row_takes_at_least_its_cache_and_its_logits() -> None:
    model, length = tiny_target_model(num_layers=3), 40
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    logits = 4 * model.config.vocab_size
    assert cached + logits < estimate_row_bytes(model, length) < 20 * (cached + logits)
    longer = estimate_row_bytes(model, 2 * length) - estimate_row_bytes(model, length)
    assert longer > cached


@pytest.mark.parametrize(
    ("device", "free_gb", "plan"),
    [
        (CPU, 20, BatchPlan(512, 10)),  # eight parts of 64 rows, of which each takes 1.3 GB
        (CPU, 3, BatchPlan(512, 1)),  # one part at a time: the same tokens, later
        (CPU, 1, BatchPlan(32, 1)),
        (CPU, 0.0001, BatchPlan(1, 1)),
        (CUDA, 20, BatchPlan(512, 1)),
        (CUDA, 3, BatchPlan(64, 1)),
    ],
)
def test_a_batch_fits_the_free_memory(
    device: torch.device, free_gb: float, plan: BatchPlan
) -> None:
    row_bytes = 20_000_000
    assert plan_batch(512, device, row_bytes, int(free_gb * 1e9)) == plan


def test_a_control_group_limits_what_is_free(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used, statistics = tmp_path / "limit", tmp_path / "used", tmp_path / "memory.stat"
    used.write_text("300\n")
    statistics.write_text("anon 200\ninactive_file 100\n")
    monkeypatch.setattr(memory, "CGROUP_FILES", ((tmp_path, "limit", "used", "inactive_file"),))
    without = measure_free_memory(CPU)
    assert without > 2**20
    limit.write_text("max\n")
    assert measure_free_memory(CPU) > 2**20
    limit.write_text("1000\n")
    assert measure_free_memory(CPU) == 800  # page cache is dropped when memory is needed


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "others1", "others2")
    ] + [(f"rest{number}", ctypes.c_size_t) for number in range(5)]


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or newer counts what it maps"
)
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_large_tensors_are_mapped_by_themselves_where_the_vocabulary_is_large() -> None:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo

    def measure_mapped_bytes() -> int:
        """Return how many mapped bytes 64 new tensors of 8 MiB add.

        Free parts of the heap hold a few of them.
        """
        before = libc.mallinfo2().hblkhd
        tensors = [torch.empty(2**21) for _ in range(64)]
        added = libc.mallinfo2().hblkhd - before
        del tensors
        return int(added)

    for _ in range(3):
        torch.empty(2**22 + 2**21)  # 24 MiB, after which glibc takes what is smaller from the heap
    # This must come first: the other cases leave free parts in the heap, which it would use.
    with map_large_tensors(LARGE_VOCABULARY):
        assert measure_mapped_bytes() >= 32 * 2**23
    assert measure_mapped_bytes() == 0
    with map_large_tensors(LARGE_VOCABULARY - 1):
        assert measure_mapped_bytes() == 0
