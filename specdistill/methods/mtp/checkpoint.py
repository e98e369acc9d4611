"""Multi-token-prediction drafts: a target's own, a fresh one, and one in a folder of its own.

Engines load such a layer from the target's checkpoint alone, so a draft's folder (config.json, model.safetensors) is specdistill's; its
tensors bear the names that engines know, and `specdistill.methods.mtp.export` puts them where engines look.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.hub import cached_file

from specdistill.errors import UserError
from specdistill.methods.checkpoint import read_config, read_tensors, write_draft
from specdistill.methods.mtp.module import MtpDraft
from specdistill.methods.mtp.tensor_names import Naming, depth_key, has_fused_experts, naming_of
from specdistill.targets.files import Shards
from specdistill.targets.frozen import FrozenTarget

ARCHITECTURE = "SpecdistillMtp"
# Of the target's text config, what must be the same where a draft is used.
IDENTITY = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


def build_mtp(target: FrozenTarget, *, init: str | None = None, seed: int = 0) -> MtpDraft:
    """A draft in float32 on the target's device: one layer, called again for each further token.

    Args:
        init: None for the weights that the target's checkpoint has, `scratch` for a fresh layer, or a draft's folder.

    Raises UserError when the target has no such weights and `init` is None, when they are not those of one layer, or when the target's
    architecture does not fit (see `MtpDraft`).
    """
    if init is not None and init != "scratch":
        return load_mtp(init, target, key="draft.init")
    draft = MtpDraft(target)
    if init == "scratch":
        _initialize(draft, target, seed)
        return draft
    native = _native(target)
    if native is None:
        got = f"null, and {target.name} has no multi-token-prediction weights"
        raise UserError("draft.init", got=got, expected="scratch, or the folder of a trained draft")
    naming, prefix, tensors = native
    _check_copies(target, {name: tensors.pop(prefix + name) for name in naming.copies if prefix + name in tensors})
    fill(draft, tensors, naming, prefix, source=target.name, key="target.model")
    return draft


@torch.no_grad()
def _initialize(draft: MtpDraft, target: FrozenTarget, seed: int) -> None:
    """The target's last hidden state, through a layer as its architecture initializes them, into the target's own final norm.

    A copy of the target's layer starts lower but learns slower: it was made for a residual stream that all layers before it add to.
    """
    size = draft.fc.out_features
    draft.fc.weight.copy_(torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1))
    draft.norm.load_state_dict(target.backbone.norm.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft.layers.apply(target.model._init_weights)


def _native(target: FrozenTarget) -> tuple[Naming, str, dict[str, Tensor]] | None:
    """Naming, prefix and tensors of the layers that transformers leaves out at load; None when the checkpoint has none."""
    where = target.model.config.name_or_path
    if not where:  # a model that came from no checkpoint
        return None
    if not Path(where).is_dir():  # it came from the Hub, whose files are in the cache by now
        where = str(Path(cached_file(where, "config.json", revision=target.revision) or where).parent)
    shards = Shards.open(Path(where), "target.model")
    naming = naming_of(target.config.model_type)
    prefix = naming.find_prefix(shards.file_of, target.num_layers)
    if prefix is None:
        strange = next((name for name in shards.file_of if "mtp" in name), None)
        if strange:
            raise UserError("target.model", got=f"{where} with {strange}", expected=f"the names of {naming.name}")
        return None
    return naming, prefix, shards.load(name for name in shards.file_of if naming.owns(name, prefix))


def _check_copies(target: FrozenTarget, copies: Mapping[str, Tensor]) -> None:
    """What a checkpoint repeats must be the target's own: engines share that, and so does the draft."""
    for name, tensor in copies.items():
        own = (target.model.get_input_embeddings() if name == "embed_tokens.weight" else target.lm_head).weight
        if not torch.equal(tensor.to(own), own):
            got = f"{target.name}, whose multi-token-prediction layer has its own {name}"
            raise UserError("target.model", got=got, expected="a layer that shares embedding and head with the target")


def fill(
    draft: MtpDraft, tensors: Mapping[str, Tensor], naming: Naming, prefix: str, *, source: str, key: str, assign: bool = False
) -> None:
    """Load tensors named as in files; with `assign` in the dtype they come in.

    Raises UserError, which names them, when some are missing, unknown or of another shape.
    """
    expected = naming.to_file(draft.state_dict(), prefix, fused=has_fused_experts(tensors))
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    misshapen = [name for name in sorted(expected.keys() & tensors.keys()) if expected[name].shape != tensors[name].shape]
    if missing or unknown or misshapen:
        problems = [f"without {name}" for name in missing] + [f"with unknown {name}" for name in unknown]
        problems += [f"with {name} of shape {tuple(tensors[name].shape)}" for name in misshapen]
        wanted = "; ".join(f"{name} of shape {tuple(expected[name].shape)}" for name in (missing + misshapen)[:3])
        expectation = wanted or "the tensors of one multi-token-prediction layer alone"
        raise UserError(key, got=f"{source} {', '.join(problems[:3])}", expected=expectation)
    draft.load_state_dict(naming.from_file(tensors, prefix), assign=assign)


def save_mtp(draft: MtpDraft, folder: Path) -> None:
    """Write a draft; `load_mtp` reads it back bit for bit."""
    text = draft.config.text_config
    naming = naming_of(text["model_type"])
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "specdistill_mtp",
        "naming": naming.name,
        depth_key(text["model_type"]): 1,
        "dtype": str(draft.fc.weight.dtype).removeprefix("torch."),
        "text_config": text,
    }
    write_draft(folder, config, naming.to_file(draft.state_dict(), naming.prefix(text["num_hidden_layers"])))


def load_mtp(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> MtpDraft:
    """Read a draft for a target, in the dtype of the file. `key` is the recipe key the folder came from, which errors name.

    Raises UserError when files are missing or broken, when a tensor is missing, unknown or of another shape, or when the draft is for
    another target.
    """
    folder = Path(folder)
    check_fit(read_config(folder, key), target.config.to_dict(), folder, key, target.name)
    tensors = read_tensors(folder, key)
    draft, naming = MtpDraft(target), naming_of(target.config.model_type)
    fill(draft, tensors, naming, naming.prefix(target.num_layers), source=str(folder), key=key, assign=True)
    return draft.to(target.device)


def check_fit(config: Mapping[str, Any], text_config: Mapping[str, Any], folder: Path, key: str, target: str) -> None:
    """Raises UserError unless a folder's config.json is that of a draft for a target with this text config."""
    if config.get("architectures") != [ARCHITECTURE]:
        got = f"{folder} with architectures {config.get('architectures')}"
        raise UserError(key, got=got, expected=f"a multi-token-prediction draft ({ARCHITECTURE})")
    own = config.get("text_config") or {}
    for name in IDENTITY:
        if own.get(name) != text_config.get(name):
            got = f"{folder}, a draft for a target with {name} {own.get(name)}"
            raise UserError(key, got=got, expected=f"{text_config.get(name)}, as {target} has")
