"""Read and write checkpoints of block drafters: config.json and weights.

They are read in the layouts of their authors, which engines load, and of speculators. They are
written in the layout of their authors. `specdistill.serving.export` writes either one.

These differences between files and this project are handled here and nowhere else:

- The layers that are read count "after L layers" in this project and in the files of speculators.
  The authors' `target_layer_ids` count L - 1.
- Engines read keys at the top level or in `dflash_config`, so they are written to both.
- Embedding and LM head are the target's and are omitted. A draft with a pruned vocabulary has its
  LM head and `d2t`.
- Causality is what `is_causal` says, else `dflash_config.causal`. If both are absent, layers with a
  window are causal and others are not.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.blocks.module import BlockConfig, BlockDraft, Kind
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import HeadExport, Layout
from specdistill.targets.files import EMBEDDING, HEAD, TargetFiles, read_stated, require_target
from specdistill.targets.frozen import FrozenTarget

NESTED_CONFIG_KEY = "dflash_config"
MASK_EMBEDDING = "mask_embedding.pt"


def save_block(draft: BlockDraft, kind: Kind, folder: Path) -> None:
    """Write config.json and weights of a draft into a folder.

    `load_block` reads the draft back bit for bit.

    Args:
        draft: the draft.
        kind: the method of block drafting.
        folder: where to write; is created.
    """
    # Leave out the target's own tables, and the map of a vocabulary that is not pruned.
    tensors = {
        name: tensor for name, tensor in draft.state_dict().items() if name not in draft.shared
    }
    if not draft.config.prunes_vocabulary:
        del tensors["d2t"]
    checkpoint.write_draft(
        folder, write_block_config(draft.config, kind, draft.fc.weight.dtype), tensors
    )


def load_block(
    kind: Kind, folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft"
) -> BlockDraft:
    """Load a block drafter, and check that it fits the target.

    Args:
        kind: the method of block drafting.
        folder: the folder of the draft.
        target: the target.
        key: the recipe key to name in errors.

    Raises:
        UserError: for files that are missing or broken, for tensors or sizes that do not fit, and
            for a mask token or layers that the target does not have.
    """
    return checkpoint.load_feature_draft(
        partial(check_block, kind), kind.draft, folder, target, key=key
    )


def check_block(
    kind: Kind,
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: checkpoint.AnyTarget | None,
    *,
    key: str,
    name: Path | str,
) -> tuple[BlockConfig, dict[str, Tensor]]:
    """Check a draft's config and tensors against each other and against its target.

    Args:
        kind: the method of block drafting.
        folder: the folder of the draft.
        tensors: the draft's tensors by name; they may be on the meta device.
        target: the target. None: only compare the draft's files with each other.
        key: the recipe key to name in errors.
        name: what errors call the draft.

    Returns:
        The config, and the draft's tensors. Of the vocabulary maps, `t2d` is left out, and `d2t`
        too if the vocabulary is not pruned. If the target is given, copies of its embedding and LM
        head are also left out.

    Raises:
        UserError: for tensors or sizes that do not fit, and for a mask token or layers that the
            target does not have.
    """
    # Compare the sizes of draft and target.
    raw = checkpoint.read_config(folder, key)
    config = read_block_config(kind, raw, None if target is None else target.num_layers, key)
    if target is not None:
        sizes = {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_target_layers": config.target_num_layers,
        }
        checkpoint.check_fit(sizes, target, name, key)
    _check_mask_and_layers(config, folder, name, key)

    # Compare the tensors with those of a draft of this config.
    draft_tensors = {
        tensor_name: tensor for tensor_name, tensor in tensors.items() if tensor_name != "t2d"
    }
    with torch.device("meta"):
        expected = kind.draft(config).state_dict()
    optional = {EMBEDDING} if config.prunes_vocabulary else {EMBEDDING, HEAD, "d2t"}
    checkpoint.check_tensors(
        expected, draft_tensors, name, key, what=f"a {kind.name} draft", optional=optional
    )

    # Leave out copies of the target's embedding and LM head, and refuse tables that differ from the
    # target's. The LM head of a pruned vocabulary is the draft's own, so it stays.
    if target is not None:
        for table_name in {EMBEDDING, HEAD} & optional & draft_tensors.keys():
            table = draft_tensors.pop(table_name)
            if not table.is_meta and not checkpoint.is_copy(table, target.tensor(table_name)):
                raise UserError(
                    key,
                    got=f"{name}, whose {table_name} differs from the target's",
                    expected=f"a draft without {table_name}, or with a copy of the target's",
                )
    if not config.prunes_vocabulary:
        draft_tensors.pop("d2t", None)
    return config, draft_tensors


def _check_mask_and_layers(config: BlockConfig, folder: Path, name: Path | str, key: str) -> None:
    """Raise UserError if a draft needs a mask token or a layer that the target does not have.

    Args:
        config: the draft's config.
        folder: the folder of the draft.
        name: what errors call the draft.
        key: the recipe key to name in errors.
    """
    # The embedding of the mask must be a row of the target's embedding table. Drafts that ship
    # another one, in a file of its own, are refused.
    if (folder / MASK_EMBEDDING).is_file():
        raise UserError(
            key,
            got=f"{name} with an embedding of its own for the mask ({MASK_EMBEDDING})",
            expected="a draft whose mask is a token of the target (mask_token_id)",
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise UserError(
            key,
            got=f"{name} with mask_token_id {config.mask_token_id}",
            expected=f"a token id from 0 to {config.vocab_size - 1}",
        )
    if not all(0 < layer <= config.target_num_layers for layer in config.aux_layers):
        raise UserError(
            key,
            got=f"{name}, which reads the target after layers {list(config.aux_layers)}",
            expected=f"layers from 1 to {config.target_num_layers}, the target's depth",
        )


def export_block(
    kind: Kind,
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a draft in the layout of an engine.

    Args:
        kind: the method of block drafting.
        draft: the folder of the draft.
        engine: the name of the engine.
        layout: the engine's layout for this method.
        output: a new folder.
        target: the target's files; None if they are not known.
        num_speculative_tokens: the number of draft tokens per round, for engines that read it from
            the config.

    Raises:
        UserError: before anything is written, for what the engine cannot express.
    """
    # Check the draft, and that the engine can express it.
    config, tensors = check_block(
        kind, draft, checkpoint.read_tensors(draft, "draft"), target, key="draft", name=draft
    )
    layout.check(engine, config, draft)

    # Write the draft. Engines read both maps of a pruned vocabulary.
    dtype = checkpoint.choose_stored_dtype(tensors.values())
    if config.prunes_vocabulary:
        tensors |= checkpoint.build_vocabulary_maps(tensors["d2t"], config.vocab_size)
    head = HeadExport(
        write_block_config(config, kind, dtype), config, target, num_speculative_tokens
    )
    if layout.needs_target:
        require_target(target, layout.needs_target)
    checkpoint.write_draft(output, layout.config(head), tensors)


