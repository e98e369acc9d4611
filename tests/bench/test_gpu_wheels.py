"""The wheels of make gpu are those that pyproject.toml needs, and they fit the limit.

A missing package is named with its wheel.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name, parse_wheel_filename

from bench import gpu_wheels
from specdistill.common.project import ROOT

PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    if "==" in line
)
PINNED = {canonicalize_name(name): version for name, version in PINS.items()}


def test_the_list_holds_what_is_required_at_the_tested_versions() -> None:
    wheels = {
        wheel: parse_wheel_filename(wheel)
        for group in gpu_wheels.read_list().values()
        for wheel in group
    }
    versions = {name: str(version) for name, version, _, _ in wheels.values()}
    assert versions == {name: PINNED[name] for name in gpu_wheels.find_closure() if name != "torch"}
    assert {name for name, *_ in map(parse_wheel_filename, gpu_wheels.read_list()["machine"])} == {
        *gpu_wheels.LARGE_PACKAGES
    } - {"torch"}
    for wheel, (*_, tags) in wheels.items():
        assert any(
            tag.interpreter in ("py3", "py312", "cp312") or tag.abi == "abi3" for tag in tags
        ), wheel


def test_checkout_and_wheels_fit_the_limit() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    total = gpu_wheels.measure_checkout() + sum(gpu_wheels.read_list()["carried"].values())
    assert 0 < total <= 64 * 2**20
    ignored = subprocess.run(
        ["git", "check-ignore", "wheels/one.whl"], cwd=ROOT, capture_output=True, check=False
    )
    assert ignored.returncode == 0


def test_a_missing_package_is_named_with_its_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_wheels, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(
        gpu_wheels,
        "read_requirements",
        lambda: ["transformers>=999", "numpy>=999", "torch>=999", "rich"],
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert gpu_wheels.main(["install", str(tmp_path / "packages")]) == 3
    lines = capsys.readouterr().err.splitlines()
    for name in ("transformers", "numpy", "torch"):
        (line,) = [line for line in lines if line.startswith(f"  {name}>=999 (")]
        assert "is installed" in line and ("the machine must have it" in line) == (
            name != "transformers"
        )
    assert any(f"transformers-{PINS['transformers']}-py3-none-any.whl" in line for line in lines)
    assert not any("rich" in line for line in lines) and any(
        "make gpu-wheels" in line for line in lines
    )


def write_wheel(folder: Path, name: str, *lines: str) -> Path:
    """Write a wheel of one module, which holds `VALUE = 1`."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    metadata = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *lines, ""])
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 1\n")
        wheel.writestr(f"{information}/METADATA", metadata)
        wheel.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{information}/RECORD", "")
    return path


def test_carried_wheels_are_installed_for_missing_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, packages = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    carried = [
        write_wheel(wheels, "lackingone", "Requires-Dist: lackingtwo"),
        write_wheel(wheels, "lackingtwo"),
    ]
    listed = {"carried": {path.name: path.stat().st_size for path in carried}, "machine": {}}
    monkeypatch.setattr(gpu_wheels, "WHEELS", wheels)
    monkeypatch.setattr(gpu_wheels, "PYTHON", f"{sys.version_info.major}.{sys.version_info.minor}")
    monkeypatch.setattr(gpu_wheels, "read_list", lambda: listed)
    monkeypatch.setattr(gpu_wheels, "read_requirements", lambda: ["lackingone>=1", "packaging"])
    monkeypatch.setattr(sys, "path", [*sys.path])

    carried[1].write_bytes(carried[1].read_bytes()[:-1])  # as if its transfer had been cut off
    assert gpu_wheels.main(["install", str(packages)]) == 3
    assert (
        "Missing in wheels/, or not of the listed size: lackingtwo-1.0-py3-none-any.whl"
        in capsys.readouterr().err
    )

    write_wheel(wheels, "lackingtwo")
    assert gpu_wheels.main(["install", str(packages)]) == 0
    assert (packages / "lackingone.py").is_file() and (packages / "lackingtwo.py").is_file()
    for path in carried:
        path.unlink()
    # No package is missing: nothing is installed again.
    assert gpu_wheels.main(["install", str(packages)]) == 0
