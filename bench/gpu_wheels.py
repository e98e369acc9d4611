"""Bring the packages that `make gpu` needs to a machine without a network.

    make gpu-wheels  # needs a network: downloads the wheels of bench/gpu_wheels.json into wheels/
    # writes bench/gpu_wheels.json anew, after a change of constraints.txt
    make gpu-wheels ARGS=record
    # the first step of `make gpu`: checks the packages, and installs wheels/ into folder D
    python -m bench.gpu_wheels install D

The machine has Python 3.12, a CUDA build of torch, and the other LARGE_PACKAGES. All other
packages that pyproject.toml requires travel as wheels, at the versions of constraints.txt. Of the
packages that such a machine could lack, this file imports only `packaging`, which is among the
wheels.
"""

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "wheels"
LIST = Path(__file__).with_suffix(".json")
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = "3.12"

# The platform tags of wheels that run there: glibc 2.28 or older, on x86-64.
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)

# The values of environment markers on that machine. Requirements for other systems are skipped.
MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
}
# These take 130 MB even without torch, so the machine must have them.
LARGE_PACKAGES = ("matplotlib", "numpy", "pandas", "pyarrow", "scipy", "torch")
# The largest size of checkout and wheels together.
LIMIT_BYTES = 64 * 2**20
# Seconds of an installation. bench/gpu.py subtracts them from the time of its short form.
INSTALL_LIMIT_S = 30
# The exit code of specdistill's commands if something outside of them is missing. This file cannot
# import it from the package, whose own requirements may not be installed yet.
RESOURCE_EXIT_CODE = 3


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return its exit code.

    The commands are `download`, `download record` and `install FOLDER`. Other arguments print the
    help, and the exit code is 2.
    """
    try:
        match arguments:
            case ["download"]:
                return download()
            case ["download", "record"]:
                return record()
            case ["install", folder]:
                return install(Path(folder))
    # pip has printed the reason already.
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"error: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return RESOURCE_EXIT_CODE
    print(__doc__)
    return 2


def read_list() -> dict[str, dict[str, int]]:
    """Read bench/gpu_wheels.json: the sizes of the wheels in bytes, by group and by file name.

    There are two groups. The wheels in `carried` are copied to the GPU machine. Those in `machine`
    are too large to copy, so the machine must already have their packages.
    """
    sizes: dict[str, dict[str, int]] = json.loads(LIST.read_text(encoding="utf-8"))
    return sizes


# On a machine with a network


def download() -> int:
    """Download the listed wheels into wheels/, print their size, and return the exit code."""
    # Download exactly the listed versions: the name of a wheel begins with `project-version-`, and
    # pip expects `project==version`.
    carried = read_list()["carried"]
    shutil.rmtree(WHEELS, ignore_errors=True)
    fetch(["==".join(wheel.split("-")[:2]) for wheel in carried], WHEELS)
    return report_size()


def report_size() -> int:
    """Print the total size of the checkout and its wheels, which are copied to the GPU machine.

    Returns:
        The exit code: RESOURCE_EXIT_CODE if the total exceeds LIMIT_BYTES, or if a wheel is missing
        or damaged; else 0.
    """
    # Each listed wheel must be there, in its listed size.
    damaged = find_damaged_wheels()
    if damaged:
        print(
            f"error: these wheels are missing, or not of the size in {LIST.name}:"
            f" {', '.join(damaged)}",
            file=sys.stderr,
        )
        print("Run `make gpu-wheels ARGS=record` to write the list anew.", file=sys.stderr)
        return RESOURCE_EXIT_CODE

    # Print the size of everything that is copied.
    wheels = read_list()["carried"].values()
    tracked = measure_checkout()
    total = tracked + sum(wheels)
    print(
        f"Size of {len(wheels)} wheels: {format_size(sum(wheels))}; of the checkout:"
        f" {format_size(tracked)}"
    )
    print(f"Total size: {format_size(total)} (limit {format_size(LIMIT_BYTES)})")
    return 0 if total <= LIMIT_BYTES else RESOURCE_EXIT_CODE


def measure_checkout() -> int:
    """Return the total size in bytes of all files that git tracks."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum((ROOT / name).lstat().st_size for name in listed.split("\0") if name)


