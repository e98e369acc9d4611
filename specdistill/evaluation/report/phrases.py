"""The words and numbers of a report, the same in every format.

These are the verdict, sentences, names of rows and rules, and `–` for None.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.common.progress import format_speed
from specdistill.evaluation.report.schema import ChangeDocument, RuleDocument
from specdistill.evaluation.statistics.records import ALL_PROMPTS

Report = dict[str, Any]  # as `ReportDocument` describes it
ResultRow = Mapping[str, Any]  # a row of a report's results: numbers by the names of metrics
Settings = Mapping[str, Any]  # the settings of a report
DEFAULT_CONFIDENCE = 0.95  # the confidence of a rule that states none
NO_EVIDENCE = "no evidence: "  # how the reason begins, if a rule failed without evidence
# The highest estimate of needed prompts that is written as a number. Above it, "more than 10,000"
# says enough.
MAX_ESTIMATED_PROMPTS = 10_000


def format_times(value: float | None) -> str:
    """Format a factor, e.g. 1.54×."""
    return "–" if value is None else f"{value:.2f}×"


def format_number(value: float | None, digits: int = 2) -> str:
    """Format a number with `digits` digits after the decimal point."""
    return "–" if value is None else f"{value:,.{digits}f}"


def format_percent(value: float | None) -> str:
    """Format a share as a whole percentage."""
    return "–" if value is None else f"{value:.0%}"


def format_signed(change: float) -> str:
    """Format a relative change, e.g. +3.1% or −3.1%, with a minus as wide as the plus."""
    return f"{change:+.1%}".replace("-", "−")


def format_interval(row: ResultRow, name: str) -> str:
    """Format the 95 % interval of a metric, e.g. 1.43 to 1.65; empty if there is none."""
    return " to ".join(f"{end:.2f}" for end in row.get(f"{name}_ci95") or ())


def format_bracketed_interval(row: ResultRow, name: str) -> str:
    """Return the 95 % interval of a metric in brackets, e.g. " (1.43 to 1.65)"; empty without one.

    The text is meant to follow the metric's value, so it begins with a space.

    Args:
        row: the row of the report.
        name: the name of the metric.
    """
    interval = format_interval(row, name)
    return f" ({interval})" if interval else ""


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1, e.g. "3 batches"."""
    # The plural of nouns in -ch has -es, as in batches.
    plural_ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural_ending}"


def format_duration(seconds: float | None) -> str:
    """Return a duration as text, e.g. "2 h 5 min", "2 min 21 s" or "4.2 s"; "–" for None."""
    # Below 9.95 s, which would be rounded to 10.0, one decimal is shown. Anything longer is rounded
    # to whole seconds.
    if seconds is None or seconds < 9.95:
        return "–" if seconds is None else f"{seconds:.1f} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {remaining_seconds} s" if minutes else f"{remaining_seconds} s"


def format_size(num_bytes: int) -> str:
    """Return a number of bytes as text in KiB, MiB or GiB, e.g. "1.5 GiB"; "none" for 0."""
    if not num_bytes:
        return "none"
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.1f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**10:,.1f} KiB"


