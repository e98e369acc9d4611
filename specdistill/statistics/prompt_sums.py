"""Per-prompt sums, from which every metric is computed: the bootstrap resamples prompts, so nothing is summed across them before.

Context buckets are powers of two: bucket b holds the rounds that began with b to 2b - 1 tokens before them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

import numpy as np
from numpy.typing import NDArray

from specdistill.statistics.records import PromptRecord, RoundRecord, Timing

PromptSums = dict[str, NDArray[np.float64]]

MIN_BUCKET_DRAFTS = 30  # below this a bucket's acceptance length is mostly noise


def prompt_sums(records: Sequence[PromptRecord]) -> PromptSums:
    """Name of a sum -> [P], its value for each prompt; NaN where it was not measured.

    Where prompts were decoded together, `batch` numbers the batch of each; it is no sum.
    """
    long_from = long_context_start(records)
    in_batches = any(record.batch is not None for record in records)
    rows = [
        {**_sums(record), **_long_and_short(record, long_from), **({"batch": record.batch} if in_batches else {})}
        for record in records
    ]
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in (rows[0] if rows else ())}


def drafts_with_context(record: PromptRecord) -> Iterator[tuple[int, RoundRecord]]:
    """The rounds with a draft, each with the number of tokens before it."""
    context = record.num_prompt_tokens + 1
    for round in record.rounds:
        if round.drafted:
            yield context, round
        context += len(round.emitted)


def bucket_of(context: int) -> int:
    """The largest power of two that is not above `context`."""
    return 1 << (context.bit_length() - 1)


def drafts_per_bucket(records: Sequence[PromptRecord]) -> Counter[int]:
    return Counter(bucket_of(context) for record in records for context, _ in drafts_with_context(record))


def accepted_in_bucket(record: PromptRecord, bucket: int) -> int:
    """Accepted tokens of the rounds that began in a bucket."""
    return sum(len(round.accepted) for context, round in drafts_with_context(record) if bucket_of(context) == bucket)


def long_context_start(records: Sequence[PromptRecord]) -> int | None:
    """Where long contexts begin: the highest bucket with enough drafts in it and below it; None without one."""
    counts = drafts_per_bucket(records)
    for bucket in sorted(counts, reverse=True):
        num_below = sum(count for other, count in counts.items() if other < bucket)
        if counts[bucket] >= MIN_BUCKET_DRAFTS and num_below >= MIN_BUCKET_DRAFTS:
            return bucket
    return None


def _sums(record: PromptRecord) -> dict[str, float]:
    drafts = record.drafts()
    hf, covered = record.hf_generate, record.num_in_draft_vocabulary
    baseline = asdict(record.baseline) if record.baseline else {field.name: None for field in fields(Timing)}
    return {
        "num_prompts": 1,
        "num_drafts": len(drafts),
        "num_draft_tokens": sum(drafted for drafted, _ in drafts),
        "num_accepted_tokens": sum(accepted for _, accepted in drafts),
        **asdict(record.speculative),
        **{f"baseline_{name}": number for name, number in baseline.items()},
        "hf_num_tokens": hf.num_tokens if hf else np.nan,
        "hf_seconds": hf.seconds if hf else np.nan,
        "num_in_draft_vocabulary": np.nan if covered is None else covered,
    }


def _long_and_short(record: PromptRecord, long_from: int | None) -> dict[str, float]:
    """Drafts and accepted tokens at long and at shorter contexts; NaN where the suite has no long ones."""
    sums = {f"num_{what}_{length}": np.nan for what in ("drafts", "accepted") for length in ("long", "short")}
    if long_from is not None:
        sums = dict.fromkeys(sums, 0.0)
        for context, round in drafts_with_context(record):
            length = "long" if context >= long_from else "short"
            sums[f"num_drafts_{length}"] += 1
            sums[f"num_accepted_{length}"] += len(round.accepted)
    return sums
