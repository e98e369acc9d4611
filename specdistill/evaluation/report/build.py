"""Build the report as one document, from its measured parts.

The parts are:

- result rows, computed from the records of prompts: one for the whole suite, one for each category;
- the numbers to quote;
- findings: what a reader should know before quoting the numbers.

Every number is a formula of specdistill.evaluation.statistics.metrics. A number that was not
measured is absent, with the reason under `not_measured`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import numpy as np

from specdistill import __version__
from specdistill.common.credentials import remove_places
from specdistill.evaluation.report.phrases import Report
from specdistill.evaluation.report.schema import ContextBucketDocument
from specdistill.evaluation.statistics.intervals import (
    CONTROL_P_VALUE,
    compute_interval,
    compute_macro_interval,
)
from specdistill.evaluation.statistics.metrics import (
    METRICS,
    PromptSums,
    collect_prompt_sums,
    compute_value,
    count_acceptance,
    group_rounds_by_context,
)
from specdistill.evaluation.statistics.records import ALL_PROMPTS, Configuration, PromptRecord
from specdistill.evaluation.statistics.theory import (
    BETTER_K_GAIN,
    RoundCost,
    alpha_from_acceptance_length,
    compute_deviation_from_rising,
    compute_speedup_curve,
    select_best_point,
)
from specdistill.evaluation.suites.suite import Suite
from specdistill.serving.engines import ENGINES

Numbers = dict[str, Any]  # numbers by their names in the report's schema

# Parts of a report that name files and servers of the machine.
NAMING = ("engine", "suite", "target", "draft", "not_measured")
PREDICTED_METRICS = ("predicted_speedup", "prediction_gap")
# Metrics that a report gives without an interval. They explain the speedup, and a bootstrap of each
# would take time.
METRICS_WITHOUT_INTERVAL = (
    "draft_ms",
    "verify_ms",
    "baseline_step_ms",
    "overhead_factor",
    *PREDICTED_METRICS,
    "decode_speedup",
)
ACCEPTANCE = ("acceptance_length_vllm", "acceptance_rate")
SPEEDS = ("tokens_per_second", "baseline_tokens_per_second", "speedup")
METRICS_WITH_INTERVAL = ("mean_acceptance_length", *ACCEPTANCE, *SPEEDS)
# Metrics that a row lacks if nothing was drafted.
METRICS_OF_DRAFTS = (
    *ACCEPTANCE,
    "acceptance_rate_per_position",
    "conditional_acceptance_rate",
    "draft_ms",
    *PREDICTED_METRICS,
)
# Metrics that a row lacks if no prompt had a round, because every completion ended with its first
# token.
METRICS_OF_ROUNDS = (
    "mean_acceptance_length",
    "overhead_factor",
    "verify_ms",
    "baseline_step_ms",
    "decode_speedup",
)
# Below this share of the speed of transformers' `generate()`, the baseline flatters the draft. The
# 5 % below 1 leave room for noise in the two timings.
SLOW_BASELINE = 0.95
# The largest gap between measured and predicted speedup that is no finding, by device. A lower
# bound finds more mistakes and reports more noise. Times on a CPU vary more.
MAX_PREDICTION_GAP = {"cpu": 0.10, "cuda": 0.03}
# The half-width of an interval, as a share of the speedup, above which the reader is told. With
# more than ±5 %, the first decimal of a usual speedup is uncertain.
WIDE_INTERVAL = 0.05


def build_report(
    *,
    suite: Suite,
    headline: Numbers,
    theory: Numbers | None,
    not_measured: Mapping[str, str],
    git_revision: str | None,
    engine: Mapping[str, object] | None = None,
    incomplete: str | None = None,
    **sections: Any,
) -> Report:
    """Build the content of report.json from the measured parts, and add the findings.

    Findings are sentences about the numbers, e.g. that the baseline was slow. The report is not
    judged yet: its gate has no rules and does not pass.

    Args:
        suite: the suite of prompts that was measured.
        headline: the numbers to quote, such as the speedup.
        theory: the predictions of the cost model; None if nothing was drafted.
        not_measured: name of a part that the report lacks -> the reason.
        git_revision: the revision of the code; None outside of a git checkout.
        engine: the name and version of the program that decoded; None for this package.
        incomplete: why the measurement was cut short; None if it was not.
        sections: the sections target, draft, hardware, software, settings, results, context,
            lossless and measurement of the report.
    """
    # Collect the reason for each part that is absent.
    absence_reasons = {
        **({} if git_revision else {"git_revision": "the code is not in a git checkout"}),
        **({} if theory else {"theory": "nothing was drafted"}),
        **not_measured,
        **({"incomplete": incomplete} if incomplete else {}),
    }
    optional = {"git_revision": git_revision, "incomplete": bool(incomplete), "theory": theory}

    # Put together the parts that every report has, and the measured sections.
    report: Numbers = {
        "schema_version": 3,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "specdistill_version": __version__,
        **{name: part for name, part in optional.items() if part},
        "engine": dict(engine or {"name": "specdistill", "version": __version__}),
        "suite": {
            **{
                name: getattr(suite, name)
                for name in ("name", "version", "licence", "source", "sha256")
            },
            "num_prompts": len(suite.rows),
        },
        "headline": headline,
        **sections,
        "gate": {"verdict": None, "passed": False, "rules": []},
        "not_measured": absence_reasons,
    }

    # Remove folder names and server addresses of this machine, which must not be published.
    report |= remove_places({name: report[name] for name in NAMING})

    # The findings are sentences about the finished numbers, so they come last.
    return {
        **report,
        "findings": [
            {"name": name, "message": message} for name, message in list_findings(report).items()
        ],
    }


def build_result_rows(
    records: Sequence[PromptRecord],
    suite: Suite,
    configuration: Configuration,
    *,
    seed: int,
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> list[Numbers]:
    """Build the rows of the report for one configuration (K, temperature, …), from its records.

    The first row has the numbers of the whole suite (`category: all`). One row for each category of
    prompts follows, in the suite's order.

    Args:
        records: what was measured of each prompt in this configuration.
        suite: the suite of prompts that was measured.
        configuration: the configuration.
        seed: the seed of the bootstrap that gives the confidence intervals.
        reasons: name of a number -> why this way of measuring cannot give it.
    """
    # Group the records: all of them, then those of each category.
    groups = {ALL_PROMPTS: list(records)}
    for record in records:
        groups.setdefault(record.category, []).append(record)

    # Each row has the suite, the configuration, and the numbers computed from its group.
    return [
        {
            "suite": suite.name,
            "suite_version": suite.version,
            "category": category,
            **asdict(configuration),
            **_compute_row_numbers(group, configuration, seed, reasons),
        }
        for category, group in groups.items()
    ]


def build_context_rows(records: Sequence[PromptRecord]) -> list[ContextBucketDocument]:
    """Return the acceptance length for each range of context lengths, e.g. 64 to 127 tokens.

    The context length of a round is the number of tokens before the round. Each range begins at a
    power of two and ends just below the next one.
    """
    rows: list[ContextBucketDocument] = []
    for bucket, emitted in sorted(group_rounds_by_context(records).items()):
        rows.append(
            {
                "bucket": f"{bucket}-{2 * bucket - 1}",
                "num_rounds": len(emitted),
                "mean_acceptance_length": sum(emitted) / len(emitted),
            }
        )
    return rows


def build_theory(
    row: Numbers,
    costs: Sequence[RoundCost],
    passes: Callable[[int], int],
    *,
    depends_on_width: bool = False,
) -> Numbers | None:
    """Return the report's section `theory`, the predictions of the cost model.

    K is the most draft tokens of a measured round (for a tree, its depth). K' is a smaller number.
    The section has these numbers, which specdistill.evaluation.statistics.theory defines:

    - alpha, the acceptance probability of a draft token;
    - v, the cost of verifying a round, and c, the cost of drafting a token, both in steps of plain
      decoding. For a tree, c·K is the cost of drafting all nodes;
    - the predicted speedup at K, at K' = 0 (plain decoding), and at each K' that was timed.

    Args:
        row: the report's row of the whole suite. It has the cost of a round at K, measured on all
            prompts.
        costs: the costs of rounds at K and at each K' that was timed, on a few prompts. Only their
            ratios are used: the cost at K' is predicted as the cost in `row`, times the timed cost
            at K', divided by the timed cost at K. Empty for trees and for drafts behind a lookup.
        passes: K' -> the number of forward passes of the draft in a round with K' draft tokens.
        depends_on_width: whether the acceptance of a token depends on how many tokens are drafted,
            as for some block drafters. Then the acceptance at a K' below K is unknown.

    Returns:
        The section `theory` of the report. Its predictions are in `curve`. If `depends_on_width`,
        they are only for K' = 0 (plain decoding) and K. None if the row lacks a number that the
        model needs, for example because nothing was drafted.
    """
    # The model needs these numbers.
    needed = (
        "mean_acceptance_length",
        "verify_ms",
        "draft_ms",
        "baseline_step_ms",
        "predicted_speedup",
    )
    if any(name not in row for name in needed):
        return None

    # The mean cost of a round. `draft_ms` in the row is per draft token, and a round may have fewer
    # than K of these (the draft stopped early) or more (all nodes of a tree).
    step_ms = row["baseline_step_ms"]
    k = row["num_speculative_tokens"]
    draft_ms = row["draft_ms"] * row["num_draft_tokens"] / row["num_rounds"]
    cost = RoundCost(k, row["verify_ms"], draft_ms)

    # Predict the speedup at each K' that was timed. If acceptance depends on how many tokens are
    # drafted, it is known at K only: do not use the times of a smaller K'.
    usable_costs = () if depends_on_width else costs
    curve = compute_speedup_curve(
        row["emitted_per_position"], row["num_drafts"], step_ms, cost, usable_costs
    )
    return {
        "alpha": alpha_from_acceptance_length(row["mean_acceptance_length"], k),
        "K": k,
        "v": cost.verify_ms / step_ms,
        "c": cost.draft_ms / k / step_ms,
        "predicted": row["predicted_speedup"],
        "best_k": select_best_point(curve)["k"],
        "cost_deviation": compute_deviation_from_rising(usable_costs),
        "curve": [{**point, "draft_passes": passes(int(point["k"]))} for point in curve],
    }


def select_headline(rows: Sequence[Numbers], records: Sequence[PromptRecord]) -> Numbers:
    """Return the acceptance length and speedup to quote from a configuration, averaged in two ways.

    Args:
        rows: the rows of the configuration: one for the whole suite, then one for each category.
        records: the records of the prompts, from which the confidence intervals are computed.

    Returns:
        The macro-averages over the categories of prompts: each category counts the same. The entry
        `micro` has the micro-averages over the whole suite: each round counts the same, so a
        category with longer completions counts more. A number that a category lacks is left out.
    """
    # A number can be averaged over the categories only if every category has it.
    category_rows = [row for row in rows if row["category"] != ALL_PROMPTS]
    quoted_names = []
    for name in ("mean_acceptance_length", "speedup"):
        if category_rows and all(name in row for row in category_rows):
            quoted_names.append(name)
    if not quoted_names:
        return {}

    # The macro-average: every category counts the same.
    sums = collect_prompt_sums(records)
    categories = [record.category for record in records]
    macro: Numbers = {}
    for name in quoted_names:
        macro[name] = sum(row[name] for row in category_rows) / len(category_rows)
        bounds = compute_macro_interval(METRICS[name], sums, categories)
        if bounds:
            macro[f"{name}_ci95"] = list(bounds)

    macro["average"] = f"mean of the {len(category_rows)} categories (macro-average)"

    # The micro-average: the numbers of the suite's row, where every round counts the same.
    suite_row = rows[0]
    micro: Numbers = {}
    for name in quoted_names:
        for key in (name, f"{name}_ci95"):
            if key in suite_row:
                micro[key] = suite_row[key]
    micro["average"] = (
        f"all {suite_row['num_new_tokens']} tokens of {len(records)} prompts together"
        " (micro-average)"
    )
    return {**macro, "micro": micro}


def _compute_row_numbers(
    records: Sequence[PromptRecord],
    configuration: Configuration,
    seed: int,
    reasons: Mapping[str, str],
) -> Numbers:
    """Compute the counts and metrics of a row of the report, and the reason for each absent number.

    Args:
        records: the records of the row's prompts.
        configuration: the configuration of the row.
        seed: the seed of the bootstrap that gives the confidence intervals.
        reasons: name of a number -> why this way of measuring cannot give it.
    """
    # Collect the numbers of each prompt: name -> values [P]. All metrics are computed from them.
    sums = collect_prompt_sums(records)
    num_timed_by_hf = sum(record.hf_generate is not None for record in records)

    # Count prompts, tokens and rounds, and estimate the metrics. Prompts without a batch number
    # were decoded one by one, so each counts as a batch. A server does not show its rounds (their
    # number is NaN), and some servers return no token ids: counts that need these are left out.
    row: Numbers = {
        "num_prompts": len(records),
        "num_batches": len(np.unique(sums["batch"])) if "batch" in sums else len(records),
        "num_new_tokens": int(sums["num_tokens"].sum()),
    }
    if not np.isnan(sums["num_rounds"]).any():
        row["num_rounds"] = int(sums["num_rounds"].sum())
    if all(record.token_ids for record in records):
        row["num_looping"] = sum(map(is_looping, records))
    if num_timed_by_hf:
        row["hf_generate_num_prompts"] = num_timed_by_hf
    # The first token of a completion comes from the prefill, before any round. So a completion that
    # ends with its first token counts as empty.
    row = {
        **row,
        "num_empty": int((sums["num_tokens"] <= 1).sum()),
        "num_disturbed_rounds": int(
            sum(np.nansum(sums[f"{side}num_disturbed_rounds"]) for side in ("", "baseline_"))
        ),
        **count_acceptance(records, configuration.num_speculative_tokens),
        **_estimate_metrics(sums, seed),
    }

    # Keep the reasons of numbers that are absent.
    all_reasons = {**_list_reasons(row), **reasons}
    not_measured = {name: reason for name, reason in all_reasons.items() if name not in row}
    return {**row, "not_measured": not_measured}


def _estimate_metrics(sums: PromptSums, seed: int) -> Numbers:
    """Return the value of each metric that was measured, and its interval if the report has one.

    The baseline is this package's plain decoding. A baseline that is slower than transformers'
    `generate()` makes the speedup over it look too large. Only then the speedup over `generate()`
    is returned, too.

    Args:
        sums: the table of what was measured of each prompt: name -> values [P].
        seed: the seed of the bootstrap that gives the intervals.
    """
    numbers: Numbers = {}
    # The baseline is slow if it has less than SLOW_BASELINE times the speed of `generate()`. If the
    # two were not compared, it counts as fast enough.
    speed_ratio = compute_value(METRICS["baseline_over_hf_generate"], sums)
    is_slow = (speed_ratio or 1.0) < SLOW_BASELINE
    for name, metric in METRICS.items():
        # Compute the value, if everything that the metric needs was measured.
        value = compute_value(metric, sums)
        if value is None or (name == "speedup_over_hf_generate" and not is_slow):
            continue
        numbers[name] = value

        # Compute the interval, if the report gives one for this metric.
        has_interval = name not in METRICS_WITHOUT_INTERVAL
        bounds = compute_interval(metric, sums, seed=seed) if has_interval else None
        if bounds is not None:
            numbers[f"{name}_ci95"] = list(bounds)
    return numbers


def is_looping(record: PromptRecord) -> bool:
    """Return whether a completion ends by repeating itself, which makes it easy to draft.

    This is so if the last 48 tokens repeat with a period of at most 16 tokens.
    """
    # 48 tokens are three periods of the longest loop. With fewer tokens, lists in a text would
    # count as loops, too. The tokens have a period of n if they equal themselves shifted by n.
    tail = record.token_ids[-48:]
    return len(tail) == 48 and any(tail[period:] == tail[:-period] for period in range(1, 17))


def _list_reasons(row: Numbers) -> dict[str, str]:
    """Return why each number may be absent from a row: name of the number -> reason.

    The caller uses only the reasons of the numbers that the row lacks.

    Args:
        row: the row of the report, with the numbers that could be computed.

    Returns:
        The reasons, in words, by the name of the number.
    """
    # Reasons for numbers about transformers' `generate()`. It was timed on some prompts only. If
    # the row has none of these prompts, all such numbers are absent. Otherwise the row has
    # `baseline_over_hf_generate`: the speed of plain decoding (the baseline), divided by the speed
    # of `generate()`. The speedup over `generate()` may still be absent, because the report gives
    # it only if the baseline is slower than `generate()`.
    untimed_reason = "none of these prompts was among those timed"
    is_generate_timed = "baseline_over_hf_generate" in row
    speedup_reason = (
        "the baseline is as fast as transformers' generate()"
        if is_generate_timed
        else untimed_reason
    )

    # Reasons for absent intervals. A speed needs several batches, because the prompts of a batch
    # are decoded at the same time.
    interval_reason = (
        "fewer than two prompts"
        if row["num_prompts"] < 2
        else "its resamples are undefined: too few prompts or conversations"
    )
    is_one_batch = row["num_batches"] == 1 < row["num_prompts"]
    timed_interval_reason = (
        "its prompts share the times of one batch" if is_one_batch else interval_reason
    )

    return {
        **dict.fromkeys(SPEEDS, "no time was measured"),
        **dict.fromkeys(METRICS_OF_DRAFTS, "nothing was drafted"),
        **dict.fromkeys(METRICS_OF_ROUNDS, "every completion ended with its first token"),
        **dict.fromkeys(
            ("hf_generate_tokens_per_second", "baseline_over_hf_generate"), untimed_reason
        ),
        "speedup_over_hf_generate": speedup_reason,
        "context_ratio": (
            "too few drafts at a long or a short context"
            if row["num_drafts"]
            else "nothing was drafted"
        ),
        "vocabulary_coverage": "this method can propose any token",
        **{
            f"{name}_ci95": timed_interval_reason if METRICS[name].is_timed else interval_reason
            for name in METRICS_WITH_INTERVAL
            if name in row
        },
    }


def list_findings(report: Report) -> dict[str, str]:
    """Return the findings of a report: name -> sentence.

    A finding is something that a reader must know before quoting the numbers, for example that the
    measurement was interrupted or the baseline was slow.
    """
    return {
        **dict(_list_timing_findings(report)),
        **dict(_list_losslessness_findings(report)),
        **dict(_list_drafting_findings(report)),
    }


def _list_timing_findings(report: Report) -> Iterator[tuple[str, str]]:
    """Yield findings, as (name, sentence), about how far the measured times can be trusted."""
    # The first row has the numbers of the whole suite in the main configuration.
    row = report["results"][0]

    # An interrupted measurement.
    if report.get("incomplete"):
        yield (
            "incomplete",
            f"The measurement was cut short: {report['not_measured']['incomplete']}. Its numbers"
            " cover only the part that was measured.",
        )

    # Times that do not add up: the measured speedup is not the one that acceptance and costs give.
    # A device that has no bound of its own gets the wider bound of the CPU.
    bound = MAX_PREDICTION_GAP.get(report["hardware"]["device"], MAX_PREDICTION_GAP["cpu"])
    if "speedup" in row and row.get("prediction_gap", 0) > bound:
        yield (
            "prediction_gap",
            (
                f"The measured speedup ({row['speedup']:.2f}×) is {row['prediction_gap']:.0%} away"
                f" from the predicted one ({row['predicted_speedup']:.2f}×), more than {bound:.0%};"
                f" without prefill it is {row['decode_speedup']:.2f}×."
            ),
        )

    # A baseline that is slower than it should be.
    if row.get("baseline_over_hf_generate", 1) < SLOW_BASELINE:
        yield (
            "slow_baseline",
            (
                f"The baseline has {row['baseline_over_hf_generate']:.0%} of the speed of"
                " transformers' generate(); compared with generate(), the speedup is"
                f" {row['speedup_over_hf_generate']:.2f}×."
            ),
        )

    # Noise: rounds that were disturbed, and too few prompts.
    count = row.get("num_disturbed_rounds")
    if count:
        yield (
            "disturbed",
            f"Dropped as outliers: {count} rounds took far longer than in other repetitions,"
            " probably by other work on the machine; their prompts were timed again.",
        )
    low, high = row.get("speedup_ci95", (0.0, 0.0))
    half_width = (high - low) / 2 / row.get("speedup", 1.0)
    if half_width > WIDE_INTERVAL:
        yield (
            "wide_interval",
            f"{row['num_prompts']} prompts: the speedup is only known to ±{half_width:.0%}.",
        )


def _list_losslessness_findings(report: Report) -> Iterator[tuple[str, str]]:
    """Yield findings, as (name, sentence), about whether the output is really the target's.

    One finding warns that an engine counts tokens which are not in the output.
    """
    row = report["results"][0]
    settings = report["settings"]
    lossless = report["lossless"]
    engine = ENGINES.get(report.get("engine", {}).get("name", ""))

    # An engine that counts more accepted tokens than a completion has. In the worst case each
    # prompt has K such tokens, so the acceptance length is too high by prompts · K / drafts. (If
    # this package decoded, `engine` is None, and no such tokens are counted.)
    if engine and engine.counts_past_end and row["num_drafts"]:
        max_excess = row["num_prompts"] * settings["num_speculative_tokens"] / row["num_drafts"]
        yield (
            "past_the_end",
            (
                f"{engine.title} also counts tokens that it accepts past the end of a completion: "
                f"acceptance_length_vllm is up to {max_excess:.2f} too high."
            ),
        )

    # Differences between the outputs with and without the draft.
    count = lossless.get("unexplained_divergences")
    if count:
        yield (
            "divergence",
            f"{count} of {lossless['prompts_checked']} greedy completions differ from the target's,"
            " and rounding does not explain the difference.",
        )
    count = lossless.get("near_ties")
    if count:
        yield (
            "near_ties",
            (
                f"{count} greedy completions diverge from the target's at a near-tie of its best"
                " logits."
            ),
        )

    # A sampling test that does not even reject a wrong rule.
    sampling_test = lossless.get("sampling_test", {})
    if sampling_test.get("negative_control_p_value", 0) > CONTROL_P_VALUE:
        yield (
            "insensitive_sampling_test",
            "The sampling test did not detect deliberately wrong verification, so its result means"
            " little here.",
        )


def _list_drafting_findings(report: Report) -> Iterator[tuple[str, str]]:
    """Yield findings, as (name, sentence), about drafts, completions and a K that may be better."""
    # Rounds in which nothing was drafted. If they are more than one in 20, the acceptance length
    # over all rounds and that over rounds with a draft (as vLLM computes it) differ visibly. The
    # number of rounds is not known for a server.
    row = report["results"][0]
    share_without_draft = 0.0
    if row["num_drafts"] and "num_rounds" in row:
        share_without_draft = 1 - row["num_drafts"] / row["num_rounds"]
    if share_without_draft > 0.05:
        yield (
            "rounds_without_draft",
            (
                f"Nothing was drafted in {share_without_draft:.0%} of the rounds. The acceptance"
                f" length ({row['mean_acceptance_length']:.2f}) counts these rounds;"
                f" 1 + accepted / drafts is {row['acceptance_length_vllm']:.2f}."
            ),
        )

    # Completions that say little about a draft: empty ones, and loops, which are easy to predict.
    if row["num_empty"]:
        yield (
            "empty_completions",
            f"{row['num_empty']} of {row['num_prompts']} completions ended with their first token:"
            " no draft helps there.",
        )
    if row.get("num_looping", 0) > 0.1 * row["num_prompts"]:
        yield (
            "loops",
            f"{row['num_looping']} of {row['num_prompts']} completions degenerate into repetition,"
            " which inflates acceptance.",
        )

    # Another K, if it is predicted to be faster by more than the uncertainty of the prediction.
    theory = report.get("theory")
    if theory and theory["best_k"] != theory["K"]:
        best_speedup = select_best_point(theory["curve"])["predicted_speedup"]
        low, high = row.get("speedup_ci95", (0.0, 0.0))
        uncertainty = (high - low) / 2 / row.get("speedup", 1.0)
        margin = max(BETTER_K_GAIN, uncertainty, theory.get("cost_deviation", 0.0))
        if best_speedup > theory["predicted"] * (1 + margin):
            yield (
                "best_k",
                f"K = {theory['best_k']} is predicted to be faster ({best_speedup:.2f}×) than the"
                f" K = {theory['K']} measured.",
            )