def format_scalar(value: object) -> str:
    """Return a value as text: a float with four digits, a boolean as true or false."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


# For metrics that rules name: the title, the format of the value, the unit, and the factor that
# converts the value to that unit. Other metrics go by their names.
METRICS = {
    "mean_acceptance_length": ("acceptance length", ".2f", " tokens", 1),
    "acceptance_length_vllm": ("acceptance length by vLLM's counters", ".2f", " tokens", 1),
    "acceptance_rate": ("acceptance rate", ".3g", "%", 100),
    "speedup": ("speedup", ".2f", "×", 1),
    "tokens_per_second": ("tokens per second", ",.0f", "", 1),
    "draft_ms": ("time to draft a token", ".3f", " ms", 1),
    "verify_ms": ("time to verify a draft", ".3f", " ms", 1),
    "baseline_over_hf_generate": (
        "speed of plain decoding over transformers' generate()",
        ".2f",
        "×",
        1,
    ),
    "prediction_gap": ("gap between measured and predicted speedup", ".3g", "%", 100),
    "context_ratio": (
        "acceptance length at long contexts relative to shorter ones",
        ".3g",
        "%",
        100,
    ),
    "vocabulary_coverage": ("share of tokens that the draft can propose", ".3g", "%", 100),
    "lossless.greedy_identical": ("greedy completions are the target's", "", "", 1),
    "lossless.unexplained_divergences": (
        "greedy completions that are not the target's",
        ",d",
        "",
        1,
    ),
    "lossless.sampling_test.p_value": ("p-value of the sampling test", ".2g", "", 1),
    "lossless.sampling_test.negative_control_p_value": (
        "p-value of the sampling test on deliberately wrong verification",
        ".2g",
        "",
        1,
    ),
    "draft.bytes": ("size of the draft", ",.3g", " MB", 1e-6),
    "measurement.peak_memory_bytes": ("peak memory", ",.3g", " GB", 1e-9),
    "measurement.seconds": ("time of the measurement", ",.0f", " s", 1),
}


def format_in_unit(metric: str, value: Any, style: str = "") -> tuple[str, str]:
    """Return a metric's value as text, and its unit, e.g. ("1.54", "×").

    METRICS has for each metric its title, the format of its value, its unit, and the factor that
    converts the report's value to this unit (e.g. 100 for a percentage). The digits of a number of
    tokens per second depend on its size, so `format_speed` chooses them.

    Args:
        metric: the name of the metric.
        value: the value, in the unit of the report.
        style: a format specification that replaces the metric's own, e.g. ".3f"; empty: none.
    """
    if isinstance(value, bool | str) or metric not in METRICS:
        return format_scalar(value), ""
    if metric == "tokens_per_second" and not style:
        return format_speed(value), ""
    _, style_of_metric, unit, scale = METRICS[metric]
    return format(value * scale, style or style_of_metric), unit


def format_title(report: Report) -> str:
    """Return the title of a report, e.g. eagle3 draft for org/name."""
    return f"{report['draft']['method']} draft for {report['target']['model']}"


def format_verdict(report: Report) -> str:
    """Return the verdict of the gate as a title, or "Not judged"."""
    return (report["gate"]["verdict"] or "not judged").capitalize()


def format_summary(report: Report) -> str:
    """Say in one sentence how fast the draft is, and whether the output is the target's own.

    Args:
        report: the content of report.json. Its first row has the numbers of the whole suite.
    """
    row = report["results"][0]
    lossless = report["lossless"]
    completions = f"{lossless['prompts_checked']} greedy completions"
    reference = name_reference(report)

    # Say whether greedy completions with the draft are those of the reference. At a near-tie,
    # rounding decides between the target's two best tokens, so completions may differ there.
    if not lossless["prompts_checked"]:
        comparison = f"no completion compared with {reference}"
    elif lossless["greedy_identical"]:
        comparison = f"all {completions} identical to {reference}"
    elif lossless.get("unexplained_divergences") == 0:
        near_ties = lossless["near_ties"]
        comparison = f"{completions} equal to {reference} up to {near_ties} near-ties"
    else:
        comparison = f"{lossless['divergences']} of {completions} DIFFERENT from {reference}"

    # The sentence begins with the speedup, or with the reason why there is none.
    reason = describe_absence(row, "speedup")
    speed = f"Speed not measured ({reason})" if reason else format_gain(row)
    return f"{speed}, {comparison}."


def is_lossless(report: Report) -> bool | None:
    """Return whether greedy completions equal the target's; None if they were not compared.

    Completions may differ at near-ties, where rounding decides between the two best tokens.
    """
    # Count the differences that near-ties do not explain. A report without this count only says
    # whether all completions are identical.
    unexplained = report["lossless"].get("unexplained_divergences")
    return report["lossless"].get("greedy_identical") if unexplained is None else not unexplained


def name_reference(report: Report) -> str:
    """Name the program with whose completions those with the draft are compared."""
    return "transformers' generate()" if _is_specdistill(report) else "the server without a draft"


def format_gain(row: ResultRow) -> str:
    """Return a row's speedup as text, e.g. "1.54× the speed of plain decoding (1.43 to 1.65)"."""
    interval = format_bracketed_interval(row, "speedup")
    return f"{format_times(row['speedup'])} the speed of plain decoding{interval}"


