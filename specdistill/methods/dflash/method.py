"""DFlash as a row of the table (arXiv 2602.06036)."""

from specdistill.methods import sizes
from specdistill.methods.blocks.checkpoint import Kind
from specdistill.methods.blocks.method import block_method
from specdistill.methods.blocks.module import BlockConfig, BlockDraft
from specdistill.methods.dflash.config import RECIPE

KIND = Kind("dflash", ("DFlashDraftModel", "DFlashSpeculator"), BlockConfig, BlockDraft)
PUBLISHED = sizes.PublishedFigures(
    None,
    "no figure to compare with the others': AL 3.48 (MT-bench) to 7.9 (mathematics) at K = 15, after six epochs on 64 GPUs (Qwen3-8B, "
    "NVIDIA Model-Optimizer pull request 2342); on equal data 13% less to 31% more than EAGLE-3 (arXiv 2607.05147)",
    800_000 * sizes.TOKENS_PER_SAMPLE,
    "800k regenerated conversations (arXiv 2602.06036)",
)
METHOD = block_method(KIND, PUBLISHED, RECIPE)
