"""Why candidates differ, in sentences made by fixed rules from measured numbers.

Only differences whose paired 95 % interval excludes 0 are given as reasons.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specdistill.report.phrases import counted, gain, number, percent

MOSTLY = 2 / 3  # of the gap's logarithm: from this share on, the gap comes mostly from one part
MIN_REASON = 0.005  # a smaller relative difference is not given as a reason, however certain it is
FULL_COVERAGE = 0.9995  # rounds to 100 %

Entry = Mapping[str, Any]


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
    for name, candidate in by_name.items():
        covered = candidate["report"]["results"][0].get("vocabulary_coverage", 1.0)
        if covered < FULL_COVERAGE:
            part = f"covers {covered:.1%} of the target's tokens; it cannot propose the others"
            yield "coverage", f"The draft vocabulary of {name} {part}."
    yield from (("context", text) for text in _context(candidates))


def shown(difference: Mapping[str, Any] | None) -> float:
    """The relative difference, or 0 where its interval includes 0 or it is too small to be a reason."""
    change = float(difference["change"]) if difference and is_separable(difference) else 0.0
    return change if abs(change) >= MIN_REASON else 0.0


def is_separable(difference: Mapping[str, Any] | None) -> bool:
    """Whether a difference's interval excludes 0; without an interval nothing is separable."""
    low, high = (difference and difference["ci95"]) or (0.0, 0.0)
    return bool(low > 0 or high < 0)


def _fastest(best: Entry, others: Sequence[Entry], report: Mapping[str, Any]) -> str:
    row, unsure = report["results"][0], [other["name"] for other in others if not other["separable_from_best"]]
    low, high = row.get("speedup_ci95", (0.0, math.inf))
    sign = "slower than" if high < 1 else "not separable from" if low <= 1 else ""
    speed = f"{gain(row)}, which is {sign} plain decoding" if sign else gain(row)
    if not unsure:
        return f"{best['name']} is the fastest: {speed}."
    verb = "is" if len(unsure) == 1 else "are"
    return f"{best['name']} measured fastest, {speed}, but {_listed(unsure)} {verb} not separable from it."


def _gap(other: Entry, best: Entry) -> Iterator[str]:
    """How much slower, and whether by fewer tokens a round or by costlier rounds."""
    differences = other["difference_to_best"]
    name, first, speed = other["name"], best["name"], differences["speedup"]
    tokens, cost = shown(differences["tokens_per_round"]), shown(differences["round_cost"])
    yields = f"a round yields {_more(tokens, 'fewer')} tokens ({_against(other, best, 'tokens_per_round')})"
    costs = f"a round costs {_more(cost, 'less')} ({_against(other, best, 'round_cost', ' plain steps')})"
    if not other["separable_from_best"]:
        yield f"{name} is not separable from {first}: {_direction(speed['change'])}{_range(speed)}."
        if tokens and cost and (tokens > 0) == (cost > 0):
            yield f"The two offset each other: {yields}, and {costs}."
        elif tokens or cost:
            yield f"It differs in that {yields if tokens else costs}, but that does not show in the speed."
        return
    yield f"{name} is {_direction(speed['change'])} than {first}{_range(speed)}."
    slower = -1 if speed["change"] < 0 else 1
    from_tokens, from_cost = max(slower * math.log1p(tokens), 0.0), max(-slower * math.log1p(cost), 0.0)
    if from_tokens and from_cost:
        share = from_tokens / (from_tokens + from_cost)
        mostly = "mostly from acceptance" if share >= MOSTLY else "mostly from cost"
        source = "from both sides" if 1 - MOSTLY < share < MOSTLY else mostly
        yield f"That comes {source}: {yields}, and {costs}."
    elif from_tokens:
        yield f"That comes from acceptance: {yields}{f', although {costs}' if cost else ''}."
    elif from_cost:
        yield f"That comes from cost: {costs}{f', although {yields}' if tokens else ''}."
    else:
        yield "Neither the tokens of a round nor its cost explain that."