def describe_losslessness(report: Report) -> tuple[str, str]:
    """Return two sentences about whether the output with a draft is the output of the target.

    The first one is about the comparison of greedy completions, the second one about the test of
    sampled tokens. If one of them was not made, the sentence gives the reason.
    """
    # Describe the completions that differ, if there are any. `first` is the first such completion.
    # Its `top2_gap` is the difference between the target's two best logits, at the first token that
    # differs.
    lossless = report["lossless"]
    reasons = report["not_measured"]
    differences = "all identical"
    first = lossless.get("first_divergence")
    if first:
        near_ties = (
            f"{lossless['near_ties']} of them"
            if "near_ties" in lossless
            else f"number unknown ({reasons.get('lossless.near_ties')})"
        )
        gap = f" (gap {first['top2_gap']:.4f})" if "top2_gap" in first else ""
        differences = (
            f"{lossless['divergences']} differ (at near-ties of the target's best logits:"
            f" {near_ties}); the first is {first['prompt_id']} at token"
            f" {first.get('position', '–')}{gap}"
        )

    # Describe the greedy comparison, if there was one.
    greedy = f"not compared ({reasons.get('lossless.greedy_identical')})"
    num_checked = lossless["prompts_checked"]
    if num_checked:
        greedy = (
            f"{num_checked} completions compared token for token with {name_reference(report)},"
            f" {differences}"
        )

    # Describe the sampling test, if there was one.
    sampled = f"not measured ({reasons.get('lossless.sampling_test')})"
    test = lossless.get("sampling_test")
    if test:
        sampled = (
            f"chi-square test that {test['num_draws']} continuations of two tokens follow"
            f" {name_reference(report)}, p = {test['p_value']:.3g}; for deliberately wrong"
            f" verification, which the test must detect, p = {test['negative_control_p_value']:.1g}"
        )
    return f"Greedy: {greedy}.", f"Sampled: {sampled}."


def format_about(count: int) -> str:
    """Return an estimated number of prompts as text, rounded up to two digits, e.g. "about 800"."""
    # The step is 10 for numbers of three digits, 100 for numbers of four digits, and so on.
    step = 10 ** max(0, len(str(count)) - 2)
    return (
        f"more than {MAX_ESTIMATED_PROMPTS:,}"
        if count > MAX_ESTIMATED_PROMPTS
        else f"about {math.ceil(count / step) * step:,}"
    )


def describe_undecided(report: Report) -> str:
    """Say which rules of the gate are undecided, and how many prompts could decide them.

    Args:
        report: the content of report.json. The text is empty if its verdict is not "inconclusive".
    """
    if report["gate"]["verdict"] != "inconclusive":
        return ""
    if report["settings"].get("quick"):
        return "A quick look cannot pass a gate: measure without quick=true."
    rules = [rule for rule in report["gate"]["rules"] if find_outcome(rule) == "inconclusive"]
    names = ", ".join(dict.fromkeys(map(name_metric, rules)))

    # `prompts_needed` is an estimate. If it is unknown (`needed` is then 0), or not above the
    # number of measured prompts, do not advise to measure more.
    estimates = [rule["prompts_needed"] for rule in rules]
    needed = 0 if None in estimates else max(estimates)
    if needed <= report["results"][0]["num_prompts"]:
        return f"The evidence cannot decide {names}."

    # Say how to get that many prompts: from this suite, if it has them, or from a larger one.
    suite = report["suite"]
    if needed > MAX_ESTIMATED_PROMPTS:
        advice = "the value is too close to the requirement"
    elif needed <= suite["num_prompts"]:
        advice = f"eval.num_prompts={needed}"
    else:
        advice = f"a suite with more than the {suite['num_prompts']} of {suite['name']}"
    return f"The evidence cannot decide {names}: {format_about(needed)} prompts could ({advice})."


