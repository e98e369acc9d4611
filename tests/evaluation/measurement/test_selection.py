"""train.metric_for_best_model=decoded_acceptance_length: training measures the same length as an
evaluation of the checkpoint does."""

import json
from pathlib import Path

import pytest

from specdistill.evaluation.measurement import loading
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from tests.launches import tiny_files
from tests.proposers import ModelProposer, tiny_target
from tests.refusals import refused, refused_key
from tests.scripts import evaluate, specdistill

METRIC = "train.metric_for_best_model=decoded_acceptance_length"


@pytest.mark.long  # two trainings with four measurements each
def test_the_checkpoint_that_decodes_best_becomes_the_draft(tmp_path: Path) -> None:
    suite = tmp_path / "few.jsonl"
    suite.write_text(
        "".join(json.dumps({"prompt": f"Row {number}"}) + "\n" for number in (3, 5, 8))
    )
    keys = [
        *tiny_files(tmp_path),
        METRIC,
        f"selection={{suite: {suite}, max_new_tokens: 24}}",
        "data.regenerate.num_tokens=2000",
    ]
    keys += [
        "train.max_steps=90",
        "train.eval_steps=30",
        "train.save_steps=30",
        "train.learning_rate=1e-2",
    ]
    run = tmp_path / "run"
    assert specdistill("train", *keys, f"train.output_dir={run}").returncode == 0
    state = json.loads((run / "checkpoint-90" / "trainer_state.json").read_text())
    key = "eval_decoded_acceptance_length"
    measured = {entry["step"]: entry[key] for entry in state["log_history"] if key in entry}
    best = max(measured, key=lambda step: measured[step])
    assert 0 not in measured  # a fresh head accepts nothing
    assert (
        measured[best] > 1
        and state["best_global_step"] == best
        and state["best_metric"] == measured[best]
    )
    tensors = "draft/model.safetensors"
    assert (run / tensors).read_bytes() == (run / f"checkpoint-{best}" / tensors).read_bytes()

    report = tmp_path / "report"
    settings = [
        f"recipe={run / 'run' / 'recipe.yaml'}",
        f"eval.suite={suite}",
        f"eval.output_dir={report}",
    ]
    few = ["eval.max_new_tokens=24", "eval.repeats=1", "eval.warmup=0", "eval.sampling_draws=0"]
    evaluate(*settings, *few, f"eval.draft={run / 'checkpoint-60' / 'draft'}")
    judged = json.loads((report / "report.json").read_text())
    assert judged["results"][0]["mean_acceptance_length"] == pytest.approx(measured[60])
    assert "training" not in judged["draft"]

    # A draft that starts from that one is measured before its first step, and its report says what
    # training gained.
    further = [
        f"draft.init={run / 'draft'}",
        "train.max_steps=4",
        "train.eval_steps=2",
        "train.save_steps=2",
    ]
    assert (
        specdistill("train", *keys, *further, f"train.output_dir={tmp_path / 'further'}").returncode
        == 0
    )
    evaluate(
        f"recipe={tmp_path / 'further' / 'run' / 'recipe.yaml'}",
        *few,
        f"eval.suite={suite}",
        f"eval.output_dir={report}",
    )
    judged = json.loads((report / "report.json").read_text())
    gained, length = judged["draft"]["training"], judged["results"][0]["mean_acceptance_length"]
    assert gained["steps"] in (2, 4) and gained["simulated"]["before"] > 1
    assert gained["decoded"] == {
        "before": pytest.approx(measured[best]),
        "after": pytest.approx(length),
    }
    for page in ("report.md", "report.html"):
        shown = (report / page).read_text().partition("Before and after training")[2].lower()
        assert f"{measured[best]:.2f}" in shown and f"after {gained['steps']} steps" in shown


def test_a_mistake_in_the_suite_shows_before_any_work(tmp_path: Path) -> None:
    keys = [
        METRIC,
        "target.model=pico",
        "selection.suite=picco",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    process = specdistill("train", *keys)
    assert process.returncode == 2 and refused_key(process.stderr) == "selection.suite"
    assert not (tmp_path / "run").exists()


def test_the_decoded_metric_is_the_acceptance_length_over_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target itself drafts: the first of 7 tokens comes from the prefill, and two rounds emit 3
    each."""
    (tmp_path / "few.jsonl").write_text('{"prompt": "Row 3"}\n{"prompt": "Row 5"}\n')
    target = tiny_target()
    monkeypatch.setattr(
        loading, "load_proposer", lambda *arguments, **options: ModelProposer(target.model)
    )
    keys = [
        METRIC,
        f"selection={{suite: {tmp_path / 'few.jsonl'}, max_new_tokens: 7}}",
        "eval.num_speculative_tokens=2",
    ]
    recipe = load_recipe(
        Recipe, ["target.model=pico", f"train.output_dir={tmp_path / 'run'}", *keys]
    )
    measure = loading.measure_checkpoints(recipe, target)  # type: ignore[arg-type]
    assert measure and measure(tmp_path) == 3


@pytest.mark.parametrize(
    ("keys", "key", "got"),
    [
        ([METRIC], "selection.suite", "nothing with train.metric_for_best_model="),
        (["selection.suite=pico"], "selection.suite", "pico"),
        ([METRIC, "selection.num_prompts=2"], "selection.suite", "nothing"),
        (
            [METRIC, "selection.suite=pico", "target.shard=layers"],
            "train.metric_for_best_model",
            "decoded_acceptance_length",
        ),
    ],
)
def test_the_selection_suite_and_its_metric_require_each_other(
    keys: list[str], key: str, got: str
) -> None:
    with refused(key, got):
        load_recipe(Recipe, ["target.model=pico", "train.output_dir=runs/x", *keys])
