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
# text, and because tokens share characters. So the last SPELLING_CONTEXT tokens before a token are
# decoded together with it.
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
        start: the index of the batch's first prompt among all prompts.
    """

    start: int
    prompts: tuple[Prompt, ...]

    @property
    def end(self) -> int:
        """The index of the prompt after the last one."""
        return self.start + len(self.prompts)


def split_into_batches(prompts: Sequence[Prompt], size: int) -> list[PromptBatch]:
    """Split prompts into consecutive batches; the last one may be smaller."""
    return [
        PromptBatch(start, tuple(prompts[start : start + size]))
        for start in range(0, len(prompts), size)
    ]


def sample_batches(batches: Sequence[PromptBatch], count: int) -> list[PromptBatch]:
    """Return `count` of the batches, so that the categories of the suite are equally represented.

    A batch counts for the category of its first prompt.
    """
    return select_evenly(batches, [batch.prompts[0].category for batch in batches], count)


def decode_batch(decoder: Decoder, batch: PromptBatch, settings: Settings) -> list[Generation]:
    """Decode the prompts of a batch together, with the decoder's draft if it has one.

    Args:
        decoder: the decoder. Without a draft it decodes plainly, one token per pass of the target.
        batch: the prompts.
        settings: the settings. K and the tree are ignored if the decoder has no draft.

    Returns:
        The completion of each prompt.
    """
    # Seed each prompt by its index among all prompts, so that the size of batches changes no token.
    generators = [
        torch.Generator().manual_seed(settings.seed + index)
        for index in range(batch.start, batch.end)
    ]
    options = settings.decoding
    # Without a draft, draft no tokens: K is 0.
    if decoder.proposer is None:
        options |= {"num_speculative_tokens": 0, "tree": None}
    return decoder.generate_all(
        [prompt.token_ids for prompt in batch.prompts], generators=generators, **options
    )


def generate_with_transformers(
    target: FrozenTarget, batch: PromptBatch, plain: Sequence[Generation], settings: Settings
) -> list[Generation]:
    """Decode a batch with transformers' `generate()`, and time it.

    Args:
        target: the target model.
        batch: the prompts.
        plain: the completions of the same prompts by this project's plain decoding. Sampled
            completions get as many tokens as these, so that both do the same work. Greedy
            completions have the same tokens anyway.
        settings: the settings of the measurement.

    Returns:
        The completion of each prompt, with its times.
    """
    # Limit the number of tokens of each completion.
    if settings.sampling.is_greedy:
        counts = [settings.max_new_tokens for _ in plain]
    else:
        counts = [len(generation.token_ids) for generation in plain]
    return time_generate(
        target, [prompt.token_ids for prompt in batch.prompts], counts, sampling=settings.sampling
    )


def sum_seconds(batches: Iterable[BatchGenerations]) -> float:
    """Return the total seconds of decoding batches, with each draft and without.

    Args:
        batches: the completions of the batches, [batch][arm][prompt].
    """
    seconds = 0.0
    for arms in batches:
        for generations in arms:
            seconds += sum(generation.seconds for generation in generations)
    return seconds


def log_estimate(generations: BatchGenerations, num_runs: int, num_check_passes: int) -> None:
    """Log how long a measurement will take, estimated from the times of one batch.

    Args:
        generations: the completions of the batch in each arm of the measurement: without a draft,
            then with each draft.
        num_runs: how many runs are left. A run is one prompt in one repetition, in all arms
            together.
        num_check_passes: about how many passes of the target the checks will take.
    """
    # If several processes measure, only the first one logs.
    if not is_first():
        return

    # A run (decoding one prompt in all arms) is expected to take as long as for the average prompt
    # of the batch.
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
    """Create the objects that will collect the completions of each prompt with each draft.

    Args:
        batches: all batches of the measurement.
        settings: the settings of the measurement.
        num_drafts: the number of drafts.

    Returns:
        The runs of each draft, [draft][prompt], whose lists of completions are empty.
    """
    runs: list[list[PromptRuns]] = [[] for _ in range(num_drafts)]
    for batch in batches:
        # The id of a batch is the seed of its first prompt, because no two prompts share a seed. An
        # index would not do, because each process counts its batches from 0. A prompt that is
        # decoded alone has no batch (None).
        batch_id = settings.seed + batch.start if settings.batch_size > 1 else None
        for prompt in batch.prompts:
            # All drafts share these two lists, so a completion that is appended once is in the runs
            # of every draft.
            baseline: list[Generation] = []
            hf_generate: list[Generation] = []
            for runs_of_draft in runs:
                runs_of_draft.append(PromptRuns(prompt, batch_id, [], baseline, hf_generate))
    return runs


def add_generations(
    runs: Sequence[Sequence[PromptRuns]],
    batch: PromptBatch,
    generations: Sequence[Sequence[Generation]],
) -> None:
    """Add one repetition of a batch to the runs of its prompts.

    Args:
        runs: the runs of each draft, [draft][prompt], which are changed in place.
        batch: the batch.
        generations: the completions of the batch's prompts: by plain decoding, then by each draft,
            then by transformers' `generate()` if it was timed on this batch.
    """
    # Split the completions by how they were decoded. If there is one more entry than for plain
    # decoding and all drafts, the last entry is that of transformers' `generate()`.
    plain, *drafted = generations
    hf_generate = drafted.pop() if len(drafted) > len(runs) else None
    for offset in range(len(batch.prompts)):
        index = batch.start + offset
        # All drafts share the lists `baseline` and `hf_generate`, so append to those of the first.
        runs[0][index].baseline.append(plain[offset])
        if hf_generate is not None:
            runs[0][index].hf_generate.append(hf_generate[offset])
        for runs_of_draft, generations_of_draft in zip(runs, drafted, strict=True):
            runs_of_draft[index].speculative.append(generations_of_draft[offset])


def is_disturbed(
    runs: Sequence[Sequence[PromptRuns]], batch: PromptBatch, num_repetitions: int
) -> bool:
    """Return whether a batch must be decoded again because some of its rounds were disturbed.

    A round is disturbed if it took far longer than in the other repetitions. Each prompt needs
    `num_repetitions` repetitions without such a round: with each draft, by plain decoding and, if
    it was timed, by transformers' `generate()`.

    Args:
        runs: the runs of each draft: [draft][prompt].
        batch: the batch.
        num_repetitions: how many undisturbed repetitions are needed.
    """
    for runs_of_draft in runs:
        for run in runs_of_draft[batch.start : batch.end]:
            for repetitions in (run.baseline, run.speculative, run.hf_generate):
                # transformers' `generate()` is not timed on every prompt.
                if not repetitions:
                    continue
                # Count the repetitions in which 0 rounds were disturbed.
                num_undisturbed = count_disturbed_rounds(repetitions).count(0)
                if num_undisturbed < num_repetitions:
                    return True
    return False


def remember_outputs(proposers: Sequence[Proposer], earlier_runs: Sequence[PromptRuns]) -> None:
    """Give the outputs of earlier prompts to the drafts that look tokens up in earlier outputs.

    Args:
        proposers: the drafts, of which some may be such lookups.
        earlier_runs: the runs of earlier prompts; empty to forget all outputs. Their outputs by
            plain decoding are used, because these do not depend on a draft.
    """
    # Take the outputs of the first repetition, which the records are made from.
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
    """Build the record of each prompt, as the report stores it, from the runs of one draft.

    The tokens are from the first repetition. The times are computed from all repetitions (see
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

        # The first token comes from the prefill, all further tokens from rounds.
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
    """Build the records of a completion's rounds, which have the text of each token, too.

    Args:
        tokenizer: the tokenizer that decodes the tokens.
        context: the tokens before the first round: the prompt and the token of the prefill.
        rounds: the rounds: what was drafted, accepted and emitted in each.
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

    The texts joined together are the text of all tokens, except for characters that several tokens
    share.

    Args:
        tokenizer: the tokenizer.
        context: the tokens before `token_ids`. Only the last SPELLING_CONTEXT of them are decoded,
            because the text of a token depends on few tokens before it.
        token_ids: the tokens whose texts are returned.
    """
    tokens = list(context[-SPELLING_CONTEXT:])
    text_before = tokenizer.decode(tokens)
    texts = []
    for token in token_ids:
        tokens.append(token)
        text_after = tokenizer.decode(tokens)
        # Usually a token only adds to the text, and its own text is what it adds. But if the text
        # ends within a character of several bytes, its end is decoded as a replacement character
        # (�). The token with the last bytes changes that end, so decode such a token alone.
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
    over its rounds. A stall of the machine hits one round of one repetition, which the median
    ignores. The lower median of two values is the smaller one.

    Args:
        repetitions: the completions of one prompt, decoded several times in the same way.
    """
    # Drop repetitions that have another number of rounds than the first one. They occur on a device
    # whose rounding differs from run to run, so that other tokens are generated.
    num_rounds = len(repetitions[0].rounds)
    comparable = [generation for generation in repetitions if len(generation.rounds) == num_rounds]
    prefill = statistics.median_low(generation.prefill_seconds for generation in comparable)

    # Transpose the rounds to [round][repetition], and add up the median times of all rounds.
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

    Such a round is called disturbed: something else used the machine. The prefill counts as a
    round.

    Args:
        repetitions: the completions of one prompt, decoded several times in the same way.

    Returns:
        The number of disturbed rounds of each repetition.
    """
    # List the seconds of the prefill and of every round: [repetition][round].
    seconds_by_repetition = []
    for generation in repetitions:
        rounds = [entry.draft_seconds + entry.verify_seconds for entry in generation.rounds]
        seconds_by_repetition.append([generation.prefill_seconds, *rounds])

    # Compute for each round the longest time that still counts as undisturbed. Repetitions may have
    # different numbers of rounds (see `compute_timing`); `zip` stops at the end of the shortest.
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

    It decodes a few prompts with each number of draft tokens k from 1 to K. A round is one pass.
    Half of the draft tokens are assumed to be accepted, so a round emits 1 + k / 2 tokens.
    """
    num_tokens = count_cost_prompts(prompts) * min(settings.max_new_tokens, COST_TOKENS)
    return sum(
        math.ceil(num_tokens / (1 + k / 2)) for k in range(1, settings.num_speculative_tokens + 1)
    )


def measure_round_costs(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> list[RoundCost]:
    """Measure how long a round takes with each number k of draft tokens from 1 to K.

    A few prompts are decoded with each k. The report predicts from these times which K is best.

    Returns:
        The median milliseconds of drafting and of verifying in a round with k draft tokens. A k
        with which no round drafted k tokens is left out. Empty for trees and for drafts behind a
        lookup.
    """
    # With a tree or a lookup, a round drafts as many tokens as the draft or the lookup finds. So
    # rounds with k tokens do not show what a smaller K would cost.
    if settings.tree or isinstance(proposer, LookupFirstProposer):
        return []

    # Choose a few prompts, and a short completion.
    settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, COST_TOKENS))
    decoder = Decoder(target, proposer, compiled=settings.compile)
    batches = sample_batches(
        split_into_batches(prompts, settings.batch_size),
        math.ceil(count_cost_prompts(prompts) / settings.batch_size),
    )

    # Decode each batch with every k, one right after the other. Keep only the rounds that drafted k
    # tokens: a round may draft fewer, e.g. at the end of a completion.
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
