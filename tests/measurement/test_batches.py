"""Prompts measured together: the same completions as alone, and shares of the time that add up."""

from dataclasses import replace

import pytest

from specdistill.decoding.batch_decoder import BatchDecoder
from specdistill.decoding.sampling import Sampling
from specdistill.measurement import measure as measuring
from specdistill.measurement import reference
from specdistill.measurement.configurations import MeasurementPlan, Settings
from specdistill.measurement.losslessness import compare_greedy, greedy_pairs
from specdistill.measurement.measure import in_batches, measure_together, prompt_records, round_costs, some
from specdistill.measurement.timing import prompt_timing
from specdistill.methods.ngram.method import NgramProposer
from specdistill.report.build import result_rows
from specdistill.statistics.metrics import prompt_sums
from specdistill.suites.suite import Prompt
from tests.measuring import measure
from tests.proposers import ModelProposer, tiny_target
from tests.simulated import SUITE

PROMPTS = [Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, *range(30, 31 + number))) for number in range(5)]
ALONE = Settings(num_speculative_tokens=2, max_new_tokens=12, repeats=2, warmup=1)
TOGETHER = replace(ALONE, batch_size=2)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def proposer(target):
    return ModelProposer(target.model)


@pytest.fixture
def runs(target, proposer, simulated_clock):
    return measure(target, proposer, PROMPTS, TOGETHER)


def test_prompts_keep_their_order_and_the_last_batch_holds_the_rest():
    batches = in_batches(PROMPTS, 2)
    assert [[prompt.id for prompt in batch.prompts] for batch in batches] == [["p0", "p1"], ["p2", "p3"], ["p4"]]
    assert [(batch.start, batch.end) for batch in batches] == [(0, 2), (2, 4), (4, 5)]
    assert [batch.start for batch in some(in_batches(PROMPTS, 1), 2)] == [0, 1]  # one of each category


def test_every_prompt_runs_both_ways_in_its_batch(target, runs, monkeypatch):
    assert [(len(run.speculative), len(run.baseline), len(run.hf_generate)) for run in runs] == [(2, 2, 2)] * 5
    alone = measure(target, NgramProposer(), PROMPTS, replace(ALONE, repeats=1))
    assert [run.speculative[0].token_ids for run in runs] == [run.baseline[0].token_ids for run in alone]
    order = []
    generate = BatchDecoder.generate

    def watched(decoder, prompts, **options):
        order.append(([prompt[0] - 20 for prompt in prompts], decoder.proposer is not None))
        return generate(decoder, prompts, **options)

    monkeypatch.setattr(BatchDecoder, "generate", watched)
    measure(target, NgramProposer(), PROMPTS, replace(TOGETHER, max_new_tokens=2, warmup=0))
    assert order == [
        ([0, 1], False), ([0, 1], True), ([2, 3], True), ([2, 3], False), ([4], False), ([4], True),
        ([0, 1], True), ([0, 1], False), ([2, 3], False), ([2, 3], True), ([4], True), ([4], False),
    ]  # fmt: skip


def test_drafts_measured_together_share_batches_and_a_baseline(target, proposer):
    first, second = measure_together(target, [proposer, NgramProposer()], PROMPTS, replace(TOGETHER, repeats=1, warmup=0))
    for one, other in zip(first, second, strict=True):
        assert one.baseline is other.baseline and len(one.baseline) == 1
        assert one.speculative[0].token_ids == other.speculative[0].token_ids == one.baseline[0].token_ids


def test_the_librarys_loop_writes_the_same_batches(target, runs):
    """They are ours, and a batch's seconds are shared by their numbers of tokens."""
    for run in runs:
        assert [timing.token_ids for timing in run.hf_generate] == [run.baseline[0].token_ids] * 2
    for first, second in ((runs[0], runs[1]), (runs[2], runs[3])):
        for one, other in zip(first.hf_generate, second.hf_generate, strict=True):
            assert one.seconds / len(one.token_ids) == pytest.approx(other.seconds / len(other.token_ids))


