"""Decode prompts in batches, compute the records of prompts, and measure the costs of rounds."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from specdistill.common.errors import logger
from specdistill.common.processes import is_first
from specdistill.common.progress import format_clock, show_progress
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.decoding.proposer import Proposer, UsesPastOutputs
from specdistill.decoding.sequence import Generation, Round
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.hardware import freeze_garbage_collector
from specdistill.evaluation.measurement.reference import time_generate
from specdistill.evaluation.statistics.records import (
    Configuration,
    HFGenerate,
    PromptRecord,
    RoundRecord,
    Timing,
)
from specdistill.evaluation.statistics.theory import RoundCost
from specdistill.evaluation.suites.conversations import Tokenizer
from specdistill.evaluation.suites.suite import Prompt, select_evenly
from specdistill.targets.frozen import FrozenTarget

# A batch that was decoded in every arm of a measurement: [arm][prompt of the batch].
BatchGenerations = list[list[Generation]]
# The text of a token depends on the tokens before it, because spaces are dropped at the start of a
# text, and because tokens share characters. So many tokens before it are decoded together with it.
# A character of UTF-8 has at most four bytes, and so at most four tokens.
SPELLING_CONTEXT = 8
# A round is disturbed if it took more than this many times its lower median over the repetitions,
# and more than this many seconds longer. The ratio alone would call jitter of short rounds
# disturbed, and the seconds alone would do so for long rounds.
DISTURBED_RATIO = 3.0
DISTURBED_SECONDS = 0.005
# How many prompts are decoded to time rounds with fewer draft tokens, and how many tokens are
# generated for each. The costs of a round are medians over rounds, so they need no more.
MAX_COST_PROMPTS = 4
COST_TOKENS = 32
# At most this share of the prompts, rounded up, is used for the costs of rounds, so that their
# timing does not take longer than the measurement of a short suite.
COST_SHARE = 1 / 4


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are decoded together.

    Attributes:
        start: the index of the first of them among all prompts.
    """

    start: int
    prompts: tuple[Prompt, ...]

    @property
    def end(self) -> int:
        """The number of the prompt after the last one."""
        return self.start + len(self.prompts)


def split_into_batches(prompts: Sequence[Prompt], size: int) -> list[PromptBatch]:
    """Split prompts into consecutive batches; the last one may be smaller."""
    return [
        PromptBatch(start, tuple(prompts[start : start + size]))
        for start in range(0, len(prompts), size)
    ]


def sample_batches(batches: Sequence[PromptBatch], count: int) -> list[PromptBatch]:
    """Return `count` of the batches, spread over the categories of their first prompts."""
    return select_evenly(batches, [batch.prompts[0].category for batch in batches], count)


def decode_batch(decoder: Decoder, batch: PromptBatch, settings: Settings) -> list[Generation]:
    """Decode a batch with the decoder's draft, or plainly if it has none.

    Args:
        decoder: the decoder.
        batch: the prompts.
        settings: the settings; K and the tree are ignored without a draft.

    Returns:
        The completion of each prompt.
    """
    # The seed of a prompt depends on its index among all prompts, not on the size of batches.
    generators = [
        torch.Generator().manual_seed(settings.seed + index)
        for index in range(batch.start, batch.end)
    ]
    options = settings.decoding
    if decoder.proposer is None:
        options |= {"num_speculative_tokens": 0, "tree": None}
    return decoder.generate_all(
        [prompt.token_ids for prompt in batch.prompts], generators=generators, **options
    )


def generate_with_transformers(
    target: FrozenTarget, batch: PromptBatch, plain: Sequence[Generation], settings: Settings
) -> list[Generation]:
    """Decode a batch with transformers' `generate()`, and time it.

    Sampled completions get as many tokens as those of plain decoding (`plain`), so that both do the
    same work. Greedy ones have the same tokens anyway.
    """
    if settings.sampling.is_greedy:
        counts = [settings.max_new_tokens for _ in plain]
    else:
        counts = [len(generation.token_ids) for generation in plain]
    return time_generate(
        target, [prompt.token_ids for prompt in batch.prompts], counts, sampling=settings.sampling
    )


def sum_seconds(batches: Iterable[BatchGenerations]) -> float:
    """Return how long the decoding of batches took, in all arms."""
    seconds = 0.0
    for arms in batches:
        for generations in arms:
            seconds += sum(generation.seconds for generation in generations)
    return seconds


