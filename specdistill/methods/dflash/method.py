"""DFlash as a row of the table (arXiv 2602.06036)."""

from specdistill.methods import sizes
from specdistill.methods.blocks.checkpoint import Kind
from specdistill.methods.blocks.method import block_method
from specdistill.methods.blocks.module import BlockConfig, BlockDraft
from specdistill.methods.dflash.config import RECIPE
from specdistill.statistics.theory import alpha_from_acceptance_length

KIND = Kind("dflash", ("DFlashDraftModel", "DFlashSpeculator"), BlockConfig, BlockDraft)
PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(2.98, 7), alpha_from_acceptance_length(3.48, 15)),
    "AL 2.98 at temperature 1, K = 7 (Gemma4-12B, arXiv 2607.05147) to 3.48 greedy, K = 15 (Qwen3-8B, NVIDIA Model-Optimizer pull request "
    "2342), MT-bench; up to 7.9 on mathematics; on equal data 13% less to 31% more than EAGLE-3",
    800_000 * sizes.TOKENS_PER_SAMPLE,
    "800k regenerated conversations (arXiv 2602.06036)",
)
METHOD = block_method(KIND, PUBLISHED, RECIPE)
