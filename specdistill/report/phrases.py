"""What a report says in words, the same in every format: the verdict, sentences, and the names of rows, rules and settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.report.numbers import between, counted, number, times
from specdistill.statistics.records import ALL

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def title(report: Report) -> str:
    return f"{report['draft']['method']} draft for {report['target']['model']}"


def verdict(report: Report) -> str:
    gate = report["gate"]
    if not gate["rules"]:
        return "Not judged"
    return "Passed" if gate["passed"] else "Failed"


def summary(report: Report) -> str:
    """One sentence: the speedup, how sure it is, and whether the output is the target's."""
    row, lossless = report["results"][0], report["lossless"]
    checked = f"{lossless['prompts_checked']} greedy completions"
    if not lossless["prompts_checked"]:
        same = "no completion compared with plain decoding"
    elif lossless["greedy_identical"]:
        same = f"all {checked} identical to plain decoding"
    elif lossless.get("unexplained_divergences") == 0:
        same = f"{checked} equal to plain decoding up to {lossless['near_ties']} near-ties"
    else:
        same = f"{lossless['divergences']} of {checked} DIFFERENT from plain decoding"
    if "speedup" in row:
        gain = f"{times(row['speedup'])} the speed of plain decoding{between(row, 'speedup')}"
    else:
        gain = f"Speed not measured ({reason(row, 'speedup')})"
    return f"{gain}, {same}."


def losslessness(report: Report) -> tuple[str, str]:
    """What the greedy comparison and the sampling test found, or why there was none."""
    lossless, absent = report["lossless"], report["not_measured"]
    greedy, first = f"not compared ({absent.get('lossless.greedy_identical')})", lossless.get("first_divergence")
    if lossless["prompts_checked"]:
        ties = (
            f"{lossless['near_ties']} of them"
            if "near_ties" in lossless
            else f"number unknown ({absent['lossless.near_ties']})"
        )
        differ = f"{lossless['divergences']} differ (at near-ties of the target's top two logits: {ties})"
        same = "all identical" if lossless["greedy_identical"] else differ
        greedy = f"{lossless['prompts_checked']} completions compared token for token with plain decoding, {same}"
        if first:
            gap = f" (gap {first['top2_gap']:.4f})" if "top2_gap" in first else ""
            greedy += f"; the first is {first['prompt_id']} at token {first.get('position', '–')}{gap}"
    sampled = f"not measured ({absent.get('lossless.sampling_test')})"
    if test := lossless.get("sampling_test"):
        sampled = (
            f"chi-square test that {test['num_draws']} continuations of two tokens with the draft and without follow one distribution, "
            f"p = {test['p_value']:.3g}; for a rule that is wrong on purpose, p = {test['negative_control_p_value']:.1g}"
        )
    return f"Greedy: {greedy}.", f"Sampled: {sampled}."


def failed_rules(report: Report) -> str:
    """Which rules failed the gate; empty without any."""
    rules = report["gate"]["rules"]
    failed = [rule["metric"] for rule in rules if outcome(rule) == "failed"]
    return f"{len(failed)} of {len(rules)} rules failed: {', '.join(dict.fromkeys(failed))}." if failed else ""


def reason(row: Row, name: str) -> str:
    """Why a number is absent; empty when it is present."""
    return "" if name in row else row["not_measured"].get(name, "not measured")


def absences(row: Row, names: Sequence[str]) -> str:
    """Which of `names` were not measured, grouped by reason; empty without any."""
    absent: dict[str, list[str]] = {}
    for name in names:
        if why := reason(row, name):
            absent.setdefault(why, []).append(name.replace("_ms", "").replace("_", " "))
    groups = "; ".join(f"{', '.join(group)} ({why})" for why, group in absent.items())
    return f"Not measured: {groups}." if groups else ""


def other_speeds(row: Row) -> str:
    """Tokens a second of plain decoding and of transformers' `generate()`."""
    names = {"baseline_tokens_per_second": "plain", "hf_generate_tokens_per_second": "transformers"}
    return ", ".join(f"{name} {number(row[metric], 0)}" for metric, name in names.items() if metric in row)


def averages(report: Report) -> list[str]:
    """The macro- and the micro-average of acceptance length and speedup, each with how it was averaged."""
    headline = report["headline"]
    return [
        f"{average['average']}: acceptance length {number(average.get('mean_acceptance_length'))}"
        f"{between(average, 'mean_acceptance_length')}, speedup {times(average.get('speedup'))}{between(average, 'speedup')}"
        for average in (headline, headline.get("micro"))
        if average
    ]


def row_name(row: Row) -> str:
    return f"all of {row['suite']}" if row["category"] == ALL else row["category"].replace("_", " ")


def configuration_name(row: Row) -> str:
    """How a row was measured, as: simulated, K = 4, greedy, batch 1."""
    parts = [row["suite"], f"K = {row['num_speculative_tokens']}"]
    if row.get("tree"):
        parts.append(tree(row["tree"]))
    parts += [_sampling(row["temperature"]), f"batch {row['batch_size']}"]
    return ", ".join(parts if row["context_bucket"] == ALL else [*parts, f"prompts cut to {row['context_bucket']} tokens"])


