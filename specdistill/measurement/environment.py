"""What a measurement ran on: device, processor and library versions, for the report's header."""

import importlib.metadata
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "numpy", "scipy")


def hardware(device: torch.device) -> dict[str, Any]:
    """device, name, count and memory_bytes of the accelerator, or of the processor when there is none; `cpu…` always."""
    cpu = {
        "cpu": cpu_name(),
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": "cuda", "name": properties.name, "count": 1, "memory_bytes": properties.total_memory, **cpu}
    memory = psutil.virtual_memory().total
    return {"device": device.type, "name": cpu["cpu"], "count": 1, "memory_bytes": memory, **cpu}


def cpu_name() -> str:
    """The processor's trade name where Linux tells it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def begin(device: torch.device) -> float:
    """The clock's seconds at the beginning of a measurement; an accelerator's peak memory counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return time.perf_counter()


def measurement(device: torch.device, begun: float) -> dict[str, Any]:
    """seconds since `begin`, and peak_memory_bytes of the accelerator since then, or of this process where there is none."""
    seconds = time.perf_counter() - begun
    if device.type == "cuda":
        return {"seconds": seconds, "peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return {"seconds": seconds, "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def software() -> dict[str, str]:
    """Versions of Python and of the libraries that shape a measurement."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for library in LIBRARIES:
        versions[library] = importlib.metadata.version(library)
    return versions
