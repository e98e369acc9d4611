"""DSpark as a row of the table (arXiv 2607.05147)."""

from specdistill.methods import sizes
from specdistill.methods.blocks.checkpoint import Kind
from specdistill.methods.blocks.method import block_method
from specdistill.methods.dspark.config import RECIPE
from specdistill.methods.dspark.module import DSparkConfig, DSparkDraft
from specdistill.statistics.theory import alpha_from_acceptance_length

KIND = Kind("dspark", ("Qwen3DSparkModel", "DSparkSpeculator"), DSparkConfig, DSparkDraft)
PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(3.49, 7), alpha_from_acceptance_length(3.72, 7)),
    "AL 3.49 (Gemma4-12B) to 3.72 (Qwen3-8B), MT-bench at temperature 1, K = 7; up to 6.2 on mathematics; on equal data 27 to 31% more "
    "than EAGLE-3 (arXiv 2607.05147)",
    1_300_000 * sizes.TOKENS_PER_SAMPLE,
    "1.3M regenerated conversations (arXiv 2607.05147)",
)
METHOD = block_method(
    KIND,
    PUBLISHED,
    RECIPE,
    frozenset({"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}),
)
