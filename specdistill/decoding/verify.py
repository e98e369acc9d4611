"""Decide which draft tokens are accepted, and which token follows them.

These are pure functions over tensors; `specdistill.decoding.decoder` calls them once per round.

Shapes: B rows, K draft tokens, N nodes of a tree, V vocabulary.

**Chains.** The target's distribution p_k is at the position of draft token k; p_K follows all of
them. A draft token x_k ~ q_k is accepted with probability min(1, p_k(x_k) / q_k(x_k)). At the first
rejection the next token is drawn from the residual max(p_k - q_k, 0), rescaled. If all draft tokens
are accepted, it is drawn from p_K. The output then follows the target's distribution exactly, for
any q (arXiv 2211.17192, 2302.01318). If q is one-hot (greedy drafting), the rule becomes: accept
with probability p_k(x_k), else draw from p_k without x_k.

**Trees.** One path of a tree is accepted. Row 0 of the target's distributions follows the root, and
row 1 + i follows node i.

*Certain candidates* (greedy drafting, q is one-hot). First the target makes its own choice after
every node: its best token, or a draw from p. The path follows these choices from the root for as
long as the tree contains them. The first choice outside the tree is the next token. The output
consists of the target's choices, so it has the target's distribution by construction. For siblings
x_1, x_2, … this equals the rule below with one-hot q: x_1 is accepted with probability p(x_1), x_2
with p(x_2) / (1 - p(x_1)), and otherwise a token is drawn from p without them.

*Candidates drawn from q without replacement* (recursive rejection: SpecInfer arXiv 2305.09781,
multi-candidate sampling arXiv 2401.06706). With r_1 = p and q_1 = q, sibling x_i ~ q_i is accepted
with probability min(1, r_i(x_i) / q_i(x_i)). If it is rejected,

    r_{i+1} = max(r_i - q_i, 0), rescaled          q_{i+1} = q_i without x_i, rescaled

If all siblings are rejected, the next token is drawn from the last r. Each test is the test of
`verify_sampled_chain` with target r_i, so the token that it leads to follows r_i. By induction from
the last sibling to the first, the token that all tests lead to follows p.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.sampling import draw_tokens
from specdistill.decoding.tree import ROOT, Tree


def verify_greedy_chain(tokens: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """Accept the draft tokens of a chain up to the first that is not the target's choice.

    Args:
        tokens: the K draft tokens.
        choices: [K + 1], the target's best token after the sequence and after each draft token.

    Returns:
        The number of accepted tokens, and the target's choice after them.
    """
    num_accepted = 0
    while num_accepted < len(tokens) and tokens[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return num_accepted, choices[num_accepted]


def verify_sampled_chain(
    tokens_BK: Tensor, target_probs_BKV: Tensor, draft_probs_BKV: Tensor | None, uniforms_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Verify B chains of K draft tokens by speculative sampling.

    A draft token x is accepted with probability min(1, p(x) / q(x)), where p is the target's
    distribution and q the draft's. After the first rejection the next token is drawn from
    max(p - q, 0), rescaled. So the output follows p exactly.

    Args:
        tokens_BK: draft tokens [B, K].
        target_probs_BKV: p over the vocabulary [B, K + 1, V], at each draft token and after the
            last.
        draft_probs_BKV: q [B, K, V], the distribution that each draft token was drawn from. None:
            each draft token was certain (q is one-hot).
        uniforms_BK: random numbers [B, K + 1] in [0, 1): one for each acceptance test, the last to
            draw the next token.

    Returns:
        The number of accepted draft tokens of each chain [B], and its next token [B].
    """
    num_draft_tokens = tokens_BK.shape[1]
    if draft_probs_BKV is None:
        draft_probs_BKV = F.one_hot(tokens_BK, target_probs_BKV.shape[-1]).to(
            target_probs_BKV.dtype
        )

    # Accept a draft token if u < p / q. The test is u q < p, because q may be 0. The product of the
    # passed tests is 1 up to the first rejection.
    index_BK1 = tokens_BK.unsqueeze(-1)
    p_of_token_BK = target_probs_BKV[:, :num_draft_tokens].gather(-1, index_BK1).squeeze(-1)
    q_of_token_BK = draft_probs_BKV.gather(-1, index_BK1).squeeze(-1)
    passed_BK = uniforms_BK[:, :num_draft_tokens] * q_of_token_BK < p_of_token_BK
    num_accepted_B = passed_BK.long().cumprod(-1).sum(-1)

    # Draw the next token from the residual p - q at the first rejected token. If all K were
    # accepted, it comes from p alone: the padding adds a row of zeros as q.
    row_B = torch.arange(len(tokens_BK), device=tokens_BK.device)
    target_BV = target_probs_BKV[row_B, num_accepted_B]
    draft_BV = F.pad(draft_probs_BKV, (0, 0, 0, 1))[row_B, num_accepted_B]
    residual_BV = (target_BV - draft_BV).clamp_min(0)
    # If p = q up to rounding, the residual is empty. A rejection then has probability zero up to
    # rounding, too, so any distribution would do.
    has_residual_B1 = residual_BV.sum(-1, keepdim=True) > 0
    residual_BV = torch.where(has_residual_B1, residual_BV, target_BV)
    return num_accepted_B, draw_tokens(residual_BV, uniforms_BK[:, num_draft_tokens])


