"""Compute causal attention over packed documents in linear memory, and its log-sum-exp.

A token sees the tokens of its own document up to itself, and no token of another document.

Shapes: S tokens of all documents in a row, N query heads, G key/value heads, d key head size, e
value head size, D documents.

Forward and backward are two custom operators, which torch.compile does not trace into. Otherwise
the document boundaries, which differ from batch to batch, would break its graph. So a training step
compiles as one graph. The backward is FlashAttention's (arXiv 2205.14135, appendix B): it computes
the weights again as exp(scores - log-sum-exp), and uses the row sums of gradient times output. It
also works for a softmax over these keys *and others*: given the output and the log-sum-exp of that
softmax, it returns the gradients for these keys.

On a GPU, 16-bit dtypes use one kernel for all documents. Elsewhere each document is computed by
itself: on a CPU at once if it fits the window, else `ROWS` tokens at a time.
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
# The queries of a block where documents are divided into blocks. More queries need more memory for
# their scores, and fewer take more calls of small operations.
ROWS = 256


def choose_wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of many numbers of a dtype: at least float32.

    A 16-bit sum would lose the small terms of a long sum.
    """
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("specdistill::packed_attention", mutates_args=())
def attend_packed(
    query_SNd: Tensor,
    key_SGd: Tensor,
    value_SGe: Tensor,
    cumulative_lengths: Tensor,
    longest: int,
    window: int | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within documents: a token sees its document up to itself.

    Args:
        query_SNd: [S, N, d]: S tokens of all documents one after the other, N heads of size d.
        key_SGd: [S, G, d], with G key/value heads.
        value_SGe: [S, G, e].
        cumulative_lengths: int32 [D + 1], where each of the D documents begins, then S. Documents
            may be empty.
        longest: tokens of the longest document.
        window: a token sees itself and the window - 1 tokens before it; None for all of them.
        scale: factor of the scores; None for d^-1/2.

    Returns:
        The output [S, N, e], and the log-sum-exp of the scores [N, S], in the dtype that
        `choose_wide_dtype` returns.
    """
    # Pad the heads to one size, as the kernels need it. The default scale depends on the size
    # without padding, so it is computed first.
    scale = query_SNd.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = _align_heads(query_SNd, key_SGd, value_SGe)

    if _has_one_kernel(query):
        # One call of a GPU's kernel computes all documents. It returns no debug mask (False).
        packing, options = _list_kernel_arguments(cumulative_lengths, longest, window, scale)
        output, lse, *_ = aten._flash_attention_forward(
            query, key, value, *packing, False, **options
        )
    else:
        output = torch.empty_like(query)
        # The log-sum-exp is [N, S]: the first two dimensions of the query [S, N, size], reversed.
        lse = query.new_empty(query.shape[1::-1], dtype=choose_wide_dtype(query.dtype))
        # Each block of a document is computed by itself, and written to its rows of the output.
        # Query heads are grouped by the key/value head that they share: [G, N / G, S, size].
        q, k, v, o = (_group_heads(x, key.shape[1]) for x in (query, key, value, output))
        lse_GnS = lse.view(q.shape[:3])
        for rows, keys, bias in _split_blocks(cumulative_lengths, window, query):
            o[:, :, rows], lse_GnS[:, :, rows] = _attend_block(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, scale
            )

    # Cut the padding off.
    return output[..., : value_SGe.shape[-1]].contiguous(), lse


@torch.library.custom_op("specdistill::packed_attention_backward", mutates_args=())
def attend_packed_backward(
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
    """Compute the gradients of query, key and value of `attend_packed` from the output's gradient.

    The caller may have merged `attend_packed` with attention to other keys, in one joint softmax.
    Then it passes the output and the log-sum-exp of the joint softmax. The gradients of `key_SGd`
    and `value_SGe` are complete. The gradient of the query lacks the part that comes from the other
    keys, which the caller adds.

    Args:
        grad_SNe: [S, N, e], the gradient of the output of S tokens and N query heads.
        query_SNd: [S, N, d].
        key_SGd: [S, G, d], with G key/value heads.
        value_SGe: [S, G, e].
        output_SNe: [S, N, e], the output of the attention.
        lse_NS: [N, S], the log-sum-exp of the scores, over all keys of the softmax.
        cumulative_lengths: where each document begins, then S, as in `attend_packed`.
        longest: tokens of the longest document.
        window: tokens that a token sees, itself included; None for all up to itself.
        scale: factor of the scores; None for d^-1/2.

    Returns:
        The gradients [S, N, d], [S, G, d] and [S, G, e].
    """
    # Pad the heads to one size, as the kernel needs it. The default scale depends on the size
    # without padding, so it is computed first.
    scale = query_SNd.shape[-1] ** -0.5 if scale is None else scale
    grad, query, key, value, output = _align_heads(
        grad_SNe, query_SNd, key_SGd, value_SGe, output_SNe
    )

    # One call of a GPU's kernel computes the gradients of all documents.
    if _has_one_kernel(query):
        packing, options = _list_kernel_arguments(cumulative_lengths, longest, window, scale)
        gradients = aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            output,
            lse_NS,
            *packing,
            # The state of the random numbers is empty, because there is no dropout.
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            query.new_empty(0),
            **options,
        )
    else:
        gradients = _compute_gradients_by_blocks(
            grad, query, key, value, output, lse_NS, cumulative_lengths, window, scale
        )

    # Cut the padding off, and return the gradients in the dtypes of the inputs.
    dq_SNd, dk_SGd, dv_SGe = (
        x[..., : like.shape[-1]].to(like.dtype).contiguous()
        for x, like in zip(gradients, (query_SNd, key_SGd, value_SGe), strict=True)
    )
    return dq_SNd, dk_SGd, dv_SGe


def _compute_gradients_by_blocks(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse_NS: Tensor,
    cumulative_lengths: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value of attention, block by block.

    A block is a part of one document. The arguments are those of `attend_packed_backward`, but all
    heads have the same size.
    """
    # Several blocks of queries add to the gradients of the same keys and values, so these are
    # summed in the wider dtype.
    gradients = (
        torch.empty_like(query),
        torch.zeros_like(key, dtype=choose_wide_dtype(key.dtype)),
        torch.zeros_like(value, dtype=choose_wide_dtype(value.dtype)),
    )

    # Query heads are grouped by the key/value head that they share: [G, N / G, S, size]. These are
    # views, so what is written to dq, dk and dv below is in `gradients`.
    g, q, k, v, o, dq, dk, dv = (
        _group_heads(x, key.shape[1]) for x in (grad, query, key, value, output, *gradients)
    )
    lse_GnS = lse_NS.view(q.shape[:3])
    for rows, keys, bias in _split_blocks(cumulative_lengths, window, query):
        dq[:, :, rows], block_dk, block_dv = _compute_block_gradients(
            g[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            o[:, :, rows],
            lse_GnS[:, :, rows],
            bias,
            scale,
        )
        # All queries of a group share its key and value heads.
        dk[:, :, keys] += block_dk.sum(1, keepdim=True)
        dv[:, :, keys] += block_dv.sum(1, keepdim=True)
    return gradients


def attend_cached(
    query_1NTd: Tensor,
    key_1GSd: Tensor,
    value_1GSe: Tensor,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention of T new positions to all S positions of a KV cache.

    The new positions are the last of the S. With a mask [T, S], torch would repeat keys and values
    for every query head, so a mask is avoided in two cases. A GPU's kernel computes causality and
    windows itself. And if nothing is cached and the window holds all, plain causality is enough.

    Args:
        query_1NTd: [1, N, T, d], with N query heads of size d.
        key_1GSd: [1, G, S, d], with G key/value heads.
        value_1GSe: [1, G, S, e].
        window: tokens that a token sees, itself included; None for all up to itself.
        scale: factor of the scores; None for d^-1/2.

    Returns:
        The output [1, T, N, e].
    """
    # Heads are padded to one size, and kernels take [1, positions, heads, size].
    num_queries = query_1NTd.shape[2]
    num_keys = key_1GSd.shape[2]
    scale = query_1NTd.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = _align_heads(
        *(x.transpose(1, 2) for x in (query_1NTd, key_1GSd, value_1GSe))
    )

    # A GPU's kernel computes causality and windows itself. There is one sequence, so no boundaries
    # are given (None).
    if _has_one_kernel(query):
        output, *_ = aten._flash_attention_forward(
            query,
            key,
            value,
            None,
            None,
            num_queries,
            num_keys,
            0.0,
            window is None,  # causality, which a window implies
            False,
            scale=scale,
            **_convert_window(window),
        )
    else:
        # If nothing is cached and the window holds all, the mask is plain causality and need not be
        # built.
        seen_TS = None
        is_all = num_queries == num_keys and (window is None or window >= num_keys)
        if not is_all:
            # The queries are the last positions. Query t is at position S - T + t, and sees the
            # window up to there.
            num_before = num_keys - num_queries
            seen_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            seen_TS = seen_TS.tril(num_before)
            if window is not None:
                seen_TS = seen_TS.triu(num_before - window + 1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, seen_TS, is_causal=is_all, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    unpadded_1TNe: Tensor = output[..., : value_1GSe.shape[-1]]
    return unpadded_1TNe


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs and outputs of `attend_packed` for the backward pass.

    torch calls this after the forward pass, with the context that the backward pass gets.
    """
    *tensors, ctx.longest, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _compute_gradients(ctx: Any, grad_SNe: Tensor, _: object) -> tuple[Tensor | None, ...]:
    """Return a gradient for each input of `attend_packed`; autograd calls this function.

    Args:
        ctx: the context with the saved inputs and outputs.
        grad_SNe: the gradient of the output.
        _: the gradient of the log-sum-exp, which is ignored, because no loss depends on it.
    """
    # The last four inputs (document boundaries and numbers) have the gradient None.
    query, key, value, lengths, *output = ctx.saved_tensors
    packing = (lengths, ctx.longest, ctx.window, ctx.scale)
    gradients = attend_packed_backward(grad_SNe, query, key, value, *output, *packing)
    return (*gradients, None, None, None, None)


attend_packed.register_autograd(_compute_gradients, setup_context=_save_for_backward)


# torch.compile learns the shapes and dtypes of the results from these two functions.
@attend_packed.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
) -> tuple[Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes of the output and the log-sum-exp.

    torch.compile calls this instead of the operator, to learn what the operator returns.
    """
    size, heads = query.shape[:2]
    output = query.new_empty(size, heads, value.shape[-1])
    lse = query.new_empty(heads, size, dtype=choose_wide_dtype(query.dtype))
    return output, lse


@attend_packed_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes of the three gradients.

    torch.compile calls this instead of the operator, to learn what the operator returns.
    """
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
    longest: int,
    window: int | None,
    *scale: float,
    **options: object,
) -> int:
    """Count the floating-point operations of `attend_packed`, from the shapes of its arguments.

    torch's flop counter calls this with shapes in place of tensors.
    """
    # Two matrix products are counted: they compute the scores (width d) and the output (width e).
    return _count_products(query, longest, window, width=query[-1] + value[-1])


@register_flop_formula(torch.ops.specdistill.packed_attention_backward)
def _(
    grad: torch.Size,
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    output: torch.Size,
    lse: torch.Size,
    lengths: torch.Size,
    longest: int,
    window: int | None,
    *scale: float,
    **options: object,
) -> int:
    """Count the operations of `attend_packed_backward`, from the shapes of its arguments.

    torch's flop counter calls this with shapes in place of tensors.
    """
    # Five matrix products are counted: the scores, which are computed again (width d), the gradient
    # of the softmax weights (e), and the gradients of queries (d), keys (d) and values (e).
    return _count_products(query, longest, window, width=3 * query[-1] + 2 * grad[-1])


def _count_products(query: torch.Size, longest: int, window: int | None, *, width: int) -> int:
    """Estimate the floating-point operations of the matrix products of attention.

    Only pairs of a query and a key that causality and the window allow are counted. Each document
    is counted as if it were as long as the longest.

    Args:
        query: shape of the queries, [S tokens, N heads, d].
        longest: tokens of the longest document.
        window: tokens that a token sees, itself included; None for all up to itself.
        width: multiplications for each pair, which is the sum of the widths of all products.
    """
    # On average a query sees half of its document. A multiplication and an addition make two
    # operations.
    num_queries = query[0] * query[1]
    mean_seen_keys = min((longest + 1) / 2, window or longest)
    return int(2 * num_queries * width * mean_seen_keys)


def _align_heads(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose heads are padded with zeros to a common size.

    Kernels need heads of the same size, a multiple of 8, and dense in memory. Zeros change no score
    and no output. A tensor that needs no change is returned as it is.
    """
    size = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    dense = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    return [x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in dense]


# The lookup is cached, because it is made for every call of a kernel.
capability = cache(torch.cuda.get_device_capability)


def _has_one_kernel(query: Tensor) -> bool:
    """Return whether one call of FlashAttention's GPU kernel can compute all documents.

    The kernel needs a 16-bit dtype and heads of at most 256 numbers, on an Ampere GPU or later.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and capability(query.device) >= (8, 0)
    )


def _list_kernel_arguments(
    cumulative_lengths: Tensor, longest: int, window: int | None, scale: float
) -> tuple[tuple[object, ...], dict[str, float]]:
    """Return the arguments of FlashAttention's kernel that follow the tensors, and its options.

    `torch.nn.attention.varlen` calls the kernel in the same way.
    """
    # Queries and keys have the same boundaries and the same greatest length, and there is no
    # dropout (0.0). The last argument asks for causality. With a window it is False, because a
    # window that ends at the token itself is causal already.
    arguments = (cumulative_lengths, cumulative_lengths, longest, longest, 0.0, window is None)
    return arguments, {"scale": scale, **_convert_window(window)}


def _convert_window(window: int | None) -> dict[str, int]:
    """Return the kernel's options for a sliding window.

    Args:
        window: tokens that a token sees, itself included; None for all up to itself.
    """
    # The kernel wants the number of tokens seen to the left (-1 for all) and to the right (none,
    # because these come later). Unlike `window`, the number does not include the token itself.
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _group_heads(x_SHd: Tensor, groups: int) -> Tensor:
    """Return a view [G, H / G, S, d] of heads [S, H, d], grouped by the key/value head they use.

    S is the number of tokens, and d the size of a head. For queries, H is the number of query
    heads, and each of the G key/value heads is shared by H / G of them. For keys and values H is G,
    so the second dimension is one.
    """
    output: Tensor = x_SHd.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    return output


def _split_blocks(
    cumulative_lengths: Tensor, window: int | None, like: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield blocks of queries, each of one document, with the range of keys that they see.

    Args:
        cumulative_lengths: where each document begins, then the number of all tokens.
        window: tokens that a token sees, itself included; None for all up to itself.
        like: a tensor whose dtype and device the bias gets.

    Yields:
        The queries, their keys, and the bias [queries, keys] that is added to the scores: 0 for a
        key that is seen, otherwise -inf. A bias of None means causality alone, which the fused
        kernel computes itself.
    """
    # An empty document begins where the next one begins, so `unique` leaves it out.
    for start, end in pairwise(cumulative_lengths.unique().tolist()):
        # A whole document is one block if its window covers it and a fused kernel exists.
        if _has_fused_kernel(like) and (window is None or end - start <= window):
            yield slice(start, end), slice(start, end), None
            continue
        for first in range(start, end, ROWS):
            # The queries in [first, last) see keys from the oldest in their window on.
            last = min(first + ROWS, end)
            oldest = start if window is None else max(start, first - window + 1)
            query_positions = torch.arange(first, last, device=like.device)
            key_positions = torch.arange(oldest, last, device=like.device)
            distance = query_positions[:, None] - key_positions
            is_unseen = distance < 0
            if window is not None:
                is_unseen = is_unseen | (distance >= window)
            bias = like.new_zeros(distance.shape).masked_fill_(is_unseen, -torch.inf)
            yield slice(first, last), slice(oldest, last), bias


def _has_fused_kernel(like: Tensor) -> bool:
    """Return whether to use torch's fused attention kernel for CPUs.

    Without it, attention is computed by separate operations, such as matrix products. On a GPU this
    happens only where FlashAttention's kernel cannot be used (see `_has_one_kernel`).
    """
    return like.is_cpu


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of one block of queries, and the log-sum-exp of its scores.

    Args:
        q: queries [G, N / G, rows, d]: N query heads, in groups that share one of G key/value
            heads; `rows` tokens of one document; heads of size d.
        k: keys [G, 1, seen, d] of the tokens that some query of the block sees.
        v: values [G, 1, seen, d].
        bias: [rows, seen], added to the scores: 0 for a key that a query sees, else -inf. None for
            causality alone.
        scale: factor of the scores.

    Returns:
        The output [G, N / G, rows, d] and the log-sum-exp [G, N / G, rows].
    """
    # A CPU's kernel needs keys and values for every query head; `expand` copies nothing.
    # There is no dropout (0.0). Without a bias the kernel applies causality itself.
    if _has_fused_kernel(q):
        shared = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, *shared, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        return output, lse

    # Elsewhere `_split_blocks` always gives a bias. Compute the scores, their log-sum-exp, and then
    # softmax = exp(scores - log-sum-exp).
    assert bias is not None
    scores = (q @ k.mT).to(choose_wide_dtype(q.dtype)) * scale + bias
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse


def _compute_block_gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention for the queries, keys and values of one block.

    N query heads share G key/value heads. The gradients of keys and values are still separate for
    each of the N / G query heads of a group; the caller adds them up.

    Args:
        g: the gradient of the output, [G, N / G, rows, d].
        q: queries [G, N / G, rows, d].
        k: keys [G, 1, seen, d] of the tokens that some query of the block sees.
        v: values [G, 1, seen, d].
        o: the output, [G, N / G, rows, d].
        lse: the log-sum-exp of the scores, [G, N / G, rows].
        bias: [rows, seen], added to the scores: 0 for a key that a query sees, else -inf. None for
            causality alone.
        scale: factor of the scores.
    """
    # A CPU's kernel needs keys and values for every query head; `expand` copies nothing.
    if _has_fused_kernel(q):
        shared = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, *shared, o, lse, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        return dq, dk, dv

    # The weights of the softmax are computed again from the log-sum-exp. The gradient of the scores
    # is weights * (gradient of the weights - row sum of gradient * output) * scale.
    assert bias is not None
    weights = ((q @ k.mT).to(lse.dtype) * scale + bias - lse.unsqueeze(-1)).exp()
    row_sums = (g * o).to(lse.dtype).sum(-1, keepdim=True)
    grad_weights_centered = (g @ v.mT).to(lse.dtype) - row_sums
    grad_scores = (weights * grad_weights_centered * scale).to(q.dtype)
    weights = weights.to(q.dtype)
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ g
