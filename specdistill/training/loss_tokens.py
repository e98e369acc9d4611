"""Select the packed rows from which a draft can learn something.

Such a row has a loss token that the draft predicts. This module also checks that some answers are
as long as a draft: drafted positions beyond the longest answer would learn nothing.

Shapes: B rows of a batch, T positions.
"""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from torch import nn

from specdistill.common.errors import UserError, logger
from specdistill.data.rows.files import is_first_here
from specdistill.data.rows.row_set import SPLITS
from specdistill.recipe.data_sources import list_source_names
from specdistill.recipe.sections import DataConfig
from specdistill.training.objective import Objective


def find_longest_runs(rows: Dataset, ahead: int) -> NDArray[np.int64]:
    """Return, for each packed row, how many tokens its longest run of loss tokens has.

    Loss tokens without enough tokens of their document before them do not count, because the draft
    cannot predict them. A row without any loss token that counts has 0.

    Args:
        rows: packed rows of T tokens. Of their columns, `loss_mask` (1 for a loss token) and
            `position_ids` (from 0 in each document) are read.
        ahead: the fewest tokens of its document that must be before a token, so that the draft can
            predict it (`Objective.ahead`).
    """
    longest = []
    columns = rows.select_columns(["loss_mask", "position_ids"]).with_format("numpy")
    for batch in columns.iter(batch_size=256):
        has_loss_BT = (np.stack(batch["loss_mask"]) > 0) & (
            np.stack(batch["position_ids"]) >= ahead
        )
        # A token's place in its run is the count of loss tokens up to it, minus the count up to the
        # last token without loss. For tokens with loss 0 1 1 0 1, the counts are 0 1 2 2 3, the
        # counts up to the last token without loss 0 0 0 2 2, and the places 0 1 2 0 1. A document's
        # first token has no loss, so no run continues into the next document. (B is the number of
        # rows of a batch.)
        counts_BT = has_loss_BT.cumsum(1)
        before_BT = np.maximum.accumulate(np.where(has_loss_BT, 0, counts_BT), axis=1)
        longest.append((counts_BT - before_BT).max(axis=1))
    return np.concatenate(longest)


def select_learnable_rows(
    sets: Sequence[Dataset], objective: nn.Module, config: DataConfig
) -> list[Dataset]:
    """Return the training and the validation rows from which a draft learns something.

    Rows without a loss token that the draft can predict are left out with a warning. Row sets of
    earlier versions may hold such rows. There is also a warning if every answer has fewer tokens
    than the draft proposes at once.

    Args:
        sets: the training and the validation rows.
        objective: the draft's objective. It says how many tokens a predicted token needs before it
            (`ahead`), and how many positions are drafted (`num_positions`).
        config: the recipe's section `data`, whose keys errors and warnings name.

    Raises:
        UserError: if no training row or no validation row is left.
    """
    # Measure each row's longest run of loss tokens that the method can predict. An objective that
    # does not set `ahead` has the default, 1.
    ahead = getattr(objective, "ahead", Objective.ahead)
    key = "data.rows" if config.rows else "data.source"
    runs = [find_longest_runs(rows, ahead) for rows in sets]

    # Refuse a split without any useful row, and warn about useless rows. The first process of each
    # machine warns for all.
    for split, split_runs in zip(SPLITS, runs, strict=True):
        num_useless = np.count_nonzero(split_runs == 0)
        if num_useless == len(split_runs):
            where = config.rows or ", ".join(list_source_names(config.source))
            raise UserError(
                key,
                got=(
                    f"{where}, where no row of the {split} split has a loss token that a draft of"
                    " this method can learn"
                ),
                expected=(
                    f"rows with a loss token (1 in loss_mask) after {ahead} or more other tokens"
                ),
            )
        if num_useless and is_first_here():
            logger.warning(
                f"{key}: left out {num_useless:,} of {len(split_runs):,} rows of the {split}"
                " split, which have no loss token that a draft of this method can learn."
            )

    # Drafted positions beyond the longest answer learn nothing.
    longest = [int(split_runs.max()) for split_runs in runs]
    num_positions = getattr(objective, "num_positions", 1)
    if min(longest) < num_positions and is_first_here():
        logger.warning(
            f"The answers are too short for drafted positions {min(longest) + 1} to"
            f" {num_positions}. The longest run of loss tokens has {longest[0]} tokens in training"
            f" rows and {longest[1]} in validation rows. Positions above {longest[0]} learn"
            f" nothing, and positions above {longest[1]} are not measured. Use data with longer"
            " answers, or draft fewer tokens."
        )

    # Leave out the useless rows.
    return [
        rows.select(np.flatnonzero(split_runs)) if (split_runs == 0).any() else rows
        for rows, split_runs in zip(sets, runs, strict=True)
    ]
