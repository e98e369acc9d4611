"""Where the time goes: the prefill, and of each round the draft, the target's step and the rest, with the draft and without."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.statistics.records import PromptRecord, Timing

SIDES = ("baseline", "speculative")
KINDS = ("prefill", "draft", "target", "rest")


def a_token(records: Sequence[PromptRecord]) -> dict[str, dict[str, float]]:
    """side -> kind -> milliseconds that one token costs; the kinds add up to the whole."""
    sums = _sums(records)
    return {
        side: {kind: 1000 * sums[side][kind] / sums[side]["tokens"] for kind in KINDS} for side in SIDES if sums[side]["tokens"]
    }


def lines(records: Sequence[PromptRecord]) -> list[tuple[str, float | None, float | None]]:
    """(what, plain, with the draft) in milliseconds: a text's prefill, then what a round is made of; None where there is none."""
    plain, draft = (_sums(records)[side] for side in SIDES)

    def each(kind: str, unit: str) -> tuple[float | None, float | None]:
        values = [1000 * side[kind] / side[unit] if side[unit] and side[kind] else None for side in (plain, draft)]
        return values[0], values[1]

    return [
        ("prefill of a text", *each("prefill", "texts")),
        ("drafting, a round", *each("draft", "rounds")),
        ("target's step, a round", *each("target", "rounds")),
        ("rest, a round", *each("rest", "rounds")),
        ("a token, all in all", *each("seconds", "tokens")),
    ]


def _sums(records: Sequence[PromptRecord]) -> Mapping[str, dict[str, Any]]:
    """side -> counts, and seconds of each kind. A server's texts are left out: nobody sees what their time went into."""
    records, sums = [record for record in records if record.counts is None], {}
    for side in SIDES:
        timings: list[Timing] = [getattr(record, side) for record in records]
        parts = {
            "prefill": sum(timing.prefill_seconds or 0.0 for timing in timings),
            # Plain decoding drafts nothing; what the clock saw there is the loop's.
            "draft": sum(timing.draft_seconds or 0.0 for timing in timings) if side == "speculative" else 0.0,
            "target": sum(timing.verify_seconds or 0.0 for timing in timings),
        }
        seconds = sum(timing.seconds for timing in timings)
        sums[side] = {
            **parts,
            "rest": max(seconds - sum(parts.values()), 0.0),
            "seconds": seconds,
            "texts": len(timings),
            "rounds": sum(timing.num_rounds or 0 for timing in timings),
            "tokens": sum(timing.num_tokens for timing in timings),
        }
    return sums
