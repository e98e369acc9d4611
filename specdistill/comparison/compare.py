"""Several drafts for one target, measured together on the same prompts: which is fastest, and where the differences come from.

A round yields tokens and costs time: S = AL / (v + c·K) (see specdistill.statistics.theory). So every difference to the fastest
candidate is split into tokens per round and cost per round, and these into acceptance rates and step costs, each with a paired interval
over prompts.

Why candidates differ is said in sentences made by fixed rules from these numbers. Only differences whose interval excludes 0 are given as
reasons.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from specdistill import __version__
from specdistill.report.phrases import gain, is_lossless, number, percent, signed
from specdistill.statistics.intervals import relative_change
from specdistill.statistics.metrics import METRICS, Metric, PromptSums, prompt_sums, value
from specdistill.statistics.records import PromptRecord

MOSTLY = 2 / 3  # of the gap's logarithm: from this share on, the gap comes mostly from one part
MIN_REASON = 0.005  # a smaller relative difference is not given as a reason, however certain it is

Entry = Mapping[str, Any]


def _in_plain_steps(*seconds: str, each: str) -> Metric:
    """What one of `each` takes, over what a step of plain decoding does."""
    sums = (*seconds, each, "baseline_verify_seconds", "baseline_num_rounds")
    return Metric(
        sums, lambda *totals: sum(totals[:-3]) / totals[-3] / (totals[-2] / totals[-1]), "lower"
    )


# The parts of a difference in speed. Costs are in plain decoding steps; rounds without a draft count.
PARTS: dict[str, Metric] = {
    "tokens_per_round": METRICS["tokens_per_round"],
    "round_cost": _in_plain_steps("draft_seconds", "verify_seconds", each="num_rounds"),
    "acceptance_rate": METRICS["acceptance_rate"],
    "drafted_per_round": Metric(
        ("num_draft_tokens", "num_rounds"), lambda drafted, rounds: drafted / rounds
    ),
    "first_position_rate": Metric(
        ("num_accepted_first", "num_drafts"), lambda accepted, drafts: accepted / drafts
    ),
    "later_position_rate": Metric(
        ("num_accepted_later", "num_reached_later"), lambda accepted, reached: accepted / reached
    ),
    "draft_step": _in_plain_steps("draft_seconds", each="num_draft_tokens"),
    "verification": _in_plain_steps("verify_seconds", each="num_rounds"),
    "draft_share": Metric(
        ("draft_seconds", "verify_seconds"), lambda draft, verify: draft / (draft + verify), "lower"
    ),
}


@dataclass(frozen=True)
class Measured:
    """One candidate's measurement. training: its `History.summary()`, None where it is unknown."""

    name: str
    training: dict[str, Any] | None
    report: dict[str, Any]
    records: Sequence[PromptRecord]


def compare(candidates: Sequence[Measured], *, seed: int = 0) -> dict[str, Any]:
    """The document comparison.json: the candidates with their reports, their ranking, and why they differ.

    The records of all candidates are of the same prompts in the same order. Ranked by speedup, candidates that are not lossless last;
    every difference is relative to the first of the ranking, and separable from it when its interval excludes 0.
    """
    prompts = [[record.id for record in candidate.records] for candidate in candidates]
    assert all(ids == prompts[0] for ids in prompts), (
        "candidates were measured on different prompts"
    )
    ordered = sorted(
        candidates,
        key=lambda entry: (not is_lossless(entry.report), -entry.report["results"][0]["speedup"]),
    )
    sums = [prompt_sums(candidate.records) for candidate in ordered]
    differences = [None, *(_differences(own, sums[0], seed) for own in sums[1:])]
    ranking = [
        {
            "rank": rank,
            "name": candidate.name,
            "speedup": candidate.report["results"][0]["speedup"],
            "lossless": is_lossless(candidate.report),
            "separable_from_best": is_separable(difference["speedup"]) if difference else None,
            "parts": {name: value(metric, own) for name, metric in PARTS.items()},
            "difference_to_best": difference,
        }
        for rank, (candidate, own, difference) in enumerate(
            zip(ordered, sums, differences, strict=True), start=1
        )
    ]
    listed = [
        {name: part for name, part in vars(candidate).items() if name != "records"}
        for candidate in candidates
    ]
    return {
        "schema_version": 3,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "specdistill_version": __version__,
        "candidates": listed,
        "ranking": ranking,
        "why": [{"name": name, "message": message} for name, message in reasons(listed, ranking)],
    }


