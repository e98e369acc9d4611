"""DSpark as a row of the table (arXiv 2607.05147)."""

from specdistill.methods import sizes
from specdistill.methods.blocks.checkpoint import Kind
from specdistill.methods.blocks.method import block_method
from specdistill.methods.dspark.config import RECIPE
from specdistill.methods.dspark.module import DSparkConfig, DSparkDraft

KIND = Kind("dspark", ("Qwen3DSparkModel", "DSparkSpeculator"), DSparkConfig, DSparkDraft)
PUBLISHED = sizes.PublishedFigures(
    None,
    "no figure to compare with the others': AL 3.56 sampled to 4.15 greedy at K = 7 (Qwen3.5-9B, SPEED-Bench, NVIDIA Model-Optimizer); on "
    "equal data 27 to 31% more than EAGLE-3 (arXiv 2607.05147)",
    1_300_000 * sizes.TOKENS_PER_SAMPLE,
    "1.3M regenerated conversations (arXiv 2607.05147)",
)
METHOD = block_method(KIND, PUBLISHED, RECIPE, frozenset({"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}))