def tree(settings: Mapping[str, Any]) -> str:
    """The shape of drafted trees, as: tree of 24 tokens, 6 deep, top 4; or: tree with branching 4, 2, 1."""
    if "branching" in settings:
        return f"tree with branching {', '.join(map(str, settings['branching']))}"
    return f"tree of {settings['budget']} tokens, {settings['depth']} deep, top {settings['top_k']}"


def a_round(row: Row) -> str:
    """Tokens per round, where rounds without a draft make it differ from the acceptance length; else empty."""
    differs = row["num_drafts"] != row.get("num_rounds", row["num_drafts"])
    return f"{number(row['tokens_per_round'])} a round" if differs and "tokens_per_round" in row else ""


# Rules


def requirement(rule: Mapping[str, Any]) -> str:
    ((kind, threshold),) = rule["requirement"].items()
    sign = {"min": "≥", "max": "≤", "equals": "=", "max_regression": "regression ≤"}[kind]
    shown = str(threshold).lower() if isinstance(threshold, bool) else threshold
    return f"{sign} {shown:g}" if isinstance(shown, float) else f"{sign} {shown}"


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
    return "warning" if rule["severity"] == "warn" else "failed"


# Since a baseline


def direction(change: Mapping[str, Any]) -> str:
    """better or worse where the interval of a change excludes 0, else open."""
    low, high = change.get("ci95", (0.0, 0.0))
    if low <= 0 <= high:
        return "open"
    return "better" if (low > 0) == (change["better"] == "higher") else "worse"


def since(report: Mapping[str, Any]) -> str:
    """What the report was compared with, how many numbers changed, and which regressions the gate does not allow."""
    baseline = report["baseline"]
    draft = baseline["draft"]
    name = "@".join(filter(None, (draft["model"] or draft["method"], draft["revision"])))
    intro = f"Compared with {name}, measured {baseline['created'][:10]}"
    if "reason" in baseline:
        return f"{intro}: not comparable ({baseline['reason']})."
    directions = [direction(change) for change in baseline["changes"] if "ci95" in change]
    better, worse, still = (directions.count(name) for name in ("better", "worse", "open"))
    refused = [
        rule["metric"]
        for rule in report["gate"]["rules"]
        if "max_regression" in rule["requirement"] and rule["value"] is not None and outcome(rule) == "failed"
    ]
    gate = f" Regressions that the gate does not allow: {', '.join(refused)}." if refused else ""
    return (
        f"{intro}, {len(directions)} numbers prompt by prompt: {better} better, {worse} worse, {still} open "
        f"(the 95 % interval includes 0).{gate}"
    )


# How it was measured


def settings_line(report: Report) -> str:
    """The settings in short: those that a comparison shares, the engine, and how drafts are proposed."""
    settings, parts = report["settings"], [shared_settings(report)]
    if not _is_specdistill(report):
        parts.append(f"{report['engine']['name']} {report['engine']['version']}")
    if settings["tree"] is not None:
        parts.append(tree(settings["tree"]))
    if settings["batch_size"] > 1:
        parts.append(f"batches of {settings['batch_size']}")
    if settings.get("drafting"):
        parts.append(f"drafting: {_listed(settings['drafting'])}")
    return " · ".join(parts)


def shared_settings(report: Report) -> str:
    """The part of the settings that all drafts of a comparison have in common."""
    settings = report["settings"]
    parts = (
        f"K = {settings['num_speculative_tokens']}",
        _sampling(settings["temperature"]),
        f"suite {report['suite']['name']}",
    )
    return " · ".join((*parts, report["hardware"]["name"]))


def decoding(settings: Mapping[str, Any]) -> str:
    """All settings that are a single value; the others are in `settings_line`."""
    return _listed({name: value for name, value in settings.items() if not isinstance(value, Mapping)})


def procedure(report: Report) -> str:
    """How the numbers were measured, in sentences."""
    settings = report["settings"]
    size = settings["batch_size"]
    if _is_specdistill(report) or report["engine"].get("baseline_server"):
        decoder = "the same decoder" if _is_specdistill(report) else "a server of the same engine"
        sides, baseline = "with and without the draft, interleaved", f"The baseline is {decoder} without a draft."
    else:
        sides, baseline = "with the draft", "There is no baseline."
    times_, warmup = counted(settings["repeats"], "time"), "warm-up prompt" if size == 1 else "warm-up batch"
    batches = f" They were decoded {size} at a time; a prompt's times are its shares of its batch's." if size > 1 else ""
    return (
        f"Every prompt was decoded {sides}, {times_} after {counted(settings['warmup'], warmup)}; the median of each prompt counts."
        f"{batches} {baseline}"
    )


def _is_specdistill(report: Report) -> bool:
    """Whether this package decoded, not an inference engine."""
    return "engine" not in report or report["engine"]["name"] == "specdistill"


def _sampling(temperature: float) -> str:
    return f"T = {temperature:g}" if temperature else "greedy"


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if value is not None)
