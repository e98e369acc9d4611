"""Verification: which draft tokens are accepted, and which token follows them. Pure functions over tensors.

Shapes: B rows, K draft tokens, V vocabulary. The target's p_k is at the position of draft token k; p_K follows all of them.

A draft token x_k ~ q_k is accepted with probability min(1, p_k(x_k) / q_k(x_k)). At the first rejection the next token is drawn from
the residual max(p_k - q_k, 0), rescaled; when all are accepted, from p_K. The output then follows the target's distribution exactly, for
any q (arXiv 2211.17192, 2302.01318). With q one-hot (greedy drafting) this is: accept with probability p_k(x_k), else draw from p_k
without x_k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.sampling import draw


def greedy(tokens_BK: Tensor, target_logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
    """Accept while the draft token is the target's argmax.

    Args:
        tokens_BK: draft token ids, int64.
        target_logits_BKV: [B, K + 1, V].

    Returns:
        num_accepted_B and next_token_B: the argmax after the accepted prefix.
    """
    best = target_logits_BKV.argmax(-1)
    num_accepted = _prefix_length(tokens_BK == best[:, :-1])
    return num_accepted, best.gather(1, num_accepted.unsqueeze(1)).squeeze(1)


def rejection(
    tokens_BK: Tensor, target_probs_BKV: Tensor, draft_probs_BKV: Tensor | None, uniforms_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Exact speculative sampling, as a function of its randomness: uniforms [B, K + 1] in [0, 1), K acceptance tests, then one draw.

    `draft_probs_BKV` [B, K, V] is the distribution each draft token was drawn from; None means one-hot. Returns num_accepted_B and
    next_token_B, as `greedy` does.
    """
    width = tokens_BK.shape[1]
    if draft_probs_BKV is None:
        draft_probs_BKV = F.one_hot(tokens_BK, target_probs_BKV.shape[-1]).to(target_probs_BKV.dtype)
    p_of_token = target_probs_BKV[:, :width].gather(-1, tokens_BK.unsqueeze(-1)).squeeze(-1)
    q_of_token = draft_probs_BKV.gather(-1, tokens_BK.unsqueeze(-1)).squeeze(-1)
    num_accepted = _prefix_length(uniforms_BK[:, :width] * q_of_token < p_of_token)

    row = torch.arange(len(tokens_BK), device=tokens_BK.device)
    distribution = target_probs_BKV[row, num_accepted]
    # Nothing was proposed after the last draft token, so nothing is subtracted there.
    proposed = F.pad(draft_probs_BKV, (0, 0, 0, 1))[row, num_accepted]
    residual = (distribution - proposed).clamp_min(0)
    # p = q up to rounding leaves no residual; a rejection there has probability zero up to rounding too.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, distribution)
    return num_accepted, draw(residual, uniforms_BK[:, width])


def _prefix_length(accepted_BK: Tensor) -> Tensor:
    return accepted_BK.long().cumprod(-1).sum(-1)