def describe_failed_rules(report: Report) -> str:
    """Say which rules of the gate failed, or else which are undecided; empty if all passed."""
    rules = report["gate"]["rules"]
    failed_names = [name_metric(rule) for rule in rules if find_outcome(rule) == "failed"]
    return (
        f"{len(failed_names)} of {len(rules)} rules failed:"
        f" {', '.join(dict.fromkeys(failed_names))}."
        if failed_names
        else describe_undecided(report)
    )


def describe_absence(row: ResultRow, name: str) -> str:
    """Say why a number is absent; empty if it is present."""
    return "" if name in row else row["not_measured"].get(name, "not measured")


def describe_absences(row: ResultRow, names: Sequence[str]) -> str:
    """Say which metrics a row of the report lacks, and why; empty if it lacks none.

    An example is "Not measured: speedup, predicted speedup (nothing was drafted)."

    Args:
        row: the row of the report.
        names: the metrics to look for.
    """
    names_by_reason: dict[str, list[str]] = {}
    for name in names:
        reason = describe_absence(row, name)
        if reason:
            words = name.replace("_ms", "").replace("_", " ")
            names_by_reason.setdefault(reason, []).append(words)
    groups = "; ".join(
        f"{', '.join(group)} ({reason})" for reason, group in names_by_reason.items()
    )
    return f"Not measured: {groups}." if groups else ""


def format_other_speeds(row: ResultRow) -> str:
    """Return the speeds without the draft as text, in tokens per second.

    They are those of plain decoding and of transformers' `generate()`, as far as the row has them.
    """
    names = {"baseline_tokens_per_second": "plain", "hf_generate_tokens_per_second": "transformers"}
    return ", ".join(
        f"{name} {format_speed(row[metric])}" for metric, name in names.items() if metric in row
    )


def format_averages(report: Report) -> list[str]:
    """Return one line for each average of the acceptance length and the speedup.

    The macro-average counts each category of prompts the same, the micro-average counts each round
    the same. A line begins with the kind of average. Averages that the report lacks are left out.
    """
    headline = report["headline"]
    return [
        f"{row['average']}: acceptance length"
        f" {format_number(row.get('mean_acceptance_length'))}"
        f"{format_bracketed_interval(row, 'mean_acceptance_length')},"
        f" speedup {format_times(row.get('speedup'))}{format_bracketed_interval(row, 'speedup')}"
        for row in (headline, headline.get("micro"))
        if row
    ]


def name_row(row: ResultRow) -> str:
    """Return the name of a result row: its category, or "all of SUITE" for the whole suite."""
    return (
        f"all of {row['suite']}"
        if row["category"] == ALL_PROMPTS
        else row["category"].replace("_", " ")
    )


def name_configuration(row: ResultRow) -> str:
    """Return how a row of the report was measured, in words, e.g. "SUITE, K = 4, greedy, batch 1".

    Parts that do not apply, such as a tree, are left out.
    """
    # ALL_PROMPTS ("all") means that prompts were not cut to a length.
    context = ""
    if row["context_bucket"] != ALL_PROMPTS:
        context = f"prompts cut to {row['context_bucket']} tokens"
    parts = (
        row["suite"],
        f"K = {row['num_speculative_tokens']}",
        describe_tree(row.get("tree")),
        _format_sampling(row),
        f"batch {row['batch_size']}",
        context,
    )
    return ", ".join(filter(None, parts))