def _differences(sums: PromptSums, best: PromptSums, seed: int) -> dict[str, Any]:
    """Each part's relative change from the best candidate's, with its paired interval; None where one of them has no value."""
    differences: dict[str, Any] = dict.fromkeys(("speedup", *PARTS))
    for name in differences:
        metric = PARTS.get(name, METRICS["speedup"])
        if value(metric, sums) is not None and value(metric, best):  # a change from 0 has no size
            change, bounds = relative_change(metric, sums, best, seed=seed)
            differences[name] = {"change": change, "ci95": bounds and list(bounds)}
    return differences


def reasons(candidates: Sequence[Entry], ranking: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """(topic, sentences) in reading order, from the `candidates` and the `ranking` of a comparison."""
    by_name = {candidate["name"]: candidate for candidate in candidates}
    best, *others = ranking
    yield "fastest", _fastest(best, others, by_name[best["name"]]["report"])
    for other in others:
        yield "gap", " ".join(_gap(other, best))
        if detail := " ".join([*_acceptance(other, best), *_cost(other, best, by_name)]):
            yield "cause", detail
    for entry in ranking:
        if not entry["lossless"]:
            lossless = by_name[entry["name"]]["report"]["lossless"]
            completions = f"{lossless['unexplained_divergences']} of {lossless['prompts_checked']} greedy completions"
            placed = f"{entry['name']} is ranked below the lossless drafts whatever its speed"
            yield "lossless", f"{placed}: {completions} are not the target's."


def shown(difference: Mapping[str, Any] | None) -> float:
    """The relative difference, or 0 where its interval includes 0 or it is too small to be a reason."""
    change = float(difference["change"]) if difference and is_separable(difference) else 0.0
    return change if abs(change) >= MIN_REASON else 0.0


def is_separable(difference: Mapping[str, Any] | None) -> bool:
    """Whether a difference's interval excludes 0; without an interval nothing is separable."""
    low, high = (difference and difference["ci95"]) or (0.0, 0.0)
    return bool(low > 0 or high < 0)


def _fastest(best: Entry, others: Sequence[Entry], report: Mapping[str, Any]) -> str:
    row, unsure = (
        report["results"][0],
        [other["name"] for other in others if not other["separable_from_best"]],
    )
    low, high = row.get("speedup_ci95", (0.0, math.inf))
    sign = "slower than" if high < 1 else "not separable from" if low <= 1 else ""
    speed = f"{gain(row)}, which is {sign} plain decoding" if sign else gain(row)
    if not unsure:
        return f"{best['name']} is the fastest: {speed}."
    return f"{best['name']} measured fastest, {speed}, but is not separable from {' and '.join(unsure)}."


def _gap(other: Entry, best: Entry) -> Iterator[str]:
    """How much slower, and whether by fewer tokens per round or by costlier rounds."""
    differences = other["difference_to_best"]
    name, first, speed = other["name"], best["name"], differences["speedup"]
    tokens, cost = shown(differences["tokens_per_round"]), shown(differences["round_cost"])
    yields = f"{name} yields {_more(tokens, 'fewer')} tokens per round ({_against(other, best, 'tokens_per_round')})"
    costs = f"a round costs {_more(cost, 'less')} ({_against(other, best, 'round_cost', ' plain steps')})"
    if not other["separable_from_best"]:
        yield f"{name} is not separable from {first}: {_direction(speed['change'])}{_range(speed)}."
        if tokens and cost and (tokens > 0) == (cost > 0):
            yield f"The two offset each other: {yields}, and {costs}."
        elif tokens or cost:
            yield f"It differs in that {yields if tokens else costs}, but that does not show in the speed."
        return
    yield f"{name} is {_direction(speed['change'])} than {first}{_range(speed)}."
    sign = -1 if speed["change"] < 0 else 1
    from_tokens, from_cost = max(sign * math.log1p(tokens), 0.0), max(-sign * math.log1p(cost), 0.0)
    if not (from_tokens or from_cost):
        yield "Neither the tokens per round nor the cost per round explain that."
        return
    share = from_tokens / (from_tokens + from_cost)
    source = (
        "acceptance"
        if share >= MOSTLY
        else "cost"
        if share <= 1 - MOSTLY
        else "both acceptance and cost"
    )
    yield f"That comes mainly from {source}: {', and '.join([yields] * bool(tokens) + [costs] * bool(cost))}."


def _acceptance(other: Entry, best: Entry) -> Iterator[str]:
    """At which positions tokens are lost or gained; nothing unless the tokens per round differ."""
    differences = other["difference_to_best"]
    if not shown(differences["tokens_per_round"]):
        return
    if shown(differences["drafted_per_round"]):
        mine, theirs = (number(entry["parts"]["drafted_per_round"], 1) for entry in (other, best))
        yield f"{other['name']} drafts {mine} tokens per round, {best['name']} {theirs}."
    places = {
        "first_position_rate": "at the first position",
        "later_position_rate": "at later positions once they are reached",
    }
    accepts = [
        f"{'more' if change > 0 else 'less'} {place} ({_against(other, best, rate, style=percent)})"
        for rate, place in places.items()
        if (change := shown(differences[rate]))
    ]
    if accepts:
        yield f"It accepts {' and '.join(accepts)}."


def _cost(other: Entry, best: Entry, by_name: Mapping[str, Entry]) -> Iterator[str]:
    """Which step makes rounds costlier or cheaper, and whether size explains it; nothing unless the costs per round differ."""
    differences = other["difference_to_best"]
    if not shown(differences["round_cost"]):
        return
    step, verification = shown(differences["draft_step"]), shown(differences["verification"])
    if step:
        mine, theirs = (entry["parts"] for entry in (other, best))
        yield (
            f"A draft token of {other['name']} costs {number(mine['draft_step'], 3)} plain steps against "
            f"{number(theirs['draft_step'], 3)}, and drafting takes {percent(mine['draft_share'])} of a round against "
            f"{percent(theirs['draft_share'])}."
        )
        sizes = [by_name[entry["name"]]["report"]["draft"]["parameters"] for entry in (other, best)]
        if (sizes[0] - sizes[1]) * step < 0:
            yield f"Size is not the reason: {sizes[0]:,} parameters against {sizes[1]:,}."
    if verification:
        yield f"Verifying costs {_more(verification, 'less')} ({_against(other, best, 'verification', ' plain steps')})."


def _direction(change: float) -> str:
    return f"{abs(change):.1%} {'slower' if change < 0 else 'faster'}"


def _range(difference: Mapping[str, Any]) -> str:
    ends = difference["ci95"]
    return (
        f" ({signed(ends[0])} to {signed(ends[1])})"
        if ends
        else ", with too few prompts for an interval"
    )


def _more(change: float, less: str) -> str:
    return f"{abs(change):.1%} {'more' if change > 0 else less}"


def _against(
    other: Entry,
    best: Entry,
    part: str,
    unit: str = "",
    *,
    style: Callable[[float | None], str] = number,
) -> str:
    return f"{style(other['parts'][part])}{unit} against {style(best['parts'][part])}"
