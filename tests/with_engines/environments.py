"""Where the engines stand: an environment of its own for each, made by `make engines` and started as another process."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import engines
from bench.engines import QUIET_VLLM, is_set_up


def environment(name: str) -> Path:
    """The folder of an engine that is set up; a test that needs one that is not is skipped."""
    if not is_set_up(name):
        pytest.skip(f"no {engines.environment(name)}; `make engines` sets it up")
    return engines.environment(name)


@contextmanager
def serving(log: Path, model: str, *options: str, python_path: Path | None = None) -> Iterator[str]:
    """The address of a vLLM that serves a model in float32. python_path: of modules that it imports, beside its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--block-size", "32", "--port", str(port)]
    command = [str(environment("vllm") / "bin" / "vllm"), "serve", model, *plain, *options]
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET_VLLM
    if python_path is not None:
        surroundings["PYTHONPATH"] = str(python_path)
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=surroundings) as server:
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models").close()
                    break
                except urllib.error.URLError:
                    assert server.poll() is None, log.read_text()[-4000:]
                    time.sleep(1.0)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