def describe_tree(settings: Settings | None) -> str:
    """Describe the shape of the trees that are drafted; empty for chains.

    A dynamic tree gives e.g. "tree of 24 tokens, 6 deep, top 4", and a static tree e.g. "tree with
    branching 4, 2, 1": the number of children at each level.

    Args:
        settings: the settings of the tree; None for chains.
    """
    if not settings:
        return ""
    if "branching" in settings:
        return f"tree with branching {', '.join(map(str, settings['branching']))}"
    return f"tree of {settings['budget']} tokens, {settings['depth']} deep, top {settings['top_k']}"


def format_acceptance_length(row: ResultRow) -> str:
    """Return the acceptance length of a row as text, with its interval; "–" if it has none.

    A server does not show its rounds. Then the acceptance length is that by vLLM's counters,
    1 + accepted tokens / drafts, and the text says so.
    """
    metric = "mean_acceptance_length"
    source = ""
    if metric not in row and "acceptance_length_vllm" in row:
        metric = "acceptance_length_vllm"
        source = " by vLLM's counters"
    return f"{format_number(row.get(metric))}{format_bracketed_interval(row, metric)}{source}"


def format_per_position(row: ResultRow) -> str:
    """Format the acceptance rate at each position in the draft."""
    return "  ".join(map(format_percent, row.get("acceptance_rate_per_position", []))) or "–"


def name_metric(rule: RuleDocument) -> str:
    """Return the metric that a rule of the gate tests, in words, e.g. "acceptance length"."""
    # METRICS has the titles of some metrics. Other metrics are called by their key.
    metric = rule["metric"]
    return METRICS[metric][0] if metric in METRICS else metric.replace("_", " ").replace(".", " ")


def format_requirement(rule: RuleDocument) -> str:
    """Return the requirement of a rule of the gate as text, e.g. "≥ 1.2×" or "loss ≤ 5%"."""
    # A requirement is a dictionary of one entry, kind -> threshold. The kind max_regression limits
    # the loss against an earlier report. The format `,.10g` shows up to ten digits of a threshold,
    # where the metric's own format would round it.
    ((kind, threshold),) = rule["requirement"].items()
    sign = {"min": "≥", "max": "≤", "equals": "=", "max_regression": "loss ≤"}[kind]
    if kind == "max_regression":
        return f"{sign} {100 * threshold:.3g}%"
    return f"{sign} {''.join(format_in_unit(rule['metric'], threshold, ',.10g'))}"


def format_scope(rule: RuleDocument) -> str:
    """Format the scope of a rule, the rows that it tests; "all" for the whole suite."""
    return ", ".join(map(str, rule["scope"].values())) or "all"


def identify_rule(rule: RuleDocument) -> str:
    """Return an id of a rule of the gate, e.g. "speedup.min[category=chat]".

    CI systems follow a test case by its id over time. So the id does not contain the threshold, and
    stays the same when the threshold changes.
    """
    # Two rules may differ only in their scope (the rows of the report that the rule tests) or in
    # their confidence, so the id contains these.
    (kind,) = rule["requirement"]
    scope = ",".join(f"{name}={value}" for name, value in rule["scope"].items())
    confidence = "" if rule["confidence"] == DEFAULT_CONFIDENCE else f"@{rule['confidence']:g}"
    return f"{rule['metric']}.{kind}{f'[{scope}]' if scope else ''}{confidence}"


def name_rule(rule: RuleDocument) -> str:
    """Return a rule of the gate as text, e.g. "speedup ≥ 1.2× [chat]".

    The brackets have the scope: which rows of the report the rule tests.
    """
    return f"{name_metric(rule)} {format_requirement(rule)}" + (
        f" [{format_scope(rule)}]" if rule["scope"] else ""
    )


