"""How a report says things: the same words and roundings in every format."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def title(report: Mapping[str, Any]) -> str:
    return f"{report['draft']['method']} draft for {report['target']['model']}"


def verdict(report: Mapping[str, Any]) -> str:
    gate = report["gate"]
    if not gate["rules"]:
        return "Not judged"
    return "Passed" if gate["passed"] else "Failed"


def summary(report: Mapping[str, Any]) -> str:
    """One sentence: what the draft gains, how sure that is, and whether the text stays the same."""
    row, lossless = report["results"][0], report["lossless"]
    texts = f"{lossless['prompts_checked']} greedy texts"
    if not lossless["prompts_checked"]:
        same = "no text compared with plain decoding"
    elif lossless["greedy_identical"]:
        same = f"all {texts} identical to plain decoding"
    elif lossless.get("unexplained_divergences") == 0:
        same = f"{texts} equal to plain decoding up to {lossless['near_ties']} near-ties"
    else:
        same = f"{lossless['divergences']} of {texts} DIFFERENT from plain decoding"
    if "speedup" in row:
        gain = f"{times(row['speedup'])} the speed of plain decoding{between(row, 'speedup')}"
    else:
        gain = f"Speed not measured ({reason(row, 'speedup')})"
    return f"{gain}, {same}."


def greedy_texts(report: Mapping[str, Any]) -> str:
    """How many greedy texts were compared with plain decoding, and how many differ."""
    lossless, absent = report["lossless"], report["not_measured"]
    if not lossless["prompts_checked"]:
        return f"not compared ({absent['lossless.greedy_identical']})"
    ties = f"{lossless['near_ties']} at near-ties" if "near_ties" in lossless else absent["lossless.near_ties"]
    return f"{lossless['prompts_checked']} texts, {lossless['divergences']} differ, {ties}"


def failed_rules(report: Mapping[str, Any]) -> str:
    """Which rules decided against the draft; empty when none did."""
    failed = [rule["metric"] for rule in report["gate"]["rules"] if outcome(rule) == "failed"]
    return (
        f"{len(failed)} of {len(report['gate']['rules'])} rules failed: {', '.join(dict.fromkeys(failed))}." if failed else ""
    )


def between(row: Mapping[str, Any], name: str, digits: int = 2) -> str:
    ends = row.get(f"{name}_ci95")
    return f" ({ends[0]:.{digits}f} to {ends[1]:.{digits}f})" if ends else ""


def ends(row: Mapping[str, Any], name: str) -> str:
    """The interval as 1.43 to 1.65; empty where there is none."""
    return between(row, name).strip(" ()")


def reason(row: Mapping[str, Any], name: str) -> str:
    """Why a number is absent; empty when it is there."""
    return "" if name in row else row["not_measured"].get(name, "not measured")


def absences(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """What of `names` was not measured, with the reasons: equal reasons are said once."""
    absent: dict[str, list[str]] = {}
    for name in names:
        if why := reason(row, name):
            absent.setdefault(why, []).append(name.replace("_ms", "").replace("_", " "))
    return "; ".join(f"{', '.join(which)} ({why})" for why, which in absent.items())


def other_speeds(row: Mapping[str, Any]) -> str:
    """What the tokens a second are to be seen beside."""
    names = {"baseline_tokens_per_second": "plain", "hf_generate_tokens_per_second": "transformers"}
    return ", ".join(f"{shown} {number(row[name], 0)}" for name, shown in names.items() if name in row)


def changed(entry: Mapping[str, Any]) -> dict[str, str]:
    """A change since the baseline in words: what, old, new, change, interval, and its outcome, better, worse or open."""
    name, shown = SHOWN[entry["metric"]]
    low, high = entry.get("ci95", (0.0, 0.0))
    sign = 1 if entry["better"] == "higher" else -1
    return {
        "what": name if entry["category"] == "all" else f"{name}, {entry['category'].replace('_', ' ')}",
        "old": shown(entry.get("old")),
        "new": shown(entry.get("new")),
        "change": signed(entry["change"]) if "change" in entry else "–",
        "ci95": f"{signed(low)} to {signed(high)}" if "ci95" in entry else entry.get("reason", ""),
        "outcome": "open" if low <= 0 <= high else "better" if sign * low > 0 else "worse",
    }


def since(report: Mapping[str, Any]) -> str:
    """Beside which draft, how many numbers moved for sure, and which regressions the gate refuses."""
    baseline = report["baseline"]
    draft = baseline["draft"]
    name = "@".join(filter(None, (draft["model"] or draft["method"], draft["revision"])))
    before = f"Beside {name}, measured {baseline['created'][:10]}"
    if "reason" in baseline:
        return f"{before}: not comparable ({baseline['reason']})."
    outcomes = [changed(entry)["outcome"] for entry in baseline["changes"] if "ci95" in entry]
    better, worse, still = (outcomes.count(outcome) for outcome in ("better", "worse", "open"))
    counts = f"{better} better, {worse} worse, {still} within their 95 % intervals of no change"
    refused = [
        rule["metric"]
        for rule in report["gate"]["rules"]
        if "max_regression" in rule["requirement"] and rule["value"] is not None and outcome(rule) == "failed"
    ]
    gate = f" Regressions that the gate does not allow: {', '.join(refused)}." if refused else ""
    return f"{before}, {len(outcomes)} numbers compared prompt by prompt: {counts}.{gate}"


def row_name(row: Mapping[str, Any]) -> str:
    return f"all of {row['suite']}" if row["category"] == "all" else row["category"].replace("_", " ")


def macro_average(report: Mapping[str, Any]) -> str:
    """The numbers to quote, in which every category counts the same; empty where there are none."""
    headline = report["headline"]
    parts = [
        f"{name} {shown(headline[metric])}{between(headline, metric)}"
        for metric, name, shown in (("mean_acceptance_length", "acceptance length", number), ("speedup", "speedup", times))
        if metric in headline
    ]
    return f"Macro-average, every category counting the same: {', '.join(parts)}." if parts else ""


def configuration_name(row: Mapping[str, Any]) -> str:
    """How a row was measured, as: simulated, K = 4, greedy, batch 1."""
    parts = [row["suite"], f"K = {row['num_speculative_tokens']}"]
    if row.get("tree"):
        parts.append(tree(row["tree"]))
    parts.append(f"T = {row['temperature']:g}" if row["temperature"] else "greedy")
    parts.append(f"batch {row['batch_size']}")
    return ", ".join(parts if row["context_bucket"] == "all" else [*parts, f"prompts cut to {row['context_bucket']} tokens"])


def tree(settings: Mapping[str, Any]) -> str:
    """The shape of drafted trees, as: tree of 24 tokens, 6 deep, top 4; or: tree that branches 4, 2, 1."""
    if "branching" in settings:
        return f"tree that branches {', '.join(map(str, settings['branching']))}"
    return f"tree of {settings['budget']} tokens, {settings['depth']} deep, top {settings['top_k']}"


def a_round(row: Mapping[str, Any]) -> str:
    """Tokens a round, where rounds that drafted nothing set it apart from the acceptance length; else empty."""
    differs = row["num_drafts"] != row.get("num_rounds", row["num_drafts"])
    return f"{number(row['tokens_per_round'])} a round" if differs and "tokens_per_round" in row else ""


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def signed(change: float) -> str:
    """A relative change, with a minus as wide as the plus."""
    return f"{change:+.1%}".replace("-", "−")


def counted(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def duration(seconds: float | None) -> str:
    """The two largest units that it fills, as 2 min 21 s."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(num_bytes: int) -> str:
    """Bytes in the largest of KiB, MiB and GiB that they fill."""
    if not num_bytes:
        return "none"
    unit, scale = next(
        ((unit, 2**power) for unit, power in (("GiB", 30), ("MiB", 20)) if num_bytes >= 2**power), ("KiB", 2**10)
    )
    return f"{num_bytes / scale:,.1f} {unit}"


