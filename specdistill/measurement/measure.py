"""The measurement: every prompt with and without the draft, interleaved, on an otherwise quiet device; and the records of its runs.

Timing is paired. The ways to decode a prompt (plain, and with each draft) run one right after the other, which of them comes first
rotates, and every repetition goes through all prompts again, so that a drift of the machine affects all ways alike. A prompt's times are
those of its rounds, robust to stalls (see `prompt_timing`); prompts with disturbed rounds are decoded again.

With a batch size above 1 prompts are decoded in batches, in the suite's order; all ways get the same batches. A prompt's times are then
its shares (see `Decoder.generate_all`), an equal part of each round that it took part in. They add up to the time of its batch, so
totals and speedups are right. A single prompt's share depends on its neighbours: intervals of times resample batches.

A proposer that looks up earlier outputs (`Remembering`) knows the plain outputs of the prompts that were measured before a prompt or its
batch, in the same order whatever the repetition: never its own, nor those of another configuration. In the warm-up and the tests it knows
none.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from specdistill.decoding.decoder import Decoder, Generation, Round
from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.decoding.online_length import OnlineLengthProposer
from specdistill.decoding.proposer import Proposer, Remembering
from specdistill.measurement.configurations import Settings
from specdistill.measurement.hardware import frozen_garbage_collector
from specdistill.measurement.reference import timed_generate
from specdistill.progress import progress
from specdistill.statistics.records import (
    Configuration,
    HFGenerate,
    PromptRecord,
    RoundRecord,
    Timing,
)
from specdistill.statistics.theory import RoundCost
from specdistill.suites.suite import Prompt, evenly
from specdistill.targets.frozen import FrozenTarget

NUM_COST_PROMPTS = 4  # prompts on which rounds with fewer draft tokens are timed
COST_TOKENS = 32  # generated for each of them: costs of a round, as medians, need no more
NUM_CALIBRATION_PROMPTS, CALIBRATION_TOKENS = (
    8,
    64,
)  # of the draft length: some 200 rounds, where each request learns more
NUM_HF_PROMPTS = 32  # prompts on which transformers `generate()` is timed as well; fewer leave its interval wider than 5 %
MOST_AGAIN = 3  # times that a prompt is decoded again because rounds of it were disturbed
SPELLING_CONTEXT = 8  # tokens before a token that decide its text (spaces, halves of characters)
# A round is disturbed when it took this many times its lower median, and this many seconds longer.
DISTURBED_RATIO, DISTURBED_SECONDS = 3.0, 0.005

Ways = list[list[Generation]]  # of each way of decoding, the generations of a batch
GENERATIONS = TypeAdapter(Ways)


class Journal:
    """What a measurement has decoded, so that one that is interrupted resumes with the batch that it was at: a file with a line for each,
    in their order, which follows from what was decoded before.

    known: the lines of an interrupted measurement that are not read yet. seconds: of the decoding that was read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, 0.0
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # the last line may have been cut
        if content != whole:
            path.write_bytes(whole)
        self.known = deque(whole.splitlines())

    def decoded(self, decode: Callable[[], Ways]) -> Ways:
        """The next batch: as it was decoded before the interruption, or now."""
        if self.known:
            ways = GENERATIONS.validate_json(self.known.popleft())
            self.seconds += sum(
                generation.seconds for generations in ways for generation in generations
            )
            return ways
        ways = decode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(GENERATIONS.dump_json(ways) + b"\n")
        return ways


@dataclass
class PromptRuns:
    """All repetitions of one prompt. Drafts that are measured together share the lists of the plain runs.

    batch: the seed of the first prompt of its batch, the same for all that were decoded together; None: alone.
    """

    prompt: Prompt
    batch: int | None
    speculative: list[Generation]
    baseline: list[Generation]
    hf_generate: list[Generation]