def _acceptance(other: Entry, best: Entry) -> Iterator[str]:
    """At which positions tokens of a round are lost or gained; nothing unless the tokens of a round differ."""
    differences = other["difference_to_best"]
    if not shown(differences["tokens_per_round"]):
        return
    if shown(differences["drafted_per_round"]):
        mine, theirs = (number(entry["parts"]["drafted_per_round"], 1) for entry in (other, best))
        yield f"{other['name']} drafts {mine} tokens a round, {best['name']} {theirs}."
    first, later = shown(differences["first_position_rate"]), shown(differences["later_position_rate"])
    at_first = f"at the first position ({_against(other, best, 'first_position_rate', style=percent)})"
    after = f"at later positions once they are reached ({_against(other, best, 'later_position_rate', style=percent)})"
    if first and later:
        joint = "and" if (first > 0) == (later > 0) else f"but {_amount(later)}"
        yield f"It accepts {_amount(first)} {at_first} {joint} {after}."
    elif first:
        yield f"It accepts {_amount(first)} {at_first}; later positions are not separable."
    elif later:
        yield f"It accepts {_amount(later)} {after}; the first position is not separable."


def _cost(other: Entry, best: Entry, by_name: Mapping[str, Entry]) -> Iterator[str]:
    """Which step makes rounds costlier or cheaper, and how the drafts' sizes compare; nothing unless the costs of a round differ."""
    differences = other["difference_to_best"]
    if not shown(differences["round_cost"]):
        return
    step, verification = shown(differences["draft_step"]), shown(differences["verification"])
    if step:
        mine, theirs = (entry["parts"] for entry in (other, best))
        yield (
            f"A draft step of {other['name']} costs c = {number(mine['draft_step'], 3)} plain steps against "
            f"{number(theirs['draft_step'], 3)}, and drafting takes {percent(mine['draft_share'])} of a round against "
            f"{percent(theirs['draft_share'])}."
        )
        yield from _sizes(by_name[other["name"]], by_name[best["name"]], step)
    if verification:
        yield f"Verifying costs {_more(verification, 'less')} ({_against(other, best, 'verification', ' plain steps')})."


def _sizes(other: Entry, best: Entry, step: float) -> Iterator[str]:
    mine, theirs = (entry["report"]["draft"]["parameters"] for entry in (other, best))
    surprise = ", so size is not the reason" if (mine - theirs) * step < 0 else ""
    if mine != theirs or other["num_layers"] != best["num_layers"]:
        yield f"{_size(other)}, {_size(best)}{surprise}."


def _size(candidate: Entry) -> str:
    parameters, layers = candidate["report"]["draft"]["parameters"], candidate["num_layers"]
    depth = "" if layers is None else f"{counted(layers, 'layer')} and "
    units = {"billion": 1e9, "million": 1e6, "thousand": 1e3}
    count = next((f"{parameters / size:.3g} {unit}" for unit, size in units.items() if parameters >= size), str(parameters))
    return f"{candidate['name']} has {f'{depth}{count} parameters' if parameters else 'no weights'}"


def _context(candidates: Sequence[Entry]) -> Iterator[str]:
    rows = {candidate["name"]: candidate["report"]["results"][0] for candidate in candidates}
    unchanged, unknown = [], []
    for name, row in rows.items():
        ends = row.get("context_ratio_ci95")
        if ends is None:
            unknown.append(name)
        elif ends[0] <= 1 <= ends[1]:
            unchanged.append(name)
        else:
            ratio = f"{percent(row['context_ratio'])} of that in short ones ({' to '.join(map(percent, ends))})"
            yield f"In long contexts the acceptance length of {name} is {ratio}."
    if unchanged:
        yield f"No change of acceptance with the context is shown for {_listed(unchanged)}."
    if unknown:
        yield f"Too few drafts at long or short contexts for {_listed(unknown)}."


def _direction(change: float) -> str:
    return f"{_share(change)} {'slower' if change < 0 else 'faster'}"


def _range(difference: Mapping[str, Any]) -> str:
    """The interval in words, or that there is none."""
    if difference["ci95"] is None:
        return ", with too few prompts for an interval"
    low, high = difference["ci95"]
    if low > 0 or high < 0:
        near, far = sorted((abs(low), abs(high)))
        return f" ({_share(near)} to {_share(far)})"
    return f", in an interval from {_direction(low)} to {_direction(high)}" if low < 0 < high else ", no difference at all"


def _more(change: float, less: str) -> str:
    return f"{_share(change)} {'more' if change > 0 else less}"


def _amount(change: float) -> str:
    return "more" if change > 0 else "less"


def _against(other: Entry, best: Entry, part: str, unit: str = "", *, style: Callable[[float | None], str] = number) -> str:
    return f"{style(other['parts'][part])}{unit} against {style(best['parts'][part])}"


def _share(change: float) -> str:
    return f"{abs(change):.0%}" if abs(change) >= 0.0995 else f"{abs(change):.1%}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
