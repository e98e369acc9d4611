"""EAGLE-3 checkpoints: a folder of config.json and weights. Read in the layouts of SpecForge, SafeAILab, ModelOpt, vLLM, SGLang and
speculators; written in the one that SpecForge and SGLang share, and by `specdistill.export` in each engine's own.

What goes over the edge here and nowhere else:
- the first layer is `layers.0` inside; files call it that or `midlayer`, and old ones call the norms of EAGLE-3.1 low, mid and high;
- auxiliary layers count "after L layers" inside. So does a file's top-level `eagle_aux_hidden_state_layer_ids`; the list of that name
  in `eagle_config` counts L - 1. It is omitted when the layers are the default ones, which every engine then computes alike;
- the embedding is omitted when it is the target's; `d2t` and `t2d` are omitted when the vocabulary is not pruned (vLLM refuses them);
- speculators keeps a Llama's keys in `transformer_layer_config`; where it does not state `norm_before_residual`, vLLM takes true.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.engines.engine import HeadExport, Layout
from specdistill.engines.loader import AUX_LAYERS, engine_aux_layers
from specdistill.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.eagle3.module import Eagle3Config, Eagle3Draft
from specdistill.methods.eagle3.serving import NORMS, head_config, in_eagle_config
from specdistill.targets.files import EMBEDDING, HEAD, TargetFiles, needed, stated

WHAT = "an EAGLE-3 head"
# Parts of tensors' names in files -> here.
RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# What `eagle_config` may say, above all ModelOpt's, and the value that heads have here.
FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "layer_ids": None,
}


def save_eagle3(draft: Eagle3Draft, folder: Path) -> None:
    """Write the head; `load_eagle3` reads it back bit for bit."""
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in draft.state_dict().items()
        if name not in {*draft.shared, "d2t"}
    }
    if draft.config.prunes_vocabulary:
        tensors |= checkpoint.vocabulary_maps(draft.d2t.cpu(), draft.config.vocab_size)
    checkpoint.write_draft(folder, config_to_json(draft.config, draft.fc.weight.dtype), tensors)


def check_eagle3(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: checkpoint.AnyTarget | None,
    *,
    key: str,
    name: Path | str,
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """A head's config and its tensors by the names they have here, without `t2d` (which follows from `d2t`), and without `d2t` when the
    vocabulary is whole. A file may omit what is the target's: the embedding, and the head of a whole vocabulary.

    An embedding that is a copy of the target's, perhaps in another dtype, is dropped; the config says when it is the head's own. Of
    tensors without content neither is known, nor what `d2t` says. The target is needed where the config does not say how deep it is.
    Raises UserError as `load_reading` does.
    """
    config = config_from_json(
        checkpoint.read_config(folder, key), None if target is None else target.num_layers, key
    )
    if target is not None:
        sizes = {"target_hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
        checkpoint.check_fit(
            sizes | {"num_target_layers": config.target_num_layers}, target, name, key
        )
    if not all(0 <= layer <= config.target_num_layers for layer in config.aux_layers):
        got = f"{name} with auxiliary layers {list(config.aux_layers)}"
        raise UserError(key, got=got, expected=f"0..{config.target_num_layers}")
    result: dict[str, Tensor] = {}
    for in_file, tensor in tensors.items():
        here = in_file
        for there, part in RENAMED.items():
            here = here.replace(there, part)
        if here in result:
            raise UserError(
                key, got=f"{name} with {in_file} and {here}", expected="one name for each tensor"
            )
        result[here] = tensor
    with torch.device("meta"):
        expected = Eagle3Draft(config).state_dict() | {
            "t2d": torch.empty(config.vocab_size, dtype=torch.bool)
        }
    own_width = config.hidden_size != config.target_hidden_size
    optional = {"t2d"} | (set() if own_width else {EMBEDDING})
    if not config.prunes_vocabulary:
        optional |= {"d2t"} | (set() if own_width else {HEAD})
    checkpoint.check_tensors(expected, result, name, key, what=WHAT, optional=optional)
    result.pop("t2d", None)
    if "d2t" in result and not result["d2t"].is_meta:
        checkpoint.check_offsets(result["d2t"], config.vocab_size, name, key)
    if not config.prunes_vocabulary:
        result.pop("d2t", None)
    if (
        target is not None
        and EMBEDDING in result
        and not own_width
        and not result[EMBEDDING].is_meta
    ):
        if checkpoint.is_copy(result[EMBEDDING], target.tensor(EMBEDDING)):
            del result[EMBEDDING]
        else:
            config = dataclasses.replace(config, own_embedding=True)
    return config, result


load_eagle3 = partial(
    checkpoint.load_reading, check_eagle3, Eagle3Draft
)  # from any of the layouts above


def export(
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a head for an engine. Raises UserError, before anything is written, for what the engine cannot express."""
    config, tensors = check_eagle3(
        draft, checkpoint.read_tensors(draft, "draft"), target, key="draft", name=draft
    )
    if target is None and EMBEDDING in tensors and config.hidden_size == config.target_hidden_size:
        config = dataclasses.replace(config, own_embedding=True)  # as far as is known
    layout.check(engine, config, draft)
    dtype = checkpoint.stored_dtype(tensors.values())
    if HEAD not in tensors:
        tensors[HEAD] = needed(target, f"{draft} has no {HEAD}").tensor(HEAD).to(dtype)
    if config.prunes_vocabulary:
        tensors |= checkpoint.vocabulary_maps(tensors["d2t"], config.vocab_size)
    head = HeadExport(
        checkpoint.shape_to_json(config, dtype), config, target, num_speculative_tokens
    )
    named = {
        name.replace("layers.0.", layout.first_layer): tensor for name, tensor in tensors.items()
    }
    checkpoint.write_head(output, layout, head, named)