def log_estimate(generations: BatchGenerations, num_runs: int, num_check_passes: int) -> None:
    """Log how long a measurement will take, estimated from one batch.

    Args:
        generations: the generations of the batch, in each arm.
        num_runs: how often a prompt will be decoded in all arms.
        num_check_passes: about how many passes of the target the checks will take.
    """
    if not is_first():
        return

    # Decoding a prompt takes as long as one of the batch took, in all arms together.
    plain = generations[0]
    decoding_s = num_runs * sum_seconds([generations]) / len(plain)

    # Checks decode one sequence at a time, so a pass takes as long as a step of plain decoding.
    plain_s = sum(generation.seconds for generation in plain)
    num_plain_tokens = sum(len(generation.token_ids) for generation in plain)
    checks_s = num_check_passes * plain_s / num_plain_tokens
    logger.info(
        f"The measurement takes about {format_clock(decoding_s + checks_s)}:"
        f" {format_clock(decoding_s)} to decode with and without the draft, and"
        f" {format_clock(checks_s)} for checks"
    )


@dataclass
class PromptRuns:
    """The repetitions of one prompt with one draft.

    Drafts that are measured together share the lists `baseline` and `hf_generate`.

    Attributes:
        prompt: the prompt.
        batch: identifies the prompts that were decoded together. It is the seed of the first prompt
            of the batch; None for a prompt that was decoded alone.
        speculative: the repetitions with the draft.
        baseline: the repetitions of plain decoding.
        hf_generate: the repetitions of transformers' `generate()`; empty for a prompt on which it
            was not timed.
    """

    prompt: Prompt
    batch: int | None
    speculative: list[Generation]
    baseline: list[Generation]
    hf_generate: list[Generation]


def create_prompt_runs(
    batches: Sequence[PromptBatch], settings: Settings, num_drafts: int
) -> list[list[PromptRuns]]:
    """Create the runs of each draft, [draft][prompt], with no repetitions yet."""
    runs: list[list[PromptRuns]] = [[] for _ in range(num_drafts)]
    for batch in batches:
        seed = settings.seed + batch.start if settings.batch_size > 1 else None
        for prompt in batch.prompts:
            # All drafts get the same two lists, so one append reaches all of them.
            baseline: list[Generation] = []
            hf_generate: list[Generation] = []
            for runs_of_draft in runs:
                runs_of_draft.append(PromptRuns(prompt, seed, [], baseline, hf_generate))
    return runs


def add_generations(
    runs: Sequence[Sequence[PromptRuns]],
    batch: PromptBatch,
    generations: Sequence[Sequence[Generation]],
) -> None:
    """Add a repetition to the runs of a batch's prompts.

    Args:
        runs: the runs of each draft, by prompt.
        batch: the batch.
        generations: the generations of the batch in each arm: plain decoding, then each draft, then
            transformers' `generate()` where it was timed.
    """
    # transformers' `generate()` is the last arm, if there is one more arm than drafts and plain
    # decoding.
    plain, *drafted = generations
    hf_generate = drafted.pop() if len(drafted) > len(runs) else None
    for offset in range(len(batch.prompts)):
        index = batch.start + offset
        # The drafts share these two lists.
        runs[0][index].baseline.append(plain[offset])
        if hf_generate is not None:
            runs[0][index].hf_generate.append(hf_generate[offset])
        for runs_of_draft, generations_of_draft in zip(runs, drafted, strict=True):
            runs_of_draft[index].speculative.append(generations_of_draft[offset])


def is_disturbed(
    runs: Sequence[Sequence[PromptRuns]], batch: PromptBatch, num_repetitions: int
) -> bool:
    """Return whether a batch must be decoded again because rounds of it were disturbed.

    Each prompt needs `num_repetitions` repetitions without a disturbed round, in every arm.
    """
    for runs_of_draft in runs:
        for run in runs_of_draft[batch.start : batch.end]:
            for repetitions in (run.baseline, run.speculative, run.hf_generate):
                # transformers' `generate()` is not timed on every prompt.
                if not repetitions:
                    continue
                num_undisturbed = count_disturbed_rounds(repetitions).count(0)
                if num_undisturbed < num_repetitions:
                    return True
    return False


def remember_outputs(proposers: Sequence[Proposer], earlier_runs: Sequence[PromptRuns]) -> None:
    """Give the plain outputs of earlier prompts to the proposers that look up earlier outputs."""
    outputs = [run.baseline[0].token_ids for run in earlier_runs]
    for proposer in proposers:
        if isinstance(proposer, UsesPastOutputs):
            proposer.set_past_outputs(outputs)


