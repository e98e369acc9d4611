"""The report as one document, from its measured parts: result rows made from the records of prompts (one for the whole suite, one for each
category), the numbers to quote, and findings: what a reader should know before quoting them.

Every number is a formula of specdistill.statistics.metrics. What was not measured is absent, with the reason under `not_measured`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import numpy as np

from specdistill import __version__
from specdistill.credentials import without_places
from specdistill.engines import ENGINES
from specdistill.statistics.intervals import interval, macro_interval
from specdistill.statistics.metrics import (
    METRICS,
    PromptSums,
    acceptance,
    accepted_by_bucket,
    prompt_sums,
    value,
)
from specdistill.statistics.records import ALL, Configuration, PromptRecord
from specdistill.statistics.theory import (
    BETTER_K_GAIN,
    RoundCost,
    alpha_from_acceptance_length,
    best_point,
    speedup_curve,
)
from specdistill.suites.suite import Suite

NAMING = (
    "engine",
    "suite",
    "target",
    "draft",
    "not_measured",
)  # parts that name files and servers of the machine
PREDICTED = ("overhead_factor", "predicted_speedup", "prediction_gap")
WITHOUT_INTERVAL = ("draft_ms", "verify_ms", "baseline_step_ms", *PREDICTED, "decode_speedup")
ACCEPTANCE = ("mean_acceptance_length", "acceptance_rate")
SPEEDS = ("tokens_per_second", "baseline_tokens_per_second", "speedup")
WITH_INTERVAL = ("mean_acceptance_length", "tokens_per_round", "acceptance_rate", *SPEEDS)
NEED_DRAFTS = (
    *ACCEPTANCE,
    "acceptance_rate_per_position",
    "conditional_acceptance_rate",
    "draft_ms",
    *PREDICTED,
)
NEED_ROUNDS = ("tokens_per_round", "verify_ms", "baseline_step_ms", "decode_speedup")
SLOW_BASELINE = 0.95  # below this share of the speed of transformers' `generate()` the baseline flatters the draft
MAX_PREDICTION_GAP = {"cpu": 0.10, "cuda": 0.03}  # by device: times on a CPU vary more
WIDE_INTERVAL = 0.05  # half-width, as a share of the speedup


def build_report(
    *,
    suite: Suite,
    headline: Mapping[str, Any],
    theory: Mapping[str, Any] | None,
    not_measured: Mapping[str, str],
    git_revision: str | None,
    engine: Mapping[str, Any] | None = None,
    incomplete: str | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """The report, to report.schema.json, not yet judged: its gate has no rules and does not pass.

    engine: what decoded, if not this package. incomplete: why the measurement was cut short, if it was. sections: target, draft, hardware,
    software, settings, results, context and lossless, as the report has them.
    """
    absent = {
        **({} if git_revision else {"git_revision": "the code is not in a git checkout"}),
        **({} if theory else {"theory": "nothing was drafted"}),
        **not_measured,
        **({"incomplete": incomplete} if incomplete else {}),
    }
    optional = {"git_revision": git_revision, "incomplete": bool(incomplete), "theory": theory}
    report: dict[str, Any] = {
        "schema_version": 2,
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
        "not_measured": absent,
    }
    report |= without_places({name: report[name] for name in NAMING})
    return {
        **report,
        "findings": [
            {"name": name, "message": message} for name, message in findings(report).items()
        ],
    }


def result_rows(
    records: Sequence[PromptRecord],
    suite: Suite,
    configuration: Configuration,
    *,
    seed: int,
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """A configuration's rows, from its records: the suite's (`category: all`) and one for each category, in the suite's order.

    reasons: why this way of measuring cannot give some numbers.
    """
    groups = {ALL: list(records)}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    scope = {"suite": suite.name, "suite_version": suite.version}
    return [
        {
            **scope,
            "category": category,
            **asdict(configuration),
            **_numbers(group, configuration, seed, reasons),
        }
        for category, group in groups.items()
    ]


def context_rows(records: Sequence[PromptRecord]) -> list[dict[str, Any]]:
    """Acceptance by the number of tokens before a round, in powers of two."""
    rows = []
    for bucket, accepted in sorted(accepted_by_bucket(records).items()):
        length = 1 + sum(accepted) / len(accepted)
        rows.append(
            {
                "bucket": f"{bucket}-{2 * bucket - 1}",
                "num_drafts": len(accepted),
                "mean_acceptance_length": length,
            }
        )
    return rows


def theory(
    row: dict[str, Any],
    costs: Sequence[RoundCost],
    passes: Callable[[int], int],
    *,
    depends_on_width: bool = False,
) -> dict[str, Any] | None:
    """What the suite's row implies: alpha, v and c at K, and the speedup to expect at K' up to K; None without drafts.

    costs: rounds timed at K' up to K; only what they cost relative to each other counts. passes: K' -> forward passes of the draft
    in such a round. Of a tree K is the depth, and c·K the cost of drafting all its nodes. depends_on_width: acceptance is known at K alone
    (see `Proposer`), so the curve has no K' between.
    """
    needed = (
        "acceptance_rate_per_position",
        "verify_ms",
        "draft_ms",
        "baseline_step_ms",
        "predicted_speedup",
    )
    if any(name not in row for name in needed):
        return None
    rates, step = row["acceptance_rate_per_position"], row["baseline_step_ms"]
    num_drafted = (
        row["num_draft_tokens"] / row["num_drafts"]
    )  # all nodes of a tree; fewer than K where a draft stops early
    cost = RoundCost(len(rates), row["verify_ms"], row["draft_ms"] * num_drafted)
    curve = speedup_curve(rates, step, cost, () if depends_on_width else costs)
    return {
        "alpha": alpha_from_acceptance_length(row["mean_acceptance_length"], len(rates)),
        "K": len(rates),
        "v": cost.verify_ms / step,
        "c": cost.draft_ms / cost.k / step,
        "predicted": row["predicted_speedup"],
        "best_k": best_point(curve)["k"],
        "curve": [{**point, "draft_passes": passes(int(point["k"]))} for point in curve],
    }


def headline(rows: Sequence[dict[str, Any]], records: Sequence[PromptRecord]) -> dict[str, Any]:
    """The numbers to quote of a configuration, from its rows and records: acceptance length and speedup, as macro-averages over the
    categories, and as the micro-averages of the whole suite, in which a category counts by its drafts or its time.
    """
    by_category = [row for row in rows if row["category"] != ALL]
    quoted = [
        name
        for name in ("mean_acceptance_length", "speedup")
        if by_category and all(name in row for row in by_category)
    ]
    if not quoted:
        return {}
    sums, categories = prompt_sums(records), [record.category for record in records]
    macro: dict[str, Any] = {}
    for name in quoted:
        macro[name] = sum(row[name] for row in by_category) / len(by_category)
        if bounds := macro_interval(METRICS[name], sums, categories):
            macro[f"{name}_ci95"] = list(bounds)
    return {
        **macro,
        "average": f"macro over {len(by_category)} categories, each a micro-average over its drafts",
        "micro": {
            **{
                key: rows[0][key]
                for name in quoted
                for key in (name, f"{name}_ci95")
                if key in rows[0]
            },
            "average": f"micro over {rows[0]['num_drafts']} drafts and {rows[0]['num_new_tokens']} tokens of {len(records)} prompts",
        },
    }


def _numbers(
    records: Sequence[PromptRecord],
    configuration: Configuration,
    seed: int,
    reasons: Mapping[str, str],
) -> dict[str, Any]:
    sums, drafts = prompt_sums(records), [draft for record in records for draft in record.drafts()]
    timed = sum(record.hf_generate is not None for record in records)
    row: dict[str, Any] = {
        "num_prompts": len(records),
        "num_batches": len(np.unique(sums["batch"])) if "batch" in sums else len(records),
        "num_new_tokens": int(sums["num_tokens"].sum()),
        **(
            {}
            if np.isnan(sums["num_rounds"]).any()
            else {"num_rounds": int(sums["num_rounds"].sum())}
        ),
        **(
            {"num_looping": sum(map(is_looping, records))}
            if all(record.token_ids for record in records)
            else {}
        ),
        **({"hf_generate_num_prompts": timed} if timed else {}),
        "num_empty": int((sums["num_tokens"] <= 1).sum()),
        "num_disturbed_rounds": int(
            sum(np.nansum(sums[f"{side}num_disturbed_rounds"]) for side in ("", "baseline_"))
        ),
        **acceptance(drafts, configuration.num_speculative_tokens),
        **_estimates(sums, seed),
    }
    absent = {**_reasons(row), **reasons}
    return {
        **row,
        "not_measured": {name: reason for name, reason in absent.items() if name not in row},
    }


def _estimates(sums: PromptSums, seed: int) -> dict[str, Any]:
    """Each metric that was measured, with its interval. The speedup over transformers' `generate()` is one where the baseline is slower."""
    numbers: dict[str, Any] = {}
    is_slow = (value(METRICS["baseline_over_hf_generate"], sums) or 1.0) < SLOW_BASELINE
    for name, metric in METRICS.items():
        if (is_slow or name != "speedup_over_hf_generate") and (
            point := value(metric, sums)
        ) is not None:
            numbers[name] = point
            if name not in WITHOUT_INTERVAL and (bounds := interval(metric, sums, seed=seed)):
                numbers[f"{name}_ci95"] = list(bounds)
    return numbers


