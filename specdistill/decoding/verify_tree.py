"""Verification of trees: which path is accepted, and which token follows it. Pure functions over tensors, as in `verify`.

Shapes: N nodes, V vocabulary. Row 0 of the target's distributions follows the root, row 1 + i follows node i.

Certain candidates (greedy drafting, q one-hot). The target's own choice after every node is made first, its best token or a draw from p.
The path follows these choices from the root while the tree holds them; the first that it does not hold is the next token. The output
consists of the target's choices, so its distribution is the target's by construction. For siblings x_1, x_2, … this is the rule below with
one-hot q: x_1 is accepted with probability p(x_1), x_2 with p(x_2) / (1 - p(x_1)), and otherwise a token is drawn from p without them.

Candidates drawn from q without replacement (recursive rejection: SpecInfer arXiv 2305.09781, multi-candidate sampling arXiv 2401.06706).
With r_1 = p and q_1 = q, sibling x_i ~ q_i is accepted with probability min(1, r_i(x_i) / q_i(x_i)); if it is rejected,

    r_{i+1} = max(r_i - q_i, 0), rescaled          q_{i+1} = q_i without x_i, rescaled

and when all siblings are rejected the next token is drawn from the last r. Each test is that of `verify.rejection` with target r_i:
whatever happened before, its outcome follows r_i; by induction from the last sibling to the first, the outcome of all follows p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.decoding.sampling import draw
from specdistill.decoding.tree import ROOT, Tree


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
    tokens: Sequence[int], tree: Tree, target_probs_NV: Tensor, draft_probs_NV: Tensor | None, uniforms_N: Tensor
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
            proposed_V = proposed_V.index_fill(0, torch.tensor(token, device=proposed_V.device), 0.0)
            proposed_V = proposed_V / proposed_V.sum()
        else:
            return path, int(draw(residual_V.unsqueeze(0), uniforms_N[-1:]))