def build_prompt_records(
    suite: str,
    configuration: Configuration,
    target: FrozenTarget,
    proposer: Proposer,
    runs: Sequence[PromptRuns],
) -> list[PromptRecord]:
    """Build the records of a suite's prompts from the runs of one draft.

    Tokens are those of the first repetition. Times are computed from all repetitions (see
    `compute_timing`).

    Args:
        suite: the name of the suite.
        configuration: the configuration that was measured.
        target: the target, whose tokenizer decodes the tokens.
        proposer: the draft.
        runs: the runs of the draft, by prompt.
    """
    tokenizer = target.tokenizer
    records = []
    for run in runs:
        prompt = run.prompt
        generation = run.speculative[0]
        plain_tokens = run.baseline[0].token_ids

        # The first token comes from the prefill, each of the others from a round.
        first_token = generation.token_ids[0]
        (first_text,) = spell_tokens(tokenizer, prompt.token_ids, [first_token])
        context = [*prompt.token_ids, first_token]
        rounds = _build_round_records(tokenizer, context, generation.rounds)

        # Add what was measured without the draft: the time of `generate()`, and how many tokens of
        # the plain output a draft with a pruned vocabulary can propose.
        hf_generate = None
        if run.hf_generate:
            hf_tokens = run.hf_generate[0].token_ids
            hf_generate = HFGenerate(len(hf_tokens), compute_timing(run.hf_generate).seconds)
        num_in_vocabulary = None
        if proposer.vocabulary is not None:
            vocabulary = proposer.vocabulary
            num_in_vocabulary = sum(token in vocabulary for token in plain_tokens)

        # Build the record. Special tokens stay in the texts, so that a reader sees how they end.
        records.append(
            PromptRecord(
                suite=suite,
                configuration=configuration,
                id=prompt.id,
                category=prompt.category,
                num_prompt_tokens=len(prompt.token_ids),
                prompt=prompt.text,
                text=tokenizer.decode(generation.token_ids, skip_special_tokens=False),
                first_token=first_token,
                first_token_text=first_text,
                rounds=rounds,
                speculative=compute_timing(run.speculative),
                baseline=compute_timing(run.baseline),
                hf_generate=hf_generate,
                num_in_draft_vocabulary=num_in_vocabulary,
                batch=run.batch,
                cluster=prompt.cluster,
                baseline_text=tokenizer.decode(plain_tokens, skip_special_tokens=False),
            )
        )
    return records


def _build_round_records(
    tokenizer: Tokenizer, context: Sequence[int], rounds: Sequence[Round]
) -> tuple[RoundRecord, ...]:
    """Build the records of a completion's rounds, with the texts of their tokens.

    Args:
        tokenizer: the tokenizer.
        context: the tokens before the first round.
        rounds: the rounds.
    """
    # The text of a token depends on the tokens before it, which grow with every round.
    tokens_before = list(context)
    records = []
    for entry in rounds:
        records.append(
            RoundRecord(
                drafted=entry.drafted,
                drafted_text=spell_tokens(tokenizer, tokens_before, entry.drafted),
                accepted=entry.drafted[: entry.num_accepted],
                emitted=entry.emitted,
                emitted_text=spell_tokens(tokenizer, tokens_before, entry.emitted),
                num_off_path=entry.num_off_path,
            )
        )
        tokens_before += entry.emitted
    return tuple(records)


def spell_tokens(
    tokenizer: Tokenizer, context: Sequence[int], token_ids: Sequence[int]
) -> tuple[str, ...]:
    """Return the text that each token adds to the text before it.

    The texts together are the text of all tokens, except for characters that several tokens share.

    Args:
        tokenizer: the tokenizer.
        context: the tokens before; the last SPELLING_CONTEXT of them are used.
        token_ids: the tokens whose texts are returned.
    """
    tokens = list(context[-SPELLING_CONTEXT:])
    text_before = tokenizer.decode(tokens)
    texts = []
    for token in token_ids:
        tokens.append(token)
        text_after = tokenizer.decode(tokens)
        # A token that completes a character changes the text before it, which ended in a
        # replacement character. Such a token is decoded alone.
        if text_after.startswith(text_before):
            texts.append(text_after[len(text_before) :])
        else:
            texts.append(tokenizer.decode([token]))
        text_before = text_after
    return tuple(texts)


