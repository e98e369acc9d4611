"""Training data: sources, chat templates and loss masks, packing, the draft vocabulary, and generation by the target."""

from specdistill.data.draft_vocabulary import draft_vocabulary
from specdistill.data.packing import collate
from specdistill.data.training_data import training_data

__all__ = ["collate", "draft_vocabulary", "training_data"]