def is_looping(record: PromptRecord) -> bool:
    """Whether the completion ends in a loop: its last 48 tokens repeat with a period of at most 16. Loops inflate acceptance."""
    tail = record.token_ids[-48:]
    return len(tail) == 48 and any(tail[period:] == tail[:-period] for period in range(1, 17))


def _reasons(row: Mapping[str, Any]) -> dict[str, str]:
    """Why a row lacks each number that it may lack."""
    hf = "none of these prompts was among those timed"
    fast = (
        "the baseline is as fast as transformers' generate()"
        if "baseline_over_hf_generate" in row
        else hf
    )
    few = (
        "fewer than two prompts"
        if row["num_prompts"] < 2
        else "its resamples are undefined: too few prompts or conversations"
    )
    one_batch = row["num_batches"] == 1 < row["num_prompts"]
    timed = "its prompts share the times of one batch" if one_batch else few
    return {
        **dict.fromkeys(SPEEDS, "no time was measured"),
        **dict.fromkeys(NEED_DRAFTS, "nothing was drafted"),
        **dict.fromkeys(NEED_ROUNDS, "every completion ended with its first token"),
        **dict.fromkeys(("hf_generate_tokens_per_second", "baseline_over_hf_generate"), hf),
        "speedup_over_hf_generate": fast,
        "context_ratio": "too few drafts at a long or a short context"
        if row["num_drafts"]
        else "nothing was drafted",
        "vocabulary_coverage": "this method can propose any token",
        **{
            f"{name}_ci95": timed if METRICS[name].is_timed else few
            for name in WITH_INTERVAL
            if name in row
        },
    }