def config_to_json(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of `LlamaForCausalLMEagle3`, and how many layers the target has."""
    head = HeadExport(
        checkpoint.shape_to_json(config, dtype), config, target=None, num_speculative_tokens=0
    )
    keys = head_config(head, *NORMS, "norm_before_residual", aux_layers=in_eagle_config)
    return {
        "eagle_config": {"use_aux_hidden_state": True},
        **keys,
        "num_target_layers": config.target_num_layers,
    }


def config_from_json(
    raw: Mapping[str, Any], target_num_layers: int | None, key: str
) -> Eagle3Config:
    """The inverse of `config_to_json` for every layout, with the defaults that engines assume for absent keys.

    target_num_layers: of the target that is at hand, for files that do not say.
    """
    if layer := checkpoint.layers_of_speculators(raw, "eagle3", key):
        raw = {"norm_before_residual": True, **layer, **raw}
    else:
        raw = raw.get("model") or raw  # where vLLM nests them
    nested = stated(raw, "eagle_config", dict[str, Any], key) or {}
    checkpoint.check_settings(nested, FIXED, key, what=WHAT)
    num_layers = raw.get("num_target_layers") or target_num_layers
    if num_layers is None:
        raise UserError(
            "target.model",
            got="nothing",
            expected="the target: the draft's config.json does not say how deep it is",
        )
    shape = checkpoint.shape_from_json(raw, key, what=WHAT)
    config = Eagle3Config(
        **shape,
        draft_vocab_size=raw.get("draft_vocab_size") or shape["vocab_size"],
        target_hidden_size=raw.get("target_hidden_size") or shape["hidden_size"],
        aux_layers=_aux_layers(raw, nested, num_layers, key),
        target_num_layers=num_layers,
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        norm_output=bool(raw.get("norm_output")),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        norm_before_fc=bool(nested.get("norm_before_fc", raw.get("norm_before_fc"))),
    )
    if config.fc_norm and config.norm_before_fc:
        raise UserError(key, got="fc_norm and norm_before_fc", expected=f"one of the two in {WHAT}")
    return config


def _aux_layers(
    raw: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int, key: str
) -> tuple[int, ...]:
    """After how many layers the head reads. Raises UserError when two places of the config do not agree."""
    own, inner = (stated(keys, AUX_LAYERS, list[int], key) or () for keys in (raw, nested))
    places = {tuple(own), tuple(layer + 1 for layer in inner)} - {()}
    if len(places) > 1:
        got = f"{AUX_LAYERS} {raw[AUX_LAYERS]}, and {nested[AUX_LAYERS]} in eagle_config"
        raise UserError(key, got=got, expected="the same layers: the nested list counts one less")
    (layers,) = places or {tuple(engine_aux_layers(num_layers))}
    count = raw.get("num_aux_hidden_states")
    if count is not None and count != len(layers):
        raise UserError(
            key,
            got=f"num_aux_hidden_states {count} and the layers {list(layers)}",
            expected=f"{len(layers)}",
        )
    return layers
