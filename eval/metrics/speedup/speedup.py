"""Tokens per second with a draft and without, and their ratio, each with a 95 % interval from a bootstrap over prompts.

Args:
    predictions: for each prompt, {num_tokens, seconds} with the draft.
    references: for each prompt, the same without.
    seed: of the bootstrap.
    confidence: of the intervals; above 0.95 for a run with interim analyses.
"""

import numpy as np
from datasets import Value

from specdistill.measurement.quality import metric
from specdistill.statistics.intervals import estimates

Timings = list[dict[str, float]]


def compute(predictions: Timings, references: Timings, seed: int = 0, confidence: float = 0.95) -> dict[str, object]:
    columns = {
        prefix + name: np.array([row[name] for row in rows], dtype=np.float64)
        for prefix, rows in (("", predictions), ("baseline_", references))
        for name in ("num_tokens", "seconds")
    }
    return estimates(("tokens_per_second", "baseline_tokens_per_second", "speedup"), columns, seed, confidence)


Speedup = metric("speedup", __doc__, {"num_tokens": Value("int32"), "seconds": Value("float64")}, compute)
