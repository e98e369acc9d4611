"""Rows of several documents, given to a class of transformers so that none sees another: the first way that is seen to work.

The default attention of most classes, `sdpa`, is kept within documents by a mask of T x T elements. A pass over packed rows replaces it by
`packed_attention`, which is given where documents begin, if the class takes that: it has to hand its keywords on to an attention that it
asks transformers for by name, and to ask of it nothing but causality, a sliding window and a scale. Other passes keep the class's own.

Shapes: B rows, T positions, S = B T, N query heads, G key/value heads, d key head size, e value head size, D documents.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.generic import TransformersKwargs

from specdistill.targets.anatomy import (
    CLASS_ERRORS,
    NUM_CACHED,
    NUM_TOKENS,
    backbone_of,
    reads_alike,
)
from specdistill.targets.cache import new_cache
from specdistill.targets.packed_attention import cached_attention, packed_attention

NAME = "specdistill_packed"  # under which transformers finds the attention
# What a class may hand on to its attention that changes nothing in it.
IDLE = {*TransformersKwargs.__annotations__, "use_cache"}

BackboneInputs = dict[
    str, Any
]  # of a backbone: input_ids [B, T] and position_ids [B, T], and what a way adds


class Documents(NamedTuple):
    """Where the documents of a batch are once its rows lie one behind the other.

    cumulative_lengths: int32 [D + 1], where each begins, then S; longest: tokens of the longest.
    """

    cumulative_lengths: Tensor
    longest: int

    @classmethod
    def of(cls, position_ids_BT: Tensor) -> "Documents":
        """By position ids, which start again at 0 in each. The host waits for the device; `specdistill.rows.packing` knows without."""
        begins_BT = position_ids_BT == 0
        begins_BT[:, 0] = True
        bounds = F.pad(begins_BT.flatten().nonzero().flatten(), (0, 1), value=begins_BT.numel())
        return cls(bounds.int(), int(bounds.diff().max()))


# (model, inputs, documents, pass) -> what the pass returns
PackingMethod = Callable[[Any, BackboneInputs, Documents, Callable[[BackboneInputs], Any]], Any]


def by_lengths(
    model: Any, inputs: BackboneInputs, documents: Documents, run: Callable[[BackboneInputs], Any]
) -> Any:
    """Classes with `sdpa` take `attend` in its place. Raises LookupError for a model with none."""
    with attending(sdpa_configs(model)):
        return run({**inputs, **lengths_of(inputs["input_ids"], documents)})


def lengths_of(input_ids_BT: Tensor, documents: Documents) -> BackboneInputs:
    """What tells `attend` where documents are. Without a mask transformers would look for them, for which the host has to wait."""
    lengths = {"cu_seq_lens_q": documents.cumulative_lengths, "max_length_q": documents.longest}
    return {"attention_mask": torch.ones_like(input_ids_BT), **lengths}


def as_they_are(
    _model: Any, inputs: BackboneInputs, _documents: Documents, run: Callable[[BackboneInputs], Any]
) -> Any:
    """Most classes tell documents by position ids that start again at 0."""
    return run(inputs)


def in_one_row(
    _model: Any, inputs: BackboneInputs, _documents: Documents, run: Callable[[BackboneInputs], Any]
) -> Any:
    """Flash attention tells them apart in a batch of one row alone, where transformers takes its kernel for variable lengths."""
    return run({name: tensor.flatten().unsqueeze(0) for name, tensor in inputs.items()})


def with_masks(
    model: Any, inputs: BackboneInputs, _documents: Documents, run: Callable[[BackboneInputs], Any]
) -> Any:
    """Some classes (gpt-oss) do not tell transformers their position ids when it makes their masks, and take masks that are given."""
    rows_BT0 = torch.empty(
        *inputs["input_ids"].shape, 0, dtype=model.dtype, device=inputs["input_ids"].device
    )
    config, position_ids = model.config.get_text_config(decoder=True), inputs["position_ids"]
    masks = create_masks_for_generate(
        config, rows_BT0, attention_mask=None, past_key_values=None, position_ids=position_ids
    )
    return run({**inputs, "attention_mask": masks})


@torch.no_grad()
def packing(model: Any) -> PackingMethod | None:
    """How packed rows are given to a model so that their documents never see each other: the first way that is seen to work.

    None where there is none: recurrent layers read on, ALiBi counts on.
    """
    backbone = backbone_of(model)
    ids_BT = torch.arange(2 * NUM_TOKENS, device=model.device).view(2, NUM_TOKENS)
    inputs = {
        "input_ids": ids_BT,
        "position_ids": torch.arange(NUM_TOKENS, device=model.device).expand(2, -1) % NUM_CACHED,
    }
    documents = Documents.of(inputs["position_ids"])

    def run(given: BackboneInputs) -> Tensor:
        return backbone(**given, use_cache=False).last_hidden_state

    with torch.autocast(model.device.type, enabled=False):  # its rounding would look like a leak
        alone = run({"input_ids": ids_BT[:, NUM_CACHED:]})
        for way in (by_lengths, as_they_are, in_one_row, with_masks):
            try:
                together = way(model, inputs, documents, run).view(2, NUM_TOKENS, -1)
            except CLASS_ERRORS:  # it does not take its rows in this way
                continue
            if reads_alike(together[:, NUM_CACHED:], alone):
                return way
    return None


@dataclass(frozen=True)
class CausalMask:
    """What stands in a mask's place: each token sees its document up to itself, `window` tokens at most."""

    window: int | None


