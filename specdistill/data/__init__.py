"""Training data: sources, chat templates and loss masks, packing, the draft vocabulary, and generation by the target."""

from specdistill.data.packing import collate, draft_vocabulary
from specdistill.data.training_data import training_data

__all__ = ["collate", "draft_vocabulary", "training_data"]
