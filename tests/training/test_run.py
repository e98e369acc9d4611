"""A training run: what every training script shares, and a new divergence through a script from its
recipe."""

import json
import logging
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from specdistill.common.errors import UserError
from specdistill.common.project import ROOT
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.training import run as training_run
from specdistill.training.losses.divergence import DIVERGENCES, forward_kl
from specdistill.training.run import TrainingRun, list_recipe_keys, warn_unpinned_revisions
from tests.refusals import refused
from tests.scripts import touch
from tests.tiny import write_inputs
from tests.training.small_runs import build_trainer, make_rows


def test_a_new_divergence_is_a_function_and_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only DIVERGENCES has to know a divergence: a recipe names it with its option, and a script
    trains with it."""
    powers: list[float] = []

    def powered_kl(
        draft_logits_RW: torch.Tensor, target_probs_RW: torch.Tensor, *, power: float = 2.0
    ) -> torch.Tensor:
        powers.append(power)
        return forward_kl(draft_logits_RW, target_probs_RW) ** power

    monkeypatch.setitem(DIVERGENCES, "powered_kl", powered_kl)
    monkeypatch.setattr("specdistill.training.history.draw", touch)
    disable_progress_bar()
    settings = [
        *write_inputs(tmp_path, num_rows=20),
        "draft.ttt_steps=2",
        (
            "loss.divergence=[{name: powered_kl, power: 3, weight: 0.5}, {name: forward_kl, weight:"
            " 0.5}]"
        ),
        f"train.output_dir={tmp_path / 'run'}",
        "train.max_steps=1",
        "train.report_to=none",
    ]
    runpy.run_path(str(ROOT / "train" / "eagle.py"))["main"](load_recipe(Recipe, settings))
    assert set(powers) == {3.0}
    assert (tmp_path / "run" / "draft" / "model.safetensors").exists()
    assert "name: powered_kl" in (tmp_path / "run" / "run" / "recipe.yaml").read_text()
    printed = capsys.readouterr()
    assert re.search(r"^Step 1/1: .*0:00:00 left$", printed.err, re.MULTILINE)
    assert "%|" not in printed.err and "train_runtime" not in printed.out


def make_recipe(output_dir: Path, *overrides: str) -> Recipe:
    return load_recipe(Recipe, ["target.model=pico", f"train.output_dir={output_dir}", *overrides])


def test_the_record_comes_first_and_reads_back_equal(tmp_path: Path) -> None:
    expected = make_recipe(tmp_path / "run")
    run = TrainingRun.open(expected)
    assert not run.path.exists()
    run.record(target="pico", data_fingerprint="abc")
    assert load_recipe(Recipe, [f"recipe={run.path / 'run' / 'recipe.yaml'}"]) == expected
    provenance = json.loads((run.path / "run" / "provenance.json").read_text())
    assert (
        provenance["data_fingerprint"] == "abc"
        and "torch" in provenance["packages"]
        and provenance["command"]
    )


@pytest.mark.parametrize(
    "held",
    [
        "another recipe",
        "a finished run",
        "other files",
        "a finished run that kept no complete checkpoint",
    ],
)
def test_a_folder_that_holds_something_else_is_refused_and_left_alone(
    tmp_path: Path, held: str
) -> None:
    folder = tmp_path / "run"
    if held == "other files":
        folder.mkdir()
        (folder / "thesis.tex").touch()
    else:
        other = ["draft.ttt_steps=3"] if held == "another recipe" else []
        TrainingRun.open(make_recipe(folder, *other)).record()
        (folder / "checkpoint-10").mkdir()
    if held.startswith("a finished run"):
        (folder / "draft").mkdir()
    longer = ["train.max_steps=5000"] if held.endswith("checkpoint") else []
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with refused(
        "train.output_dir", holds=f"which holds {'a run of ' * held.startswith('another')}{held}"
    ):
        TrainingRun.open(make_recipe(folder, *longer))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_interrupted_run_of_another_recipe_says_which_key_differs_and_what_resumes_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    TrainingRun.open(make_recipe(folder, "draft.ttt_steps=3", "train.learning_rate=0.5")).record()
    (folder / "checkpoint-10").mkdir()
    with pytest.raises(UserError) as caught:
        TrainingRun.open(make_recipe(folder, "train.learning_rate=0.5"))
    assert (
        f"{folder} holds a run of another recipe: draft.ttt_steps is 3 there and 5 here. "
        in str(caught.value)
    )
    assert "name another train.output_dir, or remove the folder" in str(caught.value)
    # With the key that the message says to type, the recipe is that of the run.
    typed = re.findall(r"To resume it, type (\S+)\. ", str(caught.value))
    assert typed == ["draft.ttt_steps=3"]
    assert TrainingRun.open(make_recipe(folder, *typed, "train.learning_rate=0.5")).path == folder


def test_many_differences_are_taken_back_by_the_recorded_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sizes = [
        "draft.ttt_steps=3",
        "draft.num_layers=2",
        "draft.intermediate_size=64",
        "draft.head_dim=8",
    ]
    recorded = make_recipe(folder, *sizes, "train.seed=1")
    TrainingRun.open(recorded).record()
    (folder / "checkpoint-10").mkdir()
    with pytest.raises(
        UserError, match=re.escape(f"To resume it, type recipe={folder / 'run' / 'recipe.yaml'}. ")
    ) as caught:
        TrainingRun.open(make_recipe(folder))
    assert str(caught.value).count(" there and ") == 3
    assert (
        TrainingRun.open(load_recipe(Recipe, [f"recipe={folder / 'run' / 'recipe.yaml'}"])).recipe
        == recorded
    )


def test_a_corrected_recipe_takes_the_place_of_one_that_died_before_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    folder, corrected = tmp_path / "run", make_recipe(tmp_path / "run", "draft.ttt_steps=3")
    TrainingRun.open(make_recipe(folder)).record()
    (folder / "runs").mkdir()  # a tracker's log
    TrainingRun.open(corrected).record()
    assert load_recipe(Recipe, [f"recipe={folder / 'run' / 'recipe.yaml'}"]) == corrected


def test_a_second_run_in_a_folder_is_refused_while_the_first_one_writes(tmp_path: Path) -> None:
    first = TrainingRun.open(make_recipe(tmp_path / "run"))
    first.record(target="pico")
    second = TrainingRun.open(make_recipe(tmp_path / "run"))
    with refused("train.output_dir", tmp_path / "run", holds="which process "):
        second.record(target="pico")
    first.writer.close()
    second.record(target="pico")


def test_paths_are_not_compared_between_machines(tmp_path: Path) -> None:
    one, other = (
        list_recipe_keys(
            make_recipe(
                tmp_path / name, f"data.cache_dir={name}", f"draft.ttt_steps={steps}"
            ).model_dump()
        )
        for name, steps in (("one", 3), ("other", 4))
    )
    assert {key for key in one if one[key] != other[key]} == {"draft.ttt_steps"}


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("train.output_dir"):
        TrainingRun.open(make_recipe(tmp_path / "file" / "run"))


def test_a_machine_that_keeps_shards_alone_measures_and_ends_without_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first process of ZeRO-3 gathers the weights, also with train.save_on_each_node."""
    fit = build_trainer(tmp_path, make_rows(4, 24), max_steps=1)
    fit.decode = lambda folder: 2.0
    fit.is_sharded = True
    nothing: Any = None
    monkeypatch.setattr(fit.accelerator, "get_state_dict", lambda _: nothing)
    assert fit.evaluate()["eval_decoded_acceptance_length"] == 2.0
    TrainingRun(make_recipe(tmp_path), fit.args, tmp_path).train(fit)
    assert (tmp_path / "run" / "history.json").exists() and not (tmp_path / "draft").exists()


