"""The unroll's attention in memory linear in a row's length: step 0's block by a kernel, each chain's own entries merged into it.

Shapes: B rows, T positions, S = B * T, N query heads, G key/value heads, n = N / G, d key head size, e value head size.

Step k of the root t sees step 0's keys at the positions <= t of its document, for which the kernel gives an output o_0 and a log-sum-exp
L_0, and its own chain's keys 1..k, whose scores are s_1..s_k. The softmax over all of them has

    L = log(exp L_0 + sum_j exp s_j)      o = exp(L_0 - L) o_0 + sum_j exp(s_j - L) v_j

Its gradients are the kernel's own, handed this o and L for those of step 0's block, and ds_j = exp(s_j - L) (do v_j - do o).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdistill.targets.packed_attention import packed_attention, packed_attention_backward, wide


class UnrollKVCache:
    """A `KVCache` for the unroll: step 0 is causal within documents; later steps add one entry per chain, their own.

    With a window of M positions, step k of the root t stands at t + k and sees those after t + k - M; its own chain, K - 1 long at most,
    is always within the window.

    Args:
        cumulative_lengths: int32, where each document of the flattened rows begins, then S; padding is some document's too.
        longest: tokens of the longest document.
    """

    def __init__(
        self, cumulative_lengths: Tensor, longest: int, num_layers: int, window: int | None = None
    ) -> None:
        self.cumulative_lengths = cumulative_lengths
        self.longest = longest
        self.window = window
        self.steps: list[list[Tensor]] = [
            [] for _ in range(num_layers)
        ]  # key and value of step 0, of step 1, ...

    def append(self, layer: int, key_BGTd: Tensor, value_BGTe: Tensor) -> None:
        # Float32 rotary tables widen queries and keys under autocast; values are in the dtype that projections compute in.
        self.steps[layer] += (
            x.transpose(1, 2).flatten(0, 1).to(value_BGTe.dtype) for x in (key_BGTd, value_BGTe)
        )

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTe: Tensor
    ) -> Tensor:
        steps = self.steps[layer]
        window = None if self.window is None else self.window - len(steps) // 2
        assert window is None or window > 0
        self.append(layer, key_BGTd, value_BGTe)
        query = query_BNTd.transpose(1, 2).flatten(0, 1).to(value_BGTe.dtype)
        attend: Callable[..., Tensor] = ChainAttention.apply
        output_SNe = attend(query, self.cumulative_lengths, self.longest, window, *steps)
        return output_SNe.unflatten(0, (query_BNTd.shape[0], -1)).transpose(1, 2)


class ChainAttention(torch.autograd.Function):
    """(query [S, N, d], cumulative_lengths, longest, window, key_0 [S, G, d], value_0 [S, G, e], key_1, value_1, ...) -> [S, N, e].

    `window` is step 0's. Kept for backward in addition to keys and values: query, output, log-sum-exp and the weights of the chain.
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
        key, value, *chain = steps
        root_output, root_lse_NS = packed_attention(
            query, key, value, cumulative_lengths, longest, window
        )
        q, o_0 = _by_group(query, key), _by_group(root_output, key)
        scores = [(q * k.unsqueeze(2)).sum(-1) * query.shape[-1] ** -0.5 for k in chain[::2]]
        scores_SGn = torch.stack([root_lse_NS.T.unflatten(1, q.shape[1:3]), *scores])
        lse_SGn = scores_SGn.logsumexp(0)
        weights = (scores_SGn - lse_SGn).exp().unsqueeze(-1)
        o = weights[0] * o_0
        for p, v in zip(weights[1:], chain[1::2], strict=True):
            o = o + p * v.unsqueeze(2)
        output = o.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(
            query, cumulative_lengths, output, lse_SGn.flatten(1).T.contiguous(), weights, *steps
        )
        ctx.longest, ctx.window = longest, window
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, cumulative_lengths, output, lse_NS, weights, key, value, *chain = ctx.saved_tensors
        dq_SNd, dk_SGd, dv_SGe = packed_attention_backward(
            grad, query, key, value, output, lse_NS, cumulative_lengths, ctx.longest, ctx.window
        )
        of_steps = [dk_SGd, dv_SGe]
        q, g, dq = (_by_group(x, key) for x in (query, grad, dq_SNd))
        row_sums = (g * _by_group(output, key)).sum(-1, keepdim=True)
        for p, k, v in zip(weights[1:], chain[::2], chain[1::2], strict=True):
            ds = (
                p
                * ((g * v.unsqueeze(2)).sum(-1, keepdim=True) - row_sums)
                * query.shape[-1] ** -0.5
            )
            dq = dq + ds * k.unsqueeze(2)
            of_steps += [(ds * q).sum(2).to(k.dtype), (p * g).sum(2).to(v.dtype)]
        return dq.flatten(1, 2).to(query.dtype), None, None, None, *of_steps


def _by_group(x_SNd: Tensor, key_SGd: Tensor) -> Tensor:
    """[S, G, n, d], to be summed."""
    view: Tensor = x_SNd.unflatten(1, (key_SGd.shape[1], -1))
    return view.to(wide(view.dtype))
