"""Ways to get a release out of a run that has not earned one: each is tried on a copy of a run that was measured."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdistill.decoding import verify
from specdistill.hub.evidence import SPOT_CHECK, check_evidence
from specdistill.methods.load import draft_hash
from specdistill.report.files import digest, read_report, write_report
from specdistill.statistics.records import Configuration, PromptRecord, RoundRecord
from tests.finished_runs import edit, edit_recipe, edit_report, remake, scale_weights, slower, timed, write

pytestmark = pytest.mark.xdist_group("measured run")  # one worker measures
NOT_DECODED = "not decoded again"


@pytest.fixture
def run(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "run")


def refused(run: Path, *, num_prompts: int = 0, **options: Any) -> set[str]:
    """What speaks against a run's release, beside that no prompt was decoded again."""
    found = {refusal.name for refusal in check_evidence(run, num_prompts=num_prompts, **options).refusals}
    return found if num_prompts else found - {NOT_DECODED}


# Hands on a run's files. `reseal`: with everything made to fit again, as this package's own code would have written it.


def reseal(run: Path, change: Callable[[PromptRecord], PromptRecord] = lambda record: record) -> None:
    remake(run, change)


def edit_records(run: Path, change: Callable[[list[PromptRecord]], list[PromptRecord]]) -> None:
    report, records = read_report(run / "report")
    write(run, report, change(records))


def sometimes_slower(record: PromptRecord) -> PromptRecord:
    """So that some prompts gain much and others lose much: nobody can tell."""
    factor = 0.6 if record.id[-1] in "024" else 2.6
    return replace(
        timed(record), speculative=replace(timed(record).speculative, seconds=factor * timed(record).speculative.seconds)
    )


def with_longer_drafts(record: PromptRecord) -> PromptRecord:
    """The same completion as if the draft had known it: every draft token is accepted."""
    emitted = [pair for entry in record.rounds for pair in zip(entry.emitted, entry.emitted_text, strict=True)]
    rounds = []
    for start in range(0, len(emitted), 5):
        tokens, texts = zip(*emitted[start : start + 5], strict=True)
        rounds.append(RoundRecord(tokens[:4], texts[:4], tokens[:4], tokens, texts))
    count = replace(record.speculative, num_rounds=len(rounds))
    return timed(replace(record, rounds=tuple(rounds), speculative=count))


# What is released


@pytest.mark.long  # decodes again
def test_a_run_that_was_measured_is_released(run: Path) -> None:
    release = check_evidence(run, num_prompts=3)
    assert release.refusals == ()
    assert release.report["gate"]["passed"]
    assert release.notes[-1].startswith("3 prompts ")
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert [path.name for path in release.draft] == names


@pytest.mark.long  # decodes again
def test_a_folder_that_was_moved_or_is_reached_by_a_link(run: Path, tmp_path: Path) -> None:
    (run / "draft").rename(tmp_path / "elsewhere")
    (run / "draft").symlink_to(tmp_path / "elsewhere")
    run.rename(tmp_path / "moved")
    assert refused(tmp_path / "moved", num_prompts=1) == set()


@pytest.mark.long  # decodes again
def test_a_k_that_was_chosen_once_the_draft_was_trained_is_named(run: Path) -> None:
    another_k(run)
    assert refused(run, num_prompts=2) >= {"another measurement"}
    assert refused(run, num_prompts=2, num_speculative_tokens=4) == set()
    assert refused(run, num_prompts=2, num_speculative_tokens=3) >= {"another measurement"}


def test_what_is_published_is_rendered_from_the_records(run: Path, tmp_path: Path) -> None:
    for name in ("report.md", "report.html"):
        page = run / "report" / name
        page.write_text(page.read_text().replace("Passed", "Praised"))
    release = check_evidence(run, num_prompts=0)
    write_report(tmp_path / "published", release.report, release.records)
    for name in ("report.md", "report.html"):
        assert "Praised" not in (tmp_path / "published" / name).read_text()


