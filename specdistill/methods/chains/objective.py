"""The training-time test: train a head on its own hidden states, K steps deep.

It is from EAGLE-3 (arXiv 2503.01840, section 3.2) and HASS (arXiv 2408.15766).

Shapes: B rows, T positions, H draft hidden, R loss tokens (padded), N query heads, G key/value
heads, S = B T chains.

Every position t of a packed row is the root of a chain. With g_t the target's features, y_t the
target's distribution after x_t, and h_t the draft's own output at step k - 1:

    step 0   pair (x_{t+1}, g_t)      predicts x_{t+2}      target y_{t+1}
    step k   pair (x_{t+1+k}, h_t)    predicts x_{t+2+k}    target y_{t+1+k}

This is what happens in decoding when the first k draft tokens are accepted. So step k stands at
position t + k and sees what it will see there: the pairs of step 0 at positions <= t of its
document, and the steps 1..k of its own chain. A prediction of x_s has a loss if the loss mask is 1
at x_s and x_s is in the document of the root.

EAGLE trains its head to return the target's own next feature (arXiv 2401.15077). For such a head
SmoothL1 is added between h_{t+1+k} of step k and the target's last hidden state at t + 1 + k.

The attention of the unroll takes memory linear in the length of a row. A kernel computes the block
of step 0, and each chain's own entries are merged into it. Its shapes: n = N / G, d key head size,
e value head size.

Step k of the root t sees the keys of step 0 at the positions <= t of its document. For these the
kernel returns an output o_0 and a log-sum-exp L_0. It also sees the keys 1..k of its own chain,
whose scores are s_1..s_k. The softmax over all of them has

    L = log(exp L_0 + sum_j exp s_j)      o = exp(L_0 - L) o_0 + sum_j exp(s_j - L) v_j

The kernel computes the gradients of step 0's block: it is given this o and L instead of o_0 and
L_0. The gradients of the scores are ds_j = exp(s_j - L) (do v_j - do o).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.methods.chains.head import Head
from specdistill.targets.frozen import Features
from specdistill.targets.packed_attention import (
    attend_packed,
    attend_packed_backward,
    choose_wide_dtype,
)
from specdistill.training.losses.divergence import Divergence
from specdistill.training.losses.head_loss import compute_head_loss
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    compute_geometric_weights,
    gather_before,
    select_loss_rows,
    shift_left,
)


class UnrollKVCache:
    """A `KVCache` for the unroll: K draft steps in a row from every position, as in training.

    The steps from one position, the root, are a chain. Step 0 is causal within documents. Each
    later step adds one entry to each chain, which only this chain sees.

    With a window of M positions, step k of the root t stands at t + k and sees the positions after
    t + k - M. Its own chain has at most K - 1 entries and is always within the window.
    """

    def __init__(
        self, cumulative_lengths: Tensor, longest: int, num_layers: int, window: int | None = None
    ) -> None:
        """Create an empty cache for one unroll over a batch of packed rows.

        Args:
            cumulative_lengths: int32, the start of each document in the flattened rows, then their
                length S. Padding also belongs to a document.
            longest: tokens of the longest document.
            num_layers: layers of the draft.
            window: M, the size of the sliding window; None for no window.
        """
        self.cumulative_lengths = cumulative_lengths
        self.longest = longest
        self.window = window
        # For each layer: key and value of step 0, of step 1, ...
        self.steps: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def append(self, layer: int, key_BGTd: Tensor, value_BGTe: Tensor) -> None:
        """Store the keys and values of one step of the unroll.

        All T positions of all B rows are stored as S = B T chains.

        Args:
            layer: the index of the layer.
            key_BGTd: keys [B, G, T, d], for G key/value heads of size d.
            value_BGTe: values [B, G, T, e].
        """
        # From [B, G, T, d] to [S, G, d]. Under autocast, float32 rotary tables widen the keys, so
        # they are converted back to the dtype of the values.
        self.steps[layer] += (
            x.transpose(1, 2).flatten(0, 1).to(value_BGTe.dtype) for x in (key_BGTd, value_BGTe)
        )

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTe: Tensor
    ) -> Tensor:
        """Store keys and values of the current step, and compute the attention of its queries.

        A chain is K draft steps in a row from one position, its root. A query of step k sees the
        keys of step 0 at the positions of its document up to the root, and the keys of the steps 1
        to k of its own chain.

        Args:
            layer: the index of the layer.
            query_BNTd: queries [B, N, T, d]: rows, query heads, positions, head size.
            key_BGTd: keys [B, G, T, d], for G key/value heads.
            value_BGTe: values [B, G, T, e].

        Returns:
            The attention output [B, N, T, e].
        """
        # The list has two tensors, key and value, of each step before this one: of the steps 0 to
        # k - 1. So len(steps) // 2 is k.
        # In a window, the k latest positions are the steps 1 to k of the query's own chain. The
        # rest of the window is left for the keys of step 0.
        steps = self.steps[layer]
        window = None if self.window is None else self.window - len(steps) // 2
        assert window is None or window > 0
        self.append(layer, key_BGTd, value_BGTe)

        # Attend with the T positions of all rows as S chains, then restore the rows.
        query = query_BNTd.transpose(1, 2).flatten(0, 1).to(value_BGTe.dtype)
        attend: Callable[..., Tensor] = ChainAttention.apply
        output_SNe = attend(query, self.cumulative_lengths, self.longest, window, *steps)
        output: Tensor = output_SNe.unflatten(0, (query_BNTd.shape[0], -1)).transpose(1, 2)
        return output


class ChainAttention(torch.autograd.Function):
    """The attention of step k of the unroll, with a backward pass of its own.

    In the unroll, training runs several draft steps in a row from every position. The steps from
    one position, the root, are a chain. A query sees the keys of step 0 at positions up to the
    root of its chain, and the keys of the later steps of its own chain. A kernel computes the first
    part. The second part is merged into it by one softmax over both.

    (query [S, N, d], cumulative_lengths, longest, window, key_0 [S, G, d], value_0 [S, G, e],
    key_1, value_1, ...) -> [S, N, e].

    `window` limits the keys of step 0 that a query sees. For the backward pass the function keeps,
    in addition to keys and values: query, output, log-sum-exp and the weights of the softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        cumulative_lengths: Tensor,
        longest: int,
        window: int | None,
        *steps: Tensor,
    ) -> Tensor:
        """Compute the attention of one step k of the unroll, for all positions at once.

        The unroll runs draft steps 0, 1, … from every position of the batch. The steps from one
        position, the root, are a chain, so S positions have S chains. The query of a chain sees the
        keys of step 0 at the positions of its document up to its root. It also sees the keys of the
        steps 1 to k of its own chain.

        A kernel attends to step 0. The chain's own keys are merged into its result, as if one
        softmax had run over all keys. The equations are at the top of this file.

        Args:
            ctx: keeps tensors for `backward`.
            query: [S, N, d]: chains, query heads, head size.
            cumulative_lengths: where each document starts in the S positions.
            longest: tokens of the longest document.
            window: how many positions of step 0 a query sees at most; None: all.
            *steps: key [S, G, d] and value [S, G, e] of step 0, of step 1 and so on.

        Returns:
            The attention output [S, N, e].
        """
        # `steps` has key and value of each step in turn. Separate step 0 from the later steps.
        key, value, *chain = steps
        chain_keys = chain[::2]
        chain_values = chain[1::2]

        # Attend to step 0 with the kernel: its output o_0 and log-sum-exp L_0.
        root_output, root_lse_NS = attend_packed(
            query, key, value, cumulative_lengths, longest, window
        )

        # Compute the scores s_j of the chain's own keys, one for each root and head.
        q = _group_heads(query, key)
        o_0 = _group_heads(root_output, key)
        scores = [(q * k.unsqueeze(2)).sum(-1) * query.shape[-1] ** -0.5 for k in chain_keys]

        # Merge o_0 and the chain's values v_j by one softmax: L is the log-sum-exp of L_0 and the
        # scores, the weights are exp(score - L), and o is the weighted sum.
        scores_SGn = torch.stack([root_lse_NS.T.unflatten(1, q.shape[1:3]), *scores])
        lse_SGn = scores_SGn.logsumexp(0)
        weights = (scores_SGn - lse_SGn).exp().unsqueeze(-1)
        o = weights[0] * o_0
        for p, v in zip(weights[1:], chain_values, strict=True):
            o = o + p * v.unsqueeze(2)
        output = o.flatten(1, 2).to(query.dtype)

        # Backward needs the joint output and log-sum-exp in place of the kernel's own.
        ctx.save_for_backward(
            query, cumulative_lengths, output, lse_SGn.flatten(1).T.contiguous(), weights, *steps
        )
        ctx.longest = longest
        ctx.window = window
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of query, keys and values.

        Step 0 of the unroll reads the row itself. Each later step adds one key and value to the
        chain of draft tokens that begins at a position. A query sees keys of step 0, and the keys
        of the later steps of its own chain, under one softmax. In `forward` a kernel attends to
        step 0, and the later steps are merged into its result.

        Args:
            ctx: what `forward` kept.
            grad: the gradient of the attention output [S, N, e].

        Returns:
            The gradient of each argument of `forward`: None for those that are no floating-point
            tensors.
        """
        # `key` and `value` are those of step 0. `chain` has key and value of each later step in
        # turn. `weights` has the softmax weight of step 0 as a whole, then one for each later step.
        query, cumulative_lengths, output, lse_NS, weights, key, value, *chain = ctx.saved_tensors
        chain_weights = weights[1:]
        chain_keys = chain[::2]
        chain_values = chain[1::2]

        # The kernel's own backward pass gives the gradients of the attention to step 0. It gets the
        # output and the log-sum-exp over all keys, so that it uses the weights of this softmax.
        dq_SNd, dk_SGd, dv_SGe = attend_packed_backward(
            grad, query, key, value, output, lse_NS, cumulative_lengths, ctx.longest, ctx.window
        )

        # Add the gradients of the later steps. Each has a weight p, a key k and a value v, and its
        # score is s = scale q k. `do` is the gradient of the output o. The softmax gives
        # ds = p (do v - do o). A key or value is shared by n query heads, so its gradient is summed
        # over them.
        scale = query.shape[-1] ** -0.5
        step_grads = [dk_SGd, dv_SGe]
        q, do, dq = (_group_heads(x, key) for x in (query, grad, dq_SNd))
        do_o = (do * _group_heads(output, key)).sum(-1, keepdim=True)
        for p, k, v in zip(chain_weights, chain_keys, chain_values, strict=True):
            ds_scaled = p * ((do * v.unsqueeze(2)).sum(-1, keepdim=True) - do_o) * scale
            dq = dq + ds_scaled * k.unsqueeze(2)
            step_grads.append((ds_scaled * q).sum(2).to(k.dtype))  # dk
            step_grads.append((p * do).sum(2).to(v.dtype))  # dv

        # Lengths, longest and window have no gradient.
        return dq.flatten(1, 2).to(query.dtype), None, None, None, *step_grads


def _group_heads(x_SNd: Tensor, key_SGd: Tensor) -> Tensor:
    """Reshape [S, N, d] to [S, G, n, d]: the n = N / G query heads that share a key/value head.

    The result is converted to the wider dtype in which sums are computed.

    Args:
        x_SNd: a tensor of S positions and N query heads.
        key_SGd: the keys, which tell the number G of key/value heads.
    """
    view: Tensor = x_SNd.unflatten(1, (key_SGd.shape[1], -1))
    return view.to(choose_wide_dtype(view.dtype))


class TrainingTimeTest(Objective):
    """The objective of a head: from the target's features it computes the loss of each step."""

    # From position t a head predicts x_{t+2}: the first loss token of a document is its third.
    ahead = 2

    def __init__(
        self,
        draft: Head,
        divergence: Divergence,
        num_steps: int,
        step_decay: float = 1.0,
        temperature: float = 1.0,
        feature_weight: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        """Create the objective.

        Args:
            draft: the head.
            divergence: the loss of one token.
            num_steps: K.
            step_decay: the loss weight of step k is step_decay ** k.
            temperature: divides both sets of logits.
            feature_weight: the weight of SmoothL1 to the target's next feature, a mean over its
                elements, in addition to the divergence.
            noise: in training, a uniform number between -noise and noise is added to each element
                of the first hidden state.
        """
        super().__init__(
            draft, divergence, temperature, compute_geometric_weights(step_decay, num_steps)
        )
        self.num_steps = num_steps
        self.feature_weight = feature_weight
        self.noise = noise

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        cumulative_lengths: Tensor,
        longest: int,
        features: Features,
        soft_targets: SoftTargets,
        measure: bool = False,
        **other_columns: object,
    ) -> tuple[Tensor, StepSums]:
        """Run the head for K draft steps from every position, and compute the loss of all steps.

        Step k predicts the token 2 + k positions after its start. The operations do not depend on
        the data, so that the step can be compiled.

        Args:
            input_ids: token ids [B, T] of packed rows, which hold several documents each.
            position_ids: [B, T], positions within the documents.
            loss_positions: [R], positions of the loss tokens in the flattened rows.
            cumulative_lengths: where each document starts in the flattened rows.
            longest: tokens of the longest document.
            features: the target's features (hidden states) at all positions.
            soft_targets: the target's distributions of the loss tokens.
            measure: whether to also fill the metrics that cost time (correct tokens, acceptance and
                chains).
            **other_columns: columns of the batch that are not read.

        Returns:
            The weighted sum of the losses of all steps over all loss tokens, not divided yet, and
            the sums of each step.
        """
        # Run the head K times. Row r of step k is the output that predicts the loss token r.
        rows_KRH, has_loss_KR, feature_error = self._unroll(
            input_ids,
            position_ids,
            loss_positions,
            cumulative_lengths,
            longest,
            features,
            soft_targets,
        )

        # Compute the loss of all steps together, weighted by step, and M metrics of each row.
        total, metrics_MKR = compute_head_loss(
            rows_KRH,
            has_loss_KR * self.step_weights.unsqueeze(1),
            self.draft.logits,
            partial(soft_targets.at, measure=measure),
            self.compute_row_losses,
        )

        # Sum the metrics of each step. `by_chain` sorts them by chain, to measure how many steps in
        # a row would be accepted.
        by_chain = partial(_move_to_roots, loss_positions, position_ids.numel())
        sums = StepSums.from_losses(has_loss_KR, *(metrics_MKR * has_loss_KR), by_chain=by_chain)
        return total + self.feature_weight * feature_error, sums

    def _unroll(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        cumulative_lengths: Tensor,
        longest: int,
        features: Features,
        soft_targets: SoftTargets,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the head K times, each time on its own hidden states of the step before.

        The arguments are those of `forward`.

        Returns:
            The head's outputs [K, R, H] that predict the R loss tokens in each of the K steps;
            which loss tokens count in each step [K, R]; and the weighted error of the predicted
            features, a scalar (0 if `feature_weight` is 0).
        """
        shape = self.draft.config
        kv_cache = UnrollKVCache(
            cumulative_lengths, longest, shape.num_layers, shape.sliding_window
        )

        # The head starts from the target's hidden states, with noise if the recipe says so.
        hidden = self.draft.fuse(features)
        if self.training and self.noise:
            hidden = hidden + (2 * torch.rand_like(hidden) - 1) * self.noise

        # Run the steps, and collect the outputs that predict the loss tokens.
        rows = []
        has_loss = []
        feature_error = hidden.new_zeros((), dtype=torch.float32)
        for k in range(self.num_steps):
            # Step k reads the token that step k - 1 should predict (training takes the true token),
            # and the hidden state that step k - 1 returned.
            rotary = self.draft.rotary(hidden, position_ids + k)
            normed, hidden = self.draft(shift_left(input_ids, 1 + k, 0), hidden, rotary, kv_cache)
            rows.append(gather_before(normed, loss_positions, 2 + k))
            has_loss.append(select_loss_rows(position_ids, loss_positions, ahead=2 + k))
            if self.feature_weight:
                # Compare the hidden state that the head returned with the target's feature 1 + k
                # positions on: a mean over H, summed over the loss tokens.
                predicted_RH = gather_before(hidden, loss_positions, 2 + k).float()
                target_RH = soft_targets.hidden_RD.float()
                error_R = F.smooth_l1_loss(predicted_RH, target_RH, reduction="none").mean(-1)
                feature_error = feature_error + self.step_weights[k] * (error_R * has_loss[k]).sum()
        return torch.stack(rows), torch.stack(has_loss).float(), feature_error


def _move_to_roots(loss_positions: Tensor, num_positions: int, values_KR: Tensor) -> Tensor:
    """Reorder values of loss tokens by the position at which their chain of draft steps starts.

    Every position is the root of a chain: a number of draft steps in a row. Step k of the chain
    predicts the token 2 + k positions after the root. So the value of a loss token in step k moves
    to the position 2 + k before the token, and the values of one chain end up in one column.

    The root may not exist, if the token is near the start of its document. The token then has no
    loss in this step, and its value must be 0, because it is added to an unrelated position.

    Args:
        loss_positions: [R], positions of the loss tokens in the flattened rows.
        num_positions: S, all positions of the rows. A chain starts at each of them.
        values_KR: a value for each step and loss token; 0 where the token has no loss in the step.

    Returns:
        [K, S]: the values by step and root; 0 where there is no loss token.
    """
    num_steps = len(values_KR)
    # A root before the batch becomes position 0.
    roots_KR = torch.stack([loss_positions - 2 - k for k in range(num_steps)]).clamp_min(0)
    return values_KR.new_zeros(num_steps, num_positions).scatter_add(1, roots_KR, values_KR)