def requirement(rule: Mapping[str, Any]) -> str:
    ((kind, threshold),) = rule["requirement"].items()
    shown = (
        str(threshold).lower()
        if isinstance(threshold, bool)
        else f"{threshold:g}"
        if isinstance(threshold, float)
        else threshold
    )
    return {"min": f"≥ {shown}", "max": f"≤ {shown}", "equals": f"= {shown}", "max_regression": f"regression ≤ {shown}"}[kind]


def scope(rule: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in rule["scope"].values()) or "all"


def measured(rule: Mapping[str, Any]) -> str:
    value = rule["value"]
    if value is None:
        return "no evidence"
    if isinstance(value, bool):
        return str(value).lower()
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{shown} ({rule['ci95'][0]:.3g} to {rule['ci95'][1]:.3g})" if rule["ci95"] else shown


def outcome(rule: Mapping[str, Any]) -> str:
    if rule["passed"]:
        return "passed"
    return "alarm" if rule["severity"] == "warn" else "failed"


def settings_line(report: Mapping[str, Any]) -> str:
    """How it was measured, and what the method was told beyond that."""
    by = [] if _is_own(report) else [f"{report['engine']['name']} {report['engine']['version']}"]
    return " · ".join([shared_settings(report), *by, *_draft_settings(report["settings"])])