def format_size(size: int) -> str:
    """Format bytes in MiB."""
    return f"{size / 2**20:.1f} MiB"


def record() -> int:
    """Write bench/gpu_wheels.json anew, download its wheels, and return the exit code.

    The list holds the packages that pyproject.toml requires, and the packages that they require.
    """
    # Download everything but torch once, to learn the names and sizes of the wheels.
    names = sorted(name for name in find_closure() if name != "torch")
    with tempfile.TemporaryDirectory() as folder:
        fetch([*names, "--constraint", str(CONSTRAINTS)], Path(folder))
        sizes = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}

    # Large packages are not copied: the machine must have them.
    large = {wheel: size for wheel, size in sizes.items() if project_name(wheel) in LARGE_PACKAGES}
    carried = {wheel: size for wheel, size in sizes.items() if wheel not in large}
    LIST.write_text(
        json.dumps({"carried": carried, "machine": large}, indent=1) + "\n", encoding="utf-8"
    )
    return download()


def fetch(requirements: list[str], folder: Path) -> None:
    """Download the wheels of some requirements into a folder, with pip.

    The wheels are for the Python and the platform of the GPU machine, even if this machine has
    others.
    """
    # pip accepts wheels only for the platforms that are listed, so PLATFORMS also has the tags of
    # older versions of glibc.
    platforms = [f"--platform={name}" for name in PLATFORMS]
    target = [
        f"--python-version={PYTHON}",
        "--implementation=cp",
        "--only-binary=:all:",
        *platforms,
    ]
    options = ["--quiet", "--no-deps", *target, "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *requirements], check=True)


# Requirements


def read_requirements() -> list[str]:
    """Return the requirements of this project in pyproject.toml, and its requirement of pytest.

    They are strings such as `torch>=2.6`.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    development = project["optional-dependencies"]["dev"]
    pytest = [requirement for requirement in development if requirement.startswith("pytest>")]
    return [*project["dependencies"], *pytest]


def find_closure() -> dict[str, str | None]:
    """Return all packages that are required, directly or by another package.

    Returns:
        The installed version of each package, by name; None if it is not installed.
    """
    return {name: installed_version for name, _, installed_version in walk_requirements()}


def find_unmet() -> dict[str, str]:
    """Return the requirements that this Python does not meet.

    Returns:
        For each such package, by name, a text such as `peft>=0.15 (0.13.2 is installed)`.
    """
    unmet = {}
    for name, requirement, installed_version in walk_requirements():
        specifier = requirement.specifier
        if installed_version is None:
            unmet[name] = f"{requirement.name}{specifier} (not installed)"
        elif not specifier.contains(installed_version, prereleases=True):
            unmet[name] = f"{requirement.name}{specifier} ({installed_version} is installed)"
    return unmet


def walk_requirements() -> Iterator[tuple[str, "Requirement", str | None]]:
    """Yield all requirements of this project, and the requirements of the packages it requires.

    The packages in LARGE_PACKAGES are yielded, but not what they require in turn: the machine that
    runs `make gpu` has these packages, and with them their requirements.

    Yields:
        The name of a package, the requirement, and the installed version; None if the package is
        not installed.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    # Walk from requirement to requirement, beginning with those of pyproject.toml. Each pending
    # entry has the extras for which it may be needed; "" stands for no extra.
    pending = [(Requirement(text), ("",)) for text in read_requirements()]
    visited = set()
    while pending:
        # Skip a requirement that was visited before, or whose marker says that it is not needed:
        # it is for another system, or for an extra that nobody asked for.
        requirement, extras = pending.pop()
        marker = requirement.marker
        is_needed = marker is None or any(
            marker.evaluate({**MARKERS, "extra": extra}) for extra in extras
        )
        if str(requirement) in visited or not is_needed:
            continue
        visited.add(str(requirement))

        # Yield the requirement with the version that this Python has.
        name = canonicalize_name(requirement.name)
        try:
            installed_version = version(name)
        except PackageNotFoundError:
            installed_version = None
        yield name, requirement, installed_version

        # Only an installed package says what it requires in turn.
        if installed_version is not None and name not in LARGE_PACKAGES:
            # Extras, such as fsspec's `http`, have further requirements.
            pending += [
                (Requirement(text), ("", *requirement.extras)) for text in requires(name) or []
            ]


# On the machine


def install(folder: Path) -> int:
    """Install the wheels in wheels/ into a folder, if this Python lacks required packages.

    Returns:
        The exit code: 0, or RESOURCE_EXIT_CODE if packages are still missing afterwards, which are
        then printed.
    """
    # Packages that an earlier call has installed into the folder count as installed.
    sys.path.insert(0, str(folder))
    if has_packaging() and not find_unmet():
        return 0

    # Install the wheels if all of them are here and this Python is the version that they are for.
    damaged = find_damaged_wheels()
    if not damaged and f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON:
        shutil.rmtree(folder, ignore_errors=True)
        install_wheels(folder)
        importlib.invalidate_caches()

    # Refuse to continue if something is still missing.
    unmet = find_unmet() if has_packaging() else {"packaging": "packaging (not installed)"}
    if unmet:
        print_refusal(unmet, damaged)
        return RESOURCE_EXIT_CODE
    return 0


def has_packaging() -> bool:
    """Return whether the package `packaging` can be imported."""
    return importlib.util.find_spec("packaging") is not None


def find_damaged_wheels() -> list[str]:
    """Return the names of listed wheels that are missing in wheels/ or have another size there."""
    damaged = []
    for name, size in read_list()["carried"].items():
        path = WHEELS / name
        if not path.is_file() or path.stat().st_size != size:
            damaged.append(name)
    return damaged


def install_wheels(folder: Path) -> None:
    """Install every listed wheel from wheels/ into a folder, with pip and without a network.

    Dependencies are not resolved, because the list holds all of them. Nothing is compiled to
    bytecode, which saves time.
    """
    wheels = [str(WHEELS / name) for name in read_list()["carried"]]
    options = [
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *wheels]
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)
    print(f"Installed {len(wheels)} wheels into {folder}.", flush=True)