def write_block_config(config: BlockConfig, kind: Kind, dtype: torch.dtype) -> dict[str, object]:
    """Return the config.json of a draft in the layout of the method's authors."""
    # The keys of the method are written twice, because engines read them at the top level or in
    # `dflash_config`. The authors count layers from 0. The model type is qwen3, because Qwen3's
    # layers are Llama's with norms of query and key heads, as a block drafter has them.
    method_fields = {name: getattr(config, name) for name in kind.own_fields}
    method_fields["target_layer_ids"] = [layer - 1 for layer in config.aux_layers]
    layer_type = "full_attention" if config.sliding_window is None else "sliding_attention"
    return {
        "architectures": [kind.architectures[0]],
        **checkpoint.write_shape(config, dtype),
        "model_type": "qwen3",
        "layer_types": [layer_type] * config.num_layers,
        "use_sliding_window": config.sliding_window is not None,
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.target_num_layers,
        **method_fields,
        NESTED_CONFIG_KEY: {**method_fields, "causal": config.is_causal},
    }


def read_block_config(
    kind: Kind, raw: RawConfig, target_num_layers: int | None, key: str
) -> BlockConfig:
    """Read a draft's config from config.json, in the layout of the authors or of speculators.

    This is the inverse of `write_block_config`. Absent keys have the defaults that engines assume.

    Args:
        kind: the method of block drafting.
        raw: the content of config.json.
        target_num_layers: the target's depth, for files that do not say it; None if unknown.
        key: the recipe key to name in errors.

    Raises:
        UserError: for keys that are missing or invalid, and if the target's depth is unknown.
    """
    # The layout of the method's authors nests its keys, and counts layers from 0.
    nested = dict(read_stated(raw, NESTED_CONFIG_KEY, dict[str, Any], key) or {})
    layer_ids = nested.get("target_layer_ids") or raw.get("target_layer_ids") or ()
    layers = [layer_id + 1 for layer_id in layer_ids]

    # The layout of speculators nests the keys of the layers. Its drafts are causal if they have a
    # window, unless the file says otherwise. Keys at the top level come last, so they win.
    layer_config = checkpoint.read_speculators_layers(raw, kind.name, key)
    if layer_config:
        layers = list(read_stated(raw, "aux_hidden_state_layer_ids", list[int], key) or ())
        has_window = "sliding_attention" in (layer_config.get("layer_types") or ())
        is_causal = has_window and not raw.get("sliding_window_non_causal", False)
        raw = {"is_causal": is_causal, **layer_config, **raw}

    # Read the shape, and the keys that both layouts have: causality, the target's depth, the mask
    # and the layers that are read.
    keys = {**raw, **nested}
    shape = checkpoint.read_shape(raw, key, what=f"a {kind.name} draft")
    causal = raw.get("is_causal")
    if causal is None:
        causal = nested.get("causal")
    num_layers = raw.get("num_target_layers") or target_num_layers
    if keys.get("mask_token_id") is None or not layers:
        missing = "mask_token_id" if keys.get("mask_token_id") is None else "target_layer_ids"
        raise UserError(
            key, got=f"a config.json without {missing}", expected=f"the keys of a {kind.name} draft"
        )
    if num_layers is None:
        raise UserError(
            "target.model",
            got="nothing",
            expected=(
                "the draft's target, because the draft's config.json does not say how many layers"
                " the target has"
            ),
        )

    # Read the keys that only this method has. A file without `block_size` has blocks of 16, as
    # engines assume. Without a key for causality, layers with a window are causal.
    method_fields: dict[str, Any] = {"block_size": 16}
    method_fields |= {name: keys[name] for name in kind.own_fields if keys.get(name) is not None}
    method_fields |= {
        "is_causal": shape.sliding_window is not None if causal is None else bool(causal)
    }
    for name, least in (("block_size", 2), ("mask_token_id", 0), ("markov_rank", 1)):
        read_stated(method_fields, name, checkpoint.define_size_type(least), key)
    return kind.config(
        **vars(shape),
        draft_vocab_size=raw.get("draft_vocab_size") or shape.vocab_size,
        aux_layers=tuple(layers),
        target_num_layers=num_layers,
        **method_fields,
    )