def measure_together(
    target: FrozenTarget,
    proposers: Sequence[Proposer],
    prompts: Sequence[Prompt],
    *each: Settings,
    journal: Journal | None = None,
) -> list[list[PromptRuns]]:
    """The runs of each proposer: every prompt is decoded `repeats` times without a draft and with each of them.

    each: settings of all proposers, or of each of them, which differ in K alone. journal: keeps what is decoded.

    The proposers share one baseline, and their times are paired with each other. Sampled tokens are the same in each repetition:
    a prompt has its own seed.
    """
    settings, own = each[0], each if len(each) > 1 else each * len(proposers)
    ways = [
        (Decoder(target, compiled=settings.compile), settings),
        *(
            (Decoder(target, proposer, compiled=one.compile), one)
            for proposer, one in zip(proposers, own, strict=True)
        ),
    ]
    batches = in_batches(prompts, settings.batch_size)
    kept: list[list[list[Generation]]] = [
        [[] for _ in prompts] for _ in range(len(ways) + 1)
    ]  # of each way and of `generate()`, prompt by prompt
    plain, *drafted, hf = kept
    hf_batches = some(batches, math.ceil(NUM_HF_PROMPTS / settings.batch_size))
    warmup = some(batches, settings.warmup)

    def remember(earlier: Sequence[Sequence[Generation]]) -> None:
        for proposer in proposers:
            if isinstance(proposer, Remembering):
                proposer.remember([repetitions[0].token_ids for repetitions in earlier])

    def decode_all_ways(batch: PromptBatch, first: int) -> Ways:
        remember(plain[: batch.start])
        made: Ways = [[] for _ in ways]
        for way in [*range(first, len(ways)), *range(first)]:  # 0 is plain decoding
            made[way] = decode(ways[way][0], batch, ways[way][1])
        return (
            [*made, generate_as_long(target, batch, made[0], settings)]
            if batch in hf_batches
            else made
        )

    def measure(batch: PromptBatch, first: int) -> None:
        again = bool(journal and journal.known)
        made = (
            journal.decoded(lambda: decode_all_ways(batch, first))
            if journal
            else decode_all_ways(batch, first)
        )
        for generations, of_way in zip(made, kept, strict=False):
            for repetitions, generation in zip(
                of_way[batch.start : batch.end], generations, strict=True
            ):
                repetitions.append(generation)
        advance(0 if again else len(batch.prompts))

    def is_disturbed(batch: PromptBatch) -> bool:
        """Whether a prompt of the batch has fewer undisturbed repetitions than it should."""
        decoded = (
            repetitions
            for of_way in kept
            for repetitions in of_way[batch.start : batch.end]
            if repetitions
        )
        return any(
            disturbed_rounds(repetitions).count(0) < settings.repeats for repetitions in decoded
        )

    order = [
        (repeat, number) for repeat in range(settings.repeats) for number in range(len(batches))
    ]
    num_known = len(journal.known) if journal else 0  # which take no time
    num_runs = sum(len(batches[number].prompts) for _, number in order[num_known:])
    title = f"Measuring {len(prompts)} prompts, {settings.repeats} times each"
    with progress(title, num_runs, "runs") as advance, frozen_garbage_collector():
        for batch in warmup:
            untimed = [decode(decoder, batch, chosen) for decoder, chosen in ways]
            generate_as_long(target, batch, untimed[0], settings)
        for repeat, number in order:
            measure(batches[number], first=(repeat + number) % len(ways))
        for again in range(
            MOST_AGAIN if settings.repeats > 1 else 0
        ):  # one repetition has nothing to be compared with
            disturbed = [*filter(is_disturbed, batches)]
            advance(0, more=sum(len(batch.prompts) for batch in disturbed))
            for number, batch in enumerate(disturbed):
                measure(batch, first=(again + number) % len(ways))
    remember([])
    seeds = [
        settings.seed + batch.start if settings.batch_size > 1 else None
        for batch in batches
        for _ in batch.prompts
    ]
    return [
        [PromptRuns(*run) for run in zip(prompts, seeds, of_draft, plain, hf, strict=True)]
        for of_draft in drafted
    ]


def round_costs(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> list[RoundCost]:
    """What a round costs at every K' up to K, timed on a few prompts, the lengths one right after the other.

    Of chains only, and neither behind a lookup nor of lengths that are chosen online: how many tokens a round drafts then depends on what
    was found or accepted, so that none is a shorter one of another.
    """
    if settings.tree or isinstance(proposer, LookupFirstProposer | OnlineLengthProposer):
        return []
    settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, COST_TOKENS))
    decoder = Decoder(target, proposer, compiled=settings.compile)
    batches = some(
        in_batches(prompts, settings.batch_size), math.ceil(NUM_COST_PROMPTS / settings.batch_size)
    )
    rounds: dict[int, list[Round]] = {k: [] for k in range(1, settings.num_speculative_tokens + 1)}
    with (
        progress("Timing shorter drafts", len(batches) * len(rounds), "runs") as advance,
        frozen_garbage_collector(),
    ):
        for batch in batches:
            for k, timed in rounds.items():
                for generation in decode(
                    decoder, batch, replace(settings, num_speculative_tokens=k)
                ):
                    timed += [entry for entry in generation.rounds if len(entry.drafted) == k]
                advance()
    return [
        RoundCost(
            k,
            1000 * statistics.median(entry.verify_seconds for entry in timed),
            1000 * statistics.median(entry.draft_seconds for entry in timed),
        )
        for k, timed in rounds.items()
        if timed
    ]