def follow_target_choices(
    tokens: Sequence[int], tree: Tree, choices: Sequence[int]
) -> tuple[list[int], int]:
    """Accept the path of a draft tree whose tokens are the target's own choices.

    Starts at the root (the last token of the sequence), and goes on to the child whose token the
    target chose, for as long as there is one.

    Args:
        tokens: the draft tokens of the N nodes.
        tree: the parents and children of the nodes.
        choices: the target's choice after the root (index 0) and after each node i (index i + 1).

    Returns:
        The node indices of the accepted path, and the next token: the first choice that is not in
        the tree.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        choice = choices[node + 1]
        matching_children = [child for child in tree.children[node] if tokens[child] == choice]
        if not matching_children:
            return path, choice
        path.append(matching_children[0])


def verify_sampled_tree(
    tokens: Sequence[int],
    tree: Tree,
    target_probs_NV: Tensor,
    draft_probs_NV: Tensor | None,
    uniforms_N: Tensor,
) -> tuple[list[int], int]:
    """Decide which path of a draft tree is accepted; the output has the target's distribution.

    There are two rules. If the draft chose its tokens without randomness, each is *certain* (it has
    draft probability 1). It is accepted if the target draws the same token itself. If the draft
    drew its tokens, they are tested by recursive rejection (SpecInfer, arXiv 2305.09781). The
    module's docstring explains why both rules are exact.

    Args:
        tokens: the draft tokens of the N nodes.
        tree: the parents and children of the nodes.
        target_probs_NV: the target's distributions [N + 1, V] after the root (row 0) and after each
            node i (row i + 1).
        draft_probs_NV: the draft's distributions [N, V]. Siblings share one, from which they were
            drawn without replacement. None: all draft tokens are certain.
        uniforms_N: random numbers [N + 1] in [0, 1). If the draft tokens are certain: one for a
            draw from each of the target's distributions. Otherwise: one for the test of each node,
            and the last to draw the next token.

    Returns:
        The node indices of the accepted path, and the next token.
    """
    # The draft tokens are certain: the target draws a token after every node, and the accepted path
    # follows its draws.
    if draft_probs_NV is None:
        choices = draw_tokens(target_probs_NV, uniforms_N).tolist()
        return follow_target_choices(tokens, tree, choices)

    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        children = tree.children[node]
        residual_V = target_probs_NV[node + 1].double()
        draft_V = draft_probs_NV[children[0]].double() if children else None

        # Test the children in turn, as in `verify_sampled_chain`. Each rejection subtracts the
        # draft's distribution from the residual, and removes the rejected token from the draft's.
        for child in children:
            assert draft_V is not None
            token = tokens[child]
            if uniforms_N[child] * draft_V[token] < residual_V[token]:
                path.append(child)
                break
            remaining_V = (residual_V - draft_V).clamp_min(0)
            # If r = q up to rounding, nothing remains. A rejection then has probability zero up to
            # rounding, too, so any distribution would do.
            if remaining_V.sum() > 0:
                residual_V = remaining_V / remaining_V.sum()
            draft_V = draft_V.index_fill(0, torch.tensor(token, device=draft_V.device), 0.0)
            draft_V = draft_V / draft_V.sum()
        else:
            return path, int(draw_tokens(residual_V.unsqueeze(0), uniforms_N[-1:]))
