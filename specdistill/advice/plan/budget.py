"""Compute what each device holds while a target serves, and how much context is left.

This is done for a target alone and with a draft. Weights and KV cache are counted. What an engine
takes in addition is assumed. Devices that share a model (tensor parallelism) each hold an equal
part of its weights, and whole heads of its cache.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from specdistill.advice.plan.options import ServingOptions
from specdistill.common.errors import UserError, make_unused_key_error
from specdistill.methods.sizes import ModelConfigInfo
from specdistill.targets.cache_size import CacheSize

CONTEXT = 4096  # the context in tokens, if the options do not set it
# Bytes of an engine's kernels and graphs, and of the buffers for communication between devices.
ENGINE_BYTES = 2**30
PASS_TOKENS = 8192  # prompt tokens of one pass, as in vLLM
NO_LIMIT = 2**30  # a device that holds a context of this many tokens counts as without a limit

# No target is planned for more devices than this, so that the search ends.
MAX_DEVICES = 64
# The usable share of a device's memory. The rest is the context of the driver, and what the
# allocator cannot use.
USABLE_MEMORY_SHARE = 0.92


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of a name such as `bfloat16` or `fp8`; None if no name is given."""
    if not name:
        return None
    dtype: torch.dtype = getattr(torch, "float8_e4m3fn" if name == "fp8" else name)
    return dtype


def count_kv_itemsize(serving: ServingOptions, target: ModelConfigInfo) -> int:
    """Return how many bytes a number in the KV cache takes.

    The dtype of the cache is the one in the options, else that of the weights.
    """
    return target.itemsize(parse_dtype(serving.kv_cache_dtype) or parse_dtype(serving.dtype))


def check_serving(
    serving: ServingOptions, target: ModelConfigInfo, draft: ModelConfigInfo | None = None
) -> ServingOptions:
    """Check the serving options of a plan, and fill in the context if it is not given.

    The default context is CONTEXT tokens, or the target's longest context if that is shorter.

    Args:
        serving: the options.
        target: the target.
        draft: the draft; None for the target alone.

    Returns:
        The options, with a context.

    Raises:
        UserError: for options that no engine would serve: a context longer than the target's,
            another dtype for quantized weights, or a number of attention heads that cannot be
            divided evenly among the devices.
    """
    # Take the given context or the default. It must not be longer than the target allows.
    longest = getattr(target.text, "max_position_embeddings", None)
    context = serving.context or min(CONTEXT, longest or CONTEXT)
    if longest and context > longest:
        raise UserError(
            "serving.context",
            got=f"{context} tokens",
            expected=f"at most {longest}, the longest context of {target.name}",
        )

    # Quantized weights are served in the format in which they are stored, so no dtype applies.
    if serving.dtype and target.quantization:
        raise make_unused_key_error(
            "serving.dtype",
            serving.dtype,
            f"no effect on the weights of {target.name}, which are"
            f" {target.quantization.get('quant_method', 'quantised')}",
        )

    # Tensor parallelism splits the attention heads evenly among the devices.
    for model in filter(None, (target, draft)):
        heads = getattr(model.text, "num_attention_heads", serving.tensor_parallel)
        if heads % serving.tensor_parallel:
            raise UserError(
                "serving.tensor_parallel",
                got=f"{serving.tensor_parallel} devices",
                expected=f"a number that divides the {heads} attention heads of {model.name}",
            )
    return serving.model_copy(update={"context": context})


@dataclass(frozen=True)
class Budget:
    """The memory of each device while a model is served.

    Attributes:
        parts: bytes of each part that the device holds, by name.
        needs: bytes of memory that a device needs, including the share that the engine leaves free.
        fits: whether the parts fit into the memory of a device that the options allow to use.
        room: tokens of context that all sequences together can have in that memory; 0 if the
            weights alone do not fit, and None if there is no limit, because no layer caches all
            tokens.
        cost: how many of these tokens the draft takes; None for the target alone.
        tensor_parallel: devices on which the parts fit, if they do not fit here; None if they fit,
            or if MAX_DEVICES do not hold them.
    """

    parts: dict[str, int]
    needs: int
    fits: bool
    room: int | None
    cost: int | None = None
    tensor_parallel: int | None = None


