"""Multi-token-prediction drafts: a target's own, a fresh one, and one in a folder of its own.

Engines load such a layer from the target's checkpoint alone, so a draft's folder (config.json, model.safetensors) is
specdistill's; its tensors bear the names that engines know, and the export merges them into a full copy of the target's
checkpoint, where engines look.

Only files that must differ are written there: the shards that hold the target's own such layer (or one new shard,
`model-mtp.safetensors`), the index and config.json. Other weights are hard links where the file system allows it, all else is
copied. Tensors keep the dtype that the checkpoint has them in, so a layer that was not trained comes out bit for bit.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdistill.engines.engine import Layout
from specdistill.errors import UserError
from specdistill.files.documents import read_json
from specdistill.methods.checkpoint import (
    check_tensors,
    link,
    read_config,
    read_tensors,
    write_draft,
)
from specdistill.methods.load import locate
from specdistill.methods.mtp import tensor_names
from specdistill.methods.mtp.module import MtpDraft
from specdistill.methods.mtp.tensor_names import (
    NATIVE_KEYS,
    Naming,
    depth_key,
    has_fused_experts,
    naming_of,
)
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles, needed
from specdistill.targets.frozen import FrozenTarget

ARCHITECTURE = "SpecdistillMtp"
# Of the target's text config, what must be the same where a draft is used.
IDENTITY = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
NEW_SHARD = "model-mtp.safetensors"
WHAT = "one multi-token-prediction layer"


def build_mtp(target: FrozenTarget, *, init: str | None = None, seed: int = 0) -> MtpDraft:
    """A draft in float32 on the target's device: one layer, called again for each further token.

    Args:
        init: None for the weights that the target's checkpoint has, `scratch` for a fresh layer, or a draft's folder or Hub id.

    Raises UserError when the target has no such weights and `init` is None, when they are not those of one layer, or when the
    target's architecture does not fit (see `MtpDraft`).
    """
    if init is None:
        return _of_target(target)
    if init == "scratch":
        return _fresh(target, seed)
    return load_mtp(locate(init, key="draft.init"), target, key="draft.init")


@torch.no_grad()
def _fresh(target: FrozenTarget, seed: int) -> MtpDraft:
    """The target's last hidden state, through a layer as its architecture initializes them, into the target's own final norm.

    A copy of the target's layer starts lower but learns slower: it was made for a residual stream that all layers before it add
    to.
    """
    draft, size = MtpDraft(target), target.hidden_size
    draft.fc.weight.copy_(torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1))
    draft.norm.load_state_dict(target.norm.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft.layers.apply(target.model._init_weights)
    return draft


def _of_target(target: FrozenTarget) -> MtpDraft:
    """The layer of the target's checkpoint, which transformers does not load. It shares embedding and head with the target."""
    got = f"null, and {target.name} has no multi-token-prediction weights"
    nothing = UserError(
        "draft.init", got=got, expected="scratch, or the folder or Hub id of a trained draft"
    )
    if target.files is None:  # a model made in memory
        raise nothing
    shards = Shards.open(
        target.files.fetch("config.json", INDEX, SINGLE), "target.model", complete=False
    )
    naming, prefix = native_layer(
        shards.file_of, target.config.model_type, target.num_layers, target.name
    )
    if prefix is None:
        raise nothing
    tensors = shards.load(name for name in shards.file_of if naming.owns(name, prefix))
    for name in naming.copies:
        own = target.tensor(name)
        if not torch.equal(tensors.pop(prefix + name, own).to(own), own):
            got = f"{target.name}, whose multi-token-prediction layer has its own {name}"
            raise UserError(
                "target.model",
                got=got,
                expected="a layer that shares embedding and head with the target",
            )
    exact = {name: tensor.float() for name, tensor in tensors.items()}
    return _filled(target, exact, naming, prefix, target.name, "target.model")


