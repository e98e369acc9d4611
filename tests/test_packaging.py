"""The wheel, the pins, and the commands that people and CI run are as the project states."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specdistill import __version__
from specdistill.common.project import ROOT
from tests.refusals import refused_key

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def list_repository_files(folder: str, *endings: str) -> set[str]:
    files = (
        path
        for path in (ROOT / folder).rglob("*")
        if path.suffix in endings and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    information = f"specdistill-{__version__}.dist-info/"
    assert wheel.name == f"specdistill-{__version__}-py3-none-any.whl"
    assert {name for name in names if not name.startswith(("specdistill/", information))} == set()
    assert {name for name in names if "__pycache__" in name or "/tests/" in name} == set()
    assert f"{information}licenses/LICENSE" in names


def test_wheel_carries_recipes_scripts_suites_and_assets(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = (
        list_repository_files("recipes", ".yaml")
        | list_repository_files("accelerate_configs", ".yaml")
        | list_repository_files("train", ".py")
    )
    shipped |= list_repository_files("eval", ".py", ".yaml", ".jsonl")
    assert {f"specdistill/_project/{name}" for name in shipped} <= names
    assert "specdistill/py.typed" in names  # type checkers read the package's types
    assert (
        list_repository_files(
            "specdistill",
            ".py",
            ".json",
            ".html",
            ".css",
            ".js",
            ".jinja",
            ".j2",
            ".md",
            ".safetensors",
        )
        <= names
    )


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package as pip installs it."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_installed(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdistill", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(site)},
    )


def test_wheel_works_from_an_empty_folder(site: Path, in_empty_folder: Path):
    assert (site / "specdistill" / "targets" / "pico" / "config.json").is_file()
    mistake = run_installed(site, "train", "recipe=pico/eagle3", "draft.layers=1")
    assert mistake.returncode == 2
    assert refused_key(mistake.stderr) == "draft.layers"


@pytest.mark.long  # two more processes
def test_wheel_knows_its_version_and_its_recipes(site: Path, in_empty_folder: Path):
    assert run_installed(site, "--version").stdout == f"specdistill {__version__}\n"
    assert "specdistill train recipe=pico/eagle3" in run_installed(site, "train", "--help").stdout


@pytest.mark.long  # two launched processes
@pytest.mark.distributed
def test_wheel_trains_in_two_processes_from_an_empty_folder(site: Path, in_empty_folder: Path):
    rows = [
        {"text": f"def add_{number}(a, b):\n    return a + b + {number}\n"} for number in range(8)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    keys = [
        "data.source=rows.jsonl",
        "data.regenerate=null",
        "data.max_length=32",
        "draft.ttt_steps=1",
        "train.max_steps=1",
    ]
    result = run_installed(
        site,
        "train",
        "recipe=pico/eagle3",
        "launch=ddp",
        "num_processes=2",
        "train.output_dir=run",
        *keys,
    )
    assert result.returncode == 0, result.stderr
    assert (
        "$ accelerate launch"
        f" --config_file={site}/specdistill/_project/accelerate_configs/ddp.yaml " in result.stderr
    )
    script, *_ = json.loads(Path("run/run/provenance.json").read_text(encoding="utf-8"))["command"]
    # A script of the package, as the line above says. Its path on the machine is not recorded.
    assert script == "eagle.py"
    assert Path("run/draft/model.safetensors").is_file()
    # An error of all processes is printed once, and its exit code is that of the launch.
    second_run = run_installed(
        site,
        "train",
        "recipe=pico/eagle3",
        "launch=ddp",
        "num_processes=2",
        "train.output_dir=run",
        *keys,
    )
    assert second_run.returncode == 2
    assert refused_key(second_run.stderr) == "train.output_dir"


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pinned}


def read_requirements() -> list[Requirement]:
    """Return all requirements but those of engines and trackers.

    An engine's environment has pins of its own, and only some install trackers.
    """
    optional = PYPROJECT["project"]["optional-dependencies"]
    extras = [needs for name, needs in optional.items() if name not in {"vllm", "trackio", "wandb"}]
    groups = [PYPROJECT["build-system"]["requires"], PYPROJECT["project"]["dependencies"], *extras]
    return [Requirement(line) for group in groups for line in group]


def test_constraints_pin_every_dependency_within_its_range():
    pinned = {need: read_pins().get(canonicalize_name(need.name)) for need in read_requirements()}
    assert "+" not in read_pins()["torch"]  # any build will do
    assert [
        str(need)
        for need, version in pinned.items()
        if version is None or not need.specifier.contains(version)
    ] == []


def test_constraints_pin_what_the_dependencies_need():
    """Every requirement of every installed pinned package is pinned, so that set-ups are equal."""
    from importlib.metadata import PackageNotFoundError, requires

    pinned, unpinned = read_pins(), set()
    for name in pinned:
        try:
            needs = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        wanted = [
            need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
        unpinned |= {canonicalize_name(need.name) for need in wanted} - pinned.keys()
    assert {
        name for name in unpinned if not name.startswith(("nvidia-", "cuda-", "triton"))
    } == set()


def test_newest_entry_of_the_changelog_is_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == __version__


def test_citation_has_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__


def run_make(*arguments: str) -> list[str]:
    """Return the lines that make prints when a person starts it.

    What a surrounding `make test` hands down is removed.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    line = ["make", *arguments]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    ).stdout.splitlines()


def test_pre_commit_runs_what_ci_lints():
    lint = run_make("--dry-run", "--old-file=.venv/.ready", "lint")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]] == lint


def test_ci_runs_lint_and_the_readme_s_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    steps = re.findall(r"^step (make .+)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert steps == [
        "make setup",
        "make lint",
        "make test",
        "make test-long",
        "make test-launches",
        "make test-engines",
    ]


def test_help_lists_every_target_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split()
    assert [line.split()[1] for line in run_make()] == targets


def test_readme_installs_with_commands_of_the_makefile():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install = re.search(r"## Install\n.*?```bash\n(.*?)```", readme, re.DOTALL)
    commands = [line.split("#")[0].strip() for line in install[1].splitlines()]
    assert commands[:3] == ["make setup", "make demo ARGS=quick=true", "make demo"]


@pytest.mark.long  # collects every test
def test_the_gpu_tests_run_without_the_development_extras():
    """A rented machine has pytest, and no way to fetch more."""
    extras = [
        re.split(r"[>=]", entry)[0].replace("-", "_")
        for entry in PYPROJECT["project"]["optional-dependencies"]["dev"]
    ]
    missing_modules = [*extras, "importlinter", "xdist", "_hypothesis_pytestplugin"]
    missing_modules.remove("pytest")
    code = (
        f"import sys, pytest; sys.modules.update(dict.fromkeys({missing_modules}));"
        " sys.exit(pytest.main(['-m', 'gpu', '-q', '--collect-only']))"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 and "deselected" in run.stdout, run.stdout[-2000:]
