"""Speed with and without a draft, as a local metric of the `evaluate` library: load it by its path, it works offline."""

import datasets
import evaluate
import numpy as np

from specdistill.statistics.intervals import estimates

DESCRIPTION = (
    """Tokens a second with a draft and without, and their ratio, each with a 95 % interval from a bootstrap over prompts."""
)

INPUTS = """
Args:
    predictions: for each prompt, {num_tokens, seconds} with the draft.
    references: for each prompt, the same without.
    seed: of the bootstrap.
    confidence: of the intervals; above 0.95 for a run with interim analyses.
"""


class Speedup(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        timing = {"num_tokens": datasets.Value("int32"), "seconds": datasets.Value("float64")}
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": timing, "references": timing}),
        )

    def _compute(
        self, predictions: list[dict[str, float]], references: list[dict[str, float]], seed: int = 0, confidence: float = 0.95
    ) -> dict[str, object]:
        columns = {
            "num_tokens": np.array([row["num_tokens"] for row in predictions], dtype=np.float64),
            "seconds": np.array([row["seconds"] for row in predictions], dtype=np.float64),
            "baseline_num_tokens": np.array([row["num_tokens"] for row in references], dtype=np.float64),
            "baseline_seconds": np.array([row["seconds"] for row in references], dtype=np.float64),
        }
        return estimates(("tokens_per_second", "baseline_tokens_per_second", "speedup"), columns, seed, confidence)
