"""The draft vocabulary: the most frequent tokens of the training data."""

import torch
from datasets import Dataset
from torch import Tensor

from specdistill.errors import UserError


def draft_vocabulary(rows: Dataset, vocab_size: int, draft_vocab_size: int | None) -> Tensor | None:
    """Sorted target ids [W] of the most frequent loss tokens of `rows`; None keeps the whole vocabulary.

    Ties go to the lower id. Raises UserError when the draft vocabulary is empty or larger than the target's.
    """
    if draft_vocab_size is None or draft_vocab_size == vocab_size:
        return None
    if not 0 < draft_vocab_size < vocab_size:
        raise UserError("draft.vocab_size", got=draft_vocab_size, expected=f"null or 1..{vocab_size}, the target's vocabulary")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for batch in rows.select_columns(["input_ids", "loss_mask"]).with_format("torch").iter(batch_size=1024):
        counts += torch.bincount(batch["input_ids"][batch["loss_mask"].bool()], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
