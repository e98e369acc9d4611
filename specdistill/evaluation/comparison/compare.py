"""Rank several drafts for one target, and explain where the differences in speed come from.

The drafts, called candidates, were measured together on the same prompts. A round yields tokens and
costs time, so the speedup is S = AL / (v + c·K), as specdistill.evaluation.statistics.theory
explains. Every difference in speed to the fastest candidate is split into two parts: the tokens per
round, AL, and the cost per round, v + c·K. These are split further, into acceptance rates and into
the costs of drafting and verifying. Each part has a confidence interval over prompts, paired by
prompt.

Fixed rules turn these numbers into sentences that say why candidates differ. Only differences whose
interval excludes 0 are given as reasons.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from specdistill import __version__
from specdistill.evaluation.report.phrases import (
    Report,
    format_gain,
    format_number,
    format_percent,
    format_signed,
    is_lossless,
)
from specdistill.evaluation.statistics.intervals import compute_relative_change
from specdistill.evaluation.statistics.metrics import (
    METRICS,
    Metric,
    PromptSums,
    collect_prompt_sums,
    compute_value,
)
from specdistill.evaluation.statistics.records import PromptRecord

# A gap in speed comes mainly from tokens or from cost if this part explains at least this share of
# the gap's logarithm. A larger share would name both causes more often.
MAIN_CAUSE_SHARE = 2 / 3
# A smaller relative difference is never given as a reason, even if it is significant: it is too
# small to matter to a reader.
MIN_REASON = 0.005

Entry = Mapping[str, Any]  # a candidate, its place in the ranking, or a difference
Comparison = dict[str, Any]  # the document comparison.json
Difference = dict[str, Any]  # the relative change of each part of the speed


def _define_cost_metric(*seconds: str, per: str) -> Metric:
    """Return a metric for a cost, as a multiple of the time of one step of plain decoding.

    The cost is the time of one round or of one draft token:
    (seconds / count) / (seconds of plain decoding / number of its steps).

    Args:
        seconds: the names of the times that are added up, e.g. `draft_seconds`.
        per: the name of the count that divides them: `num_rounds` or `num_draft_tokens`.
    """
    # The function of the metric gets the sums over prompts in this order: the times, then the count
    # (totals[-3]), the seconds of plain decoding (totals[-2]) and its steps (totals[-1]).
    return Metric(
        (*seconds, per, "baseline_verify_seconds", "baseline_num_rounds"),
        lambda *totals: sum(totals[:-3]) / totals[-3] / (totals[-2] / totals[-1]),
        "lower",
    )


# The parts into which a difference in speed is split. Costs are in steps of plain decoding. Rounds
# in which nothing was drafted count as rounds.
PARTS: dict[str, Metric] = {
    "mean_acceptance_length": METRICS["mean_acceptance_length"],
    "round_cost": _define_cost_metric("draft_seconds", "verify_seconds", per="num_rounds"),
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
    "draft_step": _define_cost_metric("draft_seconds", per="num_draft_tokens"),
    "verification": _define_cost_metric("verify_seconds", per="num_rounds"),
    "draft_share": Metric(
        ("draft_seconds", "verify_seconds"), lambda draft, verify: draft / (draft + verify), "lower"
    ),
}


@dataclass(frozen=True)
class Measured:
    """One candidate with its measurement.

    Attributes:
        name: the name of the candidate.
        training: the summary of its training (`History.summary()`); None if it is unknown.
        report: the candidate's report.
        records: the record of each prompt.
    """

    name: str
    training: Mapping[str, object] | None
    report: Report
    records: Sequence[PromptRecord]


def compare(candidates: Sequence[Measured], *, seed: int = 0) -> Comparison:
    """Rank the drafts (candidates) of a comparison, and explain why they differ.

    Candidates are ranked by speedup. Those whose outputs are not the target's (not lossless) come
    last. Each candidate is compared with the best one, the first of the ranking. The two are called
    separable if the confidence interval of their difference in speedup excludes 0.

    Args:
        candidates: the candidates, all measured on the same prompts in the same order.
        seed: the seed of the bootstrap, which computes the intervals.

    Returns:
        The document comparison.json: the candidates with their reports, the ranking, and the
        reasons.
    """
    # Differences are paired by prompt, so all candidates need the same prompts.
    prompts = []
    for candidate in candidates:
        prompts.append([record.id for record in candidate.records])
    assert all(ids == prompts[0] for ids in prompts), (
        "candidates were measured on different prompts"
    )

    # Rank the candidates. The first row of a report is about the whole suite.
    ordered = sorted(
        candidates,
        key=lambda entry: (not is_lossless(entry.report), -entry.report["results"][0]["speedup"]),
    )

    # Compare each further candidate with the best one, which has no difference to itself (None).
    sums = [collect_prompt_sums(candidate.records) for candidate in ordered]
    differences = [
        None,
        *(_compute_differences(candidate_sums, sums[0], seed) for candidate_sums in sums[1:]),
    ]

    # Build the ranking. `parts` holds the values that explain each candidate's speed.
    ranking = []
    for rank, (candidate, candidate_sums, difference) in enumerate(
        zip(ordered, sums, differences, strict=True), start=1
    ):
        ranking.append(
            {
                "rank": rank,
                "name": candidate.name,
                "speedup": candidate.report["results"][0]["speedup"],
                "lossless": is_lossless(candidate.report),
                "separable_from_best": is_separable(difference["speedup"]) if difference else None,
                "parts": {
                    name: compute_value(metric, candidate_sums) for name, metric in PARTS.items()
                },
                "difference_to_best": difference,
            }
        )

    # List the candidates without their records, which are in their own reports.
    listed = []
    for candidate in candidates:
        listed.append({name: part for name, part in vars(candidate).items() if name != "records"})
    return {
        "schema_version": 4,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "specdistill_version": __version__,
        "candidates": listed,
        "ranking": ranking,
        "why": [
            {"name": name, "message": message}
            for name, message in explain_differences(listed, ranking)
        ],
    }


def _compute_differences(sums: PromptSums, best: PromptSums, seed: int) -> Difference:
    """Compare a candidate with the best one: its speedup, and the parts that explain the speedup.

    The parts are numbers such as tokens per round and the cost of a round (PARTS).

    Args:
        sums: the counts and seconds of the candidate, for each prompt.
        best: the counts and seconds of the best candidate, for each prompt.
        seed: the seed of the bootstrap.

    Returns:
        Name -> the relative change from the best candidate to this one, with its confidence
        interval, paired by prompt. None for a part of which one of the two candidates has no value.
    """
    differences: dict[str, Any] = dict.fromkeys(("speedup", *PARTS))
    for name in differences:
        # `speedup` is the only name that is no part. Both candidates need a value. The best one's
        # must not be 0, because a relative change from 0 is not defined.
        metric = PARTS.get(name, METRICS["speedup"])
        if compute_value(metric, sums) is not None and compute_value(metric, best):
            change, bounds = compute_relative_change(metric, sums, best, seed=seed)
            differences[name] = {"change": change, "ci95": bounds and list(bounds)}
    return differences


def explain_differences(
    candidates: Sequence[Entry], ranking: Sequence[Entry]
) -> Iterator[tuple[str, str]]:
    """Yield sentences that say which candidate is the fastest, and why the others are slower.

    Args:
        candidates: the list `candidates` of comparison.json, with the report of each.
        ranking: the list `ranking` of comparison.json, best first.

    Yields:
        The topic of the sentences (`fastest`, `gap`, `cause` or `lossless`), and the sentences.
    """
    # Say which candidate is the fastest.
    by_name = {candidate["name"]: candidate for candidate in candidates}
    best, *remaining = ranking
    yield "fastest", _describe_fastest(best, remaining, by_name[best["name"]]["report"])

    # For every other candidate, say how far it is behind the best one, and what explains that.
    for candidate in remaining:
        yield "gap", " ".join(_describe_gap(candidate, best))
        detail = " ".join(
            [*_describe_acceptance(candidate, best), *_describe_cost(candidate, best, by_name)]
        )
        if detail:
            yield "cause", detail

    # Say why candidates that are not lossless have the last ranks.
    for entry in ranking:
        if not entry["lossless"]:
            lossless = by_name[entry["name"]]["report"]["lossless"]
            yield (
                "lossless",
                f"{entry['name']} is ranked below the lossless drafts whatever its speed:"
                f" {lossless['unexplained_divergences']} of {lossless['prompts_checked']} greedy"
                " completions are not the target's.",
            )


def select_shown_difference(difference: Entry | None) -> float:
    """Return a relative difference, or 0 if it is not significant or too small to be mentioned.

    A difference is not significant if its interval includes 0. It is too small if it is below
    MIN_REASON.

    Args:
        difference: the relative change and its interval; None for no difference.
    """
    change = float(difference["change"]) if difference and is_separable(difference) else 0.0
    return change if abs(change) >= MIN_REASON else 0.0


def is_separable(difference: Entry | None) -> bool:
    """Return whether a difference is significant: whether its confidence interval excludes 0.

    A difference without an interval counts as not significant.
    """
    if difference is None or difference["ci95"] is None:
        return False
    low, high = difference["ci95"]
    return bool(low > 0 or high < 0)


def _describe_fastest(best: Entry, remaining: Sequence[Entry], report: Report) -> str:
    """Return a sentence that names the fastest candidate, and the candidates that may be as fast.

    Args:
        best: the first candidate of the ranking.
        remaining: the other candidates of the ranking.
        report: the report of the first candidate.
    """
    # The first row is about the whole suite. `unsure` are the candidates that may be as fast as the
    # best one: their difference in speed is not significant.
    row = report["results"][0]
    unsure = [candidate["name"] for candidate in remaining if not candidate["separable_from_best"]]

    # The fastest draft may be slower than plain decoding, whose speedup is 1, or not separable from
    # it. Without an interval it counts as not separable.
    low, high = row.get("speedup_ci95", (0.0, math.inf))
    if high < 1:
        return (
            f"Plain decoding is faster than every draft: {best['name']}, the fastest of them,"
            f" reaches {format_gain(row)}."
        )
    speed = (
        f"{format_gain(row)}, which is not separable from plain decoding"
        if low <= 1
        else format_gain(row)
    )

    # Name the candidates, if any, that may be as fast as the best one.
    if not unsure:
        return f"{best['name']} is the fastest: {speed}."
    return (
        f"{best['name']} measured fastest, {speed}, but is not separable from"
        f" {' and '.join(unsure)}."
    )


def _describe_gap(candidate: Entry, best: Entry) -> Iterator[str]:
    """Say how much slower a candidate is than the best one, and why.

    The reason is either tokens per round (acceptance), or the cost of a round, or both.

    Args:
        candidate: the candidate, as the ranking lists it.
        best: the first candidate of the ranking.

    Yields:
        Sentences.
    """
    differences = candidate["difference_to_best"]
    name = candidate["name"]
    best_name = best["name"]

    # Phrase the two possible reasons, with the numbers of both candidates. `tokens` and `cost` are
    # relative differences; each is 0 if it is not significant.
    speed = differences["speedup"]
    tokens = select_shown_difference(differences["mean_acceptance_length"])
    cost = select_shown_difference(differences["round_cost"])
    tokens_phrase = (
        f"{name} yields {_choose_word(tokens, 'fewer')} tokens per round"
        f" ({_format_against(candidate, best, 'mean_acceptance_length')})"
    )
    cost_phrase = (
        f"a round costs {_choose_word(cost, 'less')}"
        f" ({_format_against(candidate, best, 'round_cost', ' plain steps')})"
    )

    # If the difference in speed is not significant, say so. Tokens or costs may differ
    # nevertheless.
    if not candidate["separable_from_best"]:
        direction = _name_direction(speed["change"])
        yield f"{name} is not separable from {best_name}: {direction}{_format_range(speed)}."
        if tokens and cost and (tokens > 0) == (cost > 0):
            yield f"Tokens and cost offset each other: {tokens_phrase}, and {cost_phrase}."
        elif tokens or cost:
            yield (
                f"It differs in that {tokens_phrase if tokens else cost_phrase}, but that does not"
                " show in the speed."
            )
        return

    # Otherwise say how large the gap is, and which of the two parts explains it.
    yield f"{name} is {_name_direction(speed['change'])} than {best_name}{_format_range(speed)}."

    cause = _find_main_cause(speed["change"], tokens, cost)
    if cause is None:
        yield "Neither the tokens per round nor the cost per round explain the difference."
        return
    # Give the numbers of each part that differs significantly.
    phrases = []
    if tokens:
        phrases.append(tokens_phrase)
    if cost:
        phrases.append(cost_phrase)
    yield f"The difference comes mainly from {cause}: {', and '.join(phrases)}."


def _find_main_cause(speed: float, tokens: float, cost: float) -> str | None:
    """Return whether acceptance, cost or both explain a difference in speed; None if neither does.

    Args:
        speed: the relative difference in speed.
        tokens: the relative difference in tokens per round; 0 if it is not significant.
        cost: the relative difference in the cost of a round; 0 if it is not significant.
    """
    # Speed is tokens / cost, so the logarithms of the relative changes add up: log(speed) =
    # log(tokens) - log(cost). If a part changes in the other direction, e.g. if the slower
    # candidate has more tokens per round, it explains nothing, and counts as 0.
    sign = -1 if speed < 0 else 1
    from_tokens = max(sign * math.log1p(tokens), 0.0)
    from_cost = max(-sign * math.log1p(cost), 0.0)
    if not (from_tokens or from_cost):
        return None

    # Name a part alone only if its share of the difference is large enough.
    share = from_tokens / (from_tokens + from_cost)
    if share >= MAIN_CAUSE_SHARE:
        return "acceptance"
    if share <= 1 - MAIN_CAUSE_SHARE:
        return "cost"
    return "both acceptance and cost"


def _describe_acceptance(candidate: Entry, best: Entry) -> Iterator[str]:
    """Say where a candidate accepts more or fewer tokens than the best one.

    Args:
        candidate: the candidate, as the ranking lists it.
        best: the first candidate of the ranking.

    Yields:
        Sentences; none if the tokens per round do not differ significantly.
    """
    differences = candidate["difference_to_best"]
    if not select_shown_difference(differences["mean_acceptance_length"]):
        return

    # A candidate may have more accepted tokens because it drafts more.
    if select_shown_difference(differences["drafted_per_round"]):
        drafted = format_number(candidate["parts"]["drafted_per_round"], 1)
        drafted_by_best = format_number(best["parts"]["drafted_per_round"], 1)
        yield (
            f"{candidate['name']} drafts {drafted} tokens per round,"
            f" {best['name']} {drafted_by_best}."
        )

    # Compare the acceptance rates. A later position is only reached if all draft tokens before it
    # were accepted.
    places = {
        "first_position_rate": "at the first position",
        "later_position_rate": "at later positions once they are reached",
    }
    phrases = []
    for rate, place in places.items():
        change = select_shown_difference(differences[rate])
        if change:
            rates = _format_against(candidate, best, rate, style=format_percent)
            phrases.append(f"{'more' if change > 0 else 'less'} {place} ({rates})")
    if phrases:
        yield f"{candidate['name']} accepts {' and '.join(phrases)}."


def _describe_cost(candidate: Entry, best: Entry, by_name: Mapping[str, Entry]) -> Iterator[str]:
    """Say whether drafting or verifying takes more or less time than with the best candidate.

    Args:
        candidate: the candidate, as the ranking lists it.
        best: the first candidate of the ranking.
        by_name: name -> the candidate with its report.

    Yields:
        Sentences; none if the costs of a round do not differ significantly.
    """
    differences = candidate["difference_to_best"]
    if not select_shown_difference(differences["round_cost"]):
        return

    # Find out which cost differs: that of drafting a token, or that of verifying.
    step = select_shown_difference(differences["draft_step"])
    verification = select_shown_difference(differences["verification"])
    if step:
        parts = candidate["parts"]
        best_parts = best["parts"]
        yield (
            f"A draft token of {candidate['name']} costs {format_number(parts['draft_step'], 3)}"
            f" plain steps against {format_number(best_parts['draft_step'], 3)}, and drafting takes"
            f" {format_percent(parts['draft_share'])} of a round against"
            f" {format_percent(best_parts['draft_share'])}."
        )
        size = by_name[candidate["name"]]["report"]["draft"]["parameters"]
        best_size = by_name[best["name"]]["report"]["draft"]["parameters"]
        # If the smaller of the two drafts costs more per draft token, size is not the reason. This
        # is so if the difference in parameters and the difference in cost have opposite signs.
        if (size - best_size) * step < 0:
            yield f"Size is not the reason: {size:,} parameters against {best_size:,}."
    if verification:
        yield (
            f"Verifying costs {_choose_word(verification, 'less')}"
            f" ({_format_against(candidate, best, 'verification', ' plain steps')})."
        )


def _name_direction(change: float) -> str:
    """Return a change of speed as text, e.g. 3.1% slower."""
    return f"{abs(change):.1%} {'slower' if change < 0 else 'faster'}"


def _format_range(difference: Entry) -> str:
    """Return the confidence interval of a difference as text, e.g. ` (−3.1% to +0.2%)`.

    The text is put at the end of a sentence. Without an interval it names the reason: too few
    prompts.
    """
    if difference["ci95"] is None:
        return ", with too few prompts for an interval"
    low, high = difference["ci95"]
    return f" ({format_signed(low)} to {format_signed(high)})"


def _choose_word(change: float, less: str) -> str:
    """Return a change as text, e.g. 3.1% more; `less` is the word for a decrease."""
    return f"{abs(change):.1%} {'more' if change > 0 else less}"


def _format_against(
    candidate: Entry,
    best: Entry,
    part: str,
    unit: str = "",
    *,
    style: Callable[[float | None], str] = format_number,
) -> str:
    """Return as text a number of a candidate and of the best one, e.g. 2.31 against 2.52.

    Args:
        candidate: the candidate, as the ranking lists it.
        best: the first candidate of the ranking.
        part: the name of the number: a key of PARTS.
        unit: text after the candidate's number.
        style: the function that formats a number.
    """
    return f"{style(candidate['parts'][part])}{unit} against {style(best['parts'][part])}"