def test_checkpoints_that_one_machine_lacks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "find_complete_steps", lambda _: [4, 2])
    monkeypatch.setattr(training_run, "all_gather_object", lambda own: [own, (None, [])])
    with refused("train.output_dir", tmp_path / "run"):
        TrainingRun.open(make_recipe(tmp_path / "run"))
    monkeypatch.setattr(training_run, "all_gather_object", lambda own: [own, (None, [2])])
    monkeypatch.setattr(training_run, "check_launch", lambda *_: None)
    assert (
        TrainingRun.open(make_recipe(tmp_path / "run")).checkpoint
        == tmp_path / "run" / "checkpoint-2"
    )


def test_a_folder_that_another_machine_does_not_see_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "VISIBILITY_WAIT_S", 0)
    second: Any = SimpleNamespace(should_save=False, process_index=1)
    with caplog.at_level(logging.WARNING, logger="specdistill"):
        TrainingRun(make_recipe(tmp_path / "run"), second, tmp_path / "run").record()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Process 1 does not see ") and "train.save_on_each_node" in message


PINNED = {"source": "org/chats", "revision": "v1", "license": "mit"}


def make_recipe_of_source(source: Any, folder: Path, *keys: str) -> Any:
    loaded = load_recipe(
        Recipe,
        ["recipe=small/eagle3", "data.source=pico", f"train.output_dir={folder / 'run'}", *keys],
    )
    return loaded.model_copy(update={"data": loaded.data.model_copy(update={"source": source})})


@pytest.mark.parametrize(
    ("source", "keys", "messages"),
    [
        ("pico", ["target.model=pico"], []),
        ("self", ["target.model=org/name", "target.revision=abc"], []),
        ([PINNED], ["target.model=org/name"], ["target.revision: org/name is not pinned"]),
        (
            [{**PINNED, "revision": None, "license": None}],
            ["target.model=pico"],
            ["data.source: org/chats has no revision"],
        ),
        ("rows.jsonl", ["target.model=pico"], ["data.source: rows.jsonl has no license"]),
        (
            [{"source": "rows.jsonl", "license": "mit"}, PINNED],
            ["target.model=org/name/file.gguf"],
            ["target.revision: org/name/file"],
        ),
    ],
)
def test_missing_revisions_and_licenses_are_logged(
    tmp_path: Path, source: Any, keys: list[str], messages: list[str]
) -> None:
    lines = list(warn_unpinned_revisions(make_recipe_of_source(source, tmp_path, *keys)))
    assert len(lines) == len(messages) and all(
        line.startswith(start) for line, start in zip(lines, messages, strict=True)
    )


def test_a_run_warns_of_a_missing_license_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="specdistill"):
        TrainingRun.open(
            make_recipe_of_source("rows.jsonl", tmp_path, "target.model=pico", "train.bf16=false")
        )
    assert [record.getMessage()[:36] for record in caplog.records] == [
        "data.source: rows.jsonl has no licen"
    ]
