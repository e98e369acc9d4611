"""Which masks a batch is trained on: the conditional drop of PARD (arXiv 2504.18583).

Shapes: B rows, T positions, S = B T, M masks of a row (padded).

After the token at column t come the masks 1, 2, …, of which mask i stands in the place of x_{t+i} and predicts x_{t+1+i}. Mask i is kept
for a share max(least, retention ** i) of the tokens, and never without mask i - 1, which it reads: chains stay whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SIZES = 8  # a row's masks are padded to multiples of T / SIZES, so that a compiled step meets few sizes


def draw_masks(batch: dict[str, Any], num_predicted: int, retention: float, least: float, seed: int) -> tuple[Tensor, Tensor]:
    """The columns [B, M] of the tokens that masks follow, and the masks' numbers [B, M], from 1 on; padding follows column 0 and has the
    number `num_predicted`, which no mask has.

    A mask is possible if what it predicts carries loss in its token's document, and all between the two do.
    """
    num_rows, length = batch["position_ids"].shape
    num_tokens = num_rows * length
    # Loss positions are never a document's first, so a run of them is in one document. Zeros past the end end the last one.
    has_loss_S = torch.zeros(num_tokens + num_predicted, dtype=torch.bool).index_fill(0, batch["loss_positions"], True)
    has_loss_S[0] = False  # padding of loss positions
    possible_S = has_loss_S[1 : num_tokens + 1]
    starts = possible_S.nonzero().flatten()
    rank_S = torch.ones(num_tokens)
    rank_S[starts] = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed)) / max(len(starts), 1)
    kept = []
    for i in range(1, num_predicted):
        possible_S = possible_S & has_loss_S[1 + i : num_tokens + 1 + i]
        kept.append(possible_S & (rank_S < max(least, retention**i)))
    kept_SI = torch.stack(kept, 1) if kept else torch.zeros(num_tokens, 0, dtype=torch.bool)
    found = [row.nonzero() for row in kept_SI.view(num_rows, length, -1)]
    columns_BM = pad_sequence([pairs[:, 0] for pairs in found], batch_first=True)
    numbers_BM = pad_sequence([pairs[:, 1] + 1 for pairs in found], batch_first=True, padding_value=num_predicted)
    spare = -columns_BM.shape[1] % -(-length // SIZES)
    return F.pad(columns_BM, (0, spare)), F.pad(numbers_BM, (0, spare), value=num_predicted)
