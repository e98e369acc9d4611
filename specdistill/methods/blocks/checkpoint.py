"""Checkpoints of block drafters: config.json and weights. Read in the layouts of their authors, which engines load, and of speculators;
written in the former, and by `specdistill.export` in either.

What goes over the edge here and nowhere else:
- layers that are read count "after L layers" inside and in speculators' files; the authors' `target_layer_ids` count L - 1;
- engines read keys at the top level or in `dflash_config`, so they stand in both;
- embedding and head are the target's and omitted, but for a pruned vocabulary, whose head and `d2t` are there;
- causality is what `is_causal` says, else `dflash_config.causal`; else layers with a window are causal and others are not.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.engines.engine import HeadExport, Layout
from specdistill.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.blocks.module import BlockConfig, BlockDraft
from specdistill.methods.layers import FeatureShape
from specdistill.targets.files import EMBEDDING, HEAD, TargetFiles, needed, stated
from specdistill.targets.frozen import FrozenTarget

NESTED = "dflash_config"
MASK_EMBEDDING = "mask_embedding.pt"


@dataclass(frozen=True)
class Kind:
    """A method of block drafting. name: in speculators' files; architectures: in config.json, the first of them written."""

    name: str
    architectures: tuple[str, ...]
    config: type[BlockConfig]
    draft: Callable[[Any], BlockDraft]

    @property
    def own_fields(self) -> list[str]:
        """Of the config, with the names that files have."""
        return [field.name for field in dataclasses.fields(self.config) if field.name not in COMMON]


COMMON = {field.name for field in dataclasses.fields(FeatureShape)}


def save(draft: BlockDraft, kind: Kind, folder: Path) -> None:
    """Write the draft; `load` reads it back bit for bit."""
    kept = {name: tensor for name, tensor in draft.state_dict().items() if name not in draft.shared}
    if not draft.config.prunes_vocabulary:
        del kept["d2t"]
    checkpoint.write_draft(folder, config_to_json(draft.config, kind, draft.fc.weight.dtype), kept)


