import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.evaluation.measurement import losslessness, reference
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.losslessness import (
    check_greedy,
    generate_greedily,
    generate_pairs,
    summarize_greedy,
)
from specdistill.evaluation.measurement.prompt_runs import (
    build_prompt_records,
    compute_timing,
    generate_with_transformers,
    measure_round_costs,
    sample_batches,
    spell_tokens,
    split_into_batches,
)
from specdistill.evaluation.report.build import build_result_rows
from specdistill.evaluation.statistics.metrics import collect_prompt_sums
from specdistill.evaluation.suites.suite import Prompt
from specdistill.methods.models.proposer import DraftModelProposer
from tests.measuring import measure, measure_drafts
from tests.proposers import ModelProposer, ngram_proposer, tiny_target
from tests.simulated import SUITE
from tests.tiny import tiny_tokenizer

PROMPTS = [
    Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, 30, 40)) for number in range(3)
]
SETTINGS = Settings(num_speculative_tokens=2, max_new_tokens=12, repeats=2, warmup=1)
NUM_ROUNDS_A_PROMPT = 4  # of 12 tokens, the first from the prefill and three a round


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def proposer():
    return ModelProposer(tiny_target(seed=0).model)  # the target itself: every draft is accepted


@pytest.fixture
def runs(target, proposer, simulated_clock):
    return measure(target, proposer, PROMPTS, SETTINGS)


def make_stalling(
    function: Callable[..., object], call: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., object]:
    """Return the function with a stall of half a second in its `call`th call.

    The clock is simulated: it advances by a millisecond whenever it is read.
    """
    seconds, calls = 0.0, 0

    def read_clock() -> float:
        nonlocal seconds
        seconds += 1e-3
        return seconds

    def call_with_stall(*arguments: object) -> object:
        nonlocal seconds, calls
        calls += 1
        seconds += 0.5 * (calls == call)
        return function(*arguments)

    monkeypatch.setattr(time, "perf_counter", read_clock)
    return call_with_stall


def test_a_prompt_with_a_stalled_round_is_decoded_again(target, monkeypatch, capsys):
    """The second round of the second prompt stalls: the prompt gets one more repetition, and its
    times show no trace of the stall."""
    proposer = ModelProposer(tiny_target(seed=0).model)
    monkeypatch.setattr(
        proposer, "propose", make_stalling(proposer.propose, NUM_ROUNDS_A_PROMPT + 2, monkeypatch)
    )
    runs = measure(target, proposer, PROMPTS, replace(SETTINGS, warmup=0))
    assert (
        [len(run.speculative) for run in runs] == [len(run.baseline) for run in runs] == [2, 3, 2]
    )
    assert "Measuring 3 prompts, 2 times each: 7 of 7 runs, took" in capsys.readouterr().err
    quiet, disturbed, _ = build_prompt_records(
        "suite", SETTINGS.configuration, target, proposer, runs
    )
    assert (quiet.speculative.num_disturbed_rounds, disturbed.speculative.num_disturbed_rounds) == (
        0,
        1,
    )
    assert disturbed.speculative.seconds == pytest.approx(quiet.speculative.seconds)
    assert max(run.seconds for run in runs[1].speculative) > 0.5


def test_a_stall_in_generate_of_transformers_is_found_too(target, proposer, monkeypatch):
    """The steps of generate() are timed one by one, as rounds are.

    Its speed is compared with that of plain decoding.
    """
    # The stall is in the second prompt.
    put = make_stalling(reference._Clock.put, SETTINGS.max_new_tokens + 5, monkeypatch)
    monkeypatch.setattr(reference._Clock, "put", lambda clock, value: put(clock, value))
    runs = measure(target, proposer, PROMPTS, replace(SETTINGS, warmup=0))
    assert (
        [len(run.hf_generate) for run in runs] == [len(run.baseline) for run in runs] == [2, 3, 2]
    )
    quiet, disturbed, _ = (
        record.hf_generate
        for record in build_prompt_records("s", SETTINGS.configuration, target, proposer, runs)
    )
    assert disturbed.num_tokens == SETTINGS.max_new_tokens
    assert disturbed.seconds == pytest.approx(quiet.seconds)
    assert max(run.seconds for run in runs[1].hf_generate) > 0.5