@pytest.mark.parametrize("side", ["speculative", "baseline"])
def test_a_prompt_is_sampled_with_its_own_seed_in_a_batch_of_any_size(target, proposer, side):
    """One prompt five times: its place and the run's seed alone tell its samples apart."""
    prompts = [replace(PROMPTS[0], id=f"p{number}") for number in range(5)]
    settings = replace(ALONE, sampling=Sampling(1.0), repeats=1, warmup=0, seed=5)

    def samples(**changes):
        return [getattr(run, side)[0].token_ids for run in measure(target, proposer, prompts, replace(settings, **changes))]

    alone = samples()
    assert len(set(alone)) == 5
    assert samples(batch_size=2) == samples(batch_size=5) == alone
    assert samples(seed=6)[:-1] == alone[1:]


@pytest.mark.parametrize(("temperature", "sizes"), [(0.0, []), (1.0, [2, 2, 1])])
def test_identity_is_checked_against_transformers(target, proposer, monkeypatch, temperature, sizes):
    settings = replace(TOGETHER, sampling=Sampling(temperature), repeats=1, warmup=0)
    runs = measure(target, proposer, PROMPTS, settings)
    generated = []
    generate = reference.generate
    monkeypatch.setattr(
        reference,
        "generate",
        lambda target, prompts, **options: generated.append(len(prompts)) or generate(target, prompts, **options),
    )
    found = compare_greedy(target, greedy_pairs(target, proposer, runs, settings))
    assert (found["greedy_identical"], found["prompts_checked"]) == (True, 5)
    assert generated == sizes


def test_a_reference_that_padding_changed_is_generated_alone(target, proposer, runs):
    misread = [replace(run, hf_generate=[replace(run.hf_generate[0], token_ids=(1, 2))]) for run in runs]
    found = compare_greedy(target, greedy_pairs(target, proposer, misread, TOGETHER))
    assert (found["greedy_identical"], found["prompts_checked"]) == (False, 5)
    assert found["first_divergence"]["prompt_id"] == "p4"  # alone in its batch: nothing padded it


def test_a_batch_that_writes_something_else_is_noticed(target, proposer, runs):
    wrong = replace(runs[3].speculative[0], token_ids=(*runs[3].speculative[0].token_ids[:4], 1, 1))
    broken = [replace(run, speculative=[wrong]) if run is runs[3] else run for run in runs]
    found = compare_greedy(target, greedy_pairs(target, proposer, broken, TOGETHER))
    assert (found["greedy_identical"], found["divergences"], found["first_divergence"]["prompt_id"]) == (False, 1, "p3")


def test_costs_of_shorter_drafts_are_those_of_batches(target, proposer, monkeypatch):
    sizes = []
    generate = BatchDecoder.generate
    monkeypatch.setattr(
        BatchDecoder,
        "generate",
        lambda decoder, prompts, **options: sizes.append(len(prompts)) or generate(decoder, prompts, **options),
    )
    assert [cost.k for cost in round_costs(target, proposer, PROMPTS, TOGETHER)] == [1, 2]
    assert sizes == [2, 2, 2, 2]  # two batches, at both lengths


def test_rows_say_how_many_batches_their_times_come_from(target, proposer, runs):
    found = prompt_records("suite", TOGETHER.configuration, target, proposer, runs)
    assert [record.batch for record in found] == [0, 0, 2, 2, 4]
    whole, a, _ = result_rows(found, SUITE, TOGETHER.configuration, seed=0)
    assert (whole["batch_size"], whole["num_prompts"], whole["num_batches"]) == (2, 5, 3)
    assert (a["num_prompts"], a["num_batches"]) == (3, 3)
    seconds = sum(prompt_timing(run.speculative).seconds for run in runs)
    assert whole["tokens_per_second"] == pytest.approx(60 / seconds)
    alone = measure(target, proposer, PROMPTS[:1], ALONE)
    assert "batch" not in prompt_sums(prompt_records("suite", ALONE.configuration, target, proposer, alone))


def test_a_run_that_stops_early_does_so_after_whole_batches(target, monkeypatch):
    monkeypatch.setattr(measuring, "interim_sizes", lambda number: [3, number])
    monkeypatch.setattr(measuring, "reached_precision", lambda records, target_precision, seed: False)
    plan = MeasurementPlan(replace(TOGETHER, repeats=1, warmup=0), PROMPTS, target_precision=0.01)
    runs = measuring.measure_plan(target, NgramProposer(), "suite", plan)
    assert sorted(run.prompt.id for run in runs) == ["p0", "p1", "p2", "p3", "p4"]
    assert [run.batch for run in runs] == [0, 0, 2, 2, 4]  # batches stay as they were decoded