def format_measured(rule: RuleDocument) -> str:
    """Return the value that a rule of the gate tests, as text, e.g. "1.54× (1.43 to 1.65)".

    The brackets have the confidence interval. "no evidence" if the value was not measured.
    """
    if rule["value"] is None:
        return "no evidence"

    # Convert the value and both ends of its interval to text. A rule that limits a loss tests a
    # change against an earlier report, which is a signed percentage.
    is_change = "max_regression" in rule["requirement"]
    texts = []
    unit = ""
    for value in (rule["value"], *(rule["ci95"] or ())):
        if is_change:
            text = format_signed(value)
        else:
            text, unit = format_in_unit(rule["metric"], value)
        texts.append(text)
    value_text, *ends = texts
    interval = f" ({' to '.join(ends)})" if ends else ""
    return f"{value_text}{unit}{interval}"


def note(rule: RuleDocument) -> str:
    """Return a short remark about a rule of the gate that did not pass; empty if it passed.

    The remark says why there is no evidence, or else how many prompts could decide the rule, and
    the confidence of the test unless it is the usual one. A confidence of 0, at which a rule tests
    the value itself without an interval, is not mentioned, either.
    """
    if rule["passed"]:
        return ""
    if rule["reason"].startswith(NO_EVIDENCE):
        return rule["reason"].removeprefix(NO_EVIDENCE)
    is_usual_confidence = rule["confidence"] in (0, DEFAULT_CONFIDENCE)
    confidence = "" if is_usual_confidence else f"at {rule['confidence']:.0%} confidence"
    needed = rule["prompts_needed"]
    prompts = f"{format_about(needed)} prompts could decide" if needed else ""
    return " ".join(filter(None, (prompts, confidence)))


def format_evidence(rule: RuleDocument) -> str:
    """Return the measured value of a rule of the gate as text.

    If the rule did not pass, a remark follows, e.g. how many prompts could decide it.
    """
    remark = note(rule)
    return f"{format_measured(rule)}; {remark}" if remark else format_measured(rule)


def list_warnings(report: Report) -> list[str]:
    """Return a sentence for each rule that did not pass and only warns, so the gate may still pass.

    An example is "Warning: speedup ≥ 1.2× is not reached: measured 1.1× (1.0 to 1.15)."
    """
    warnings = []
    for rule in report["gate"]["rules"]:
        if find_outcome(rule) != "warning":
            continue
        ending = "is not reached" if rule["verdict"] == "failed" else "is undecided"
        if rule["reason"].startswith(NO_EVIDENCE):
            ending = "cannot be judged"
        measured = "" if rule["value"] is None else "measured "
        warnings.append(f"Warning: {name_rule(rule)} {ending}: {measured}{format_evidence(rule)}.")
    return warnings


def find_outcome(rule: RuleDocument) -> str:
    """Return the verdict of a rule, or `warning` for a rule that only warns and did not pass."""
    return "warning" if rule["severity"] == "warn" and not rule["passed"] else str(rule["verdict"])


def find_direction(change: ChangeDocument) -> str:
    """Return whether a change against an earlier report is "better", "worse" or "open".

    It is open if its confidence interval includes 0, or if it has no interval.
    """
    # A change without an interval gets one that includes 0.
    low, high = change.get("ci95", (0.0, 0.0))
    if low <= 0 <= high:
        return "open"

    # Now the whole interval lies above 0 (a rise) or below 0 (a fall).
    is_rise = low > 0
    should_rise = change["better"] == "higher"
    return "better" if is_rise == should_rise else "worse"


