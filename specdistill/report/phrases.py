"""What a report says in words and numbers, the same in every format: the verdict, sentences, names of rows and rules, `–` for None."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.statistics.records import ALL

Report = Mapping[str, Any]
ResultRow = Mapping[str, Any]  # of a report's results
DEFAULT_CONFIDENCE = 0.95  # of a rule
MOST_PROMPTS = 10_000  # estimates of how many prompts a rule needs end here: nobody measures more


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def signed(change: float) -> str:
    """A relative change, with a minus as wide as the plus."""
    return f"{change:+.1%}".replace("-", "−")


def interval(row: ResultRow, name: str) -> str:
    """A metric's interval, e.g. 1.43 to 1.65; empty where there is none."""
    return " to ".join(f"{end:.2f}" for end in row.get(f"{name}_ci95") or ())


def between(row: ResultRow, name: str) -> str:
    """`interval` in brackets, to follow the number."""
    shown = interval(row, name)
    return f" ({shown})" if shown else ""


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def duration(seconds: float | None) -> str:
    """In the two largest units that are not zero, e.g. 2 min 21 s."""
    if seconds is None or seconds < 9.95:
        return "–" if seconds is None else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(num_bytes: int) -> str:
    """Bytes in KiB, MiB or GiB."""
    unit, power = (
        ("GiB", 30) if num_bytes >= 2**30 else ("MiB", 20) if num_bytes >= 2**20 else ("KiB", 10)
    )
    return f"{num_bytes / 2**power:,.1f} {unit}" if num_bytes else "none"


def scalar(value: Any) -> str:
    """A number, a truth value or a name that a rule is about."""
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


# Of metrics that rules name: title, how the value is written, its unit, and what makes it that unit's. Others go by their names.
METRICS = {
    "mean_acceptance_length": ("acceptance length", ".2f", " tokens", 1),
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
        "acceptance length at long contexts over that at shorter ones",
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
        "p-value of the sampling test on a wrong rule",
        ".2g",
        "",
        1,
    ),
    "draft.bytes": ("size of the draft", ",.3g", " MB", 1e-6),
    "measurement.peak_memory_bytes": ("peak memory", ",.3g", " GB", 1e-9),
    "measurement.seconds": ("time of the measurement", ",.0f", " s", 1),
}


def in_unit(metric: str, value: Any, style: str = "") -> tuple[str, str]:
    """A metric's value as it is written, and its unit."""
    if isinstance(value, bool | str) or metric not in METRICS:
        return scalar(value), ""
    _, own, unit, scale = METRICS[metric]
    return format(value * scale, style or own), unit


def title(report: Report) -> str:
    return f"{report['draft']['method']} draft for {report['target']['model']}"


def verdict(report: Report) -> str:
    return (report["gate"]["verdict"] or "not judged").capitalize()


def summary(report: Report) -> str:
    """One sentence: the speedup, how sure it is, and whether the output is the target's."""
    row, lossless = report["results"][0], report["lossless"]
    checked, judge = f"{lossless['prompts_checked']} greedy completions", reference(report)
    if not lossless["prompts_checked"]:
        same = f"no completion compared with {judge}"
    elif lossless["greedy_identical"]:
        same = f"all {checked} identical to {judge}"
    elif lossless.get("unexplained_divergences") == 0:
        same = f"{checked} equal to {judge} up to {lossless['near_ties']} near-ties"
    else:
        same = f"{lossless['divergences']} of {checked} DIFFERENT from {judge}"
    why = reason(row, "speedup")
    return f"Speed not measured ({why}), {same}." if why else f"{gain(row)}, {same}."


def is_lossless(report: Report) -> bool | None:
    """Whether greedy completions are the target's, but for near-ties that rounding explains; None where they were not compared."""
    unexplained = report["lossless"].get("unexplained_divergences")
    return report["lossless"].get("greedy_identical") if unexplained is None else not unexplained


def reference(report: Report) -> str:
    """What generated the completions that those with the draft must equal."""
    return "transformers' generate()" if _is_specdistill(report) else "the server without a draft"


def gain(row: ResultRow) -> str:
    return f"{times(row['speedup'])} the speed of plain decoding{between(row, 'speedup')}"


