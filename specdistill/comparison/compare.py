"""Several drafts for one target, measured together on the same prompts: which is fastest, and where the differences come from.

A round yields tokens and costs time: S = AL / (v + c·K) (see specdistill.statistics.theory). So every difference to the fastest
candidate is split into tokens a round and cost of a round, and these into acceptance rates and step costs, each with a paired interval
over prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from specdistill import __version__
from specdistill.comparison.explanation import is_separable, reasons
from specdistill.report.files import validate
from specdistill.statistics.intervals import relative_change
from specdistill.statistics.metrics import METRICS, Metric, PromptSums, prompt_sums, value
from specdistill.statistics.records import PromptRecord

SCHEMA = Path(__file__).parent / "comparison.schema.json"


def _in_plain_steps(*seconds: str, each: str) -> Metric:
    """What one of `each` takes, over what a step of plain decoding does."""
    sums = (*seconds, each, "baseline_verify_seconds", "baseline_num_rounds")
    return Metric(sums, lambda *totals: sum(totals[:-3]) / totals[-3] / (totals[-2] / totals[-1]), "lower")


# The parts of a difference in speed. Costs are in plain decoding steps; rounds without a draft count.
PARTS: dict[str, Metric] = {
    "tokens_per_round": METRICS["tokens_per_round"],
    "round_cost": _in_plain_steps("draft_seconds", "verify_seconds", each="num_rounds"),
    "acceptance_rate": METRICS["acceptance_rate"],
    "drafted_per_round": Metric(("num_draft_tokens", "num_rounds"), lambda drafted, rounds: drafted / rounds),
    "first_position_rate": Metric(("num_accepted_first", "num_drafts"), lambda accepted, drafts: accepted / drafts),
    "later_position_rate": Metric(("num_accepted_later", "num_reached_later"), lambda accepted, reached: accepted / reached),
    "draft_step": _in_plain_steps("draft_seconds", each="num_draft_tokens"),
    "verification": _in_plain_steps("verify_seconds", each="num_rounds"),
    "draft_share": Metric(("draft_seconds", "verify_seconds"), lambda draft, verify: draft / (draft + verify), "lower"),
}


@dataclass(frozen=True)
class Measured:
    """One candidate's measurement.

    num_layers: decoder layers of the draft, None without weights; training: its `History.summary()`, None where it is unknown.
    """

    name: str
    num_layers: int | None
    training: dict[str, Any] | None
    report: dict[str, Any]
    records: Sequence[PromptRecord]


def compare(candidates: Sequence[Measured], *, seed: int = 0) -> dict[str, Any]:
    """The document comparison.json: the candidates with their reports, their ranking, and why they differ.

    The records of all candidates are of the same prompts in the same order. Ranked by speedup, candidates that are not lossless last;
    every difference is relative to the first of the ranking, and separable from it when its interval excludes 0.
    """
    prompts = [[record.id for record in candidate.records] for candidate in candidates]
    assert all(ids == prompts[0] for ids in prompts), "candidates were measured on different prompts"
    ordered = sorted(candidates, key=lambda entry: (not is_lossless(entry.report), -entry.report["results"][0]["speedup"]))
    sums = [_sums(candidate.records) for candidate in ordered]
    frontier = pareto_frontier([candidate.report for candidate in ordered])
    differences = [None, *(_differences(own, sums[0], seed) for own in sums[1:])]
    ranking = [
        {
            "rank": rank,
            "name": candidate.name,
            "speedup": candidate.report["results"][0]["speedup"],
            "lossless": is_lossless(candidate.report),
            "separable_from_best": is_separable(difference["speedup"]) if difference else None,
            "on_pareto_frontier": on_frontier,
            "parts": {name: value(metric, own) for name, metric in PARTS.items()},
            "difference_to_best": difference,
        }
        for rank, (candidate, own, on_frontier, difference) in enumerate(
            zip(ordered, sums, frontier, differences, strict=True), start=1
        )
    ]
    listed = [{name: part for name, part in vars(candidate).items() if name != "records"} for candidate in candidates]
    return {
        "schema_version": 2,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "specdistill_version": __version__,
        "candidates": listed,
        "ranking": ranking,
        "why": [{"name": name, "message": message} for name, message in reasons(listed, ranking)],
    }


def validate_comparison(comparison: Mapping[str, Any]) -> None:
    """Raises UserError that names the first field that does not fit the schema, in the comparison or in one of its reports."""
    validate(comparison, "comparison.json", "comparison", SCHEMA)
    for candidate in comparison["candidates"]:
        validate(candidate["report"], f"comparison.json ({candidate['name']})", "comparison")


def is_lossless(report: dict[str, Any]) -> bool:
    """Whether greedy completions are those of plain decoding, but for near-ties that rounding explains."""
    return not report["lossless"]["unexplained_divergences"]


def pareto_frontier(reports: Sequence[dict[str, Any]]) -> list[bool]:
    """For each report, whether no other has both a higher acceptance length and a lower c; False where nothing was drafted."""
    points = [
        (report["results"][0]["mean_acceptance_length"], -report["theory"]["c"]) if "theory" in report else None
        for report in reports
    ]
    drafting = [point for point in points if point]
    return [
        point is not None and not any(length >= point[0] and cheap >= point[1] for length, cheap in {*drafting} - {point})
        for point in points
    ]


def _sums(records: Sequence[PromptRecord]) -> PromptSums:
    """`prompt_sums`, and those that separate the first drafted position from the later ones."""
    drafts = [[(len(round.accepted), len(round.drafted)) for round in record.rounds if round.drafted] for record in records]
    by_position = {
        "num_accepted_first": [sum(accepted > 0 for accepted, _ in prompt) for prompt in drafts],
        "num_accepted_later": [sum(max(accepted - 1, 0) for accepted, _ in prompt) for prompt in drafts],
        # A position is reached when the one before it was accepted; the first rejection ends a draft.
        "num_reached_later": [sum(min(accepted + 1, drafted) - 1 for accepted, drafted in prompt) for prompt in drafts],
    }
    return prompt_sums(records) | {name: np.array(counts, dtype=np.float64) for name, counts in by_position.items()}


def _differences(sums: PromptSums, best: PromptSums, seed: int) -> dict[str, Any]:
    """Each part's relative change from the best candidate's, with its paired interval; None where one of them has no value."""
    differences: dict[str, Any] = dict.fromkeys(("speedup", *PARTS))
    for name in differences:
        metric = PARTS.get(name, METRICS["speedup"])
        if value(metric, sums) is not None and value(metric, best):  # a change from 0 has no size
            change, bounds = relative_change(metric, sums, best, seed=seed)
            differences[name] = {"change": change, "ci95": bounds and list(bounds)}
    return differences