def test_the_order_alternates_over_prompts_and_repetitions(
    target, proposer, monkeypatch, simulated_clock
):
    order = []
    generate = Decoder.generate_all

    def record_order(decoder, prompts, **options):
        order.append((prompts[0][0] - 20, decoder.proposer is not None))
        return generate(decoder, prompts, **options)

    monkeypatch.setattr(Decoder, "generate_all", record_order)
    measure(
        target,
        proposer,
        PROMPTS,
        Settings(num_speculative_tokens=1, max_new_tokens=2, repeats=2, warmup=0),
    )
    assert order == [
        (0, False), (0, True), (1, True), (1, False), (2, False), (2, True),
        (0, True), (0, False), (1, False), (1, True), (2, True), (2, False),
    ]  # fmt: skip


def test_records_say_what_was_decoded(target, proposer, runs):
    for run, record in zip(
        runs,
        build_prompt_records("suite", SETTINGS.configuration, target, proposer, runs),
        strict=True,
    ):
        tokens = [
            record.first_token,
            *(token for entry in record.rounds for token in entry.emitted),
        ]
        assert tuple(tokens) == run.speculative[0].token_ids
        assert all(
            entry.accepted == entry.drafted[: len(entry.accepted)] for entry in record.rounds
        )
        assert record.speculative.num_tokens == record.baseline.num_tokens == 12
        # 1 + 4 · 3 tokens pass the limit of 12 by one
        assert record.speculative.num_rounds == len(record.rounds) == 4
        assert record.baseline.num_rounds == 11
        assert record.hf_generate.num_tokens == 12
        timing = record.speculative
        assert (
            0
            < timing.draft_seconds + timing.verify_seconds + timing.prefill_seconds
            <= timing.seconds
        )


def test_the_draft_vocabulary_covers_tokens_of_the_plain_completion(target, runs, monkeypatch):
    proposer = ModelProposer(target.model)
    monkeypatch.setattr(proposer, "vocabulary", frozenset({30}))
    run = replace(runs[0], baseline=[replace(runs[0].baseline[0], token_ids=(30, 1, 30))])
    (record,) = build_prompt_records("suite", SETTINGS.configuration, target, proposer, [run])
    assert record.num_in_draft_vocabulary == 2


def test_transformers_generates_as_many_sampled_tokens_as_plain_decoding(target, runs):
    plain, (batch, *_) = (
        [replace(runs[0].baseline[0], token_ids=(1, 2, 3))],
        split_into_batches(PROMPTS, 1),
    )
    for sampling, number in ((Sampling(1.0), 3), (Sampling(), 12)):
        (found,) = generate_with_transformers(
            target, batch, plain, replace(SETTINGS, sampling=sampling)
        )
        assert len(found.token_ids) == number


def test_greedy_completions_are_compared_with_those_that_were_timed(
    target, proposer, runs, monkeypatch
):
    monkeypatch.setattr(
        losslessness.reference,
        "generate_reference",
        lambda *_, **__: pytest.fail("generated once more"),
    )
    pairs = list(generate_pairs(target, proposer, runs, SETTINGS))
    assert [prompt.id for prompt, _, _ in pairs] == ["p0", "p1", "p2"]
    assert all(with_draft.token_ids == token_ids for _, with_draft, token_ids in pairs)


def test_a_completion_that_was_not_timed_is_generated(target, proposer, runs):
    untimed = [replace(run, hf_generate=[]) if run.prompt.id == "p1" else run for run in runs]
    assert list(generate_pairs(target, proposer, untimed, SETTINGS)) == list(
        generate_pairs(target, proposer, runs, SETTINGS)
    )


def test_compared_drafts_share_the_generated_references(target, proposer, runs, monkeypatch):
    untimed, generated = [replace(run, hf_generate=[]) for run in runs], []
    generate_reference = losslessness.reference.generate_reference
    monkeypatch.setattr(
        losslessness.reference,
        "generate_reference",
        lambda *arguments, **limits: (
            generated.append(arguments) or generate_reference(*arguments, **limits)
        ),
    )
    generate = generate_greedily(target, SETTINGS)
    first, second = (check_greedy(target, proposer, untimed, SETTINGS, generate) for _ in range(2))
    assert first == second == [None] * 3 and len(generated) == 3


def test_sampled_text_repeats_and_is_decoded_greedily_once_more(target, proposer, simulated_clock):
    settings = Settings(
        num_speculative_tokens=2,
        max_new_tokens=12,
        sampling=Sampling(1.0),
        repeats=2,
        warmup=0,
        seed=5,
    )
    runs = measure(target, proposer, PROMPTS, settings)
    assert all(run.speculative[0].token_ids == run.speculative[1].token_ids for run in runs)
    assert all(
        len(timed.token_ids) == len(run.baseline[0].token_ids)
        for run in runs
        for timed in run.hf_generate
    )
    assert all(len(run.hf_generate) == len(run.speculative) == 2 for run in runs)
    assert any(run.speculative[0].token_ids != run.baseline[0].token_ids for run in runs)
    pairs = list(generate_pairs(target, proposer, runs, settings))
    assert all(with_draft.token_ids == token_ids for _, with_draft, token_ids in pairs)


