"""Runs that may not be released: each attempt changes a copy of a measured run."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specdistill.common.errors import UserError
from specdistill.evaluation.report.files import write_report
from specdistill.evaluation.statistics.records import PromptRecord
from specdistill.hub.evidence import RECIPE, Release
from specdistill.hub.evidence import read_release as read
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from tests.finished_runs import edit, edit_recipe, edit_report, remake, scale_weights, slower, timed

pytestmark = pytest.mark.xdist_group("measured run")  # one worker measures


def read_release(run: Path) -> Release:
    return read(run, load_recipe(Recipe, [f"recipe={run / RECIPE}"]))


def list_refusal_kinds(run: Path) -> set[str]:
    """Return the kinds of the refusals of a run's release."""
    return {refusal.partition(":")[0] for refusal in read_release(run).refusals}


def slow_down_some_prompts(record: PromptRecord) -> PromptRecord:
    """Make some prompts faster and others slower, so that the gate is inconclusive."""
    factor, record = 0.6 if record.id[-1] in "024" else 2.6, timed(record)
    return replace(
        record, speculative=replace(record.speculative, seconds=factor * record.speculative.seconds)
    )


def test_a_run_that_was_measured_is_released(run: Path, tmp_path: Path) -> None:
    for name in ("report.md", "report.html"):
        page = run / "report" / name
        page.write_text(page.read_text().replace("Passed", "Praised"))
    run.rename(tmp_path / "moved")
    release = read_release(tmp_path / "moved")
    assert release.refusals == () and release.report["gate"]["passed"]
    names = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in release.draft] == names
    write_report(tmp_path / "published", release.report, release.records)
    for name in ("report.md", "report.html"):
        assert "Praised" not in (tmp_path / "published" / name).read_text()


def test_other_versions_are_not_refused(run: Path) -> None:
    edit_report(run, "git_revision", to=f"{'1' * 40}-dirty")
    remake(run, lambda record: record)
    assert read_release(run).refusals == ()


# Attempts; ATTEMPTS has the kinds of the refusals for each.


def other_weights(run: Path) -> None:
    scale_weights(run / "draft")


def edited_tokenizer(run: Path) -> None:
    edit(run / "draft/tokenizer_config.json", lambda config: {**config, "model_max_length": 1})


def a_link_named_by_the_old_hash(run: Path) -> None:
    """The Hub's cache names files by their hash, and that name is trusted."""
    path = run / "draft/model.safetensors"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    scale_weights(run / "draft")
    path.rename(run / sha256)
    path.symlink_to(run / sha256)


def a_report_without_the_hash_of_a_draft(run: Path) -> None:
    edit(
        run / "report/report.json",
        lambda report: {**report, "draft": {**report["draft"], "weights": ""}},
    )
    remake(run, lambda record: record)


def a_better_speedup(run: Path) -> None:
    edit_report(run, "results", 0, "speedup", to=2.5)


def quicker_records(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "report/samples.jsonl").read_text().splitlines()]
    for line in lines:
        line["speculative"]["seconds"] /= 2
    (run / "report/samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def cut_short(run: Path) -> None:
    why = {"incomplete": True, "not_measured": {"incomplete": "a server died"}}
    edit(run / "report/report.json", lambda report: {**report, **why})
    remake(run, lambda record: record)


def a_verdict_turned_around(run: Path) -> None:
    remake(run, slower)
    edit_report(run, "gate", "passed", to=True)
    edit_report(run, "gate", "verdict", to="passed")


def nobody_can_tell(run: Path) -> None:
    remake(run, slow_down_some_prompts)


def a_gate_of_that_name_in_the_working_directory(run: Path) -> None:
    (run.parent / "default").write_text("- {metric: speedup, min: 0.1}\n")
    remake(run, slower)


def a_gate_that_the_recipe_asks(run: Path) -> None:
    (run / "strict.yaml").write_text("- {metric: mean_acceptance_length, min: 4.9}\n")
    edit_recipe(run, {"gate: default": f"gate: {run / 'strict.yaml'}"})


def the_report_of_another_target(run: Path) -> None:
    edit_report(run, "target", "weights", to="1" * 64)
    remake(run, lambda record: record)


def another_target_in_the_recipe(run: Path) -> None:
    (model_line,) = (
        line
        for line in (run / "run/recipe.yaml").read_text().splitlines()
        if line.startswith("  model:")
    )
    shutil.copytree(model_line.removeprefix("  model: "), run / "other")
    scale_weights(run / "other")
    edit_recipe(run, {model_line: f"  model: {run / 'other'}"})


ATTEMPTS: dict[Callable[[Path], None], set[str]] = {
    other_weights: {"other weights"},
    edited_tokenizer: {"other weights"},
    a_link_named_by_the_old_hash: {"other weights"},
    a_report_without_the_hash_of_a_draft: {"other weights"},
    a_better_speedup: {"edited report", "gate failed"},
    quicker_records: {"edited report", "gate failed"},
    cut_short: {"gate failed"},
    a_verdict_turned_around: {"gate failed"},
    nobody_can_tell: {"gate inconclusive"},
    a_gate_of_that_name_in_the_working_directory: {"gate failed"},
    a_gate_that_the_recipe_asks: {"gate failed"},
    the_report_of_another_target: {"another target"},
    another_target_in_the_recipe: {"another target"},
}


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.__name__)
def test_an_attempt_is_refused(
    run: Path, attempt: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    attempt(run)
    assert list_refusal_kinds(run) == ATTEMPTS[attempt]


def test_a_converted_target_is_named_as_such(run: Path) -> None:
    edit(
        run / "report/report.json",
        lambda report: {**report, "engine": {"name": "llama.cpp", "version": "b1"}},
    )
    the_report_of_another_target(run)
    (refusal,) = read_release(run).refusals
    assert refusal.startswith("another target: it was measured in llama.cpp with another file; ")


def test_a_target_that_is_gone_is_an_error(run: Path) -> None:
    (model_line,) = (
        line
        for line in (run / "run/recipe.yaml").read_text().splitlines()
        if line.startswith("  model:")
    )
    edit_recipe(run, {model_line: f"  model: {run / 'gone'}"})
    with pytest.raises(UserError, match=r"^target\.model: got "):
        read_release(run)