def native_layer(
    names: Collection[str], model_type: str, num_layers: int, target: str
) -> tuple[Naming, str | None]:
    """How a checkpoint names its own layer, and the prefix of that, None where it has none. Raises UserError for names of no known kind."""
    naming = naming_of(model_type)
    prefix = naming.find_prefix(names, num_layers)
    if prefix is None and (strange := next((name for name in names if "mtp" in name), None)):
        raise UserError(
            "target.model", got=f"{target} with {strange}", expected=f"the names of {naming.name}"
        )
    return naming, prefix


def check_native(shapes: Mapping[str, torch.Size], target: TargetFiles) -> int:
    """How many tensors the layer in a target's own checkpoint has. shapes: of all tensors of the checkpoint, by name.

    Raises UserError when there is no such layer, or when it is not what engines load: the norms and the projection, and a
    decoder layer with the names and shapes of the target's own last one.
    """
    text, last = target.text_config, f".layers.{target.num_layers - 1}."
    naming, prefix = native_layer(
        shapes.keys(), str(text.get("model_type")), target.num_layers, target.name
    )
    if prefix is None:
        stated = next(
            (
                f", though its config.json says {key} {text[key]}"
                for key in NATIVE_KEYS
                if text.get(key)
            ),
            "",
        )
        got = f"{target.name}, whose files have no layer that predicts further tokens{stated}"
        raise UserError(
            "target.model",
            got=got,
            expected="a target that comes with such a layer, or draft=…, one that was trained",
        )
    decoder = {
        f".{name}".partition(last)[2]: shape for name, shape in shapes.items() if last in f".{name}"
    }
    expected = _surroundings(naming, prefix, target.hidden_size)
    expected |= {
        prefix + naming.layer + end: torch.empty(shape, device="meta")
        for end, shape in decoder.items()
    }
    found = {name: torch.empty(shapes[name], device="meta") for name in expected if name in shapes}
    check_tensors(expected, found, target.name, "target.model", what=WHAT)
    return sum(naming.owns(name, prefix) for name in shapes)


def check_mtp(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: TargetFiles | None,
    *,
    key: str,
    name: Path | str,
) -> None:
    """As `load_mtp`, but for the decoder layer inside, which only the target's own class describes. The tensors need have no content."""
    if target is None:
        return
    check_fit(read_config(folder, key), target.text_config, name, key, target.name)
    naming = naming_of(target.text_config["model_type"])
    prefix = naming.prefix(target.num_layers)
    if strange := next((each for each in tensors if not naming.owns(each, prefix)), None):
        raise UserError(
            key,
            got=f"{name} with {strange}",
            expected=f"the tensors of one layer, {prefix}… ({naming.name})",
        )
    expected = _surroundings(naming, prefix, target.hidden_size)
    check_tensors(
        expected,
        {each: tensors[each] for each in expected if each in tensors},
        name,
        key,
        what=WHAT,
    )


def _surroundings(naming: Naming, prefix: str, size: int) -> dict[str, Tensor]:
    """What surrounds the decoder layer, without content, by names in files: fc [H, 2H] and norms of H."""
    shapes = {
        there: (size, 2 * size) if part == "fc.weight" else (size,)
        for part, there in naming.names.items()
    }
    return {prefix + there: torch.empty(shape, device="meta") for there, shape in shapes.items()}


def _filled(
    target: FrozenTarget,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    prefix: str,
    source: Path | str,
    key: str,
) -> MtpDraft:
    """A draft of tensors named as in files, in the dtypes they come in. Raises UserError as `check_tensors` does."""
    draft = MtpDraft(target)
    check_tensors(
        naming.to_file(draft.state_dict(), prefix, fused=has_fused_experts(tensors)),
        tensors,
        source,
        key,
        what=WHAT,
    )
    draft.load_state_dict(naming.from_file(tensors, prefix), assign=True)
    return draft.to(target.device)


