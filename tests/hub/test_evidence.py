"""Ways to get a release out of a run that has not earned one. Each is tried on a copy of one run that was measured."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdistill.errors import UserError
from specdistill.hub.evidence import check_evidence
from tests.finished_runs import finished_run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("measured"))


@pytest.fixture
def run(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "run")


def refused(run: Path, **options) -> list[str]:
    """Names of what speaks against a run's release."""
    return [refusal.name for refusal in check_evidence(run, **options).refusals]


def test_a_run_that_was_measured_is_released(run: Path) -> None:
    release = check_evidence(run)
    assert release.refusals == ()
    assert release.report["gate"]["passed"]
    assert [path.name for path in release.draft] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("part", ["draft", "run/recipe.yaml", "run/provenance.json", "report/report.json"])
def test_a_folder_that_is_no_finished_run(run: Path, part: str) -> None:
    path = run / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match="run: got "):
        check_evidence(run)


def test_other_weights(run: Path) -> None:
    weights = load_file(run / "draft/model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in weights.items()}, run / "draft/model.safetensors", {"format": "pt"})
    assert refused(run) == ["other weights"]


def test_an_edited_config(run: Path) -> None:
    path = run / "draft/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5e5}))
    assert refused(run) == ["other weights"]