def describe_baseline(report: Report) -> str:
    """Say with which earlier report a report was compared, and how many numbers changed.

    Args:
        report: the content of report.json. Its section `baseline` has the comparison: the draft of
            the earlier report, and the changes, or the reason why the two cannot be compared.
    """
    # The first ten characters of `created` are the date.
    baseline = report["baseline"]
    draft = baseline["draft"]
    name = "@".join(filter(None, (draft["model"] or draft["method"], draft["revision"])))
    intro = f"Compared with {name}, measured {baseline['created'][:10]}"
    if "reason" in baseline:
        return f"{intro}: not comparable ({baseline['reason']})."

    # Count the changes by direction.
    directions = [find_direction(change) for change in baseline["changes"] if "ci95" in change]
    return (
        f"{intro}, {len(directions)} numbers prompt by prompt: {directions.count('better')} better,"
        f" {directions.count('worse')} worse, {directions.count('open')} open (the 95 % interval"
        " includes 0)."
    )


def lookup_first(settings: Settings) -> str:
    """Describe the lookup in front of the draft; empty if the report was measured without one.

    In each round, the lookup searches the text so far for an earlier occurrence of its last tokens,
    and proposes what followed. If it finds nothing, the draft proposes: a tree (`draft_tree`), or a
    chain of `draft_tokens` tokens. For example, "ngram lookup of 2 to 5 tokens first, behind it a
    chain of 3" means that the last 2 to 5 tokens are searched for.

    Args:
        settings: the section `settings` of the report.
    """
    lookup = settings.get("drafting", {}).get("lookup_first")
    if not lookup:
        return ""
    proposal = (
        f"a {describe_tree(lookup['draft_tree'])}"
        if "draft_tree" in lookup
        else f"a chain of {lookup['draft_tokens']}"
    )
    return (
        f"{lookup['method']} lookup of {lookup['min']} to {lookup['max']} tokens first, behind it"
        f" {proposal}"
    )


def describe_shape(settings: Settings) -> str:
    """Describe the lookup in front of the draft, or else the draft's tree; empty for a chain."""
    return lookup_first(settings) or describe_tree(settings["tree"])


def format_settings(report: Report) -> str:
    """Return the main settings of a report in one line.

    These are K, the sampling, the suite, the machine, the engine, and how drafts are proposed.

    Args:
        report: the content of report.json.
    """
    # Name the engine, if it is not this package, and the number of sequences at once (for a server:
    # requests).
    settings = report["settings"]
    engine = (
        ""
        if _is_specdistill(report)
        else f"{report['engine']['name']} {report['engine']['version']}"
    )
    size = settings["batch_size"]
    batch_text = "batches of {}" if _is_specdistill(report) else "{} requests in flight"
    batches = batch_text.format(size) if size > 1 else ""

    # Describe the drafting beyond K: the proposer's own settings, and a lookup.
    proposer_settings = {
        name: value
        for name, value in settings.get("drafting", {}).items()
        if name != "lookup_first"
    }
    drafting = "; ".join(
        filter(None, (_describe_proposer(proposer_settings), lookup_first(settings)))
    )

    # Join the parts that are not empty.
    parts = (
        format_shared_settings(report),
        engine,
        describe_tree(settings["tree"]),
        batches,
        "compiled" if settings.get("compile") else "",
        drafting,
    )
    return " · ".join(filter(None, parts))


def _describe_proposer(settings: Settings) -> str:
    """Describe the settings of a draft, e.g. "drafting: block size 8"; empty if it has none.

    For n-gram lookup, the text is e.g. "n-gram lookup (n = 1 to 3) in prompt and output". With the
    rule of an engine it is e.g. "n-gram lookup (rule vllm, n = 1 to 3) in prompt and output".

    Args:
        settings: the settings, without those of a lookup in front of the draft.
    """
    if not settings:
        return ""

    # The names of the settings tell whether this is n-gram lookup. It has `min` and `max`, maybe
    # `rule` or `lookup`, and nothing else. (Suffix lookup has `min` and `max`, and other settings.)
    has_min_and_max = {"min", "max"} <= settings.keys()
    is_ngram_lookup = has_min_and_max and settings.keys() <= {"min", "max", "rule", "lookup"}
    if not is_ngram_lookup:
        return f"drafting: {_format_listed(settings)}"

    # The rule of llama.cpp only looks up n-grams of `max` tokens, whatever `min` is.
    rule = settings.get("rule")
    is_one_length = settings["min"] == settings["max"] or rule == "llama.cpp"
    lengths = (
        f"n = {settings['max']}" if is_one_length else f"n = {settings['min']} to {settings['max']}"
    )
    details = f"rule {rule}, {lengths}" if rule else lengths
    text = "the prompt" if settings.get("lookup") == "prompt" else "prompt and output"
    return f"n-gram lookup ({details}) in {text}"


