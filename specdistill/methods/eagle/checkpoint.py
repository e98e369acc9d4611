"""EAGLE-1 checkpoints: config.json and weights, in the layout that SafeAILab ships and vLLM wraps.

The config is that of a one-layer Llama with the key `bias`. SafeAILab takes an absent `bias` for
true. An `fc.bias` of zeros is read as no bias, whatever the config says.

Embedding and head are the target's. The files written here omit them. Files that hold them, as
SafeAILab's do, are checked against the target.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.eagle.module import EagleConfig, EagleDraft
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import HeadExport, Layout
from specdistill.targets.files import TargetFiles, require_target
from specdistill.targets.frozen import FrozenTarget

DESCRIPTION = "an EAGLE-1 head"


def save_eagle(draft: EagleDraft, folder: Path) -> None:
    """Write config.json and weights of a head into a folder.

    `load_eagle` reads the head back bit for bit.
    """
    # Embedding and LM head are the target's, so they are left out.
    tensors = {
        name: tensor for name, tensor in draft.state_dict().items() if name not in draft.shared
    }
    checkpoint.write_draft(folder, write_eagle_config(draft.config, draft.fc.weight.dtype), tensors)


def load_eagle(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> EagleDraft:
    """Load an EAGLE-1 head, and check that it fits the target.

    Args:
        folder: the folder of the head.
        target: the target.
        key: the recipe key to name in errors.

    Raises:
        UserError: for files that are missing or broken, for tensors or sizes that do not fit, for
            another scale of logits than the target's, and for an embedding or LM head that is not
            the target's.
    """
    draft = checkpoint.load_feature_draft(check_eagle, EagleDraft, folder, target, key=key)

    # The scale of logits must be the target's, up to the rounding of a number in config.json. 1 may
    # mean that config.json states no scale; the target's is used then.
    if draft.config.logit_scale != 1 and not math.isclose(
        draft.config.logit_scale, target.logits.scale, rel_tol=1e-4
    ):
        raise UserError(
            key,
            got=f"{folder} with logit_scale {draft.config.logit_scale:g}",
            expected=f"{target.logits.scale:g}, as {target.name} has",
        )
    draft.copy_from_target(target)
    return draft


def check_eagle(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: checkpoint.AnyTarget | None,
    *,
    key: str,
    name: Path | str,
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Check a head's config and tensors against each other and against its target.

    Args:
        folder: the folder that holds config.json.
        tensors: the tensors by name; they may be on the meta device, without values. A bias of
            zeros counts as no bias; without values, the config says whether there is a bias.
        target: the target. None: only compare the head's files with each other.
        key: the recipe key to name in errors.
        name: what errors call the head.

    Returns:
        The config, and the tensors. If the target is given, copies of its embedding and LM head
        are left out.

    Raises:
        UserError: for tensors or sizes that do not fit, and for an embedding or LM head that is not
            the target's.
    """
    # Compare the sizes of head and target.
    config = read_eagle_config(checkpoint.read_config(folder, key), key)
    if target is not None:
        checkpoint.check_fit(
            {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}, target, name, key
        )

    # Treat a bias of zeros as no bias. SafeAILab's files have a bias, vLLM loads none.
    tensors = dict(tensors)
    bias = tensors.get("fc.bias")
    if bias is not None and not (config.fc_bias if bias.is_meta else bias.any()):
        del tensors["fc.bias"]
        config = dataclasses.replace(config, fc_bias=False)

    # Compare the tensors with those of a head of this config.
    with torch.device("meta"):
        expected = EagleDraft(config).state_dict()
    checkpoint.check_tensors(
        expected, tensors, name, key, what=DESCRIPTION, optional=EagleDraft.shared
    )

    # Embedding and LM head, if the file has them, must be copies of the target's.
    if target is not None:
        for table_name in sorted(EagleDraft.shared & tensors.keys()):
            table = tensors.pop(table_name)
            if not table.is_meta and not checkpoint.is_copy(table, target.tensor(table_name)):
                raise UserError(
                    key,
                    got=f"{name}, whose {table_name} differs from that of {target.name}",
                    expected="a head that was trained for this target",
                )
    return config, tensors


def export_eagle(
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a head in the layout of an engine; see `Method.export` for the arguments.

    If the head's files contain the target's embedding or LM head, the target must be given, so that
    they can be compared.

    Raises:
        UserError: before anything is written: for features that the engine does not support, and
            for an embedding or LM head that is not the target's.
    """
    # Check the head, and that the engine can express it.
    config, tensors = check_eagle(
        draft, checkpoint.read_tensors(draft, "draft"), target, key="draft", name=draft
    )
    layout.check(engine, config, draft)

    # `check_eagle` removes an embedding or LM head that it has compared with the target's. One that
    # is left was not compared, because the target was not given.
    repeated = EagleDraft.shared & tensors.keys()
    if repeated:
        require_target(target, f"{draft} repeats its {min(repeated)}")

    # Engines look embeddings up without the scale. Only fc reads embeddings, so the scale can go
    # into the half of fc's weight that is multiplied with them.
    if config.embedding_scale != 1:
        tensors["fc.weight"][:, : config.hidden_size] *= config.embedding_scale
        config = dataclasses.replace(config, embedding_scale=1.0)

    # SGLang's model always has a bias in fc, so a head without one gets zeros.
    dtype = checkpoint.choose_stored_dtype(tensors.values())
    if layout.fc_bias:
        tensors.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=dtype))
    head = HeadExport(_build_llama_config(config, dtype), config, target, num_speculative_tokens)
    checkpoint.write_head(output, layout, head, tensors)


def write_eagle_config(config: EagleConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return the config.json of a head: the keys of a small Llama model, and `bias` for fc."""
    return {
        "architectures": ["LlamaForCausalLM"],
        **_build_llama_config(config, dtype),
        "bias": config.fc_bias,
    }


def read_eagle_config(raw: RawConfig, key: str) -> EagleConfig:
    """Read a head's config from the content of its config.json.

    This is the inverse of `write_eagle_config`, and also reads vLLM's form of config.json.

    Args:
        raw: the content of config.json.
        key: the recipe key to name in errors.

    Raises:
        UserError: for a size that is missing, and for a setting that a head cannot have.
    """
    # vLLM nests the keys of the head in `model`. `read_shape` refuses a `logit_scale` other than 1,
    # so it gets None in place of the value. SafeAILab's heads have a bias unless they say
    # otherwise.
    raw = raw.get("model", raw)
    return EagleConfig(
        **vars(checkpoint.read_shape({**raw, "logit_scale": None}, key, what=DESCRIPTION)),
        fc_bias=raw.get("bias", True),
        logit_scale=raw.get("logit_scale") or 1.0,
    )


def _build_llama_config(config: EagleConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return the keys of config.json that describe the head's layers and its scale of logits."""
    scale = {} if config.logit_scale == 1 else {"logit_scale": config.logit_scale}
    return {**checkpoint.write_shape(config, dtype), **scale}
