"""The metrics of a report, each one formula over the totals of per-prompt sums.

The acceptance length is the number of tokens that a draft-verify round emits. These are the
accepted draft tokens and the target's own token, which is absent if a round ends at a stop token or
at `max_new_tokens`. Rounds in which nothing was drafted count.

`acceptance_length_vllm` is what vLLM's counters give, 1 + accepted / drafts. It adds a token for
every draft, even if none was emitted, and leaves out rounds without a draft. Compare it with the
numbers of a server.

Every ratio is a micro-average, a ratio of sums over a row. The same formula gives the value and, on
resampled prompts, its interval. The bootstrap resamples prompts, or groups of prompts that belong
together, so numbers are kept for each prompt until then.

Context buckets are powers of two: bucket b holds the rounds that began with b to 2b - 1 tokens
before them.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from specdistill.evaluation.statistics.records import PromptRecord, Timing
from specdistill.evaluation.statistics.theory import predicted_speedup

PromptSums = dict[str, NDArray[np.float64]]
# A sum over prompts, or [R] for R resamples at once.
Total = NDArray[np.float64]

# The fewest rounds from which an acceptance length is computed. With fewer it is mostly noise; a
# higher bound would leave out the long contexts of small suites.
MIN_BUCKET_ROUNDS = 30


def collect_prompt_sums(records: Sequence[PromptRecord]) -> PromptSums:
    """Return a table of numbers that metrics add up over prompts: name -> values [P].

    A value is NaN if it was not measured. Two more columns say which prompts are not independent of
    each other: `batch`, the number of the batch in which a prompt was decoded, and `cluster`, which
    is equal for e.g. the turns of one conversation. Each is absent if no prompt has a batch or a
    cluster.

    Args:
        records: the records of the P prompts.
    """
    # Collect the numbers of each prompt. Rounds and emitted tokens are also counted separately for
    # long and for short contexts. A context counts as long from `long_from` tokens on.
    long_from = find_long_context_start(records)
    rows = [
        {**_collect_sums(record), **_count_long_and_short(record, long_from)} for record in records
    ]

    # Turn them into one array for each name. A number that was not measured is None, which becomes
    # NaN.
    sums = {}
    for name in rows[0] if rows else ():
        sums[name] = np.array([row[name] for row in rows], dtype=np.float64)

    # Number the batches and clusters. A prompt without a cluster is a cluster of its own. In the
    # result of np.unique, item [1] has the number of each prompt's cluster.
    if any(record.batch is not None for record in records):
        sums["batch"] = np.array([record.batch for record in records], dtype=np.float64)
    if any(record.cluster is not None for record in records):
        cluster_ids = [record.cluster or record.id for record in records]
        sums["cluster"] = np.unique(cluster_ids, return_inverse=True)[1].astype(np.float64)
    return sums


def group_rounds_by_context(records: Sequence[PromptRecord]) -> dict[int, list[int]]:
    """Group rounds by the number of tokens before them, in buckets that are powers of two.

    Returns:
        bucket -> the number of tokens that each of its rounds emitted. Bucket b holds the rounds
        that began with b to 2b - 1 tokens of context.
    """
    emitted = defaultdict(list)
    for record in records:
        # The first round follows the prompt and the token of the prefill.
        context = record.num_prompt_tokens + 1
        for round in record.rounds:
            # The highest power of two that is not above the context is the bucket.
            emitted[1 << (context.bit_length() - 1)].append(len(round.emitted))
            context += len(round.emitted)
    return emitted


def find_long_context_start(records: Sequence[PromptRecord]) -> int | None:
    """Return the number of tokens from which a context counts as long.

    A bucket b, which is a power of two, holds the rounds with b to 2b - 1 tokens of context. The
    result is the highest bucket that has at least MIN_BUCKET_ROUNDS rounds, and that can be
    compared with at least MIN_BUCKET_ROUNDS rounds in all lower buckets together. It is None if no
    bucket has so many rounds in it and below it.
    """
    counts = {bucket: len(emitted) for bucket, emitted in group_rounds_by_context(records).items()}
    for bucket in sorted(counts, reverse=True):
        num_below = sum(count for lower_bucket, count in counts.items() if lower_bucket < bucket)
        if counts[bucket] >= MIN_BUCKET_ROUNDS and num_below >= MIN_BUCKET_ROUNDS:
            return bucket
    return None


def _collect_sums(record: PromptRecord) -> dict[str, float | None]:
    """Return the numbers of a prompt that metrics add up: name -> number, None if not measured."""
    # The times of plain decoding (the baseline); None for each of them if it was not measured.
    baseline: dict[str, float | None] = {field.name: None for field in fields(Timing)}
    if record.baseline:
        baseline = asdict(record.baseline)

    # A server sends totals over all rounds, and no single rounds. Then `rounds` is empty, and the
    # counts of first and later positions below are 0.
    drafts = record.list_drafts()
    hf_generate = record.hf_generate
    rounds = [round for round in record.rounds if round.drafted]
    return {
        "num_prompts": 1,
        "num_drafts": len(drafts),
        "num_draft_tokens": sum(drafted for drafted, _ in drafts),
        "num_accepted_tokens": sum(accepted for _, accepted in drafts),
        # Accepted tokens at the first position of a draft, and at all later positions.
        "num_accepted_first": sum(len(round.accepted) > 0 for round in rounds),
        "num_accepted_later": sum(max(len(round.accepted) - 1, 0) for round in rounds),
        # Later positions that were reached. A position of a draft is reached if the round emitted a
        # token there: the draft token, or the target's own token after a rejection. For example, of
        # 4 draft tokens 2 are accepted, and 3 tokens are emitted: positions 1 to 3 are reached, and
        # 2 of them are later than the first. If all 4 are accepted, the fifth emitted token is at
        # no position of the draft.
        "num_reached_later": sum(
            min(len(round.emitted), len(round.drafted)) - 1 for round in rounds
        ),
        # Tokens, rounds and times of decoding with the draft, without it, and by `generate()`.
        **asdict(record.speculative),
        **{f"baseline_{name}": number for name, number in baseline.items()},
        "hf_num_tokens": hf_generate.num_tokens if hf_generate else None,
        "hf_seconds": hf_generate.seconds if hf_generate else None,
        # Tokens of the baseline's completion that the draft could have proposed.
        "num_in_draft_vocabulary": record.num_in_draft_vocabulary,
    }


def _count_long_and_short(record: PromptRecord, long_from: int | None) -> dict[str, float]:
    """Count the rounds of a prompt and the tokens they emitted, at long and at short contexts.

    Args:
        record: the record of the prompt.
        long_from: the number of tokens from which a context is long. None: the suite has no long
            contexts, and all counts are NaN.
    """
    names = ("num_rounds_long", "num_rounds_short", "num_emitted_long", "num_emitted_short")
    sums = dict.fromkeys(names, np.nan)
    if long_from is not None:
        sums = dict.fromkeys(names, 0.0)
        for bucket, emitted in group_rounds_by_context([record]).items():
            length = "long" if bucket >= long_from else "short"
            sums[f"num_rounds_{length}"] += len(emitted)
            sums[f"num_emitted_{length}"] += sum(emitted)
    return sums


@dataclass(frozen=True)
class Metric:
    """A number of the report, computed from totals over prompts.

    Attributes:
        sums: the names of the sums that the formula reads.
        formula: computes the value from the totals of `sums`, in that order. It works elementwise,
            so that totals of many resamples pass through at once.
        better: whether a higher or a lower value is better.
    """

    sums: tuple[str, ...]
    formula: Callable[..., Total]
    better: Literal["higher", "lower"] = "higher"

    @property
    def is_timed(self) -> bool:
        """Whether the metric depends on the machine, not only on draft and completions."""
        return any("seconds" in name for name in self.sums)


def _define_metric(
    formula: Callable[..., Total], better: Literal["higher", "lower"] = "higher"
) -> Metric:
    """Make a metric from a formula; the names of its parameters say which sums it reads.

    For example, `lambda num_tokens, seconds: num_tokens / seconds` reads two sums: the tokens and
    the seconds of all prompts.

    Args:
        formula: computes the metric from these sums.
        better: whether a higher or a lower value is better.
    """
    return Metric(tuple(inspect.signature(formula).parameters), formula, better)


def _compute_speedup(
    num_tokens: Total, seconds: Total, baseline_num_tokens: Total, baseline_seconds: Total
) -> Total:
    """Return tokens per second with the draft divided by tokens per second without it.

    If both sides generated the same tokens, this is the ratio of their times.
    """
    return (num_tokens / seconds) / (baseline_num_tokens / baseline_seconds)


def _compute_acceptance_length(num_tokens: Total, num_prompts: Total, num_rounds: Total) -> Total:
    """Return the tokens emitted in rounds divided by the number of rounds.

    The first token of each prompt comes from the prefill, not from a round.
    """
    return (num_tokens - num_prompts) / num_rounds


def _compute_predicted_speedup(
    num_tokens: Total,
    num_prompts: Total,
    num_rounds: Total,
    num_draft_tokens: Total,
    draft_seconds: Total,
    verify_seconds: Total,
    baseline_num_rounds: Total,
    baseline_verify_seconds: Total,
) -> Total:
    """Return the speedup that the cost model of `theory.predicted_speedup` predicts.

    The model reads the tokens, the verification time and the drafting time of a mean round. The
    means are over all rounds, also those in which nothing was drafted. All parameters are totals
    over prompts; those that begin with `baseline_` belong to plain decoding.
    """
    # The time of a step of plain decoding is the unit of all costs.
    step = baseline_verify_seconds / baseline_num_rounds

    # The cost of a draft token. If nothing was drafted, it is 0 / 0, and the prediction is NaN.
    draft_token = draft_seconds / num_draft_tokens / step
    return predicted_speedup(
        _compute_acceptance_length(num_tokens, num_prompts, num_rounds),
        verify_seconds / num_rounds / step,
        draft_token * (num_draft_tokens / num_rounds),
    )


_ACCEPTANCE_LENGTH = _define_metric(_compute_acceptance_length)
_PREDICTED = _define_metric(_compute_predicted_speedup)
_SPEEDUP = _define_metric(_compute_speedup)

METRICS: dict[str, Metric] = {
    "mean_acceptance_length": _ACCEPTANCE_LENGTH,
    "acceptance_length_vllm": _define_metric(
        lambda num_accepted_tokens, num_drafts: 1 + num_accepted_tokens / num_drafts
    ),
    "acceptance_rate": _define_metric(
        lambda num_accepted_tokens, num_draft_tokens: num_accepted_tokens / num_draft_tokens
    ),
    "tokens_per_second": _define_metric(lambda num_tokens, seconds: num_tokens / seconds),
    "baseline_tokens_per_second": _define_metric(
        lambda baseline_num_tokens, baseline_seconds: baseline_num_tokens / baseline_seconds
    ),
    "speedup": _SPEEDUP,
    # Without the prefill, which yields the first token of each prompt.
    "decode_speedup": Metric(
        (*_SPEEDUP.sums, "num_prompts", "prefill_seconds", "baseline_prefill_seconds"),
        lambda tokens, seconds, plain_tokens, plain_seconds, prompts, prefill, plain_prefill: (
            _compute_speedup(
                tokens - prompts,
                seconds - prefill,
                plain_tokens - prompts,
                plain_seconds - plain_prefill,
            )
        ),
    ),
    "draft_ms": _define_metric(
        lambda draft_seconds, num_draft_tokens: 1000 * draft_seconds / num_draft_tokens, "lower"
    ),
    "verify_ms": _define_metric(
        lambda verify_seconds, num_rounds: 1000 * verify_seconds / num_rounds, "lower"
    ),
    "baseline_step_ms": _define_metric(
        lambda baseline_verify_seconds, baseline_num_rounds: (
            1000 * baseline_verify_seconds / baseline_num_rounds
        ),
        "lower",
    ),
    "overhead_factor": Metric(
        (*_ACCEPTANCE_LENGTH.sums, *_SPEEDUP.sums),
        lambda *sums: _compute_acceptance_length(*sums[:3]) / _compute_speedup(*sums[3:]),
        "lower",
    ),
    "predicted_speedup": _PREDICTED,
    "prediction_gap": Metric(
        (*_SPEEDUP.sums, *_PREDICTED.sums),
        lambda *sums: np.abs(
            _compute_speedup(*sums[:4]) / _compute_predicted_speedup(*sums[4:]) - 1
        ),
        "lower",
    ),
    "hf_generate_tokens_per_second": _define_metric(
        lambda hf_num_tokens, hf_seconds: hf_num_tokens / hf_seconds
    ),
    "baseline_over_hf_generate": Metric(
        ("baseline_num_tokens", "baseline_seconds", "hf_num_tokens", "hf_seconds"), _compute_speedup
    ),
    "speedup_over_hf_generate": Metric(
        ("num_tokens", "seconds", "hf_num_tokens", "hf_seconds"), _compute_speedup
    ),
    "context_ratio": Metric(
        ("num_emitted_long", "num_rounds_long", "num_emitted_short", "num_rounds_short"),
        lambda long, long_rounds, short, short_rounds: (
            (long / long_rounds) / (short / short_rounds)
        ),
    ),
    "vocabulary_coverage": Metric(
        ("num_in_draft_vocabulary", "baseline_num_tokens"), lambda covered, tokens: covered / tokens
    ),
}


def select_measured(metric: Metric, sums: PromptSums) -> list[NDArray[np.float64]]:
    """Return the columns [P] that a metric reads, without prompts that were not fully measured.

    The prompts of a cluster are not independent, and neither are the times of a batch. So their
    values are added up first, and a column then has one entry for each cluster or batch.

    Args:
        metric: the metric; `metric.sums` names the columns that its formula reads.
        sums: the table of what was measured of each prompt: name -> values [P], NaN if unknown.
    """
    # Leave out prompts with a NaN. `measured_sums` is [number of columns, P].
    all_sums = np.stack([sums[name] for name in metric.sums])
    is_measured = ~np.isnan(all_sums).any(axis=0)
    measured_sums = all_sums[:, is_measured]

    # Add up the prompts of each cluster or batch.
    units = list_units(metric, sums)
    if units is not None:
        unit_numbers, unit_indices = np.unique(units[is_measured], return_inverse=True)
        num_units = len(unit_numbers)
        totals = [np.bincount(unit_indices, column, num_units) for column in measured_sums]
        measured_sums = np.stack(totals)
    return list(measured_sums)


def list_units(metric: Metric, sums: PromptSums) -> NDArray[np.float64] | None:
    """Return which prompts are drawn together when prompts are resampled for a metric.

    Prompts whose values are not independent must be drawn together, as one unit:

    - The prompts of a cluster, e.g. the turns of a conversation.
    - The prompts of a batch, which were decoded at the same time. This matters only if the metric
      depends on time.

    If both apply, either the clusters or the batches are the units: whichever are fewer. The others
    are ignored. To respect both, all prompts that are linked by a cluster or a batch would have to
    be one unit, which could be most of the suite.

    Args:
        metric: the metric.
        sums: the table of what was measured of each prompt. Its columns `cluster` and `batch` have
            the number of each prompt's cluster and batch. Both are optional.

    Returns:
        [P], the number of each prompt's cluster or batch; None if each prompt is drawn alone.
    """
    names = ("batch", "cluster") if metric.is_timed else ("cluster",)
    candidates = [sums[name] for name in names if name in sums]
    return min(candidates, key=lambda units: len(np.unique(units)), default=None)


def compute_value(metric: Metric, sums: PromptSums) -> float | None:
    """Return the value of a metric over all prompts; None if it was measured of no prompt.

    The formula is applied to totals over prompts, so longer completions count more.
    """
    # If the metric was measured of no prompt, the totals are 0, and the formula gives 0 / 0, which
    # is NaN. NaN is returned as None.
    totals = [column.sum() for column in select_measured(metric, sums)]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(metric.formula(*totals))
    return value if np.isfinite(value) else None


class AcceptanceCounts(TypedDict):
    """The counts and rates of a result row (see `count_acceptance`)."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: list[int]
    emitted_per_position: NotRequired[list[int]]
    acceptance_rate_per_position: NotRequired[list[float | None]]
    conditional_acceptance_rate: NotRequired[list[float | None]]


