"""The environments of the engines, as `make engines` leaves them, and ways to run their programs.

Each engine has an environment of its own, and its programs run in other processes.
"""

import hashlib
import os
import subprocess
import tomllib
from pathlib import Path

from specdistill import __version__
from specdistill.common.errors import ResourceError
from specdistill.common.project import ROOT
from specdistill.serving.engines.guard import build_environment

# vLLM reaches no network, sends no statistics, and reserves 1 GiB for its KV cache on a CPU.
QUIET_VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

# The folder in which `make engines` sets up the environments.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = Path(os.environ.get("SPECDISTILL_ENGINES", CACHE / "specdistill" / "engines"))


def find_environment(name: str) -> Path:
    """Return the folder of the Python environment in which an engine is installed.

    `make engines` creates the folder. Its name ends with a hash of the engine's list of packages,
    so that a changed list gets a new environment.
    """
    package_list = ROOT / "tests" / "with_engines" / f"{name}.txt"
    sha256 = hashlib.sha256(package_list.read_bytes()).hexdigest()
    return FOLDER / f"{name}-{sha256[:12]}"


def is_set_up(name: str) -> bool:
    """Return whether `make engines` has finished the environment of an engine."""
    return (find_environment(name) / ".ready").is_file()


def run(*command: str | Path) -> str:
    """Run a program of an engine, and return its output.

    The program does not see the packages of this Python, because the variables that point to them
    are removed from its environment.

    Returns:
        The output: stdout, then stderr.

    Raises:
        ResourceError: if the program fails; the message shows the end of the output.
    """
    # The output is captured, and shown only if the program fails.
    process = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env=build_environment(str(command[0])),
    )
    if process.returncode:
        output = f"{process.stdout[-2000:]}\n{process.stderr[-6000:]}"
        raise ResourceError(
            f"{command[0]} failed with exit code {process.returncode}:\n{output}",
            next_step="read the output of the program above",
        )
    return process.stdout + process.stderr


def install_plugin(folder: Path) -> str:
    """Make this checkout look installed to vLLM, and return the PYTHONPATH to start vLLM with.

    vLLM then imports specdistill from the checkout, and finds specdistill's plugin for vLLM by the
    metadata of a package.

    Args:
        folder: the folder to write the metadata to. pip writes such metadata when it installs a
            package.
    """
    # Write the metadata of an installed package, so that vLLM finds the plugin by its entry point.
    information = folder / f"specdistill-{__version__}.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: specdistill\nVersion: {__version__}\n"
    )

    # Copy the entry points of pyproject.toml in the format of entry_points.txt.
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = []
    for group, entries in groups.items():
        for name, value in entries.items():
            lines.append(f"[{group}]\n{name} = {value}\n")
    (information / "entry_points.txt").write_text("".join(lines))
    return f"{folder}{os.pathsep}{ROOT}"


# llama.cpp is built from the sources that its environment unpacks.
LLAMA_CPP = find_environment("llama.cpp") / "source" / "vendor" / "llama.cpp"
SERVER = LLAMA_CPP / "build" / "bin" / "llama-server"


def convert(
    checkpoint: Path,
    output: Path,
    *options: str | Path,
    script: tuple[str | Path, ...] | None = None,
) -> Path:
    """Convert a checkpoint to a GGUF file, by default with llama.cpp's own converter.

    The converter runs in the Python environment of vLLM, which has the packages that the converter
    imports.

    Args:
        checkpoint: the folder to convert.
        output: the GGUF file.
        *options: further arguments of the converter.
        script: the arguments with which Python starts another converter; None for llama.cpp's own.

    Returns:
        `output`.

    Raises:
        ResourceError: if the checkpoint cannot be converted.
    """
    converter = script or (LLAMA_CPP / "convert_hf_to_gguf.py",)
    run(
        find_environment("vllm") / "bin" / "python",
        *converter,
        checkpoint,
        *options,
        "--outfile",
        output,
    )
    return output