def losslessness(report: Report) -> tuple[str, str]:
    """What the greedy comparison and the sampling test found, or why there was none."""
    lossless, absent = report["lossless"], report["not_measured"]
    greedy, same = f"not compared ({absent.get('lossless.greedy_identical')})", "all identical"
    if first := lossless.get("first_divergence"):
        unknown = f"number unknown ({absent.get('lossless.near_ties')})"
        ties = f"{lossless['near_ties']} of them" if "near_ties" in lossless else unknown
        gap = f" (gap {first['top2_gap']:.4f})" if "top2_gap" in first else ""
        where = f"the first is {first['prompt_id']} at token {first.get('position', '–')}{gap}"
        same = f"{lossless['divergences']} differ (at near-ties of the target's best logits: {ties}); {where}"
    if checked := lossless["prompts_checked"]:
        greedy = f"{checked} completions compared token for token with {reference(report)}, {same}"
    sampled = f"not measured ({absent.get('lossless.sampling_test')})"
    if test := lossless.get("sampling_test"):
        sampled = (
            f"chi-square test that {test['num_draws']} continuations of two tokens follow {reference(report)}, "
            f"p = {test['p_value']:.3g}; for a rule that is wrong on purpose, p = {test['negative_control_p_value']:.1g}"
        )
    return f"Greedy: {greedy}.", f"Sampled: {sampled}."


def about(count: int) -> str:
    """An estimated number of prompts, to two digits, e.g. about 800."""
    step = 10 ** max(0, len(str(count)) - 2)
    return (
        f"more than {MOST_PROMPTS:,}"
        if count > MOST_PROMPTS
        else f"about {-(-count // step) * step:,}"
    )


def undecided(report: Report) -> str:
    """What an inconclusive verdict lacks, and the key that gets it; empty for another verdict."""
    rules = [rule for rule in report["gate"]["rules"] if outcome(rule) == "inconclusive"]
    if report["gate"]["verdict"] != "inconclusive":
        return ""
    names, needed = (
        ", ".join(dict.fromkeys(map(metric_title, rules))),
        [rule["prompts_needed"] for rule in rules],
    )
    if None in needed or (enough := max(needed)) <= report["results"][0]["num_prompts"]:
        return f"The evidence cannot decide {names}."
    name, has = report["suite"]["name"], report["suite"]["num_prompts"]
    how = (
        f"eval.num_prompts={enough}"
        if enough <= has
        else f"a suite with more than the {has} of {name}"
    )
    how = "it is too close to the requirement" if enough > MOST_PROMPTS else how
    return f"The evidence cannot decide {names}: {about(enough)} prompts could ({how})."


def failed_rules(report: Report) -> str:
    """Which rules failed the gate, or which it cannot decide; empty when it passed."""
    rules = report["gate"]["rules"]
    failed = [metric_title(rule) for rule in rules if outcome(rule) == "failed"]
    return (
        f"{len(failed)} of {len(rules)} rules failed: {', '.join(dict.fromkeys(failed))}."
        if failed
        else undecided(report)
    )


def reason(row: ResultRow, name: str) -> str:
    """Why a number is absent; empty when it is present."""
    return "" if name in row else row["not_measured"].get(name, "not measured")


def absences(row: ResultRow, names: Sequence[str]) -> str:
    """Which of `names` were not measured, grouped by reason; empty without any."""
    absent: dict[str, list[str]] = {}
    for name in names:
        if why := reason(row, name):
            absent.setdefault(why, []).append(name.replace("_ms", "").replace("_", " "))
    groups = "; ".join(f"{', '.join(group)} ({why})" for why, group in absent.items())
    return f"Not measured: {groups}." if groups else ""


def other_speeds(row: ResultRow) -> str:
    """Tokens per second of plain decoding and of transformers' `generate()`."""
    names = {"baseline_tokens_per_second": "plain", "hf_generate_tokens_per_second": "transformers"}
    return ", ".join(
        f"{name} {number(row[metric], 0)}" for metric, name in names.items() if metric in row
    )


def averages(report: Report) -> list[str]:
    """The macro- and the micro-average of acceptance length and speedup, each with how it was averaged; the lengths chosen online."""
    headline, row = report["headline"], report["results"][0]
    counts = row.get("num_rounds_per_length", [])
    shares = ", ".join(
        f"{k} in {percent(count / sum(counts))}" for k, count in enumerate(counts) if count
    )
    chosen = [f"Draft {online_length(row)}; of the rounds {shares}"] if shares else []
    return chosen + [
        f"{row['average']}: acceptance length {number(row.get('mean_acceptance_length'))}{between(row, 'mean_acceptance_length')}, "
        f"speedup {times(row.get('speedup'))}{between(row, 'speedup')}"
        for row in (headline, headline.get("micro"))
        if row
    ]


def row_name(row: ResultRow) -> str:
    return f"all of {row['suite']}" if row["category"] == ALL else row["category"].replace("_", " ")


def configuration_name(row: ResultRow) -> str:
    """How a row was measured, e.g. simulated, K = 4, greedy, batch 1."""
    shape, cut = (
        tree(row.get("tree")),
        "" if row["context_bucket"] == ALL else f"prompts cut to {row['context_bucket']} tokens",
    )
    parts = (
        row["suite"],
        f"K = {row['num_speculative_tokens']}",
        shape,
        _sampling(row),
        f"batch {row['batch_size']}",
        cut,
    )
    return ", ".join(filter(None, parts))