def save_mtp(draft: MtpDraft, folder: Path) -> None:
    """Write a draft; `load_mtp` reads it back bit for bit."""
    text = draft.config.text_config
    naming = naming_of(text["model_type"])
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "specdistill_mtp",
        depth_key(text["model_type"]): 1,
        "dtype": str(draft.fc.weight.dtype).removeprefix("torch."),
        "text_config": text,
    }
    write_draft(
        folder, config, naming.to_file(draft.state_dict(), naming.prefix(text["num_hidden_layers"]))
    )


def load_mtp(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> MtpDraft:
    """Read a draft for a target, in the dtype of the file. `key` is the recipe key the folder came from, which errors name.

    Raises UserError when files are missing or broken, when a tensor is missing, unknown or of another shape, or when the draft
    is for another target.
    """
    folder = Path(folder)
    check_fit(read_config(folder, key), target.config.to_dict(), folder, key, target.name)
    naming = naming_of(target.config.model_type)
    return _filled(
        target, read_tensors(folder, key), naming, naming.prefix(target.num_layers), folder, key
    )


def check_fit(
    config: Mapping[str, Any],
    text_config: Mapping[str, Any],
    folder: Path | str,
    key: str,
    target: str,
) -> None:
    """Raises UserError unless a folder's config.json is that of a draft for a target with this text config."""
    if config.get("architectures") != [ARCHITECTURE]:
        got = f"{folder} with architectures {config.get('architectures')}"
        raise UserError(key, got=got, expected=f"a multi-token-prediction draft ({ARCHITECTURE})")
    own = config.get("text_config") or {}
    for name in IDENTITY:
        if own.get(name) != text_config.get(name):
            got = f"{folder}, a draft for a target with {name} {own.get(name)}"
            raise UserError(key, got=got, expected=f"{text_config.get(name)}, as {target} has")


def export(
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write the target's checkpoint with the draft's layer. Raises UserError for a target of which no engine would look for it."""
    target = needed(target, "the layer goes into its checkpoint")
    check_target(engine, target)
    merge_mtp_weights(draft, target.fetch("*"), output)


def check_target(engine: str, target: TargetFiles) -> None:
    """Raises UserError for a target of which no engine would look for such a layer, and for one whose checkpoint takes none."""
    kind = target.text_config.get("model_type")
    if kind not in tensor_names.SERVED_TYPES:
        got = f"{engine} for a layer of {target.name}, a {kind}"
        expected = (
            f"a target that it loads such layers of: {', '.join(sorted(tensor_names.SERVED_TYPES))}"
        )
        raise UserError("engine", got=got, expected=expected)
    if target.config.get("quantization_config") or target.text_config.get("quantization_config"):
        raise UserError(
            "target.model",
            got=f"{target.name}, which is quantized",
            expected="a checkpoint in floating point",
        )


def merge_mtp_weights(draft: Path, target: Path, output: Path) -> None:
    """Write `output`: the checkpoint in the folder `target` with the layer in the folder `draft` (see `save_mtp`).

    Raises UserError, before anything is written, when the draft is for another target, its tensors are not those that the checkpoint
    already has, or the checkpoint disagrees with its index.
    """
    checkpoint = Shards.open(target, "target.model")
    checkpoint.check()
    config, draft_config = (
        read_config(checkpoint.folder, checkpoint.key),
        read_config(draft, "draft"),
    )
    merged = _tensors(draft, draft_config, checkpoint, config)
    text, depth = (
        config.get("text_config") or config,
        depth_key(draft_config["text_config"]["model_type"]),
    )
    _write(checkpoint, merged, output)
    if text.get(depth) != 1:
        text[depth] = 1
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(
    draft: Path, draft_config: dict[str, Any], checkpoint: Shards, config: dict[str, Any]
) -> dict[str, Tensor]:
    """The draft's tensors by the names, and in the dtypes, that the checkpoint has or would have them in."""
    target, text = checkpoint.folder, config.get("text_config") or config
    # A config.json may omit what is its model's default.
    check_fit(
        draft_config, (draft_config.get("text_config") or {}) | text, draft, "draft", str(target)
    )
    naming, num_layers = (
        naming_of(draft_config["text_config"]["model_type"]),
        draft_config["text_config"]["num_hidden_layers"],
    )
    shards, draft_prefix, stored = (
        Shards.open(draft, "draft"),
        naming.prefix(num_layers),
        checkpoint.without_content(),
    )
    prefix = naming.find_prefix(checkpoint.file_of, num_layers) or draft_prefix
    present = {name for name in checkpoint.file_of if naming.owns(name, prefix)}
    tensors = {
        prefix + name.removeprefix(draft_prefix): tensor
        for name, tensor in shards.load(shards.file_of).items()
    }
    if has_fused_experts(present or checkpoint.file_of):
        tensors = tensor_names.merge_experts(tensors)
    if present:
        wrong = (present - {prefix + name for name in naming.copies}) ^ tensors.keys()
        wrong |= {
            name for name in tensors.keys() & present if stored[name].shape != tensors[name].shape
        }
    else:
        wrong = {prefix + name for name in naming.names.values()} - tensors.keys()
        tensors |= _copies(checkpoint, naming, prefix)
    if wrong:
        got = f"{draft}, which differs about {', '.join(sorted(wrong)[:3])}"
        raise UserError("draft", got=got, expected=f"the tensors of the layer that {target} has")
    stated = [part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")]
    default = next((getattr(torch, name) for name in stated if name), None)
    for name, tensor in tensors.items():
        end = "." + name.removeprefix(prefix + naming.layer)
        like = (
            name
            if name in present
            else next((other for other in checkpoint.file_of if other.endswith(end)), None)
        )
        tensors[name] = tensor.to(stored[like].dtype if like else default or tensor.dtype)
    return tensors


def _copies(checkpoint: Shards, naming: Naming, prefix: str) -> dict[str, Tensor]:
    """The target's own tensors that the naming repeats."""
    sources = {
        prefix + copy: next(
            name for end in ends for name in checkpoint.file_of if f".{name}".endswith(f".{end}")
        )
        for copy, ends in naming.copies.items()
    }
    tensors = checkpoint.load(sources.values())
    return {copy: tensors[source].clone() for copy, source in sources.items()}


def _write(checkpoint: Shards, merged: dict[str, Tensor], folder: Path) -> None:
    """The checkpoint's files in another folder, with some tensors replaced or added."""
    sharded = (checkpoint.folder / INDEX).is_file()
    file_of = checkpoint.file_of | {
        name: checkpoint.file_of.get(name, NEW_SHARD if sharded else SINGLE) for name in merged
    }
    rewritten = {file_of[name] for name in merged}
    for path in sorted(checkpoint.folder.rglob("*")):
        inside = path.relative_to(checkpoint.folder)
        # Hidden folders hold what a download or git remembers of the original.
        if (
            path.is_dir()
            or any(part.startswith(".") for part in inside.parts)
            or str(inside) in rewritten
        ):
            continue
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        link(path, folder / inside) if path.suffix == ".safetensors" else shutil.copy2(
            path, folder / inside
        )
    for file in sorted(rewritten):
        kept = [
            name
            for name, place in checkpoint.file_of.items()
            if place == file and name not in merged
        ]
        added = {
            name: tensor.contiguous() for name, tensor in merged.items() if file_of[name] == file
        }
        save_file(checkpoint.load(kept) | added, folder / file, metadata={"format": "pt"})
    if sharded:
        index = read_json(checkpoint.folder / INDEX)
        index["weight_map"] = file_of
        index.setdefault("metadata", {})["total_size"] = Shards(
            folder, file_of, "output_dir"
        ).num_bytes
        index["metadata"].pop("total_parameters", None)
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