def compute_timing(repetitions: Sequence[Generation]) -> Timing:
    """Compute the times of a prompt from its repetitions, so that stalls do not count.

    All repetitions generate the same tokens, so round r does the same work in each of them. The
    time of a round is the lower median over the repetitions, and the time of a prompt is the sum
    over its rounds. A stall of seconds falls into one round of one repetition, and is dropped with
    that. The lower median of two values is the smaller one.
    """
    # Drop repetitions with another number of rounds than the first. They occur on a device that
    # rounds differently each time.
    num_rounds = len(repetitions[0].rounds)
    comparable = [generation for generation in repetitions if len(generation.rounds) == num_rounds]
    prefill = statistics.median_low(generation.prefill_seconds for generation in comparable)

    # Transpose to [round][repetition], and add up the median times of the rounds.
    rounds = list(zip(*(generation.rounds for generation in comparable), strict=True))
    draft = 0.0
    verify = 0.0
    for repetitions_of_round in rounds:
        draft += statistics.median_low(entry.draft_seconds for entry in repetitions_of_round)
        verify += statistics.median_low(entry.verify_seconds for entry in repetitions_of_round)
    return Timing(
        num_tokens=len(repetitions[0].token_ids),
        num_rounds=num_rounds,
        seconds=prefill + draft + verify,
        prefill_seconds=prefill,
        draft_seconds=draft,
        verify_seconds=verify,
        num_disturbed_rounds=sum(count_disturbed_rounds(repetitions)),
    )


def count_disturbed_rounds(repetitions: Sequence[Generation]) -> list[int]:
    """Count the rounds of each repetition that took far longer than in the other repetitions.

    The prefill counts as a round.

    Returns:
        The number of disturbed rounds of each repetition.
    """
    # List the seconds of the prefill and of every round: [repetition][round].
    seconds_by_repetition = []
    for generation in repetitions:
        rounds = [entry.draft_seconds + entry.verify_seconds for entry in generation.rounds]
        seconds_by_repetition.append([generation.prefill_seconds, *rounds])

    # Compute the longest undisturbed time of each round. A repetition may have fewer rounds than
    # another, so `zip` stops at the shortest.
    limits = []
    for seconds_of_round in zip(*seconds_by_repetition, strict=False):
        usual = statistics.median_low(seconds_of_round)
        limits.append(max(DISTURBED_RATIO * usual, usual + DISTURBED_SECONDS))

    # Count the rounds of each repetition that took longer.
    counts = []
    for seconds in seconds_by_repetition:
        counts.append(
            sum(duration > limit for duration, limit in zip(seconds, limits, strict=False))
        )
    return counts


def count_cost_prompts(prompts: Sequence[Prompt]) -> int:
    """Return how many of the prompts `measure_round_costs` decodes."""
    return min(MAX_COST_PROMPTS, math.ceil(COST_SHARE * len(prompts)))


def count_cost_passes(prompts: Sequence[Prompt], settings: Settings) -> int:
    """Estimate how many passes of the target `measure_round_costs` takes.

    Half of the draft tokens are assumed to be accepted, so a round with k draft tokens emits
    1 + k / 2 tokens.
    """
    num_tokens = count_cost_prompts(prompts) * min(settings.max_new_tokens, COST_TOKENS)
    return sum(
        math.ceil(num_tokens / (1 + k / 2)) for k in range(1, settings.num_speculative_tokens + 1)
    )


def measure_round_costs(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> list[RoundCost]:
    """Measure what a round costs with each number of draft tokens from 1 to K, on a few prompts.

    The report predicts the best K from these costs.

    Returns:
        The cost at each k at which some round drafted k tokens. Empty for trees and for drafts
        behind a lookup.
    """
    # The rounds of trees and lookups draft as many tokens as the draft or the lookup finds, so a
    # round with k tokens is not the beginning of one with K.
    if settings.tree or isinstance(proposer, LookupFirstProposer):
        return []

    # Choose a few prompts, and a short completion.
    settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, COST_TOKENS))
    decoder = Decoder(target, proposer, compiled=settings.compile)
    batches = sample_batches(
        split_into_batches(prompts, settings.batch_size),
        math.ceil(count_cost_prompts(prompts) / settings.batch_size),
    )

    # Decode each batch with every k, one right after the other. Rounds that drafted fewer than k
    # tokens, e.g. at the end of a completion, do not count for k.
    rounds_by_k: dict[int, list[Round]] = {
        k: [] for k in range(1, settings.num_speculative_tokens + 1)
    }
    with (
        show_progress("Timing shorter drafts", len(batches) * len(rounds_by_k), "runs") as advance,
        freeze_garbage_collector(),
    ):
        for batch in batches:
            for k, rounds in rounds_by_k.items():
                for generation in decode_batch(
                    decoder, batch, replace(settings, num_speculative_tokens=k)
                ):
                    rounds += [entry for entry in generation.rounds if len(entry.drafted) == k]
                advance()

    # Take the median over all rounds, which is robust to stalls.
    costs = []
    for k, rounds in rounds_by_k.items():
        if rounds:
            verify_ms = 1000 * statistics.median(entry.verify_seconds for entry in rounds)
            draft_ms = 1000 * statistics.median(entry.draft_seconds for entry in rounds)
            costs.append(RoundCost(k, verify_ms, draft_ms))
    return costs
