"""The environments of the engines, one for each, which `make engines` sets up.

An engine runs as another process.
"""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bench import engines
from bench.engines import QUIET_VLLM, is_set_up
from specdistill.serving.engines.start import start_server

# vLLM starts no process for its worker beside those of its server and of its core. That process
# imports torch and vLLM once more, which takes a third of the time until a server answers.
QUICK_VLLM = QUIET_VLLM | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def environment(name: str) -> Path:
    """Return the environment of an engine; skip the test if it is not set up."""
    if not is_set_up(name):
        pytest.skip(f"no {engines.find_environment(name)}; `make engines` sets it up")
    return engines.find_environment(name)


def serving(
    log: Path, model: str, *options: str, python_path: Path | None = None
) -> AbstractContextManager[str]:
    """Start a vLLM that serves a model in float32, and yield its address.

    python_path: A folder of modules that it imports in addition to its own.
    """
    variables = QUICK_VLLM | ({"PYTHONPATH": str(python_path)} if python_path else {})
    command = [
        "env",
        *(f"{name}={value}" for name, value in variables.items()),
        str(environment("vllm") / "bin" / "vllm"),
    ]
    plain = [
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--block-size",
        "32",
    ]
    return start_server(
        [*command, "serve", model, *plain, *options], log, key="eval.engine_command"
    )