def compute_budget(
    target: ModelConfigInfo,
    serving: ServingOptions,
    draft_bytes: float = 0,
    draft_cache: CacheSize | None = None,
    num_speculative_tokens: int = 0,
) -> Budget:
    """Compute the memory of each device that serves a target, with a draft or without.

    Args:
        target: the target.
        serving: how the target is served; the context must be set (see `check_serving`).
        draft_bytes: bytes of the draft's weights; 0 without a draft.
        draft_cache: the size of the draft's KV cache; None if it has none.
        num_speculative_tokens: K, draft tokens per round.
    """
    assert serving.context is not None
    devices = serving.tensor_parallel
    itemsize = count_kv_itemsize(serving, target)

    def count_cache_bytes(context: int) -> list[int]:
        """Return the bytes of the target's and of the draft's KV cache on each device.

        `context` is the number of tokens of each sequence.
        """
        return [
            size.num_bytes(context, serving.batch_size, itemsize, devices) if size else 0
            for size in (target.cache, draft_cache)
        ]

    # Add up what a device holds: the parts that do not depend on the context, and the KV caches for
    # the context in the options.
    parts = _list_fixed_parts(target, serving, draft_bytes, num_speculative_tokens)
    fixed = sum(parts.values())
    parts["KV cache"], parts["draft's KV cache"] = count_cache_bytes(serving.context)
    total = int(sum(parts.values()))

    # Compare the sum with the memory that the engine may use, and find the longest context that
    # would fit.
    usable = serving.gpu_memory_utilization * serving.memory_gb * 2**30
    longest = _find_longest_context(lambda context: fixed + sum(count_cache_bytes(context)), usable)
    budget = Budget(
        parts={name: int(size) for name, size in parts.items() if size},
        needs=int(total / serving.gpu_memory_utilization),
        fits=total <= usable,
        room=None if longest >= NO_LIMIT else longest * serving.batch_size,
    )
    if budget.fits or 2 * devices > MAX_DEVICES:
        return budget

    # If the parts do not fit, try twice as many devices. This call doubles again, until they fit.
    doubled = compute_budget(
        target,
        serving.model_copy(update={"tensor_parallel": 2 * devices}),
        draft_bytes,
        draft_cache,
        num_speculative_tokens,
    )
    return replace(budget, tensor_parallel=2 * devices if doubled.fits else doubled.tensor_parallel)


def _list_fixed_parts(
    target: ModelConfigInfo,
    serving: ServingOptions,
    draft_bytes: float,
    num_speculative_tokens: int,
) -> dict[str, float]:
    """Return the bytes of each part of a device's memory that does not depend on the context.

    The two KV caches do depend on it. They are in the result with 0 bytes, for the caller to fill.

    Args:
        target: the target.
        serving: how the target is served.
        draft_bytes: bytes of the draft's weights; 0 without a draft.
        num_speculative_tokens: K, draft tokens per round.
    """
    dtype = parse_dtype(serving.dtype)
    devices = serving.tensor_parallel
    activation_bytes = _estimate_activation_bytes(
        target.text,
        target.itemsize(dtype),
        verified=serving.batch_size * (num_speculative_tokens + 1),
        devices=devices,
    )
    return {
        "target": count_weight_bytes(target, dtype) / devices,
        "KV cache": 0,
        "draft": draft_bytes / devices,
        "draft's KV cache": 0,
        "engine": ENGINE_BYTES + activation_bytes,
    }


def _find_longest_context(count_bytes: Callable[[int], float], usable: float) -> int:
    """Find the longest context in tokens that fits into a device's memory, up to NO_LIMIT.

    Args:
        count_bytes: a function that returns the bytes that a device holds, for a number of tokens
            of context.
        usable: the bytes that a device may hold.

    Returns:
        The number of tokens; 0 if nothing fits.
    """
    # The bytes grow with the context, so a binary search finds the first context that is too long.
    first_too_long = bisect.bisect_left(
        range(NO_LIMIT + 1), True, key=lambda context: count_bytes(context) > usable
    )
    return max(0, first_too_long - 1)


def count_weight_bytes(target: ModelConfigInfo, dtype: torch.dtype | None = None) -> float:
    """Return the bytes of all weights of a model; tied weights count once.

    Args:
        target: the model.
        dtype: the dtype of the weights; None for the dtype that they are stored in.
    """
    weigh = target.weigh(dtype)
    return sum(weigh(name, parameter) for name, parameter in target.model.named_parameters())


def _estimate_activation_bytes(
    text: PreTrainedConfig, itemsize: int, verified: int, devices: int
) -> int:
    """Estimate the bytes of activations that each device holds while it serves a target.

    The largest activations are those of a pass over PASS_TOKENS prompt tokens, and the float32
    logits of a round.

    Args:
        text: the target's text config.
        itemsize: bytes of a number.
        verified: tokens whose logits are computed in a round, over all sequences.
        devices: the number of devices, among which the model is split.
    """
    # Assume that each prompt token has six vectors of the hidden size, and three of the width of
    # the MLP. The MLP is split among the devices.
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    # Some model classes have a list with a width for each layer.
    widest = max(width) if isinstance(width, list) else width
    prompt_bytes = PASS_TOKENS * itemsize * (6 * text.hidden_size + 3 * widest // devices)
    logit_bytes = 4 * verified * text.vocab_size
    return int(prompt_bytes + logit_bytes)