def test_costs_of_shorter_drafts_ignore_one_stall(target, monkeypatch):
    """A round reads the clock before, between and after its two steps: each takes a millisecond."""
    proposer = ModelProposer(tiny_target(seed=0).model)
    # The median ignores one stall.
    monkeypatch.setattr(proposer, "propose", make_stalling(proposer.propose, 1, monkeypatch))
    costs = measure_round_costs(
        target, proposer, PROMPTS, Settings(num_speculative_tokens=2, max_new_tokens=12)
    )
    assert [(cost.k, cost.verify_ms, cost.draft_ms) for cost in costs] == [
        (k, *[pytest.approx(1)] * 2) for k in (1, 2)
    ]
    assert measure_round_costs(target, ngram_proposer(max=50, min=50), PROMPTS, SETTINGS) == []


@pytest.mark.parametrize("tree", [DynamicTree(budget=5, depth=2, top_k=2), StaticTree((3, 1))])
def test_records_of_trees_count_every_node_and_show_one_path(target, tree):
    draft = DraftModelProposer(tiny_target(seed=3).model)
    settings = Settings(num_speculative_tokens=2, max_new_tokens=12, repeats=1, warmup=1, tree=tree)
    runs = measure(target, draft, PROMPTS, settings)
    assert all(run.speculative[0].token_ids == run.baseline[0].token_ids for run in runs)
    found = build_prompt_records("suite", settings.configuration, target, draft, runs)
    for record in found:
        assert record.configuration.tree == tree.settings
        for entry in record.rounds:
            assert len(entry.drafted) == len(entry.drafted_text) == 2
            assert (
                entry.accepted
                == entry.drafted[: len(entry.accepted)]
                == entry.emitted[: len(entry.accepted)]
            )
            assert (
                entry.num_drafted
                == 2 + entry.num_off_path
                == (5 if isinstance(tree, DynamicTree) else 6)
            )
    assert measure_round_costs(target, draft, PROMPTS, settings) == []
    sampled = Settings(
        num_speculative_tokens=2,
        max_new_tokens=8,
        sampling=Sampling(1.0),
        repeats=1,
        warmup=0,
        tree=tree,
    )
    pairs = list(generate_pairs(target, draft, measure(target, draft, PROMPTS, sampled), sampled))
    assert all(with_draft.token_ids == token_ids for _, with_draft, token_ids in pairs)
    assert all(entry.num_off_path for _, with_draft, _ in pairs for entry in with_draft.rounds)


def test_spelled_tokens_add_up_to_the_text():
    tokenizer = tiny_tokenizer()
    context, text = tokenizer("def f():")["input_ids"], tokenizer(" return 'a b'\n")["input_ids"]
    assert "".join(spell_tokens(tokenizer, context, text)) == " return 'a b'\n"
    assert spell_tokens(tokenizer, [], [0]) == ("<|endoftext|>",)


# Prompts measured together: the same completions as alone, and shares of the time that add up

FIVE = [
    Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, *range(30, 31 + number)))
    for number in range(5)
]
IN_PAIRS = replace(SETTINGS, batch_size=2)


@pytest.fixture
def paired_runs(target, proposer, simulated_clock):
    return measure(target, proposer, FIVE, IN_PAIRS)


def test_prompts_keep_their_order_and_the_last_batch_holds_the_rest():
    batches = split_into_batches(FIVE, 2)
    assert [[prompt.id for prompt in batch.prompts] for batch in batches] == [
        ["p0", "p1"],
        ["p2", "p3"],
        ["p4"],
    ]
    assert [(batch.start, batch.end) for batch in batches] == [(0, 2), (2, 4), (4, 5)]
    assert [batch.start for batch in sample_batches(split_into_batches(FIVE, 1), 2)] == [
        0,
        1,
    ]  # one of each category


def test_every_prompt_runs_both_ways_in_its_batch(target, paired_runs):
    assert [
        (len(run.speculative), len(run.baseline), len(run.hf_generate)) for run in paired_runs
    ] == [(2, 2, 2)] * 5
    alone = measure(target, ngram_proposer(), FIVE, replace(SETTINGS, repeats=1))
    assert [run.speculative[0].token_ids for run in paired_runs] == [
        run.baseline[0].token_ids for run in alone
    ]