def test_other_versions_are_stated_and_not_refused(run: Path) -> None:
    edit_report(run, "git_revision", to=f"{'1' * 40}-dirty")
    reseal(run)
    release = check_evidence(run, num_prompts=0)
    assert {refusal.name for refusal in release.refusals} == {NOT_DECODED}
    assert all(f"{'1' * 40}-dirty" in note for note in release.notes) and len(release.notes) == 2


# Attempts. Each has the names of what refuses it.


def other_weights(run: Path) -> None:
    scale_weights(run / "draft")


def edited_config(run: Path) -> None:
    edit(run / "draft/config.json", lambda config: {**config, "rope_theta": 5e5})


def edited_tokenizer(run: Path) -> None:
    edit(run / "draft/tokenizer_config.json", lambda config: {**config, "model_max_length": 1})


def a_link_named_by_the_old_hash(run: Path) -> None:
    """The Hub's cache names files so, and is believed."""
    path = run / "draft/model.safetensors"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    scale_weights(run / "draft")
    path.rename(run / sha256)
    path.symlink_to(run / sha256)


def code_beside_the_weights(run: Path) -> None:
    (run / "draft/modeling_draft.py").write_text("import os")


def a_report_without_the_hash_of_a_draft(run: Path) -> None:
    edit(run / "report/report.json", lambda report: {**report, "draft": {**report["draft"], "weights": ""}})
    reseal(run)


def another_method(run: Path) -> None:
    edit_report(run, "draft", "method", to="eagle3")
    reseal(run)


def a_better_speedup_and_a_digest_made_to_fit(run: Path) -> None:
    edit_report(run, "results", 0, "speedup", to=2.5)
    edit_report(run, "digest", to=digest(*read_report(run / "report")))


def no_divergences(run: Path) -> None:
    """What no record shows: the digest tells."""
    edit_report(run, "lossless", "prompts_checked", to=480)


def divergences_explained_away(run: Path) -> None:
    for name, value in (("divergences", 3), ("greedy_identical", False), ("near_ties", 0)):
        edit_report(run, "lossless", name, to=value)
    reseal(run)


def quality_that_was_not_scored(run: Path) -> None:
    perfect = dict.fromkeys(("with_draft", "without_draft", "p_value"), 1.0)
    perfect |= dict.fromkeys(("num_prompts", "difference", "only_with_draft", "only_without_draft"), 0)
    edit(run / "report/report.json", lambda report: {**report, "quality": {"exact_match": perfect}})
    reseal(run)


def cut_short(run: Path) -> None:
    edit(
        run / "report/report.json",
        lambda report: {**report, "incomplete": True, "not_measured": {"incomplete": "a server died"}},
    )
    reseal(run)


def the_best_prompts_alone(run: Path) -> None:
    edit_records(run, lambda records: [record for record in records if record.category == "a"])


def a_prompt_twice(run: Path) -> None:
    edit_records(run, lambda records: [*records, records[0]])


def a_prompt_of_ones_own(run: Path) -> None:
    edit_records(run, lambda records: [*records, replace(records[0], id="mine")])


def an_easier_prompt(run: Path) -> None:
    reseal(run, lambda record: replace(record, prompt="a a a a a a"))


def another_text(run: Path) -> None:
    reseal(run, lambda record: replace(record, text="All is well."))


def another_text_of_a_round(run: Path) -> None:
    def change(record: PromptRecord) -> PromptRecord:
        first, *rest = record.rounds
        return replace(record, rounds=(replace(first, drafted_text=("well",) * len(first.drafted)), *rest))

    reseal(run, change)


def a_verdict_turned_around(run: Path) -> None:
    reseal(run, slower)
    edit_report(run, "gate", "passed", to=True)
    edit_report(run, "gate", "verdict", to="passed")


def nobody_can_tell(run: Path) -> None:
    reseal(run, sometimes_slower)


WEAK = "- {metric: speedup, min: 0.1}\n"
WARNING = "- {metric: speedup, min: 1.0, severity: warn}\n"


