"""What a measurement ran on: device, processor and library versions, for the report's header."""

import importlib.metadata
import platform
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


def software() -> dict[str, str]:
    """Versions of Python and of the libraries that shape a measurement."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for library in LIBRARIES:
        versions[library] = importlib.metadata.version(library)
    return versions
