"""EAGLE-3 checkpoints: a folder of config.json and weights.

They are read in the layouts of SpecForge, SafeAILab, ModelOpt, vLLM, SGLang and speculators. They
are written in the layout that SpecForge and SGLang share; `specdistill.serving.export` writes them
in the layout of each engine.

Only this file translates between files and the head in memory ("here"):

- The first layer is `layers.0` here. Files call it that, or `midlayer`. Old files call the norms of
  EAGLE-3.1 low, mid and high.
- Auxiliary layers count "after L layers" here. A file's top-level
  `eagle_aux_hidden_state_layer_ids` counts the same way. The list of that name in `eagle_config`
  counts L - 1. It is omitted for the default layers, which every engine then computes alike.
- The embedding is omitted if it is the target's. `d2t` and `t2d` are omitted if the vocabulary is
  not pruned, because vLLM refuses them then.
- speculators keeps a Llama's keys in `transformer_layer_config`. If its config does not state
  `norm_before_residual`, it is read as true, as in vLLM.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.eagle3.module import Eagle3Config, Eagle3Draft
from specdistill.methods.eagle3.serving import NORMS, build_head_config, format_eagle_config
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import HeadExport, Layout
from specdistill.serving.engines.loader import AUX_LAYERS, choose_aux_layers
from specdistill.targets.files import EMBEDDING, HEAD, TargetFiles, read_stated, require_target

DESCRIPTION = "an EAGLE-3 head"
# Parts of tensors' names in files, and what they are called here.
RENAMED_PARTS = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# Settings that an `eagle_config` may state (above all ModelOpt's), and the value that heads have
# here.
FIXED_SETTINGS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "layer_ids": None,
}


def save_eagle3(draft: Eagle3Draft, folder: Path) -> None:
    """Write config.json and weights of a head into a folder.

    `load_eagle3` reads the head back bit for bit.
    """
    # SpecForge and SGLang call the first layer `midlayer`.
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in draft.state_dict().items()
        if name not in {*draft.shared, "d2t"}
    }
    # Only a pruned vocabulary has maps.
    if draft.config.prunes_vocabulary:
        tensors |= checkpoint.build_vocabulary_maps(draft.d2t.cpu(), draft.config.vocab_size)
    checkpoint.write_draft(
        folder, write_eagle3_config(draft.config, draft.fc.weight.dtype), tensors
    )


def check_eagle3(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: checkpoint.AnyTarget | None,
    *,
    key: str,
    name: Path | str,
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Check a head's config and tensors against each other and against its target.

    The files may omit the target's embedding, and the target's LM head if the vocabulary is not
    pruned. If they contain an embedding, it is dropped if it is a copy of the target's. Otherwise
    it is the head's own, and `own_embedding` is set in the config.

    Args:
        folder: the folder that holds config.json.
        tensors: the tensors by their names in the file; they may be on the meta device. Then it is
            not checked whether the embedding is a copy.
        target: the target. None: only compare the head's files with each other. The target is
            needed if config.json does not say how many layers it has.
        key: the recipe key to name in errors.
        name: what errors call the head.

    Returns:
        The config, and the tensors by their names in `Eagle3Draft`: without `t2d`, which follows
        from `d2t`, and without `d2t` if the vocabulary is not pruned.

    Raises:
        UserError: for tensors, sizes or layers that do not fit each other or the target.
    """
    # Compare the sizes and layers of head and target.
    raw = checkpoint.read_config(folder, key)
    config = read_eagle3_config(raw, None if target is None else target.num_layers, key)
    if target is not None:
        sizes = {
            "target_hidden_size": config.target_hidden_size,
            "vocab_size": config.vocab_size,
            "num_target_layers": config.target_num_layers,
        }
        checkpoint.check_fit(sizes, target, name, key)
    if not all(0 <= layer <= config.target_num_layers for layer in config.aux_layers):
        raise UserError(
            key,
            got=f"{name} with auxiliary layers {list(config.aux_layers)}",
            expected=f"layers from 0 to {config.target_num_layers}, the target's depth",
        )

    # Compare the tensors with those of a head of this config. A head that is as wide as its target
    # may omit the target's tables.
    head_tensors = _rename_tensors(tensors, name, key)
    with torch.device("meta"):
        expected = Eagle3Draft(config).state_dict()
        expected["t2d"] = torch.empty(config.vocab_size, dtype=torch.bool)
    is_as_wide = config.hidden_size == config.target_hidden_size
    optional = {"t2d", EMBEDDING} if is_as_wide else {"t2d"}
    if not config.prunes_vocabulary:
        optional |= {"d2t", HEAD} if is_as_wide else {"d2t"}
    checkpoint.check_tensors(expected, head_tensors, name, key, what=DESCRIPTION, optional=optional)

    # Leave out `t2d` (it follows from `d2t`), the `d2t` of a vocabulary that is not pruned, and an
    # embedding that is a copy of the target's.
    head_tensors.pop("t2d", None)
    if not config.prunes_vocabulary:
        head_tensors.pop("d2t", None)
    embedding = head_tensors.get(EMBEDDING)
    if target is not None and is_as_wide and embedding is not None and not embedding.is_meta:
        if checkpoint.is_copy(embedding, target.tensor(EMBEDDING)):
            del head_tensors[EMBEDDING]
        else:
            config = dataclasses.replace(config, own_embedding=True)
    return config, head_tensors