def count_acceptance(records: Sequence[PromptRecord], num_positions: int) -> AcceptanceCounts:
    """Count drafts, draft tokens and accepted tokens, and compute the rates by position.

    A draft has K positions, k = 1 … K. The counts:

    - accepted_per_position [K]: how many drafts had their k-th token accepted.
    - emitted_per_position [K + 1]: how many rounds emitted at least k tokens, k = 1 … K + 1. It is
      absent for a server, which sends totals only.

    A draft reaches position k if its round emits a k-th token: the draft token, if it is accepted,
    or else the target's own token. A round may end before k by a rejection, a stop token or the
    length limit. A server does not say how many tokens a round emits. Its drafts count as reaching
    k if their first k - 1 tokens are accepted.

    The rates, which are absent if nothing was drafted:

    - conditional_acceptance_rate [K]: of the drafts that reached position k, the share whose k-th
      token was accepted. None if no draft reached it.
    - acceptance_rate_per_position [K]: the product of the conditional rates of positions 1 to k
      (the Kaplan-Meier estimate). `_multiply_rates` says what it is if one of them is None.

    Args:
        records: the records of the prompts.
        num_positions: K.
    """
    # Count the drafts that accepted at least k tokens, for each position k.
    drafts = []
    for record in records:
        drafts.extend(record.list_drafts())
    accepted_per_position = []
    for k in range(1, num_positions + 1):
        accepted_per_position.append(sum(accepted >= k for _, accepted in drafts))
    counts: AcceptanceCounts = {
        "num_drafts": len(drafts),
        "num_draft_tokens": sum(drafted for drafted, _ in drafts),
        "num_accepted_tokens": sum(accepted for _, accepted in drafts),
        "accepted_per_position": accepted_per_position,
    }

    # Count the drafts that reached each position, first by the rule for a server: those whose
    # tokens before the position were all accepted.
    reached_per_position = [len(drafts), *accepted_per_position[:-1]]

    # The records of this package have every round. So count the tokens that each round emitted, and
    # from these the drafts that reached each position.
    if all(record.counts is None for record in records):
        emitted = []
        for record in records:
            for round in record.rounds:
                emitted.append(len(round.emitted))
        emitted_per_position = []
        for k in range(1, num_positions + 2):
            emitted_per_position.append(sum(count >= k for count in emitted))
        counts["emitted_per_position"] = emitted_per_position
        # Every draft reaches its first position. A round without a draft emits one token, so it
        # reaches no later position.
        reached_per_position[1:] = counts["emitted_per_position"][1:num_positions]
    if not drafts:
        return counts

    # Compute the conditional rates and their products. Fractions keep the products exact.
    conditional_rates = [
        Fraction(accepted, reached) if reached else None
        for accepted, reached in zip(accepted_per_position, reached_per_position, strict=True)
    ]
    return {
        **counts,
        "acceptance_rate_per_position": [
            rate if rate is None else float(rate) for rate in _multiply_rates(conditional_rates)
        ],
        "conditional_acceptance_rate": [
            rate if rate is None else float(rate) for rate in conditional_rates
        ],
    }


def _multiply_rates(conditional_rates: Sequence[Fraction | None]) -> list[Fraction | None]:
    """Return for each position k the product of the conditional rates of positions 1 to k.

    From the first unknown rate (None) on, the products are None, unless a rate before it is 0: then
    all later products are 0.
    """
    product: Fraction | None = Fraction(1)
    products = []
    for rate in conditional_rates:
        # A product that is 0 or unknown stays so.
        if product:
            product = None if rate is None else product * rate
        products.append(product)
    return products
