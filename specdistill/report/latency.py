"""What the time goes into: prefill, and in each round the draft, the target's step and the rest, with and without the draft."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.statistics.records import PromptRecord, Timing

SIDES = ("baseline", "speculative")
KINDS = ("prefill", "draft", "target", "rest")


def per_token(records: Sequence[PromptRecord]) -> dict[str, dict[str, float]]:
    """side -> kind -> milliseconds a token; the kinds add up to the whole."""
    totals = _totals(records)
    return {
        side: {kind: 1000 * totals[side][kind] / totals[side]["tokens"] for kind in KINDS}
        for side in SIDES
        if totals[side]["tokens"]
    }


def lines(records: Sequence[PromptRecord]) -> list[tuple[str, float | None, float | None]]:
    """(what, plain, with the draft) in milliseconds: a prompt's prefill, the parts of a round, a token; None where there is none."""
    plain, draft = (_totals(records)[side] for side in SIDES)

    def each(kind: str, unit: str) -> tuple[float | None, float | None]:
        values = [1000 * side[kind] / side[unit] if side[unit] and side[kind] else None for side in (plain, draft)]
        return values[0], values[1]

    return [
        ("prefill of a prompt", *each("prefill", "prompts")),
        ("drafting, a round", *each("draft", "rounds")),
        ("target's step, a round", *each("target", "rounds")),
        ("rest, a round", *each("rest", "rounds")),
        ("a token, in all", *each("seconds", "tokens")),
    ]


def _totals(records: Sequence[PromptRecord]) -> Mapping[str, dict[str, Any]]:
    """side -> counts, and seconds of each kind. Records of a server are left out: it does not show what their time goes into."""
    records, totals = [record for record in records if record.counts is None], {}
    for side in SIDES:
        timings: list[Timing] = [getattr(record, side) for record in records]
        parts = {
            "prefill": sum(timing.prefill_seconds or 0.0 for timing in timings),
            # Plain decoding drafts nothing; what the clock saw there is the loop's.
            "draft": sum(timing.draft_seconds or 0.0 for timing in timings) if side == "speculative" else 0.0,
            "target": sum(timing.verify_seconds or 0.0 for timing in timings),
        }
        seconds = sum(timing.seconds for timing in timings)
        totals[side] = {
            **parts,
            "rest": max(seconds - sum(parts.values()), 0.0),
            "seconds": seconds,
            "prompts": len(timings),
            "rounds": sum(timing.num_rounds or 0 for timing in timings),
            "tokens": sum(timing.num_tokens for timing in timings),
        }
    return totals