def _rename_tensors(tensors: Mapping[str, Tensor], name: Path | str, key: str) -> dict[str, Tensor]:
    """Return a file's tensors by the names that they have in an `Eagle3Draft`.

    Args:
        tensors: the tensors by their names in the file.
        name: what the error calls the head.
        key: the recipe key that the error names.

    Raises:
        UserError: if a file has a tensor twice, by an old and a new name.
    """
    head_tensors: dict[str, Tensor] = {}
    file_names: dict[str, str] = {}
    for file_name, tensor in tensors.items():
        draft_name = file_name
        for file_part, part in RENAMED_PARTS.items():
            draft_name = draft_name.replace(file_part, part)
        if draft_name in head_tensors:
            raise UserError(
                key,
                got=f"{name} with {file_names[draft_name]} and {file_name}, names of one tensor",
                expected="only one of the two names",
            )
        head_tensors[draft_name] = tensor
        file_names[draft_name] = file_name
    return head_tensors


# Loads a head from any of the layouts that are read (see the module).
load_eagle3 = partial(checkpoint.load_feature_draft, check_eagle3, Eagle3Draft)


def export_eagle3(
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a head in the layout of an engine; see `Method.export` for the arguments.

    Raises:
        UserError: before anything is written, for what the engine cannot express.
    """
    # Check the head, and that the engine can express it.
    config, tensors = check_eagle3(
        draft, checkpoint.read_tensors(draft, "draft"), target, key="draft", name=draft
    )
    # A head that is as wide as its target usually shares the target's embedding (one of another
    # width cannot). If its file has an embedding nevertheless, this may be a copy of the target's.
    # Without the target that is not known, and the embedding counts as the head's own.
    if target is None and EMBEDDING in tensors and config.hidden_size == config.target_hidden_size:
        config = dataclasses.replace(config, own_embedding=True)
    layout.check(engine, config, draft)

    # Add what the engines expect in the file: an LM head, and both maps of a pruned vocabulary.
    dtype = checkpoint.choose_stored_dtype(tensors.values())
    if HEAD not in tensors:
        tensors[HEAD] = require_target(target, f"{draft} has no {HEAD}").tensor(HEAD).to(dtype)
    if config.prunes_vocabulary:
        tensors |= checkpoint.build_vocabulary_maps(tensors["d2t"], config.vocab_size)

    # Write the head, with the engine's name for the first layer.
    head = HeadExport(checkpoint.write_shape(config, dtype), config, target, num_speculative_tokens)
    renamed = {
        name.replace("layers.0.", layout.first_layer): tensor for name, tensor in tensors.items()
    }
    checkpoint.write_head(output, layout, head, renamed)


def write_eagle3_config(config: Eagle3Config, dtype: torch.dtype) -> dict[str, object]:
    """Return the content of a head's config.json, in the layout that SpecForge and SGLang share.

    In addition it states the target's number of layers.
    """
    # `HeadExport` also has fields for the target and the number of draft tokens, but
    # `build_head_config` does not read them.
    head = HeadExport(
        checkpoint.write_shape(config, dtype), config, target=None, num_speculative_tokens=0
    )
    switches = (*NORMS, "norm_before_residual")  # fields of `config` that are keys, too
    # If the head does not read the default layers of the target, `format_eagle_config` adds a
    # section `eagle_config` that lists its layers. It replaces the `eagle_config` below, because
    # keys that come later win.
    keys = build_head_config(head, *switches, aux_layers=format_eagle_config)
    return {
        "eagle_config": {"use_aux_hidden_state": True},
        **keys,
        "num_target_layers": config.target_num_layers,
    }


def read_eagle3_config(raw: RawConfig, target_num_layers: int | None, key: str) -> Eagle3Config:
    """Read a head's config from its config.json, in any of the layouts.

    This is the inverse of `write_eagle3_config`. Absent keys have the defaults that engines assume.

    Args:
        raw: the content of config.json.
        target_num_layers: how many layers the target has, for files that do not say; None if it is
            not known.
        key: the recipe key to name in errors.

    Raises:
        UserError: if the number of the target's layers is not known, for a size that is missing,
            and for settings that a head cannot have or that contradict each other.
    """
    # Bring the keys of all layouts to the top level. speculators nests a Llama's keys in
    # `transformer_layer_config`, and vLLM nests all keys in `model`.
    layer_config = checkpoint.read_speculators_layers(raw, "eagle3", key)
    if layer_config:
        raw = {"norm_before_residual": True, **layer_config, **raw}
    else:
        raw = raw.get("model") or raw

    # Some layouts nest the keys of EAGLE-3 in `eagle_config`. Of ModelOpt's many switches there,
    # only the usual values are supported.
    nested = read_stated(raw, "eagle_config", dict[str, Any], key) or {}
    checkpoint.check_settings(nested, FIXED_SETTINGS, key, what=DESCRIPTION)
    num_layers = raw.get("num_target_layers") or target_num_layers
    if num_layers is None:
        raise UserError(
            "target.model",
            got="nothing",
            expected=(
                "the draft's target, because the draft's config.json does not say how many layers"
                " the target has"
            ),
        )

    # Read the shape, which is that of a Llama, and the head's own sizes and switches. A switch may
    # have two names.
    shape = checkpoint.read_shape(raw, key, what=DESCRIPTION)
    config = Eagle3Config(
        **vars(shape),
        draft_vocab_size=raw.get("draft_vocab_size") or shape.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or shape.hidden_size,
        aux_layers=_read_aux_layers(raw, nested, num_layers, key),
        target_num_layers=num_layers,
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        norm_output=bool(raw.get("norm_output")),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        norm_before_fc=bool(nested.get("norm_before_fc", raw.get("norm_before_fc"))),
    )
    if config.fc_norm and config.norm_before_fc:
        raise UserError(
            key,
            got="both fc_norm and norm_before_fc",
            expected=f"at most one of the two in {DESCRIPTION}",
        )
    return config


def _read_aux_layers(
    raw: RawConfig, nested: RawConfig, num_layers: int, key: str
) -> tuple[int, ...]:
    """Return the layers of the target that a head reads, from its config.json.

    A number L means the hidden state after L layers.

    Args:
        raw: the content of config.json.
        nested: its section `eagle_config`.
        num_layers: how many layers the target has.
        key: the recipe key to name in errors.

    Raises:
        UserError: if two places of the config do not agree.
    """
    # The layers may be stated at the top level and in `eagle_config`, which counts L - 1. If both
    # state them, they must agree. If none does, engines assume the default layers.
    top_level_layers = tuple(read_stated(raw, AUX_LAYERS, list[int], key) or ())
    nested_layers = tuple(
        layer + 1 for layer in read_stated(nested, AUX_LAYERS, list[int], key) or ()
    )
    if top_level_layers and nested_layers and top_level_layers != nested_layers:
        raise UserError(
            key,
            got=f"{AUX_LAYERS} {raw[AUX_LAYERS]}, and {nested[AUX_LAYERS]} in eagle_config",
            text=(
                f"{key}: config.json has two lists of the target's layers that the draft reads, and"
                f" they do not agree. {AUX_LAYERS} is {raw[AUX_LAYERS]} at the top level, where"
                f" layers are counted from 1, and {nested[AUX_LAYERS]} in eagle_config, where they"
                " are counted from 0. If the first list is right, write"
                f" {[layer - 1 for layer in top_level_layers]} in eagle_config."
            ),
        )
    layers = top_level_layers or nested_layers or tuple(choose_aux_layers(num_layers))

    # Some files also state the number of layers.
    count = raw.get("num_aux_hidden_states")
    if count is not None and count != len(layers):
        raise UserError(
            key,
            got=f"num_aux_hidden_states {count} and the layers {list(layers)}",
            expected=f"num_aux_hidden_states {len(layers)}",
        )
    return layers
