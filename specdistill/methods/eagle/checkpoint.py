"""EAGLE-1 checkpoints: a folder of config.json and weights, in the layout that SafeAILab ships and vLLM wraps.

The config is that of a one-layer Llama with `bias`, which SafeAILab takes for true when it is absent; a `fc.bias` of zeros is read as
none, whatever the config says. Embedding and head are the target's: omitted here, checked against it in files that hold them
(SafeAILab's do).
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.engines.engine import HeadExport, Layout
from specdistill.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.eagle.module import EagleConfig, EagleDraft
from specdistill.targets.files import TargetFiles, needed
from specdistill.targets.frozen import FrozenTarget

WHAT = "an EAGLE-1 head"


def save_eagle(draft: EagleDraft, folder: Path) -> None:
    """Write the head; `load_eagle` reads it back bit for bit."""
    tensors = {
        name: tensor for name, tensor in draft.state_dict().items() if name not in draft.shared
    }
    checkpoint.write_draft(folder, config_to_json(draft.config, draft.fc.weight.dtype), tensors)


def load_eagle(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> EagleDraft:
    """Read a head for a target. Raises UserError as `load_reading` does, and for a head with another scale of logits than the target's, or
    with an embedding or an output layer that is not the target's.
    """
    draft: EagleDraft = checkpoint.load_reading(check_eagle, EagleDraft, folder, target, key=key)
    if draft.config.logit_scale != 1 and not math.isclose(
        draft.config.logit_scale, target.logits.scale, rel_tol=1e-4
    ):
        got = f"{folder} with logit_scale {draft.config.logit_scale:g}"
        raise UserError(key, got=got, expected=f"{target.logits.scale:g}, as {target.name} has")
    draft.borrow(target)
    return draft


def check_eagle(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: checkpoint.AnyTarget | None,
    *,
    key: str,
    name: Path | str,
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """A head's config and tensors, checked against each other, without the copies of the target's embedding and head that it may bring.

    Tensors need have no content: an `fc.bias` is then taken for zeros where the config says that there is none. Raises UserError as
    `load_eagle` does.
    """
    config = config_from_json(checkpoint.read_config(folder, key), key)
    if target is not None:
        checkpoint.check_fit(
            {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}, target, name, key
        )
    tensors = dict(tensors)
    bias = tensors.get("fc.bias")
    if bias is not None and not (config.fc_bias if bias.is_meta else bias.any()):
        del tensors["fc.bias"]
        config = dataclasses.replace(config, fc_bias=False)
    with torch.device("meta"):
        expected = EagleDraft(config).state_dict()
    checkpoint.check_tensors(expected, tensors, name, key, what=WHAT, optional=EagleDraft.shared)
    if target is not None:
        for shared in sorted(EagleDraft.shared & tensors.keys()):
            given = tensors.pop(shared)
            if not given.is_meta and not checkpoint.is_copy(given, target.tensor(shared)):
                raise UserError(
                    key,
                    got=f"{name} with another {shared} than {target.name} has",
                    expected="a head made for it",
                )
    return config, tensors


def export(
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a head for an engine. Raises UserError, before anything is written, for what the engine cannot express, and for a head with
    an embedding or an output layer that is not the target's.
    """
    config, tensors = check_eagle(
        draft, checkpoint.read_tensors(draft, "draft"), target, key="draft", name=draft
    )
    layout.check(engine, config, draft)
    if repeated := EagleDraft.shared & tensors.keys():
        needed(target, f"{draft} repeats its {min(repeated)}")
    dtype = checkpoint.stored_dtype(tensors.values())
    if layout.fc_bias:
        tensors.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=dtype))
    head = HeadExport(_llama(config, dtype), config, target, num_speculative_tokens)
    checkpoint.write_head(output, layout, head, tensors)


def config_to_json(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a one-layer Llama with the key `bias`."""
    return {"architectures": ["LlamaForCausalLM"], **_llama(config, dtype), "bias": config.fc_bias}


def config_from_json(raw: Mapping[str, Any], key: str) -> EagleConfig:
    """The inverse of `config_to_json`, also for a config that vLLM wraps."""
    raw = raw.get("model", raw)
    return EagleConfig(
        **checkpoint.shape_from_json({**raw, "logit_scale": None}, key, what=WHAT),
        fc_bias=raw.get("bias", True),
        logit_scale=raw.get("logit_scale") or 1.0,
    )


def _llama(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    scale = {} if config.logit_scale == 1 else {"logit_scale": config.logit_scale}
    return {**checkpoint.shape_to_json(config, dtype), **scale}
