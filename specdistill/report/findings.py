"""Findings: what a reader should know before quoting a report's numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from specdistill.engines import ENGINES
from specdistill.statistics.sample_size import PRECISION_METRICS, half_width
from specdistill.statistics.theory import best_point

MAX_PREDICTION_GAP = {"cpu": 0.10, "cuda": 0.03}  # by device: times on a CPU vary more
SLOW_BASELINE = 0.95
LOOPING_SHARE = 0.1
WIDE_INTERVAL = 0.05  # half-width, as a share of the speedup
CONTROL_P_VALUE = 0.05
ROUNDS_WITHOUT_DRAFT = 0.05
BETTER_K_GAIN = 0.02  # a smaller gain of another K is not mentioned


def findings(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, one sentence) for what the numbers alone do not show."""
    row, settings, lossless = report["results"][0], report["settings"], report["lossless"]
    if report.get("incomplete"):
        yield (
            "incomplete",
            f"The measurement was cut short: {report['not_measured']['incomplete']}. Its numbers are those of a part.",
        )
    yield from _speed_findings(row, report["hardware"]["device"], settings.get("target_precision"))
    engine = ENGINES.get(report.get("engine", {}).get("name", ""))
    if engine and engine.counts_past_end and row["num_drafts"]:
        most = row["num_prompts"] * settings["num_speculative_tokens"] / row["num_drafts"]
        yield (
            "past_the_end",
            f"{engine.title} also counts tokens that it accepts past the end of a completion: "
            f"the acceptance length is up to {most:.2f} too high.",
        )
    if lossless.get("unexplained_divergences"):
        count, checked = lossless["unexplained_divergences"], lossless["prompts_checked"]
        yield (
            "divergence",
            f"{count} of {checked} greedy completions differ from plain decoding where rounding does not explain it.",
        )
    if lossless.get("near_ties"):
        yield (
            "near_ties",
            f"{lossless['near_ties']} greedy completions diverge from plain decoding at a near-tie of the top two logits.",
        )
    test = lossless.get("sampling_test")
    if test and test["negative_control_p_value"] > CONTROL_P_VALUE:
        yield (
            "insensitive_sampling_test",
            "The sampling test did not detect a rule that is wrong on purpose: it shows little here.",
        )
    without = 1 - row["num_drafts"] / row["num_rounds"] if row["num_drafts"] and "num_rounds" in row else 0.0
    if without > ROUNDS_WITHOUT_DRAFT:
        yield (
            "rounds_without_draft",
            f"In {without:.0%} of the rounds nothing was drafted; the acceptance length ({row['mean_acceptance_length']:.2f}) leaves these "
            f"out, and a round yields {row['tokens_per_round']:.2f} tokens.",
        )
    if row["num_empty"]:
        yield (
            "empty_completions",
            f"{row['num_empty']} of {row['num_prompts']} completions ended with their first token: no draft helps there.",
        )
    if row.get("num_looping", 0) > LOOPING_SHARE * row["num_prompts"]:
        share = f"{row['num_looping']} of {row['num_prompts']}"
        yield "loops", f"{share} completions end in a loop, which is easy to draft and inflates acceptance."
    if settings["temperature"] and settings["top_k"] == 1:
        yield "top_k", "top_k=1 makes this sampled run greedy."
    theory = report.get("theory")
    best = best_point(theory["curve"])["predicted_speedup"] if theory else 0.0
    if theory and theory["best_k"] != theory["K"] and best > theory["predicted"] * (1 + BETTER_K_GAIN):
        yield "best_k", f"K = {theory['best_k']} is predicted to be faster ({best:.2f}×) than the K = {theory['K']} measured."


def _speed_findings(row: Mapping[str, Any], device: str, target_precision: float | None) -> Iterator[tuple[str, str]]:
    bound = MAX_PREDICTION_GAP.get(device, MAX_PREDICTION_GAP["cpu"])
    if row.get("prediction_gap", 0) > bound:
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
    if "speedup_ci95" in row and (half := half_width(row, "speedup")) > WIDE_INTERVAL:
        yield "wide_interval", f"With {row['num_prompts']} prompts the speedup is known to ±{half:.0%} only."
    if target_precision and not all(half_width(row, name) <= target_precision for name in PRECISION_METRICS):
        yield (
            "precision_not_reached",
            f"All {row['num_prompts']} prompts were measured and the target precision of ±{target_precision:.1%} was not reached.",
        )