def _is_own(report: Mapping[str, Any]) -> bool:
    """Whether this package decoded, not an inference engine."""
    return "engine" not in report or report["engine"]["name"] == "specdistill"


def procedure(report: Mapping[str, Any]) -> str:
    """How the numbers came about, in sentences."""
    settings = report["settings"]
    size = settings["batch_size"]
    together = f" They were decoded {size} at a time; a text's times are its shares of its batch." if size > 1 else ""
    if not _is_own(report) and not report["engine"].get("baseline_server"):
        sides, baseline = "with the draft", "There is no baseline."
    else:
        decoder = "the same decoder" if _is_own(report) else "a server of the same engine"
        sides, baseline = "with and without the draft, interleaved", f"The baseline is {decoder} without a draft."
    return (
        f"Every prompt was decoded {sides}, {counted(settings['repeats'], 'time')} after "
        f"{counted(settings['warmup'], 'warm-up prompt' if size == 1 else 'warm-up batch')}; medians per prompt count.{together} {baseline}"
    )


def decoding(settings: Mapping[str, Any]) -> str:
    """The settings that are one word or number each; the others are in `settings_line`."""
    plain = {name: value for name, value in settings.items() if value is not None and not isinstance(value, Mapping)}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items())


def quality(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the texts are worth with the draft and without, a line for each metric."""
    lines = []
    for name, entry in report.get("quality", {}).items():
        low, high = entry.get("difference_ci95", (0.0, 0.0))  # both unsaid where there is no interval
        points = [f"{100 * value:+.1f}".replace("-", "−") for value in (entry["difference"], low, high)]
        lines.append(
            {
                "name": name.replace("_", " "),
                "texts": str(entry["num_prompts"]),
                "without": f"{entry['without_draft']:.1%}",
                "with": f"{entry['with_draft']:.1%}",
                "difference": points[0],
                "ci95": f"{points[1]} to {points[2]}" if "difference_ci95" in entry else "too few texts",
                "outcome": _equality(entry),
                "single": f"{entry['only_with_draft']} with it alone, {entry['only_without_draft']} without it alone",
            }
        )
    return lines


def _equality(entry: Mapping[str, Any]) -> str:
    if "difference_ci95" not in entry:
        return "open"
    low, high = entry["difference_ci95"]
    return "equal within the interval" if low <= 0 <= high else "different"


def shared_settings(report: Mapping[str, Any]) -> str:
    """The part of the settings that all drafts of a comparison have in common."""
    settings, hardware = report["settings"], report["hardware"]
    sampling = "greedy" if not settings["temperature"] else f"T = {settings['temperature']:g}"
    return f"K = {settings['num_speculative_tokens']} · {sampling} · suite {report['suite']['name']} · {hardware['name']}"


def _draft_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings["tree"] is not None:
        yield tree(settings["tree"])
    if settings["batch_size"] > 1:
        yield f"batches of {settings['batch_size']}"
    drafting = settings.get("drafting", {})
    if drafting.get("confidence_threshold") is not None:
        yield f"drafting stops below probability {drafting['confidence_threshold']:g}"
    if drafting.get("draft_context") == "window":
        yield "the draft sees a window of the text"
    if "lookup" in drafting:
        lengths = f"{drafting['min']} to {drafting['max']}" if drafting["min"] < drafting["max"] else drafting["max"]
        yield f"n = {lengths}, looked up in {'the prompt' if drafting['lookup'] == 'prompt' else 'prompt and output'}"


# Of `changes.SHOWN`: what they are called, and how they are written.
SHOWN = {
    "mean_acceptance_length": ("acceptance length", number),
    "acceptance_rate": ("acceptance rate", percent),
    "speedup": ("speedup", times),
    "tokens_per_second": ("tokens a second", lambda value: number(value, 0)),
    "draft_ms": ("ms to draft a token", lambda value: number(value, 3)),
    "verify_ms": ("ms to verify a draft", lambda value: number(value, 3)),
}
