"""Per-prompt sums, the raw material of every metric: bootstrap resamples prompts, so nothing is summed across them before that.

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
    """Column name -> [P] sums of each prompt. What was not measured for a prompt is NaN.

    Where prompts were decoded together, `batch` says which of them share a batch; it is no sum.
    """
    long_from = long_context_start(records)
    together = any(record.batch is not None for record in records)
    rows = [
        {**_sums(record), **_long_and_short(record, long_from), **({"batch": record.batch} if together else {})}
        for record in records
    ]
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in (rows[0] if rows else ())}


def drafts_with_context(record: PromptRecord) -> Iterator[tuple[int, RoundRecord]]:
    """The rounds that drafted something, each with the number of tokens that stood before it."""
    context = record.num_prompt_tokens + 1
    for entry in record.rounds:
        if entry.drafted:
            yield context, entry
        context += len(entry.emitted)


def bucket_of(context: int) -> int:
    """The largest power of two that is not above `context`."""
    return 1 << (context.bit_length() - 1)


def drafts_per_bucket(records: Sequence[PromptRecord]) -> Counter[int]:
    return Counter(bucket_of(context) for record in records for context, _ in drafts_with_context(record))


def long_context_start(records: Sequence[PromptRecord]) -> int | None:
    """The highest bucket with enough drafts in it and below it: where "long" begins for this suite. None when there is no
    such one.
    """
    counts = drafts_per_bucket(records)
    for bucket in sorted(counts, reverse=True):
        below = sum(count for other, count in counts.items() if other < bucket)
        if counts[bucket] >= MIN_BUCKET_DRAFTS and below >= MIN_BUCKET_DRAFTS:
            return bucket
    return None


def in_bucket(record: PromptRecord, bucket: int) -> tuple[int, int]:
    """(drafts, accepted tokens) of the rounds that began in a bucket."""
    rounds = [entry for context, entry in drafts_with_context(record) if bucket_of(context) == bucket]
    return len(rounds), sum(len(entry.accepted) for entry in rounds)


def _sums(record: PromptRecord) -> dict[str, float]:
    drafts = record.drafts()
    hf, covered = record.hf_generate, record.num_in_draft_vocabulary
    baseline = asdict(record.baseline) if record.baseline else {entry.name: None for entry in fields(Timing)}
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
    drafts = {"long": np.nan, "short": np.nan}
    accepted = dict(drafts)
    if long_from is not None:
        for name in drafts:
            rounds = [entry for context, entry in drafts_with_context(record) if (context >= long_from) == (name == "long")]
            drafts[name], accepted[name] = len(rounds), sum(len(entry.accepted) for entry in rounds)
    return {f"num_drafts_{name}": number for name, number in drafts.items()} | {
        f"num_accepted_{name}": number for name, number in accepted.items()
    }