def load(kind: Kind, folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> Any:
    """Read a draft for a target. Raises UserError as `load_reading` does, and for a mask or layers that the target does not have."""
    return checkpoint.load_reading(partial(check, kind), kind.draft, folder, target, key=key)


def check(
    kind: Kind,
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: checkpoint.AnyTarget | None,
    *,
    key: str,
    name: Path | str,
) -> tuple[BlockConfig, dict[str, Tensor]]:
    """A draft's config and its own tensors. Raises UserError as `load`, as far as the tensors, which may have no content, tell."""
    config = config_from_json(
        kind,
        checkpoint.read_config(folder, key),
        None if target is None else target.num_layers,
        key,
    )
    if target is not None:
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        checkpoint.check_fit(
            sizes | {"num_target_layers": config.target_num_layers}, target, name, key
        )
    if (folder / MASK_EMBEDDING).is_file():
        raise UserError(
            key,
            got=f"{name} with {MASK_EMBEDDING}",
            expected="a mask that is a row of the target's embedding",
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        got = f"{name} with mask_token_id {config.mask_token_id}"
        raise UserError(
            key, got=got, expected=f"a token of the vocabulary, 0..{config.vocab_size - 1}"
        )
    if not all(0 < layer <= config.target_num_layers for layer in config.aux_layers):
        got = f"{name}, which reads the target after layers {list(config.aux_layers)}"
        raise UserError(key, got=got, expected=f"1..{config.target_num_layers}")
    given = {each: tensor for each, tensor in tensors.items() if each != "t2d"}
    with torch.device("meta"):
        expected = kind.draft(config).state_dict()
    optional = {EMBEDDING} if config.prunes_vocabulary else {EMBEDDING, HEAD, "d2t"}
    checkpoint.check_tensors(
        expected, given, name, key, what=f"a {kind.name} draft", optional=optional
    )
    if target is not None:
        for shared in {EMBEDDING, HEAD} & optional & given.keys():
            if not given[shared].is_meta and not checkpoint.is_copy(
                given[shared], target.tensor(shared)
            ):
                raise UserError(
                    key, got=f"{name} with a {shared} of its own", expected="the target's"
                )
            del given[shared]
    if not config.prunes_vocabulary:
        given.pop("d2t", None)
    elif not given["d2t"].is_meta:
        checkpoint.check_offsets(given["d2t"], config.vocab_size, name, key)
    return config, given


def export(
    kind: Kind,
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a draft for an engine. Raises UserError, before anything is written, for what the engine cannot express."""
    config, own = check(
        kind, draft, checkpoint.read_tensors(draft, "draft"), target, key="draft", name=draft
    )
    layout.check(engine, config, draft)
    dtype = checkpoint.stored_dtype(own.values())
    if config.prunes_vocabulary:
        own |= checkpoint.vocabulary_maps(own["d2t"], config.vocab_size)
    head = HeadExport(config_to_json(config, kind, dtype), config, target, num_speculative_tokens)
    if layout.needs_target:
        needed(target, layout.needs_target)
    checkpoint.write_draft(output, layout.config(head), own)


def config_to_json(config: BlockConfig, kind: Kind, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of the method's authors."""
    own = {name: getattr(config, name) for name in kind.own_fields}
    own["target_layer_ids"] = [layer - 1 for layer in config.aux_layers]
    layer = "full_attention" if config.sliding_window is None else "sliding_attention"
    return {
        "architectures": [kind.architectures[0]],
        **checkpoint.shape_to_json(config, dtype),
        "model_type": "qwen3",
        "layer_types": [layer] * config.num_layers,
        "use_sliding_window": config.sliding_window is not None,
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.target_num_layers,
        **own,
        NESTED: {**own, "causal": config.is_causal},
    }


def config_from_json(
    kind: Kind, raw: Mapping[str, Any], target_num_layers: int | None, key: str
) -> BlockConfig:
    """The inverse of `config_to_json` for every layout, with the defaults that engines assume for absent keys."""
    nested = dict(stated(raw, NESTED, dict[str, Any], key) or {})
    layers = [
        layer + 1 for layer in nested.get("target_layer_ids") or raw.get("target_layer_ids") or ()
    ]
    if inner := checkpoint.layers_of_speculators(raw, kind.name, key):
        layers = list(stated(raw, "aux_hidden_state_layer_ids", list[int], key) or ())
        windows = "sliding_attention" in (inner.get("layer_types") or ())
        raw = {
            "is_causal": windows and not raw.get("sliding_window_non_causal", False),
            **inner,
            **raw,
        }
    both = {**raw, **nested}
    shape = checkpoint.shape_from_json(raw, key, what=f"a {kind.name} draft")
    causal = next(
        (value for value in (raw.get("is_causal"), nested.get("causal")) if value is not None), None
    )
    num_layers = raw.get("num_target_layers") or target_num_layers
    if both.get("mask_token_id") is None or not layers:
        missing = "target_layer_ids" if both.get("mask_token_id") is not None else "mask_token_id"
        raise UserError(
            key, got=f"a config.json without {missing}", expected=f"the keys of a {kind.name} draft"
        )
    if num_layers is None:
        expected = "the target: the draft's config.json does not say how deep it is"
        raise UserError("target.model", got="nothing", expected=expected)
    own: dict[str, Any] = {"block_size": 16}
    own |= {name: both[name] for name in kind.own_fields if both.get(name) is not None}
    own |= {"is_causal": shape["sliding_window"] is not None if causal is None else bool(causal)}
    for name, least in (("block_size", 2), ("mask_token_id", 0), ("markov_rank", 1)):
        stated(own, name, checkpoint.size_from(least), key)
    return kind.config(
        **shape,
        draft_vocab_size=raw.get("draft_vocab_size") or shape["vocab_size"],
        aux_layers=tuple(layers),
        target_num_layers=num_layers,
        **own,
    )