def a_weaker_gate(run: Path, rules: str = WEAK, *, with_hash: bool = True) -> None:
    (run / "weak.yaml").write_text(rules)
    edit_recipe(run, {"gate: default": f"gate: {run / 'weak.yaml'}"}, with_hash=with_hash)


def a_weaker_gate_after_a_failure(run: Path) -> None:
    reseal(run, slower)
    a_weaker_gate(run)


def a_gate_of_the_recipe_that_was_not_asked(run: Path) -> None:
    (run / "strict.yaml").write_text("- {metric: mean_acceptance_length, min: 4.5}\n")
    edit_recipe(run, {"gate: default": f"gate: {run / 'strict.yaml'}"})


def a_rule_made_a_warning(run: Path) -> None:
    a_weaker_gate(run, WARNING)
    reseal(run, slower)


def a_gate_file_loosened_after_a_failure(run: Path) -> None:
    """The report still says which rules it was measured under."""
    a_weaker_gate(run, "- {metric: mean_acceptance_length, min: 4.5}\n")
    reseal(run)
    (run / "weak.yaml").write_text(WEAK)


def another_gate_in_the_recipe(run: Path) -> None:
    a_weaker_gate(run, with_hash=False)


def another_suite_by_name_made_to_fit(run: Path) -> None:
    edit_report(run, "suite", "name", to="pico-short")
    reseal(run)


def a_server_that_was_none(run: Path) -> None:
    """Reports of servers are judged by other rules."""
    edit_report(run, "engine", to={"name": "vllm", "version": "1"})
    reseal(run, slower)


def another_k(run: Path) -> None:
    edit_recipe(run, {"num_speculative_tokens: 4": "num_speculative_tokens: 6"})


def fewer_repetitions(run: Path) -> None:
    edit_recipe(run, {"repeats: 1": "repeats: 3"})


def records_of_another_k_first(run: Path) -> None:
    reseal(run, lambda record: replace(record, configuration=Configuration(6)))


def another_suite(run: Path) -> None:
    other = run / "easy.jsonl"
    other.write_text(json.dumps({"prompt": "a a a a a a"}) + "\n")
    (place,) = (line for line in (run / "run/recipe.yaml").read_text().splitlines() if "suite.jsonl" in line)
    edit_recipe(run, {place: f"  suite: {other}"})


def the_report_of_another_target(run: Path) -> None:
    edit_report(run, "target", "weights", to="1" * 64)
    reseal(run)


def a_look_up_in_front_of_the_draft(run: Path) -> None:
    edit_report(run, "settings", "drafting", to={"lookup_first": [2, 5], "draft_tokens": 2})
    reseal(run)


def a_draft_for_another_target(run: Path) -> None:
    def change(config: Any) -> Any:
        config["specdistill"]["target"]["weights"] = "1" * 64
        return config

    edit(run / "draft/config.json", change)
    edit_report(run, "draft", "weights", to=draft_hash(run / "draft"))
    reseal(run)


def another_target_in_the_recipe(run: Path) -> None:
    (place,) = (line for line in (run / "run/recipe.yaml").read_text().splitlines() if line.startswith("  model:"))
    shutil.copytree(place.removeprefix("  model: "), run / "other")
    scale_weights(run / "other")
    edit_recipe(run, {place: f"  model: {run / 'other'}"})


def a_target_that_is_gone(run: Path) -> None:
    (place,) = (line for line in (run / "run/recipe.yaml").read_text().splitlines() if line.startswith("  model:"))
    edit_recipe(run, {place: f"  model: {run / 'gone'}"})


