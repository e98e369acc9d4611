import json
import os
from pathlib import Path

import pytest

from specdistill.errors import UserError
from specdistill.methods.recipe import Recipe
from specdistill.recipe import load_recipe
from specdistill.training.run_directory import RunDirectory


def recipe(output_dir: Path, *overrides: str) -> Recipe:
    return load_recipe(Recipe, ["target.model=pico", f"train.output_dir={output_dir}", *overrides])


def test_the_record_comes_first_and_reads_back_equal(tmp_path: Path) -> None:
    made = recipe(tmp_path / "run")
    run = RunDirectory.open(str(tmp_path / "run"), made)
    assert not run.path.exists()
    run.record(target="pico", data_fingerprint="abc")
    assert load_recipe(Recipe, [f"recipe={run.path / 'run' / 'recipe.yaml'}"]) == made
    provenance = json.loads((run.path / "run" / "provenance.json").read_text())
    assert provenance["data_fingerprint"] == "abc" and "torch" in provenance["packages"] and provenance["command"]


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = RunDirectory.open(str(folder), recipe(folder))
    run.record()
    assert run.last_checkpoint() is None
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-20").mkdir()
    assert RunDirectory.open(str(folder), recipe(folder)).last_checkpoint() == str(folder / "checkpoint-20")


@pytest.mark.parametrize("held", ["another recipe", "a finished run", "other files"])
def test_a_folder_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path, held: str) -> None:
    folder = tmp_path / "run"
    if held == "other files":
        folder.mkdir()
        (folder / "thesis.tex").touch()
    else:
        other = ["draft.ttt_steps=3"] if held == "another recipe" else []
        RunDirectory.open(str(folder), recipe(folder, *other)).record()
    if held == "a finished run":
        (folder / "draft").mkdir()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"^train\.output_dir: got .*holds"):
        RunDirectory.open(str(folder), recipe(folder))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^train\.output_dir: got .*can be written"):
        RunDirectory.open(str(tmp_path / "file" / "run"), recipe(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"^train\.output_dir: got .*can be written"):
        RunDirectory.open(str(tmp_path / "run"), recipe(tmp_path))
