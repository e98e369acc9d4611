"""Engines as `make engines` leaves them, each in an environment of its own, and their programs, run as other processes."""

import hashlib
import os
import subprocess
import tomllib
from pathlib import Path

from specdistill import __version__
from specdistill.errors import ResourceError
from specdistill.project import ROOT

QUIET_VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = Path(os.environ.get("SPECDISTILL_ENGINES", CACHE / "specdistill" / "engines"))


def environment(name: str) -> Path:
    """The folder of an engine, which `make engines` names after the hash of its list."""
    listed = ROOT / "tests" / "with_engines" / f"{name}.txt"
    return FOLDER / f"{name}-{hashlib.sha256(listed.read_bytes()).hexdigest()[:12]}"


def is_set_up(name: str) -> bool:
    return (environment(name) / ".ready").is_file()


def run(*command: str | Path) -> str:
    """What a program of an engine prints, errors last, in a process that sees nothing of this one's Python.

    Raises ResourceError, which shows the end of that, unless it succeeds.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    surroundings = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=surroundings
    )
    if done.returncode:
        output = f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        raise ResourceError(
            f"{command[0]} ended with {done.returncode}:\n{output}",
            next_step="look at what it printed",
        )
    return done.stdout + done.stderr


def with_plugin(folder: Path) -> str:
    """The value of PYTHONPATH with which vLLM finds specdistill and its plugin as if pip had installed them. folder: for what pip notes."""
    information = folder / f"specdistill-{__version__}.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: specdistill\nVersion: {__version__}\n"
    )
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n{name} = {value}\n"
        for group, entries in groups.items()
        for name, value in entries.items()
    ]
    (information / "entry_points.txt").write_text("".join(lines))
    return f"{folder}{os.pathsep}{ROOT}"


LLAMA_CPP = environment("llama.cpp") / "source" / "vendor" / "llama.cpp"
SERVER = LLAMA_CPP / "build" / "bin" / "llama-server"


def convert(
    checkpoint: Path,
    output: Path,
    *options: str | Path,
    script: tuple[str | Path, ...] | None = None,
) -> Path:
    """A checkpoint as a GGUF file, by llama.cpp's own converter, which runs in vLLM's environment: that has what it needs.

    script: what is run in its place. Raises ResourceError for what it does not convert.
    """
    converter = script or (LLAMA_CPP / "convert_hf_to_gguf.py",)
    run(
        environment("vllm") / "bin" / "python",
        *converter,
        checkpoint,
        *options,
        "--outfile",
        output,
    )
    return output
