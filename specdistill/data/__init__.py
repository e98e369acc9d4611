"""Training data: sources, chat templates and loss masks, packing, the draft vocabulary, and rows that the target writes itself."""

from specdistill.data.packing import collate
from specdistill.data.training import training_data
from specdistill.data.vocabulary import draft_vocabulary

__all__ = ["collate", "draft_vocabulary", "training_data"]