def tree(settings: Mapping[str, Any] | None) -> str:
    """The shape of drafted trees, e.g. tree of 24 tokens, 6 deep, top 4, or tree with branching 4, 2, 1. Empty for chains."""
    if not settings:
        return ""
    if "branching" in settings:
        return f"tree with branching {', '.join(map(str, settings['branching']))}"
    return f"tree of {settings['budget']} tokens, {settings['depth']} deep, top {settings['top_k']}"


def per_position(row: ResultRow) -> str:
    """The acceptance rate at each position in the draft."""
    return "  ".join(map(percent, row.get("acceptance_rate_per_position", []))) or "–"


def per_round(row: ResultRow) -> str:
    """Tokens per round, where rounds without a draft make it differ from the acceptance length; else empty."""
    differs = row["num_drafts"] != row.get("num_rounds", row["num_drafts"])
    return (
        f"{number(row['tokens_per_round'])} per round"
        if differs and "tokens_per_round" in row
        else ""
    )


def online_length(row: ResultRow) -> str:
    """The mean of lengths that were chosen online, rounds without a draft included; empty for a fixed one."""
    if not any(counts := row.get("num_rounds_per_length", [])):
        return ""
    return f"length chosen online: {number(sum(k * count for k, count in enumerate(counts)) / sum(counts))} tokens on average"


def metric_title(rule: Mapping[str, Any]) -> str:
    metric = rule["metric"]
    return METRICS[metric][0] if metric in METRICS else metric.replace("_", " ").replace(".", " ")


def requirement(rule: Mapping[str, Any]) -> str:
    ((kind, threshold),) = rule["requirement"].items()
    sign = {"min": "≥", "max": "≤", "equals": "=", "max_regression": "loss ≤"}[kind]
    return f"{sign} {f'{100 * threshold:.3g}%' if kind == 'max_regression' else ''.join(in_unit(rule['metric'], threshold, ',.10g'))}"


def scope(rule: Mapping[str, Any]) -> str:
    return ", ".join(map(str, rule["scope"].values())) or "all"


def rule_id(rule: Mapping[str, Any]) -> str:
    """The same for a rule whatever its threshold, e.g. speedup.min[category=chat]."""
    (kind,), scope = (
        rule["requirement"],
        ",".join(f"{name}={value}" for name, value in rule["scope"].items()),
    )
    confidence = "" if rule["confidence"] == DEFAULT_CONFIDENCE else f"@{rule['confidence']:g}"
    return f"{rule['metric']}.{kind}{f'[{scope}]' if scope else ''}{confidence}"


def rule_name(rule: Mapping[str, Any]) -> str:
    return f"{metric_title(rule)} {requirement(rule)}" + (
        f" [{scope(rule)}]" if rule["scope"] else ""
    )


def measured(rule: Mapping[str, Any]) -> str:
    """The value with its unit and interval."""
    if rule["value"] is None:
        return "no evidence"
    is_change, values = (
        "max_regression" in rule["requirement"],
        (rule["value"], *(rule["ci95"] or ())),
    )
    (value, unit), *ends = (
        (signed(it), "") if is_change else in_unit(rule["metric"], it) for it in values
    )
    return f"{value}{unit}" + (f" ({ends[0][0]} to {ends[1][0]})" if ends else "")


def note(rule: Mapping[str, Any]) -> str:
    """What value and requirement do not show of a rule that is not passed: why there is no evidence, or what would decide."""
    if rule["passed"] or rule["reason"].startswith("no evidence: "):
        return "" if rule["passed"] else str(rule["reason"]).removeprefix("no evidence: ")
    at = (
        ""
        if rule["confidence"] in (0, DEFAULT_CONFIDENCE)
        else f"at {rule['confidence']:.0%} confidence"
    )
    could = (
        f"{about(rule['prompts_needed'])} prompts could decide" if rule["prompts_needed"] else ""
    )
    return ", ".join(filter(None, (at, could)))


def evidence(rule: Mapping[str, Any]) -> str:
    return measured(rule) + (f"; {note(rule)}" if note(rule) else "")


def warnings(report: Report) -> list[str]:
    """A sentence for each rule that warns."""
    rules = [rule for rule in report["gate"]["rules"] if outcome(rule) == "warning"]
    return [f"Warning: {rule_name(rule)} is not shown: {evidence(rule)}." for rule in rules]


def outcome(rule: Mapping[str, Any]) -> str:
    return "warning" if rule["severity"] == "warn" and not rule["passed"] else str(rule["verdict"])


