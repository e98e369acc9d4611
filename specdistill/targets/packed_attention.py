"""Causal attention over packed documents, none seeing another, in memory linear in their length; and its log-sum-exp.

Shapes: S tokens of all documents in a row, N query heads, G key/value heads, d key head size, e value head size, D documents.

Two operators that nothing looks into: a step that calls them holds no operation that depends on data, and compiles as one graph. The
backward is FlashAttention's (arXiv 2205.14135, appendix B): the weights again, exp(scores - log-sum-exp), and the row sums of gradient
times output. Handed output and log-sum-exp of a softmax over these keys *and others*, it gives that softmax's gradients of these.

On a GPU 16 bits take one kernel for all documents. Elsewhere each document goes by itself: on a CPU at once where the window holds it,
else `ROWS` tokens at a time.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

aten = torch.ops.aten
ROWS = 256


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is summed in: float32, or float64 of float64."""
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("specdistill::packed_attention", mutates_args=())
def packed_attention(
    query_SNd: Tensor,
    key_SGd: Tensor,
    value_SGe: Tensor,
    cumulative_lengths: Tensor,
    longest: int,
    window: int | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's attention to its document up to itself.

    Args:
        cumulative_lengths: int32 [D + 1], where each document begins, then S. Documents may be empty.
        longest: tokens of the longest document.
        window: a token sees itself and the window - 1 before it; None sees all of them.
        scale: of the scores; None: d^-1/2.

    Returns:
        the output [S, N, e], and the scores' log-sum-exp [N, S] in `wide`.
    """
    scale = query_SNd.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = _alike(query_SNd, key_SGd, value_SGe)
    if _one_kernel(query):
        packing, options = _arguments(cumulative_lengths, longest, window, scale)
        output, lse, *_ = aten._flash_attention_forward(
            query, key, value, *packing, False, **options
        )
    else:
        output, lse = (
            torch.empty_like(query),
            query.new_empty(query.shape[1::-1], dtype=wide(query.dtype)),
        )
        q, k, v, o = (_by_group(x, key.shape[1]) for x in (query, key, value, output))
        lse_GnS = lse.view(q.shape[:3])
        for rows, seen, bias in _blocks(cumulative_lengths, window, query):
            block = q[:, :, rows], k[:, :, seen], v[:, :, seen]
            o[:, :, rows], lse_GnS[:, :, rows] = _forward(*block, bias, scale)
    return output[..., : value_SGe.shape[-1]].contiguous(), lse


@torch.library.custom_op("specdistill::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad_SNe: Tensor,
    query_SNd: Tensor,
    key_SGd: Tensor,
    value_SGe: Tensor,
    output_SNe: Tensor,
    lse_NS: Tensor,
    cumulative_lengths: Tensor,
    longest: int,
    window: int | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, given the output's. Output and log-sum-exp may be those of a softmax over more keys."""
    scale = query_SNd.shape[-1] ** -0.5 if scale is None else scale
    grad, query, key, value, output = _alike(grad_SNe, query_SNd, key_SGd, value_SGe, output_SNe)
    if _one_kernel(query):
        packing, options = _arguments(cumulative_lengths, longest, window, scale)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        gradients = aten._flash_attention_backward(
            grad, query, key, value, output, lse_NS, *packing, *no_dropout, **options
        )
    else:
        gradients = (
            torch.empty_like(query),
            *(torch.zeros_like(x, dtype=wide(x.dtype)) for x in (key, value)),
        )
        g, q, k, v, o, dq, dk, dv = (
            _by_group(x, key.shape[1]) for x in (grad, query, key, value, output, *gradients)
        )
        lse_GnS = lse_NS.view(q.shape[:3])
        for rows, seen, bias in _blocks(cumulative_lengths, window, query):
            block = (
                g[:, :, rows],
                q[:, :, rows],
                k[:, :, seen],
                v[:, :, seen],
                o[:, :, rows],
                lse_GnS[:, :, rows],
            )
            dq[:, :, rows], of_keys, of_values = _backward(*block, bias, scale)
            dk[:, :, seen] += of_keys.sum(1, keepdim=True)
            dv[:, :, seen] += of_values.sum(1, keepdim=True)
    inputs = (query_SNd, key_SGd, value_SGe)
    dq_SNd, dk_SGd, dv_SGe = (
        x[..., : like.shape[-1]].to(like.dtype).contiguous()
        for x, like in zip(gradients, inputs, strict=True)
    )
    return dq_SNd, dk_SGd, dv_SGe


def cached_attention(
    query_1NTd: Tensor,
    key_1GSd: Tensor,
    value_1GSe: Tensor,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """[1, T, N, e]: the attention of the last T of S positions, each to those up to itself.

    A GPU's kernel needs no mask [T, S], nor does a prompt of which nothing is cached; with one, keys and values would be repeated for every
    query head.
    """
    num_queries, num_keys = query_1NTd.shape[2], key_1GSd.shape[2]
    scale = query_1NTd.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = _alike(*(x.transpose(1, 2) for x in (query_1NTd, key_1GSd, value_1GSe)))
    if _one_kernel(query):
        sizes = (None, None, num_queries, num_keys, 0.0, window is None, False)
        output, *_ = aten._flash_attention_forward(
            query, key, value, *sizes, scale=scale, **_sides(window)
        )
    else:
        seen_TS, is_all = None, num_queries == num_keys and (window is None or window >= num_keys)
        if not is_all:
            seen_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(
                num_keys - num_queries
            )
            seen_TS = (
                seen_TS if window is None else seen_TS.triu(num_keys - num_queries - window + 1)
            )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = {"is_causal": is_all, "scale": scale, "enable_gqa": True}
        output = F.scaled_dot_product_attention(query, key, value, seen_TS, **options).transpose(
            1, 2
        )
    return output[..., : value_1GSe.shape[-1]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad_SNe: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Of the output alone: nothing is asked of the log-sum-exp's."""
    query, key, value, lengths, *output = ctx.saved_tensors
    packing = lengths, ctx.longest, ctx.window, ctx.scale
    return *packed_attention_backward(grad_SNe, query, key, value, *output, *packing), *[
        None
    ] * len(packing)


packed_attention.register_autograd(_gradients, setup_context=_keep)


@packed_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    size, heads = query.shape[:2]
    return query.new_empty(size, heads, value.shape[-1]), query.new_empty(
        heads, size, dtype=wide(query.dtype)
    )


@packed_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    return dq, dk, dv


@register_flop_formula(torch.ops.specdistill.packed_attention)
def _(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    lengths: torch.Size,
    *packing: Any,
    **options: Any,
) -> int:
    return _products(query, *packing[:2], width=query[-1] + value[-1])  # scores, output


@register_flop_formula(torch.ops.specdistill.packed_attention_backward)
def _(grad: torch.Size, query: torch.Size, *rest: Any, **options: Any) -> int:
    return _products(
        query, *rest[5:7], width=3 * query[-1] + 2 * grad[-1]
    )  # scores, their gradient, and three gradients of it


def _products(query: torch.Size, longest: int, window: int | None, *, width: int) -> int:
    """Floating-point operations on the pairs of a query and a key that it sees, in documents that are all as long as the longest."""
    return int(2 * query[0] * query[1] * width * min((longest + 1) / 2, window or longest))


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Heads of one size, a multiple of 8, and dense in it: what kernels take. Zeros at the end change no score and no output."""
    size = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    dense = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    return [x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in dense]


capability = cache(torch.cuda.get_device_capability)


def _one_kernel(query: Tensor) -> bool:
    """Whether FlashAttention's kernel takes these: 16 bits, and heads of at most 256, on a GPU of Ampere's or later."""
    fits = (
        query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
    )
    return fits and capability(query.device) >= (8, 0)


def _arguments(
    cumulative_lengths: Tensor, longest: int, window: int | None, scale: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """That kernel's, after the tensors: queries lie as keys do, no dropout, causal, as `torch.nn.attention.varlen` says it."""
    packing = (cumulative_lengths, cumulative_lengths, longest, longest, 0.0, window is None)
    return packing, {"scale": scale, **_sides(window)}


def _sides(window: int | None) -> dict[str, int]:
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _by_group(x_SHd: Tensor, groups: int) -> Tensor:
    """A view [G, H / G, S, d]: one for keys and values, which all queries of a group share."""
    return x_SHd.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _blocks(
    cumulative_lengths: Tensor, window: int | None, like: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(queries, the keys that they see, what to add to their scores); None is causality alone, and left to the fused kernel."""
    for start, end in pairwise(cumulative_lengths.unique().tolist()):
        if _fused(like) and (window is None or end - start <= window):
            yield slice(start, end), slice(start, end), None
            continue
        for first in range(start, end, ROWS):
            last = min(first + ROWS, end)
            oldest = start if window is None else max(start, first - window + 1)
            ago = torch.arange(first, last, device=like.device)[:, None] - torch.arange(
                oldest, last, device=like.device
            )
            unseen = (ago < 0) if window is None else (ago < 0) | (ago >= window)
            yield (
                slice(first, last),
                slice(oldest, last),
                like.new_zeros(ago.shape).masked_fill_(unseen, -torch.inf),
            )


def _fused(like: Tensor) -> bool:
    """Whether the device has a kernel for one document. A GPU's are for 16 bits, which `_one_kernel` takes first."""
    return like.is_cpu


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block: queries [G, N / G, rows, d], keys and values [G, 1, seen, d]."""
    if _fused(q):
        shared = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        options = {"attn_mask": bias, "scale": scale}
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, *shared, 0.0, bias is None, **options
        )
        return output, lse
    assert bias is not None
    scores = (q @ k.mT).to(wide(q.dtype)) * scale + bias
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse


def _backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's queries, keys and values, each [G, N / G, ...], given the output's."""
    if _fused(q):
        shared = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        options = {"attn_mask": bias, "scale": scale}
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, *shared, o, lse, 0.0, bias is None, **options
        )
        return dq, dk, dv
    assert bias is not None
    weights = ((q @ k.mT).to(lse.dtype) * scale + bias - lse.unsqueeze(-1)).exp()
    of_scores = (
        weights * ((g @ v.mT).to(lse.dtype) - (g * o).to(lse.dtype).sum(-1, keepdim=True)) * scale
    )
    of_scores, weights = of_scores.to(q.dtype), weights.to(q.dtype)
    return of_scores @ k, of_scores.mT @ q, weights.mT @ g
