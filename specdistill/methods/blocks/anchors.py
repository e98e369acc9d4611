"""Where the blocks of a batch begin: anchors, drawn from its tokens with loss, and which slots of each block are trained.

Shapes: B rows, T positions, S = B T, N anchors (padded), K tokens after each that a block drafts.

An anchor is the last token that is known when a block is drafted: the target's features of all before it are known, its own are not.
"""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256  # slots of blocks that attend together
SIZES = 8  # different numbers of blocks of a full batch


def draw_blocks(
    batch: dict[str, Any], num_anchors: int, num_drafted: int, seed: int | None
) -> tuple[Tensor, Tensor]:
    """At most `num_anchors` blocks of each row, on average: their anchors, positions [N] in the flattened batch, ascending; and which of
    the K tokens after each are learned, [N, K] bool. seed: of the draw; None takes anchors evenly.

    A token is an anchor if it and the next one carry loss and there are tokens before it in its document: then there is something to draft
    from. A token after it is learned if it and all between it and the anchor carry loss in that document.
    """
    position_S, num_tokens = batch["position_ids"].flatten(), batch["position_ids"].numel()
    has_loss_S = torch.zeros(num_tokens, dtype=torch.bool).index_fill(
        0, batch["loss_positions"], True
    )
    has_loss_S[0] = False  # padding of loss positions
    possible = (has_loss_S[:-1] & has_loss_S[1:] & (position_S[1:] > 1)).nonzero().flatten()
    most = min(num_anchors * len(batch["position_ids"]), num_tokens)
    if len(possible) > most:
        evenly = [index * len(possible) // most for index in range(most)]
        chosen = (
            evenly
            if seed is None
            else sorted(random.Random(seed).sample(range(len(possible)), most))
        )
        possible = possible[chosen]
    # A compiled step is made for each size that it meets; what fills one up repeats an anchor, and learns nothing.
    step = max(1, most // SIZES)
    size = max(1, -(-len(possible) // step)) * step
    anchors_N = F.pad(
        possible, (0, size - len(possible)), value=int(possible[-1]) if len(possible) else 1
    )
    label_NK = anchors_N.unsqueeze(1) + torch.arange(1, num_drafted + 1)
    counts_NK = label_NK < num_tokens
    label_NK = label_NK.clamp_max(num_tokens - 1)
    counts_NK &= has_loss_S[label_NK] & (position_S[label_NK] > position_S[anchors_N].unsqueeze(1))
    counts_NK[len(possible) :] = False
    return anchors_N, counts_NK.cumprod(1).bool()


def spans(
    batch: dict[str, Any], anchors_N: Tensor, block_size: int
) -> list[tuple[int, int, int, int]]:
    """Blocks that attend together on a CPU: the first and the last of them, and what they see of the flattened batch, from and to.

    Whole numbers, which are read off before the step, so that nothing in it depends on data.
    """
    starts_N, size = (
        anchors_N - batch["position_ids"].flatten()[anchors_N],
        max(1, ROWS // block_size),
    )
    chunks = enumerate(zip(starts_N.split(size), anchors_N.split(size), strict=True))
    return [
        (n * size, n * size + len(starts), int(starts.min()), int(anchors.max()))
        for n, (starts, anchors) in chunks
    ]