def format_shared_settings(*reports: Report) -> str:
    """Return the settings that several compared reports have in common, in one line.

    These are the sampling, the suite and the machine. The line begins with K, which may differ: its
    smallest and largest value are given.

    Args:
        reports: the reports of a comparison, or a single one.
    """
    first, *_ = reports
    settings = first["settings"]
    suite = f"suite {first['suite']['name']}"
    values_of_k = sorted({report["settings"]["num_speculative_tokens"] for report in reports})
    k = (
        f"K = {values_of_k[0]}"
        if len(values_of_k) == 1
        else f"K = {values_of_k[0]} to {values_of_k[-1]}"
    )
    parts = (
        "quick look" if settings.get("quick") else "",
        k,
        _format_sampling(settings),
        suite,
        first["hardware"]["name"],
    )
    return " · ".join(filter(None, parts))


def list_settings(settings: Settings) -> str:
    """Return all settings that are a single value, as text, e.g. "seed 0, warmup 2".

    Settings that are dictionaries, such as a tree, are left out, because `format_settings`
    describes them.
    """
    return _format_listed(
        {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    )


def describe_procedure(report: Report) -> str:
    """Say in a few sentences how the speeds of a report were measured.

    Args:
        report: the content of report.json.
    """
    settings = report["settings"]
    engine = report.get("engine", {})
    size = settings["batch_size"]
    repeats = format_count(settings["repeats"], "time")

    # This package's own decoder alternates between decoding with and without the draft.
    is_own_decoder = _is_specdistill(report)
    warmup = format_count(
        settings["warmup"], "warm-up batch" if is_own_decoder and size > 1 else "warm-up prompt"
    )
    if is_own_decoder:
        batches = (
            f" They were decoded {size} at a time; a prompt's times are its share of the batch's"
            " times."
            if size > 1
            else ""
        )
        return (
            f"Every prompt was decoded with and without the draft, interleaved, {repeats} after"
            f" {warmup}. The time of a round is the lower median over these repetitions.{batches}"
            " The baseline is the same decoder without a draft."
        )

    # For an engine, say how the servers with and without the draft took turns. `command` is there
    # if the engine was started for this report.
    order = "There is no baseline."
    if "command" in engine:
        order = (
            "The engine was started without the draft, measured and ended, then with it, on this"
            " machine."
        )
    elif engine.get("baseline_server"):
        order = "Running servers with and without the draft were measured in alternation."
    load = (
        f" With {size} requests in flight a prompt's time is its share of the server's time."
        if size > 1
        else ""
    )
    return (
        f"{order} Every prompt was sent {repeats} after {warmup}. Of its completions, the one of"
        f" median speed counts.{load}"
    )


def _is_specdistill(report: Report) -> bool:
    """Return whether a report was measured with this package's decoder, not an inference engine."""
    # A report without the key `engine` was measured with this package, too.
    return "engine" not in report or report["engine"]["name"] == "specdistill"


def _format_sampling(settings: Settings) -> str:
    """Format the sampling temperature; "greedy" for 0."""
    return f"T = {settings['temperature']:g}" if settings["temperature"] else "greedy"


def _format_listed(settings: Settings) -> str:
    """Return settings as text, e.g. "seed 0, warmup 2"; settings that are None are left out."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if value is not None
    )
