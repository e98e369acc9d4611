"""Estimate how many rows can be generated together, from free memory and memory per row."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from specdistill.targets.anatomy import CLASS_ERRORS, find_auto_class
from specdistill.targets.cache_size import CacheSize, cache_size

# For each version of control groups: the folder, the files with a container's memory limit and
# memory use, and the name of its page cache in `memory.stat`.
CGROUP_FILES = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
# Copies of a row's logits that exist at once: the head's output, and two more while a class scales
# and caps them.
LOGITS_COPIES = 3
# Numbers that one layer holds at once for each token of a prompt, in units of the hidden size and
# of the intermediate size. Too high a value makes batches smaller than they could be, and too low a
# value lets a batch run out of memory.
HIDDEN_COPIES = 8
INTERMEDIATE_COPIES = 3

# The vocabulary from which `map_large_tensors` acts. Smaller logits leave smaller holes in the
# heap, and mapping memory takes time at each step.
LARGE_VOCABULARY = 2**16
# glibc's mallopt option, the size in bytes from which `map_large_tensors` maps tensors one
# by one, and the largest size that glibc would choose itself (DEFAULT_MMAP_THRESHOLD_MAX).
M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 2**20
GLIBC_MAPPED_BYTES = 2**25


def measure_free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate.

    For a CUDA device this is device memory. Otherwise it is main memory, within the limit of the
    container.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        # torch's own pool holds memory that is free to be used again.
        return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    # Main memory. A container, which is a control group of Linux, may have a lower limit than the
    # machine.
    available = int(psutil.virtual_memory().available)
    for folder, limit_name, used_name, cache_name in CGROUP_FILES:
        try:
            limit = int((folder / limit_name).read_text())
            used = int((folder / used_name).read_text())
            statistics = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines()
            )
            # Page cache counts as use, but the kernel drops it when memory is needed.
            available = min(available, limit - used + int(statistics.get(cache_name, 0)))
        except (OSError, ValueError):  # no such control group, or one without a limit ("max")
            continue
    return max(0, available)


def estimate_row_bytes(model: PreTrainedModel, max_length: int) -> int:
    """Estimate the bytes that one row of `max_length` tokens takes while it is generated.

    The estimate includes the row's KV cache, its logits and the hidden states of its prompt.
    """
    # A config without an intermediate size is taken to have the usual four times the hidden size.
    # It may also list one size per layer, of which the largest counts.
    config = model.config.get_text_config(decoder=True)
    itemsize = model.dtype.itemsize
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = max(intermediate) if isinstance(intermediate, list) else intermediate

    # Layers run one after the other, so the hidden states of only one layer exist at a time, in
    # several copies (HIDDEN_COPIES and INTERMEDIATE_COPIES). In the worst case the prompt is as
    # long as the row.
    numbers = (
        max_length * (HIDDEN_COPIES * config.hidden_size + INTERMEDIATE_COPIES * widest)
        + LOGITS_COPIES * config.vocab_size
    )
    cache_bytes = _cache_size(model).num_bytes(max_length, batch_size=1, itemsize=itemsize)
    return int(itemsize * numbers + cache_bytes)


def _cache_size(model: PreTrainedModel) -> CacheSize:
    """Return the size of a model's KV cache; a size of 0 bytes if it cannot be computed."""
    # A second model of the same class is built on the meta device, without weights.
    try:
        with torch.device("meta"):
            size = cache_size(find_auto_class(model.config).from_config(model.config))
    except CLASS_ERRORS:  # Some classes, such as remote code, cannot be built on the meta device.
        size = None
    return size or CacheSize(())


@contextmanager
def map_large_tensors(vocab_size: int) -> Iterator[None]:
    """Make glibc return the memory of large tensors when they are freed, for large vocabularies.

    glibc maps each block above a threshold separately, and returns it to the system when it is
    freed. But each such block that is freed raises the threshold, until the logits of a generation
    step come from the heap. The KV cache then grows into the hole that freed logits leave. The hole
    becomes too small for the logits of the next step, so the heap grows with every token: 23 rows
    with a vocabulary of 262,144 took 10 GB more in all. With a fixed threshold this does not
    happen. Mapping memory at each step costs about 3 % of the time.
    """
    # Other C libraries, such as musl or the C library of macOS, have no such threshold.
    libc = ctypes.CDLL(None)
    if vocab_size < LARGE_VOCABULARY or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return

    # A threshold that is set once is fixed: glibc does not raise it any more.
    libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    try:
        yield
    finally:
        # Set the largest threshold that glibc would choose itself.
        libc.mallopt(M_MMAP_THRESHOLD, GLIBC_MAPPED_BYTES)
