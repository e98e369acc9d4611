"""What a measurement runs on and uses: device, processor, library versions, seconds and memory."""

import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from specdistill.processes import peak_memory_bytes
from specdistill.targets.frozen import FrozenTarget

WEIGHTS_A_THREAD = (
    32 * 2**20
)  # bytes; a step over fewer is done before two threads have shared it out
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
    """Compute with as many threads as the target's weights keep busy, at most torch's own number; OMP_NUM_THREADS decides where it is set.

    Two threads are no faster than one on a model of a few megabytes, but many times slower when another process takes a core.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            max(
                1,
                min(
                    torch.get_num_threads(), target.model.get_memory_footprint() // WEIGHTS_A_THREAD
                ),
            )
        )


def hardware(device: torch.device) -> dict[str, Any]:
    """device, name, count and memory_bytes of the accelerator, or of the processor when there is none; `cpu…` always.

    A processor's name is its trade name where Linux tells it, else what Python knows.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    found = {
        "device": device.type,
        "name": name,
        "count": 1,
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"name": properties.name, "memory_bytes": properties.total_memory}
    return {
        **found,
        "cpu": name,
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads": torch.get_num_threads(),
    }


@contextmanager
def resources_used(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a dict that holds, afterwards, `seconds` and `peak_memory_bytes`: the accelerator's, or without one this process's so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    used: dict[str, Any] = {}
    start = time.perf_counter()
    yield used
    used["seconds"] = time.perf_counter() - start
    used["peak_memory_bytes"] = peak_memory_bytes(device)


@contextmanager
def frozen_garbage_collector() -> Iterator[None]:
    """Spare what exists already from garbage collection: a pass over torch and transformers takes tens of milliseconds, and would
    be timed with whichever side it strikes.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def software() -> dict[str, str]:
    """Versions of Python and of the libraries that shape a measurement."""
    versions = {library: importlib.metadata.version(library) for library in LIBRARIES}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}