def direction(change: Mapping[str, Any]) -> str:
    """better or worse where the interval of a change excludes 0, else open."""
    low, high = change.get("ci95", (0.0, 0.0))
    if low <= 0 <= high:
        return "open"
    return "better" if (low > 0) == (change["better"] == "higher") else "worse"


def since(report: Mapping[str, Any]) -> str:
    """What the report was compared with, and how many numbers changed."""
    baseline, draft = report["baseline"], report["baseline"]["draft"]
    name = "@".join(filter(None, (draft["model"] or draft["method"], draft["revision"])))
    intro = f"Compared with {name}, measured {baseline['created'][:10]}"
    if "reason" in baseline:
        return f"{intro}: not comparable ({baseline['reason']})."
    directions = [direction(change) for change in baseline["changes"] if "ci95" in change]
    better, worse, still = (directions.count(name) for name in ("better", "worse", "open"))
    counts = f"{better} better, {worse} worse, {still} open (the 95 % interval includes 0)"
    return f"{intro}, {len(directions)} numbers prompt by prompt: {counts}."


def lookup_first(settings: Mapping[str, Any]) -> str:
    """What stood in front of the draft, so that the numbers are not the draft's own; empty for nothing."""
    if not (lookup := settings.get("drafting", {}).get("lookup_first")):
        return ""
    behind = (
        f"a {tree(lookup['draft_tree'])}"
        if "draft_tree" in lookup
        else f"a chain of {lookup['draft_tokens']}"
    )
    return f"{lookup['method']} lookup of {lookup['min']} to {lookup['max']} tokens first, behind it {behind}"


def shape(settings: Mapping[str, Any]) -> str:
    """What a round drafts in place of a chain of K tokens; empty for that."""
    return lookup_first(settings) or tree(settings["tree"])


def settings_line(report: Report) -> str:
    """The settings in short: those that a comparison shares, the engine, and how drafts are proposed."""
    settings = report["settings"]
    engine = (
        ""
        if _is_specdistill(report)
        else f"{report['engine']['name']} {report['engine']['version']}"
    )
    size, together = (
        settings["batch_size"],
        "batches of {}" if _is_specdistill(report) else "{} requests in flight",
    )
    batches = together.format(size) if size > 1 else ""
    own = {
        name: value
        for name, value in settings.get("drafting", {}).items()
        if name != "lookup_first"
    }
    drafting = "; ".join(
        filter(None, (f"drafting: {_listed(own)}" if own else "", lookup_first(settings)))
    )
    compiled = "compiled" if settings.get("compile") else ""
    return " · ".join(
        filter(
            None,
            (shared_settings(report), engine, tree(settings["tree"]), batches, compiled, drafting),
        )
    )


def shared_settings(*reports: Report) -> str:
    """The part of the settings that all drafts of a comparison have in common, after the K of each."""
    first, *_ = reports
    settings, suite = first["settings"], f"suite {first['suite']['name']}"
    each = sorted({report["settings"]["num_speculative_tokens"] for report in reports})
    k = f"K = {each[0]}" if len(each) == 1 else f"K = {each[0]} to {each[-1]}"
    return " · ".join((k, _sampling(settings), suite, first["hardware"]["name"]))


def decoding(settings: Mapping[str, Any]) -> str:
    """All settings that are a single value; the others are in `settings_line`."""
    return _listed(
        {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    )


def procedure(report: Report) -> str:
    """How the numbers were measured, in sentences."""
    settings, engine = report["settings"], report.get("engine", {})
    size, repeats, own = (
        settings["batch_size"],
        counted(settings["repeats"], "time"),
        _is_specdistill(report),
    )
    warmup = counted(settings["warmup"], "warm-up batch" if own and size > 1 else "warm-up prompt")
    if own:
        batches = (
            f" They were decoded {size} at a time; a prompt's times are its shares of its batch's."
            if size > 1
            else ""
        )
        return (
            f"Every prompt was decoded with and without the draft, interleaved, {repeats} after {warmup}; "
            f"of each round the lower median counts.{batches} The baseline is the same decoder without a draft."
        )
    order = "There is no baseline."
    if "command" in engine:
        order = "The engine was started without the draft, measured and ended, then with it, on this machine."
    elif engine.get("baseline_server"):
        order = "Running servers with and without the draft were measured in alternation."
    load = (
        f" With {size} requests in flight a prompt's time is its share of the server's."
        if size > 1
        else ""
    )
    return f"{order} Every prompt was sent {repeats} after {warmup}; the median of each prompt counts.{load}"


def _is_specdistill(report: Report) -> bool:
    """Whether this package decoded, not an inference engine."""
    return "engine" not in report or report["engine"]["name"] == "specdistill"


def _sampling(settings: Mapping[str, Any]) -> str:
    return f"T = {settings['temperature']:g}" if settings["temperature"] else "greedy"


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if value is not None
    )