def findings(report: Mapping[str, Any]) -> dict[str, str]:
    """Name -> one sentence, for what the numbers alone do not show."""
    return {
        **dict(_of_times(report)),
        **dict(_of_losslessness(report)),
        **dict(_of_drafting(report)),
    }


def _of_times(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How far the times are to be trusted."""
    row = report["results"][0]
    if report.get("incomplete"):
        reason = report["not_measured"]["incomplete"]
        yield (
            "incomplete",
            f"The measurement was cut short: {reason}. Its numbers are those of a part.",
        )
    bound = MAX_PREDICTION_GAP.get(report["hardware"]["device"], MAX_PREDICTION_GAP["cpu"])
    if "speedup" in row and row.get("prediction_gap", 0) > bound:
        yield (
            "prediction_gap",
            f"The measured speedup ({row['speedup']:.2f}×) is {row['prediction_gap']:.0%} away from the predicted one "
            f"({row['predicted_speedup']:.2f}×), more than {bound:.0%}; without prefill it is {row['decode_speedup']:.2f}×.",
        )
    if row.get("baseline_over_hf_generate", 1) < SLOW_BASELINE:
        yield (
            "slow_baseline",
            f"The baseline has {row['baseline_over_hf_generate']:.0%} of the speed of transformers' generate(); "
            f"over that the speedup is {row['speedup_over_hf_generate']:.2f}×.",
        )
    if count := row.get("num_disturbed_rounds"):
        which = f"{count} rounds took far longer than in other repetitions, probably by other work on the machine"
        yield "disturbed", f"Dropped as outliers: {which}; their prompts were timed again."
    low, high = row.get("speedup_ci95", (0.0, 0.0))
    if (half := (high - low) / 2 / row.get("speedup", 1.0)) > WIDE_INTERVAL:
        yield (
            "wide_interval",
            f"{row['num_prompts']} prompts: the speedup is only known to ±{half:.0%}.",
        )


def _of_losslessness(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Whether what was counted is what the target generates."""
    row, settings, lossless = report["results"][0], report["settings"], report["lossless"]
    engine = ENGINES.get(report.get("engine", {}).get("name", ""))
    if engine and engine.counts_past_end and row["num_drafts"]:
        most = row["num_prompts"] * settings["num_speculative_tokens"] / row["num_drafts"]
        yield (
            "past_the_end",
            f"{engine.title} also counts tokens that it accepts past the end of a completion: "
            f"the acceptance length is up to {most:.2f} too high.",
        )
    if count := lossless.get("unexplained_divergences"):
        which = f"{count} of {lossless['prompts_checked']} greedy completions"
        yield "divergence", f"{which} are not the target's, where rounding does not explain it."
    if count := lossless.get("near_ties"):
        yield (
            "near_ties",
            f"{count} greedy completions diverge from the target's at a near-tie of its best logits.",
        )
    if lossless.get("sampling_test", {}).get("negative_control_p_value", 0) > 0.05:
        message = "The sampling test did not detect a rule that is wrong on purpose: it shows little here."
        yield "insensitive_sampling_test", message


def _of_drafting(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What drafting did, and what would be better."""
    row = report["results"][0]
    without = (
        1 - row["num_drafts"] / row["num_rounds"]
        if row["num_drafts"] and "num_rounds" in row
        else 0.0
    )
    if without > 0.05:
        yield (
            "rounds_without_draft",
            f"In {without:.0%} of the rounds nothing was drafted; the acceptance length ({row['mean_acceptance_length']:.2f}) does not "
            f"count these: over all rounds {row['tokens_per_round']:.2f} tokens per round.",
        )
    if row["num_empty"]:
        which = f"{row['num_empty']} of {row['num_prompts']} completions"
        yield "empty_completions", f"{which} ended with their first token: no draft helps there."
    if row.get("num_looping", 0) > 0.1 * row["num_prompts"]:
        which = f"{row['num_looping']} of {row['num_prompts']} completions"
        yield "loops", f"{which} degenerate into repetition, which inflates acceptance."
    if (theory := report.get("theory")) and theory["best_k"] != theory["K"]:
        best = best_point(theory["curve"])["predicted_speedup"]
        if best > theory["predicted"] * (1 + BETTER_K_GAIN):
            faster = f"K = {theory['best_k']} is predicted to be faster ({best:.2f}×)"
            yield "best_k", f"{faster} than the K = {theory['K']} measured."
