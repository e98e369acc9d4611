"""Draft models as a row of the table (arXiv 2211.17192)."""

from specdistill.methods import sizes
from specdistill.methods.models.method import model_method

PUBLISHED = sizes.PublishedFigures(
    (1 - 1 / 2.01, 0.76),
    "AL 2.01 (68M for Vicuna-33B, not distilled, Spec-Bench; K not stated, so alpha is at least 1 - 1/AL) to alpha 0.76 (160M for "
    "Vicuna-7B, distilled on the domain it serves, OSD, ICML 2024)",
    532_000 * sizes.TOKENS_PER_SAMPLE,
    "assumed, as for eagle3: no figure is published for this shape",
)
METHOD = model_method(PUBLISHED)
