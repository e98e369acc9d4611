"""DFlash as a method (arXiv 2602.06036): a block drafter."""

from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods import sizes
from specdistill.methods.blocks.advice import BlockAdvice
from specdistill.methods.blocks.config import BlockDraftConfig
from specdistill.methods.blocks.method import BlockMethod
from specdistill.methods.blocks.module import BlockConfig, BlockDraft, Kind
from specdistill.methods.blocks.objective import BlockObjective
from specdistill.methods.blocks.proposer import BlockProposer

KIND = Kind("dflash", ("DFlashDraftModel", "DFlashSpeculator"), BlockConfig, BlockDraft)
# The range of published acceptance (two acceptance lengths, each with its K), where the figures are
# from, and how much data was used. `specdistill plan` prints them.
PUBLISHED_FIGURES = sizes.MethodFigures(
    (alpha_from_acceptance_length(2.98, 7), alpha_from_acceptance_length(3.48, 15)),
    "AL 2.98 at temperature 1, K = 7 (Gemma4-12B, arXiv 2607.05147) to 3.48 greedy, K = 15"
    " (Qwen3-8B, NVIDIA Model-Optimizer pull request 2342), MT-bench; up to 7.9 on mathematics; on"
    " equal data 13% less to 31% more than EAGLE-3",
    800_000 * sizes.TOKENS_PER_SAMPLE,
    "800k regenerated conversations (arXiv 2602.06036)",
)


class DFlash(BlockMethod):
    """DFlash: a block of masks that reads the target's layers and is filled in one pass."""

    name = "dflash"
    kind = KIND
    objective = BlockObjective
    proposer = BlockProposer
    advice = BlockAdvice(KIND, PUBLISHED_FIGURES, BlockDraftConfig)


METHOD = DFlash()