ATTEMPTS: dict[Callable[[Path], None], set[str]] = {
    other_weights: {"other weights"},
    edited_config: {"other weights"},
    edited_tokenizer: {"other weights"},
    a_link_named_by_the_old_hash: {"other weights"},
    a_report_without_the_hash_of_a_draft: {"other weights"},
    no_divergences: {"edited report"},
    a_verdict_turned_around: {"gate failed"},
    nobody_can_tell: {"gate inconclusive"},
    a_weaker_gate_after_a_failure: {"gate failed"},
    a_gate_of_the_recipe_that_was_not_asked: {"gate failed"},
    a_rule_made_a_warning: {"gate failed"},
    a_gate_file_loosened_after_a_failure: {"gate failed"},
    the_report_of_another_target: {"another target"},
    a_draft_for_another_target: {"another target"},
    another_target_in_the_recipe: {"another target"},
}
# Against numbers and records that were made up.
MADE_UP: dict[Callable[[Path], None], set[str]] = {
    code_beside_the_weights: {"added files"},
    another_method: {"another method"},
    a_better_speedup_and_a_digest_made_to_fit: {"edited report"},
    divergences_explained_away: {"edited report"},
    quality_that_was_not_scored: {"edited report"},
    cut_short: {"incomplete"},
    the_best_prompts_alone: {"another measurement"},
    a_prompt_twice: {"edited samples"},
    a_prompt_of_ones_own: {"edited samples"},
    an_easier_prompt: {"edited samples"},
    another_text: {"edited samples"},
    another_text_of_a_round: {"edited samples"},
    another_suite_by_name_made_to_fit: {"another measurement"},
    another_gate_in_the_recipe: {"edited recipe"},
    a_server_that_was_none: {"another measurement", "gate failed"},
    another_k: {"another measurement"},
    fewer_repetitions: {"another measurement"},
    a_look_up_in_front_of_the_draft: {"another measurement"},
    records_of_another_k_first: {"another measurement"},
    another_suite: {"another measurement"},
    a_target_that_is_gone: set(),  # only that nothing is decoded again
}


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.__name__)
def test_an_attempt_is_refused(run: Path, attempt: Callable[[Path], None]) -> None:
    attempt(run)
    assert refused(run) == ATTEMPTS[attempt]


@pytest.mark.long  # a grid
@pytest.mark.parametrize("attempt", MADE_UP, ids=lambda attempt: attempt.__name__)
def test_what_was_made_up_is_refused(run: Path, attempt: Callable[[Path], None]) -> None:
    attempt(run)
    assert refused(run) == MADE_UP[attempt]


# What only decoding again can tell: records and numbers that fit each other


def test_nothing_is_released_that_was_not_decoded_again(run: Path) -> None:
    assert [refusal.name for refusal in check_evidence(run, num_prompts=0).refusals] == [NOT_DECODED]
    assert SPOT_CHECK > 1


@pytest.mark.long  # decodes again
def test_other_weights_do_not_decode_what_was_recorded(run: Path) -> None:
    scale_weights(run / "draft")
    edit_report(run, "draft", "weights", to=draft_hash(run / "draft"))
    reseal(run)
    assert refused(run, num_prompts=4) == {"not reproduced"}


@pytest.mark.long  # decodes again
def test_records_of_a_better_draft_are_not_decoded_again(run: Path) -> None:
    reseal(run, with_longer_drafts)
    assert refused(run, num_prompts=4) == {"not reproduced"}


@pytest.mark.long  # decodes again
def test_on_another_machine_the_acceptance_length_is_compared(run: Path) -> None:
    edit_report(run, "hardware", "cpu", to="Another 9000")
    reseal(run)
    release = check_evidence(run, num_prompts=2)
    assert release.refusals == ()
    reseal(run, with_longer_drafts)
    (refusal,) = check_evidence(run, num_prompts=6).refusals
    assert refusal.name == "not reproduced"


@pytest.mark.long  # decodes again
def test_losslessness_is_tested_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that accepts what it should not."""
    monkeypatch.setattr(verify, "greedy", lambda tokens, choices: (len(tokens), choices[len(tokens)]))
    refusals = check_evidence(run, num_prompts=2).refusals
    assert {refusal.name for refusal in refusals} == {"not reproduced"}
    assert any("lossless.unexplained_divergences" in refusal.why for refusal in refusals)