def causal_mask(
    *, allow_is_causal_skip: bool, local_size: int | None = None, **_: Any
) -> CausalMask:
    """Called by transformers where a class asks for a mask; raises NotImplementedError where it asks for more than a `CausalMask`."""
    if not allow_is_causal_skip:
        raise NotImplementedError("a mask of its own")
    return CausalMask(local_size)


def attend(
    module: Any,
    query_BNTd: Tensor,
    key_BGTd: Tensor,
    value_BGTe: Tensor,
    attention_mask: Any,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as a class of transformers calls it; returns [B, T, N, e], and no weights. Without lengths of documents the positions are
    the last of one sequence.

    Masks say what `sdpa` computes and keywords what flash attention does: where they differ, as in chunks, it is neither window.
    Raises NotImplementedError for what is not computed here.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = {name for name, value in others.items() if value is not None} - IDLE
    fits = (
        len(query_BNTd) == 1 if cu_seq_lens_q is None else key_BGTd.shape[2] == query_BNTd.shape[2]
    )
    if (
        unknown
        or dropout
        or not is_causal
        or not fits
        or attention_mask != CausalMask(sliding_window)
    ):
        raise NotImplementedError(
            f"more than causal attention: {attention_mask}, {sliding_window}, {sorted(unknown)}"
        )
    # Under autocast float32 rotary tables widen queries and keys; values are in the dtype that projections compute in.
    query, key, value = (x.to(value_BGTe.dtype) for x in (query_BNTd, key_BGTd, value_BGTe))
    if cu_seq_lens_q is None:
        return cached_attention(query, key, value, sliding_window, scaling), None
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output_SNe, _ = packed_attention(*flat, cu_seq_lens_q, max_length_q, sliding_window, scaling)
    return output_SNe.unflatten(0, (query_BNTd.shape[0], -1)), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, causal_mask)


@contextmanager
def attending(configs: Sequence[Any]) -> Iterator[None]:
    """Within it `attend` stands in the place of `sdpa` in these configs."""
    try:
        for config in configs:
            config._attn_implementation = {
                "": NAME
            }  # its own alone, not that of the configs within it
        yield
    finally:
        for config in configs:
            config._attn_implementation = {"": "sdpa"}


def sdpa_configs(model: Any) -> list[Any]:
    """The configs of a model and of its parts that ask for `sdpa`. Raises LookupError for none."""
    own = {
        id(part.config): part.config
        for part in model.modules()
        if isinstance(getattr(part, "config", None), PreTrainedConfig)
    }
    found = [config for config in own.values() if config._attn_implementation == "sdpa"]
    if not found:
        raise LookupError("no sdpa")
    return found


def configs_with_lengths(model: Any) -> list[Any]:
    """What `attending` takes where a model that is trained reads packed rows by `lengths_of` them; nothing where it does not."""
    drops = getattr(model.config, "attention_dropout", 0)
    return sdpa_configs(model) if not drops and packing(model) is by_lengths else []


@torch.no_grad()
def maskless_configs(model: Any) -> list[Any]:
    """What `attending` takes where passes over a KV cache go without a mask: of a class that asks for causality, a sliding window and a
    scale alone; nothing of others.
    """
    backbone, ids_1T = (
        backbone_of(model),
        torch.arange(NUM_TOKENS, device=model.device).unsqueeze(0),
    )

    def run() -> Tensor:
        cache = new_cache(model.config.get_text_config(decoder=True))
        for part_1T in ids_1T.split(NUM_CACHED, dim=1):
            hidden: Tensor = backbone(
                input_ids=part_1T, past_key_values=cache, use_cache=True
            ).last_hidden_state
        return hidden

    try:
        configs = sdpa_configs(model)
        with attending(configs):
            without = run()
    except CLASS_ERRORS:
        return []
    return configs if reads_alike(without, run()) else []
