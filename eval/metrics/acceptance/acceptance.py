"""How many draft tokens the target accepts: mean acceptance length (bonus token counted), acceptance rate, and unconditional and
conditional rates per position, as vLLM defines them; micro-averages over drafts, with 95 % intervals from a bootstrap over prompts for the
first two.

Args:
    predictions: for each prompt, the accepted number of tokens of each round.
    references: for each prompt, the number of draft tokens of the same rounds.
    num_positions: K, draft tokens of a full round.
    seed: of the bootstrap.
    confidence: of the intervals; above 0.95 for a run with interim analyses.
"""

import numpy as np
from datasets import Sequence, Value

from specdistill.measurement.quality import metric
from specdistill.statistics.intervals import estimates
from specdistill.statistics.metrics import acceptance

Rounds = list[list[int]]


def compute(
    predictions: Rounds, references: Rounds, num_positions: int, seed: int = 0, confidence: float = 0.95
) -> dict[str, object]:
    columns = {
        "num_drafts": np.array([len(prompt) for prompt in references], dtype=np.float64),
        "num_draft_tokens": np.array([sum(prompt) for prompt in references], dtype=np.float64),
        "num_accepted_tokens": np.array([sum(prompt) for prompt in predictions], dtype=np.float64),
    }
    intervals = estimates(("mean_acceptance_length", "acceptance_rate"), columns, seed, confidence)
    return intervals | acceptance(predictions, references, num_positions)


Acceptance = metric("acceptance", __doc__, Sequence(Value("int32")), compute)