def print_refusal(unmet: dict[str, str], damaged: list[str]) -> None:
    """Print which packages are missing, the wheels that contain them, and what to do.

    Args:
        unmet: by package, what is required and what is installed.
        damaged: names of wheels that are missing in wheels/ or have another size there.
    """
    # A line for each missing package, with the wheel that contains it.
    wheels = {}
    for group in read_list().values():
        wheels.update({project_name(wheel): wheel for wheel in group})
    lines = [
        f"error: Python {platform.python_version()} lacks {len(unmet)} packages that `make gpu`"
        " needs:"
    ]
    for name, text in sorted(unmet.items()):
        wheel = "its CUDA build" if name == "torch" else wheels.get(name, f"not in {LIST.name}")
        note = ", too large to carry: the machine must have it" if name in LARGE_PACKAGES else ""
        lines.append(f"  {text}: {wheel}{note}")

    # Then name the wheels that cannot be used, and say what to do.
    if WHEELS.is_dir() and damaged:
        lines.append(f"Missing in wheels/, or not of the listed size: {', '.join(damaged)}.")
    lines.append(
        f"The wheels are for Python {PYTHON} on Linux, x86-64; {LIST.name} lists all of them."
    )
    lines.append(
        "Run `make gpu-wheels` on a machine with a network, and copy this checkout with its wheels/"
        " from there."
    )
    print("\n".join(lines), file=sys.stderr)


def project_name(wheel: str) -> str:
    """Return the package name of a wheel's file name, in lower case and with hyphens."""
    return wheel.partition("-")[0].replace("_", "-").lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
