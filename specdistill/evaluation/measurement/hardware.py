"""Describe the machine of a measurement, and the seconds and memory that a measurement uses."""

import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from specdistill.common.processes import measure_peak_memory_bytes
from specdistill.evaluation.report.schema import HardwareDocument, MeasurementDocument
from specdistill.targets.frozen import FrozenTarget

# The bytes of weights that keep one thread busy. A decoding step over fewer bytes takes less time
# than it takes to divide the work over two threads.
WEIGHTS_PER_THREAD = 32 * 2**20
# The libraries whose versions affect a measurement.
LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "tokenizers",
    "numpy",
    "scipy",
)


def fit_threads(target: FrozenTarget) -> None:
    """Lower torch's number of CPU threads if the target is too small to keep all of them busy.

    Two threads are no faster than one on a model of a few megabytes. But they are many times slower
    if another process takes a core, because each waits for the other after every operation. The
    number of threads is never raised, and is not changed if the user has set OMP_NUM_THREADS.
    """
    # Use one thread for each WEIGHTS_PER_THREAD bytes of weights.
    if "OMP_NUM_THREADS" not in os.environ:
        num_busy = target.model.get_memory_footprint() // WEIGHTS_PER_THREAD
        torch.set_num_threads(max(1, min(torch.get_num_threads(), num_busy)))


def describe_hardware(device: torch.device) -> HardwareDocument:
    """Return the section `hardware` of report.json, which describes this machine.

    `device`, `name`, `count` and `memory_bytes` are those of the accelerator, or of the processor
    and its memory when there is no accelerator. The keys `cpu`, `cpu_cores` and `cpu_threads`
    always describe the processor. `count` is 1, because a process uses one device. If several
    processes measured, the caller sets `count` to their number.
    """
    # Read the trade name of the processor from /proc/cpuinfo, which only Linux has. On other
    # systems use the less exact name that Python knows.
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()

    # Describe the processor and its memory. If there is an accelerator, replace the name and the
    # memory by those of the accelerator.
    document: HardwareDocument = {
        "device": device.type,
        "name": name,
        "count": 1,
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        document |= {"name": properties.name, "memory_bytes": properties.total_memory}
    return {
        **document,
        "cpu": name,
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads": torch.get_num_threads(),
    }


@contextmanager
def measure_resources(device: torch.device) -> Iterator[MeasurementDocument]:
    """Measure the time and the peak memory of a `with` block.

    Yields:
        A dict that is filled in when the block ends: `seconds` and `peak_memory_bytes`. Without an
        accelerator, `peak_memory_bytes` is the peak of this process since it was started.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    used: MeasurementDocument = {"seconds": 0.0}
    start = time.perf_counter()
    yield used
    used["seconds"] = time.perf_counter() - start
    used["peak_memory_bytes"] = measure_peak_memory_bytes(device)


@contextmanager
def freeze_garbage_collector() -> Iterator[None]:
    """Exclude all objects that exist already from garbage collection during a `with` block.

    A garbage collection that visits all objects of torch and transformers takes tens of
    milliseconds. It would be added to the time of whatever is being timed at that moment.
    """
    # Collect garbage first. Otherwise objects that nobody uses any more would be excluded, too.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def list_software() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect a measurement."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{library: importlib.metadata.version(library) for library in LIBRARIES},
    }
