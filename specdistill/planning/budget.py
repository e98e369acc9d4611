"""What each device holds while a target serves, alone and with a draft, and how much context is left.

Weights and KV cache are counted; what an engine takes in addition is assumed. Devices that share a model (tensor parallelism)
each have an equal part of its weights, and of its cache whole heads.
"""

import bisect
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdistill.errors import UserError
from specdistill.methods.sizes import Described
from specdistill.planning.command import ServingOptions
from specdistill.targets.cache_size import CacheSize

CONTEXT = 4096  # where none is asked for
ENGINE_BYTES = 2**30  # its kernels and graphs, and buffers through which devices speak
PASS_TOKENS = 8192  # of prompts in a pass, as vLLM takes them
NO_LIMIT = 2**30  # tokens: more than that are not counted
MOST_DEVICES = 64
USABLE = (
    0.92  # of a device's memory: the rest is the driver's context and what the allocator cannot use
)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """That `serving:` names."""
    return getattr(torch, {"fp8": "float8_e4m3fn"}.get(name, name)) if name else None


def kv_itemsize(serving: ServingOptions, target: Described) -> int:
    """Bytes of a number in the KV cache."""
    return target.itemsize(torch_dtype(serving.kv_cache_dtype) or torch_dtype(serving.dtype))


def served(
    serving: ServingOptions, target: Described, draft: Described | None = None
) -> ServingOptions:
    """What a target is to serve, with a context: without one CONTEXT, or what the target has if that is less.

    Raises UserError for what no engine would serve: more context than the target has, heads that devices cannot share.
    """
    longest = getattr(target.text, "max_position_embeddings", None)
    context = serving.context or min(CONTEXT, longest or CONTEXT)
    if longest and context > longest:
        expected = f"at most {longest}, the target's max_position_embeddings"
        raise UserError("serving.context", got=context, expected=expected)
    if serving.dtype and target.quantization:
        expected = f"null: the weights of {target.name} are {target.quantization.get('quant_method', 'quantised')}"
        raise UserError("serving.dtype", got=serving.dtype, expected=expected)
    for model in filter(None, (target, draft)):
        heads = getattr(model.text, "num_attention_heads", serving.tensor_parallel)
        if heads % serving.tensor_parallel:
            expected = f"a divisor of {heads}, the attention heads of {model.name}"
            raise UserError(
                "serving.tensor_parallel", got=serving.tensor_parallel, expected=expected
            )
    return serving.model_copy(update={"context": context})


@dataclass(frozen=True)
class Budget:
    """Of each device, in bytes.

    parts: what it holds, by name. needs: a memory that they fit in, with the share that the engine leaves.
    room: tokens of context that all sequences together can have on the memory that was asked for, 0 where the weights alone do
    not fit and None where no layer keeps tokens for good. cost: of them, how many the draft takes; None for the target alone.
    tensor_parallel: devices on which it fits, where it does not; None where MOST_DEVICES do not hold it.
    """

    parts: dict[str, int]
    needs: int
    fits: bool
    room: int | None
    cost: int | None = None
    tensor_parallel: int | None = None


def budget(
    target: Described,
    serving: ServingOptions,
    draft_bytes: float = 0,
    draft_cache: CacheSize | None = None,
    num_speculative_tokens: int = 0,
) -> Budget:
    """Of a target with a draft, or alone without bytes and cache of one."""
    dtype, devices, itemsize = (
        torch_dtype(serving.dtype),
        serving.tensor_parallel,
        kv_itemsize(serving, target),
    )
    verified = serving.batch_size * (num_speculative_tokens + 1)
    parts = {
        "target": weight_bytes(target, dtype) / devices,
        "KV cache": 0,
        "draft": draft_bytes / devices,
        "draft's KV cache": 0,
        "engine": ENGINE_BYTES
        + _activations(target.text, target.itemsize(dtype), verified, devices),
    }

    def caches(context: int) -> list[int]:
        both = (target.cache, draft_cache)
        return [
            size.num_bytes(context, serving.batch_size, itemsize, devices) if size else 0
            for size in both
        ]

    assert serving.context is not None
    usable, fixed = serving.gpu_memory_utilization * serving.memory_gb * 2**30, sum(parts.values())
    parts["KV cache"], parts["draft's KV cache"] = caches(serving.context)
    total = int(sum(parts.values()))
    beyond = bisect.bisect_left(
        range(NO_LIMIT + 1), True, key=lambda context: fixed + sum(caches(context)) > usable
    )
    longest = max(0, beyond - 1)
    made = Budget(
        parts={name: int(size) for name, size in parts.items() if size},
        needs=int(total / serving.gpu_memory_utilization),
        fits=total <= usable,
        room=None if longest >= NO_LIMIT else longest * serving.batch_size,
    )
    if made.fits or 2 * devices > MOST_DEVICES:
        return made
    more = serving.model_copy(update={"tensor_parallel": 2 * devices})
    doubled = budget(target, more, draft_bytes, draft_cache, num_speculative_tokens)
    return replace(made, tensor_parallel=2 * devices if doubled.fits else doubled.tensor_parallel)


def weight_bytes(target: Described, dtype: torch.dtype | None = None) -> float:
    """Of all weights of a model, in a dtype or as they are stored; tied ones count once."""
    weigh = target.weigh(dtype)
    return sum(weigh(name, parameter) for name, parameter in target.model.named_parameters())


def _activations(text: Any, itemsize: int, verified: int, devices: int) -> int:
    """Of a pass over a chunk of prompts: six vectors as wide as the hidden state and three as the MLP; and float32 logits of one round."""
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    rows = PASS_TOKENS * itemsize * (6 * text.hidden_size + 3 * width // devices)
    return int(rows + 4 * verified * text.vocab_size)
