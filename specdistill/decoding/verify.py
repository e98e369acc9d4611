"""Verification: which draft tokens are accepted, and which token follows them. Pure functions over tensors.

Shapes: B rows, K draft tokens, N nodes of a tree, V vocabulary.

Chains. The target's p_k is at the position of draft token k; p_K follows all of them. A draft token x_k ~ q_k is accepted with
probability min(1, p_k(x_k) / q_k(x_k)). At the first rejection the next token is drawn from the residual max(p_k - q_k, 0), rescaled; when
all are accepted, from p_K. The output then follows the target's distribution exactly, for any q (arXiv 2211.17192, 2302.01318). With q
one-hot (greedy drafting) this is: accept with probability p_k(x_k), else draw from p_k without x_k.

Trees, of which a path is accepted. Row 0 of the target's distributions follows the root, row 1 + i follows node i.

Certain candidates (greedy drafting, q one-hot). The target's own choice after every node is made first, its best token or a draw from p.
The path follows these choices from the root while the tree holds them; the first that it does not hold is the next token. The output
consists of the target's choices, so its distribution is the target's by construction. For siblings x_1, x_2, … this is the rule below with
one-hot q: x_1 is accepted with probability p(x_1), x_2 with p(x_2) / (1 - p(x_1)), and otherwise a token is drawn from p without them.

Candidates drawn from q without replacement (recursive rejection: SpecInfer arXiv 2305.09781, multi-candidate sampling arXiv 2401.06706).
With r_1 = p and q_1 = q, sibling x_i ~ q_i is accepted with probability min(1, r_i(x_i) / q_i(x_i)); if it is rejected,

    r_{i+1} = max(r_i - q_i, 0), rescaled          q_{i+1} = q_i without x_i, rescaled

and when all siblings are rejected the next token is drawn from the last r. Each test is that of `rejection` with target r_i:
whatever happened before, its outcome follows r_i; by induction from the last sibling to the first, the outcome of all follows p.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.sampling import draw
from specdistill.decoding.tree import ROOT, Tree


def greedy(tokens: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """Accept while the draft token is the target's choice: (number of accepted tokens, the choice after them).

    choices [K + 1]: the target's best token after the sequence and after each of the K draft tokens.
    """
    num_accepted = next(
        (index for index, token in enumerate(tokens) if token != choices[index]), len(tokens)
    )
    return num_accepted, choices[num_accepted]


def rejection(
    tokens_BK: Tensor, target_probs_BKV: Tensor, draft_probs_BKV: Tensor | None, uniforms_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Exact speculative sampling, as a function of its randomness: uniforms [B, K + 1] in [0, 1), K acceptance tests, then one draw.

    `draft_probs_BKV` [B, K, V] is the distribution each draft token was drawn from; None means one-hot. Returns num_accepted_B and
    next_token_B.
    """
    width = tokens_BK.shape[1]
    if draft_probs_BKV is None:
        draft_probs_BKV = F.one_hot(tokens_BK, target_probs_BKV.shape[-1]).to(
            target_probs_BKV.dtype
        )
    p_of_token = target_probs_BKV[:, :width].gather(-1, tokens_BK.unsqueeze(-1)).squeeze(-1)
    q_of_token = draft_probs_BKV.gather(-1, tokens_BK.unsqueeze(-1)).squeeze(-1)
    num_accepted = (uniforms_BK[:, :width] * q_of_token < p_of_token).long().cumprod(-1).sum(-1)

    row = torch.arange(len(tokens_BK), device=tokens_BK.device)
    distribution = target_probs_BKV[row, num_accepted]
    # Nothing was proposed after the last draft token, so nothing is subtracted there.
    proposed = F.pad(draft_probs_BKV, (0, 0, 0, 1))[row, num_accepted]
    residual = (distribution - proposed).clamp_min(0)
    # p = q up to rounding leaves no residual; a rejection there has probability zero up to rounding too.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, distribution)
    return num_accepted, draw(residual, uniforms_BK[:, width])


def follow(tokens: Sequence[int], tree: Tree, choices: Sequence[int]) -> tuple[list[int], int]:
    """The path that the target's choices [N + 1] take, and the choice that leads out of the tree."""
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        choice = choices[node + 1]
        below = [child for child in tree.children[node] if tokens[child] == choice]
        if not below:
            return path, choice
        path.append(below[0])


def sampled(
    tokens: Sequence[int],
    tree: Tree,
    target_probs_NV: Tensor,
    draft_probs_NV: Tensor | None,
    uniforms_N: Tensor,
) -> tuple[list[int], int]:
    """Exact sampling over a tree: the accepted path and the token after it.

    Args:
        tokens: of the N nodes.
        target_probs_NV: [N + 1, V].
        draft_probs_NV: [N, V], the distribution each node's first sibling was drawn from; None where candidates are certain.
        uniforms_N: [N + 1] in [0, 1). For certain candidates a draw after the root and after each node; for drawn ones a test of each
            node, then one draw.
    """
    if draft_probs_NV is None:
        return follow(tokens, tree, draw(target_probs_NV, uniforms_N).tolist())
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        residual_V, children = target_probs_NV[node + 1].double(), tree.children[node]
        proposed_V = draft_probs_NV[children[0]].double() if children else None
        for child in children:
            assert proposed_V is not None
            token = tokens[child]
            if uniforms_N[child] * proposed_V[token] < residual_V[token]:
                path.append(child)
                break
            left_V = (residual_V - proposed_V).clamp_min(0)
            # r = q up to rounding leaves nothing; a rejection there has probability zero up to rounding too.
            residual_V = left_V / left_V.sum() if left_V.sum() > 0 else residual_V
            proposed_V = proposed_V.index_fill(
                0, torch.tensor(token, device=proposed_V.device), 0.0
            )
            proposed_V = proposed_V / proposed_V.sum()
        else:
            return path, int(draw(residual_V.unsqueeze(0), uniforms_N[-1:]))