def test_drafts_measured_together_share_batches_and_a_baseline(target, proposer):
    first, second = measure_drafts(
        target, [proposer, ngram_proposer()], FIVE, replace(IN_PAIRS, repeats=1, warmup=0)
    )
    for one, other in zip(first, second, strict=True):
        assert one.baseline is other.baseline and len(one.baseline) == 1
        assert (
            one.speculative[0].token_ids
            == other.speculative[0].token_ids
            == one.baseline[0].token_ids
        )


def test_transformers_generates_the_same_batches(target, paired_runs):
    """The batches are ours, and prompts share a batch's seconds by their numbers of tokens."""
    for run in paired_runs:
        assert [timing.token_ids for timing in run.hf_generate] == [run.baseline[0].token_ids] * 2
    for first, second in ((paired_runs[0], paired_runs[1]), (paired_runs[2], paired_runs[3])):
        for one, other in zip(first.hf_generate, second.hf_generate, strict=True):
            assert one.seconds / len(one.token_ids) == pytest.approx(
                other.seconds / len(other.token_ids)
            )


@pytest.mark.parametrize("side", ["speculative", "baseline"])
def test_a_prompt_is_sampled_with_its_own_seed_in_a_batch_of_any_size(target, proposer, side):
    """The same prompt is measured five times: only its place and the seed make samples differ."""
    prompts = [replace(FIVE[0], id=f"p{number}") for number in range(5)]
    settings = replace(SETTINGS, sampling=Sampling(1.0), repeats=1, warmup=0, seed=5)

    def collect_samples(**changes):
        return [
            getattr(run, side)[0].token_ids
            for run in measure(target, proposer, prompts, replace(settings, **changes))
        ]

    alone = collect_samples()
    assert len(set(alone)) == 5
    assert collect_samples(batch_size=2) == collect_samples(batch_size=5) == alone
    assert collect_samples(seed=6)[:-1] == alone[1:]


@pytest.mark.parametrize(("temperature", "sizes"), [(0.0, []), (1.0, [2, 2, 1])])
def test_identity_is_checked_against_transformers(
    target, proposer, monkeypatch, temperature, sizes
):
    settings = replace(IN_PAIRS, sampling=Sampling(temperature), repeats=1, warmup=0)
    runs = measure(target, proposer, FIVE, settings)
    generated = []
    generate = reference.generate_reference
    monkeypatch.setattr(
        reference,
        "generate_reference",
        lambda target, prompts, **options: (
            generated.append(len(prompts)) or generate(target, prompts, **options)
        ),
    )
    found = summarize_greedy(check_greedy(target, proposer, runs, settings))
    assert (found["greedy_identical"], found["prompts_checked"]) == (True, 5)
    assert generated == sizes


def test_a_reference_that_padding_changed_is_generated_alone(target, proposer, paired_runs):
    misread = [
        replace(run, hf_generate=[replace(run.hf_generate[0], token_ids=(1, 2))])
        for run in paired_runs
    ]
    found = summarize_greedy(check_greedy(target, proposer, misread, IN_PAIRS))
    assert (found["greedy_identical"], found["prompts_checked"]) == (False, 5)
    assert found["first_divergence"]["prompt_id"] == "p4"  # alone in its batch: nothing padded it


def test_costs_of_shorter_drafts_are_those_of_batches(target, proposer, monkeypatch):
    sizes = []
    generate = Decoder.generate_all
    monkeypatch.setattr(
        Decoder,
        "generate_all",
        lambda decoder, prompts, **options: (
            sizes.append(len(prompts)) or generate(decoder, prompts, **options)
        ),
    )
    assert [cost.k for cost in measure_round_costs(target, proposer, FIVE, IN_PAIRS)] == [1, 2]
    assert sizes == [2, 2]  # one batch is enough for few prompts; it runs at both lengths


def test_rows_say_how_many_batches_their_times_come_from(target, proposer, paired_runs):
    found = build_prompt_records("suite", IN_PAIRS.configuration, target, proposer, paired_runs)
    assert [record.batch for record in found] == [0, 0, 2, 2, 4]
    whole, a, _ = build_result_rows(found, SUITE, IN_PAIRS.configuration, seed=0)
    assert (whole["batch_size"], whole["num_prompts"], whole["num_batches"]) == (2, 5, 3)
    assert (a["num_prompts"], a["num_batches"]) == (3, 3)
    seconds = sum(compute_timing(run.speculative).seconds for run in paired_runs)
    assert whole["tokens_per_second"] == pytest.approx(60 / seconds)
    alone = measure(target, proposer, FIVE[:1], SETTINGS)
    assert "batch" not in collect_prompt_sums(
        build_prompt_records("suite", SETTINGS.configuration, target, proposer, alone)
    )
