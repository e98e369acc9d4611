"""DSpark as a method (arXiv 2607.05147): a block drafter with a correction."""

from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods import sizes
from specdistill.methods.blocks.advice import BlockAdvice
from specdistill.methods.blocks.method import BlockMethod
from specdistill.methods.blocks.module import Kind
from specdistill.methods.blocks.objective import BlockObjective
from specdistill.methods.blocks.proposer import BlockProposer
from specdistill.methods.dspark.config import DSparkDraftConfig
from specdistill.methods.dspark.module import DSparkConfig, DSparkDraft

KIND = Kind("dspark", ("Qwen3DSparkModel", "DSparkSpeculator"), DSparkConfig, DSparkDraft)
# The range of published acceptance (two acceptance lengths, each with its K), where the figures are
# from, and how much data was used. `specdistill plan` prints them.
PUBLISHED_FIGURES = sizes.MethodFigures(
    (alpha_from_acceptance_length(3.49, 7), alpha_from_acceptance_length(3.72, 7)),
    "AL 3.49 (Gemma4-12B) to 3.72 (Qwen3-8B), MT-bench at temperature 1, K = 7; up to 6.2 on"
    " mathematics; on equal data 27 to 31% more than EAGLE-3 (arXiv 2607.05147)",
    1_300_000 * sizes.TOKENS_PER_SAMPLE,
    "1.3M regenerated conversations (arXiv 2607.05147)",
)


class DSpark(BlockMethod):
    """DSpark: a block whose tokens are corrected by those before them."""

    name = "dspark"
    kind = KIND
    own_tensors = frozenset({"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"})
    objective = BlockObjective
    proposer = BlockProposer
    advice = BlockAdvice(KIND, PUBLISHED_FIGURES, DSparkDraftConfig)


METHOD = DSpark()