def calibrate(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> None:
    """Measure what rounds of each length cost and yield on a few prompts, for a draft whose length is chosen online; else nothing.

    Lengths from 0 to K follow each other round by round, so that their times compare. Behind a lookup the draft decodes here alone.
    """
    draft, k = proposer, settings.num_speculative_tokens
    if isinstance(proposer, LookupFirstProposer):
        draft, k = proposer.draft, min(k, proposer.levels)
    if not isinstance(draft, OnlineLengthProposer):
        return
    draft.rule.calibrate()
    settings = replace(
        settings,
        num_speculative_tokens=k,
        max_new_tokens=min(settings.max_new_tokens, CALIBRATION_TOKENS),
    )
    decoder, rounds = Decoder(target, draft, compiled=settings.compile), dict[int, list[Round]]()
    with frozen_garbage_collector():
        for batch in some(
            in_batches(prompts, settings.batch_size),
            math.ceil(NUM_CALIBRATION_PROMPTS / settings.batch_size),
        ):
            for generation in decode(decoder, batch, settings):
                for entry in generation.rounds:
                    rounds.setdefault(len(entry.drafted), []).append(entry)
    draft.rule.start(*cost_and_yield(rounds))


def cost_and_yield(rounds: Mapping[int, Sequence[Round]]) -> tuple[float, float, float, float]:
    """What `LengthRule.start` takes: (base, slope) of a round with k > 0 draft tokens, which costs base + slope · k rounds without; the
    tokens that the best k yields in the time of one of these; and how often a draft token is accepted that is reached.

    rounds: by their draft tokens. A line through their medians, which single ones are too noisy for. Where nothing was drafted drafts are
    taken to cost nothing: nothing speaks against them.
    """
    seconds = {
        k: statistics.median(one.draft_seconds + one.verify_seconds for one in same)
        for k, same in rounds.items()
    }
    if not (step := seconds.pop(0, 0.0)) or not seconds:
        return 1.0, 0.0, 1.0, 0.5
    line = (
        statistics.linear_regression([*seconds], [*seconds.values()])
        if len(seconds) > 1
        else (0.0, *seconds.values())
    )
    slope, base = (part / step for part in line)
    goodput = max(
        statistics.mean(len(one.emitted) for one in rounds[k]) / (base + slope * k) for k in seconds
    )
    judged = [
        (one.num_accepted, min(one.num_accepted + 1, k))
        for k, same in rounds.items()
        for one in same
    ]
    return (
        base,
        slope,
        goodput,
        sum(accepted for accepted, _ in judged) / sum(reached for _, reached in judged),
    )


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are decoded together. start: the place of the first of them among all prompts."""

    start: int
    prompts: tuple[Prompt, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.prompts)


def in_batches(prompts: Sequence[Prompt], size: int) -> list[PromptBatch]:
    """In their order, the last batch with what is left."""
    return [
        PromptBatch(start, tuple(prompts[start : start + size]))
        for start in range(0, len(prompts), size)
    ]


def some(batches: Sequence[PromptBatch], count: int) -> list[PromptBatch]:
    """`count` of the batches, spread over the categories of their first prompts."""
    return evenly(batches, [batch.prompts[0].category for batch in batches], count)


def decode(decoder: Decoder, batch: PromptBatch, settings: Settings) -> list[Generation]:
    """Each prompt's generation; its seed is its own, whatever batch it is in."""
    generators = [
        torch.Generator().manual_seed(settings.seed + index)
        for index in range(batch.start, batch.end)
    ]
    options = settings.decoding | (
        {} if decoder.proposer else {"num_speculative_tokens": 0, "tree": None}
    )
    return decoder.generate_all(
        [prompt.token_ids for prompt in batch.prompts], generators=generators, **options
    )


def generate_as_long(
    target: FrozenTarget, batch: PromptBatch, plain: Sequence[Generation], settings: Settings
) -> list[Generation]:
    """The batch in transformers' `generate()`: sampled, as many tokens as the `plain` generations have."""
    greedy = settings.sampling.is_greedy
    counts = [
        settings.max_new_tokens if greedy else len(generation.token_ids) for generation in plain
    ]
    return timed_generate(
        target, [prompt.token_ids for prompt in batch.prompts], counts, sampling=settings.sampling
    )


def prompt_records(
    suite: str,
    configuration: Configuration,
    target: FrozenTarget,
    proposer: Proposer,
    runs: Sequence[PromptRuns],
) -> list[PromptRecord]:
    """The records of a suite's prompts. Tokens are those of the first repetition, times are robust over all (see `prompt_timing`)."""
    tokenizer, vocabulary, records = target.tokenizer, proposer.vocabulary, []
    for run in runs:
        prompt, generation, context = run.prompt, run.speculative[0], [*run.prompt.token_ids]
        (first_text,) = spell(tokenizer, context, generation.token_ids[:1])
        context.append(generation.token_ids[0])
        rounds = []
        for entry in generation.rounds:
            texts = (
                spell(tokenizer, context, entry.drafted),
                spell(tokenizer, context, entry.emitted),
            )
            accepted = entry.drafted[: entry.num_accepted]
            rounds.append(
                RoundRecord(
                    entry.drafted, texts[0], accepted, entry.emitted, texts[1], entry.num_off_path
                )
            )
            context += entry.emitted
        plain, hf = run.baseline[0].token_ids, run.hf_generate
        record = PromptRecord(
            suite=suite,
            configuration=configuration,
            id=prompt.id,
            category=prompt.category,
            num_prompt_tokens=len(prompt.token_ids),
            prompt=prompt.text,
            text=tokenizer.decode(generation.token_ids, skip_special_tokens=False),
            first_token=generation.token_ids[0],
            first_token_text=first_text,
            rounds=tuple(rounds),
            speculative=prompt_timing(run.speculative),
            baseline=prompt_timing(run.baseline),
            hf_generate=HFGenerate(len(hf[0].token_ids), prompt_timing(hf).seconds) if hf else None,
            num_in_draft_vocabulary=None
            if vocabulary is None
            else sum(token in vocabulary for token in plain),
            batch=run.batch,
            cluster=prompt.cluster,
            baseline_text=tokenizer.decode(plain, skip_special_tokens=False),
        )
        records.append(record)
    return records


def spell(tokenizer: Any, context: Sequence[int], token_ids: Sequence[int]) -> tuple[str, ...]:
    """Each token's text after the tokens before it. Together they are the whole text, except for characters that tokens share."""
    tokens = list(context[-SPELLING_CONTEXT:])
    before, texts = tokenizer.decode(tokens), []
    for token in token_ids:
        tokens.append(token)
        after = tokenizer.decode(tokens)
        texts.append(
            after[len(before) :] if after.startswith(before) else tokenizer.decode([token])
        )
        before = after
    return tuple(texts)


def prompt_timing(repetitions: Sequence[Generation]) -> Timing:
    """The times of a prompt with or without a draft, which a stall does not change, from repetitions that generate the same tokens.

    Round r does the same work in every repetition. Its time is the lower median over the repetitions, and a prompt's time is the sum over
    its rounds: a stall of seconds falls into one round of one repetition and is dropped with it. The lower median of two is the faster.
    Repetitions with another number of rounds than the first, e.g. of a device that rounds differently each time, are dropped.
    """
    alike = [one for one in repetitions if len(one.rounds) == len(repetitions[0].rounds)]
    prefill = statistics.median_low(one.prefill_seconds for one in alike)
    rounds = list(zip(*(one.rounds for one in alike), strict=True))
    draft = sum(statistics.median_low(entry.draft_seconds for entry in same) for same in rounds)
    verify = sum(statistics.median_low(entry.verify_seconds for entry in same) for same in rounds)
    return Timing(
        num_tokens=len(repetitions[0].token_ids),
        num_rounds=len(rounds),
        seconds=prefill + draft + verify,
        prefill_seconds=prefill,
        draft_seconds=draft,
        verify_seconds=verify,
        num_disturbed_rounds=sum(disturbed_rounds(repetitions)),
    )


def disturbed_rounds(repetitions: Sequence[Generation]) -> list[int]:
    """How many rounds of each repetition, the prefill among them, took far longer than the same round of the others."""
    times = [
        [one.prefill_seconds, *(entry.draft_seconds + entry.verify_seconds for entry in one.rounds)]
        for one in repetitions
    ]
    usual = [statistics.median_low(same) for same in zip(*times, strict=False)]
    allowed = [max(DISTURBED_RATIO * seconds, seconds + DISTURBED_SECONDS) for seconds in usual]
    return [sum(took > most for took, most in zip(one, allowed, strict=False)) for one in times]
