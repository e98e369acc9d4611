"""Multi-token-prediction drafts: a target's own, a fresh one, and one in a folder of its own.

Engines load such a layer only from the target's checkpoint. The layout of a draft's own folder
(config.json, model.safetensors) is therefore specdistill's, but its tensors have the names that
engines know. The export merges them into a full copy of the target's checkpoint, where engines
look.

Only the files that must differ are written anew there: the shards that hold the target's own layer
of this kind (or one new shard, `model-mtp.safetensors`), the index and config.json. Other weights
are hard links where the file system allows it. All other files are copied. Tensors keep the dtype
that they have in the checkpoint, so a layer that was not trained comes out bit for bit.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdistill.common.documents import read_json
from specdistill.common.errors import UserError
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
    find_depth_key,
    find_naming,
    has_fused_experts,
)
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles, require_target
from specdistill.targets.frozen import FrozenTarget

# No class of transformers or of an engine has this name, so nothing else loads the folder by
# mistake.
ARCHITECTURE = "SpecdistillMtp"
# Keys of the text config that must be the same for a draft's target and the target it is used with.
IDENTITY = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
# The file for the layer in a checkpoint of several files; vLLM and SGLang find it through the
# index.
NEW_SHARD = "model-mtp.safetensors"
# How errors call the tensors that a file should hold.
DESCRIPTION = "one multi-token-prediction layer"


def build_mtp(target: FrozenTarget, *, init: str | None = None, seed: int = 0) -> MtpDraft:
    """Build a draft on the target's device: one layer, which is run once for each draft token.

    The draft is in float32, or in the dtype of its file if `init` is a folder or a Hub id.

    Args:
        target: the target.
        init: where the weights come from: None for the layer in the target's own checkpoint,
            `scratch` for a fresh layer, or the folder or Hub id of a trained draft.
        seed: the seed of a fresh layer's weights.

    Raises:
        UserError: if `init` is None and the target's checkpoint has no such layer, if the tensors
            are not those of one layer, or if the target's architecture does not fit (see
            `MtpDraft`).
    """
    if init is None:
        return _load_from_target(target)
    if init == "scratch":
        return _build_fresh(target, seed)
    return load_mtp(locate(init, key="draft.init"), target, key="draft.init")


@torch.no_grad()
def _build_fresh(target: FrozenTarget, seed: int) -> MtpDraft:
    """Build a draft with fresh weights, which reads the target's last hidden state.

    The projection fc passes on only the normed hidden state at first. After it come a decoder
    layer with random weights, and a copy of the target's final norm.

    A copy of one of the target's layers would start at a lower loss, but it learns more slowly: it
    was made for a residual stream that all layers before it add to.
    """
    # The input of fc is the embedding of the next token and then the hidden state. With fc = [0 I]
    # it ignores the embedding, and passes the hidden state on as it is.
    draft = MtpDraft(target)
    size = target.hidden_size
    draft.fc.weight.copy_(torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1))
    draft.norm.load_state_dict(target.norm.state_dict())

    # Draw the decoder layer's weights as the target's class does. `fork_rng` restores the caller's
    # random state afterwards.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft.layers.apply(target.model._init_weights)
    return draft


def _load_from_target(target: FrozenTarget) -> MtpDraft:
    """Build a draft from the multi-token-prediction layer in the target's own checkpoint.

    transformers ignores the tensors of this layer, so they are read from the files here.

    Raises:
        UserError: if the checkpoint has no such layer, or if the layer's embedding and LM head are
            not the target's.
    """
    # The next two checks raise this error.
    no_layer_error = UserError(
        "draft.init",
        got=f"null, and {target.name} has no multi-token-prediction weights",
        expected="scratch, or the folder or Hub id of a trained draft",
    )
    if target.files is None:  # a model made in memory
        raise no_layer_error

    # Find the layer in the checkpoint's files.
    shards = Shards.open(
        target.files.fetch("config.json", INDEX, SINGLE), "target.model", complete=False
    )
    naming, prefix = find_native_layer(
        shards.file_of, target.config.model_type, target.num_layers, target.name
    )
    if prefix is None:
        raise no_layer_error

    # Load the layer's tensors. DeepSeek-V3's format repeats the target's embedding and LM head in
    # the layer. The draft uses the target's, so the repeated tensors must be equal to them. If the
    # layer does not repeat a tensor, the target's is compared with itself, which is no error.
    tensors = shards.load(name for name in shards.file_of if naming.has_tensor(name, prefix))
    for name in naming.copies:
        target_tensor = target.tensor(name)
        copied_tensor = tensors.pop(prefix + name, target_tensor).to(target_tensor)
        if not torch.equal(copied_tensor, target_tensor):
            raise UserError(
                "target.model",
                got=f"{target.name}, whose multi-token-prediction layer has its own {name}",
                expected="a layer whose embedding and LM head are equal to the target's",
            )

    # Compute in float32. Which dtype the checkpoint had is looked up again when the draft is
    # exported.
    float32_tensors = {name: tensor.float() for name, tensor in tensors.items()}
    return _fill_draft(target, float32_tensors, naming, prefix, target.name, "target.model")


def find_native_layer(
    names: Collection[str], model_type: str, num_layers: int, target: str
) -> tuple[Naming, str | None]:
    """Find out under which names a checkpoint holds its own multi-token-prediction layer.

    Args:
        names: the names of the checkpoint's tensors.
        model_type: the type of the target's text model.
        num_layers: how many layers the target has.
        target: what errors call the target.

    Returns:
        The naming, which is a table of names, and the prefix that all names of the layer begin
        with. The prefix is None if the checkpoint has no such layer.

    Raises:
        UserError: if the checkpoint has such a layer under names that engines do not know.
    """
    # If no tensor has a known name, but one has `mtp` in its name, the checkpoint has a layer under
    # names that engines do not know.
    naming = find_naming(model_type)
    prefix = naming.find_prefix(names, num_layers)
    mtp_names = [name for name in names if "mtp" in name]
    if prefix is None and mtp_names:
        raise UserError(
            "target.model",
            got=f"{target}, whose files hold the tensor {mtp_names[0]}",
            expected=f"multi-token-prediction tensors named as in {naming.name}",
        )
    return naming, prefix


def check_native(shapes: Mapping[str, torch.Size], target: TargetFiles) -> int:
    """Check the multi-token-prediction layer in a target's own checkpoint; count its tensors.

    Engines load three norms, a projection, and a decoder layer whose tensors have the names and
    shapes of the target's own last layer.

    Args:
        shapes: the shapes of all tensors of the checkpoint, by name.
        target: the target's files.

    Returns:
        How many tensors the layer has.

    Raises:
        UserError: if there is no such layer, or if engines cannot load it because tensors are
            missing or of another shape.
    """
    # Find the layer by the names of the tensors.
    text = target.text_config
    last_layer = f".layers.{target.num_layers - 1}."
    naming, prefix = find_native_layer(
        shapes.keys(), str(text.get("model_type")), target.num_layers, target.name
    )
    if prefix is None:
        # config.json may promise layers that its maker did not upload. The error then says so.
        promises = [f"{key} {text[key]}" for key in NATIVE_KEYS if text.get(key)]
        promise = f", though its config.json says {promises[0]}" if promises else ""
        raise UserError(
            "target.model",
            got=f"{target.name}, whose files have no layer that predicts further tokens{promise}",
            expected="a target that comes with such a layer, or draft=PATH for a trained layer",
        )

    # List the tensors that such a layer needs: those of a decoder layer (see the target's last
    # layer), and the projection and norms around it. The dot in front of a name makes `.layers.`
    # match at its beginning, too.
    decoder_shapes = {
        f".{name}".partition(last_layer)[2]: shape
        for name, shape in shapes.items()
        if last_layer in f".{name}"
    }
    expected = _build_surroundings(naming, prefix, target.hidden_size)

    # Engines build the decoder layer from the class of the target's last layer, so its shapes
    # count.
    expected |= {
        prefix + naming.layer + name_in_layer: torch.empty(shape, device="meta")
        for name_in_layer, shape in decoder_shapes.items()
    }

    # Compare the names and the shapes. Tensors on the meta device have both, and no content.
    native_tensors = {
        name: torch.empty(shapes[name], device="meta") for name in expected if name in shapes
    }
    check_tensors(expected, native_tensors, target.name, "target.model", what=DESCRIPTION)
    return sum(naming.has_tensor(name, prefix) for name in shapes)


def check_mtp(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: TargetFiles | None,
    *,
    key: str,
    name: Path | str,
) -> None:
    """Check the config.json and the tensors of a draft's folder without building the draft.

    The shapes of the decoder layer inside are not checked, because only the target's own class
    knows them.

    Only names and shapes of the tensors are read, so they may be on the meta device. `key` is the
    recipe key to name in errors, and `name` what they call the draft.

    Raises:
        UserError: if the draft is for another target, or if tensors are unknown, missing or of
            another shape.
    """
    # Names and shapes depend on the target. Without one nothing can be checked.
    if target is None:
        return

    # The draft must be made for a target with the same sizes, and hold the tensors of one layer
    # only.
    check_layer_fit(read_config(folder, key), target.text_config, name, key, target.name)
    naming = find_naming(target.text_config["model_type"])
    prefix = naming.prefix(target.num_layers)
    for tensor_name in tensors:
        if not naming.has_tensor(tensor_name, prefix):
            raise UserError(
                key,
                got=f"{name} with the tensor {tensor_name}",
                expected=f"only tensors of one layer, named {prefix}… ({naming.name})",
            )

    # Compare the shapes of the tensors around the decoder layer.
    expected = _build_surroundings(naming, prefix, target.hidden_size)
    check_tensors(
        expected,
        {name: tensors[name] for name in expected if name in tensors},
        name,
        key,
        what=DESCRIPTION,
    )


def _build_surroundings(naming: Naming, prefix: str, size: int) -> dict[str, Tensor]:
    """Return the tensors around the decoder layer on the meta device, by their names in files.

    They are the projection fc [H, 2H] and norms [H], where H is the hidden size.

    Args:
        naming: how files name the tensors.
        prefix: how the names in the file begin.
        size: H, the hidden size.
    """
    shapes = {
        file_name: (size, 2 * size) if part == "fc.weight" else (size,)
        for part, file_name in naming.names.items()
    }
    return {
        prefix + file_name: torch.empty(shape, device="meta") for file_name, shape in shapes.items()
    }


def _fill_draft(
    target: FrozenTarget,
    tensors: Mapping[str, Tensor],
    naming: Naming,
    prefix: str,
    source: Path | str,
    key: str,
) -> MtpDraft:
    """Build a draft from a file's tensors, and keep their dtypes.

    Args:
        target: the target.
        tensors: the tensors by their names in the file, which begin with `prefix`.
        naming: how the file names the tensors of the layer.
        prefix: how the names in the file begin.
        source: where the tensors come from, for errors.
        key: the recipe key to name in errors.

    Raises:
        UserError: if tensors are missing, unknown or of another shape.
    """
    # Compare the file with a fresh draft, whose tensors are renamed as in the file. Files hold the
    # experts of a mixture of experts either one by one or in one tensor.
    draft = MtpDraft(target)
    check_tensors(
        naming.to_file(draft.state_dict(), prefix, fused=has_fused_experts(tensors)),
        tensors,
        source,
        key,
        what=DESCRIPTION,
    )

    # `assign=True` takes the file's tensors themselves, so that their dtypes are kept.
    draft.load_state_dict(naming.from_file(tensors, prefix), assign=True)
    return draft.to(target.device)


def save_mtp(draft: MtpDraft, folder: Path) -> None:
    """Write a draft into a folder, from which `load_mtp` reads exactly the same weights."""
    # Put the target's text config into config.json. `load_mtp` compares it with the text config of
    # the target that the draft is loaded for. The depth key says how many layers there are: 1. The
    # tensors get the names that they would have in the target's checkpoint.
    text = draft.config.text_config
    naming = find_naming(text["model_type"])
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "specdistill_mtp",
        find_depth_key(text["model_type"]): 1,
        "dtype": str(draft.fc.weight.dtype).removeprefix("torch."),
        "text_config": text,
    }
    write_draft(
        folder, config, naming.to_file(draft.state_dict(), naming.prefix(text["num_hidden_layers"]))
    )


def load_mtp(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> MtpDraft:
    """Load a draft for a target, in the dtype of the file.

    Args:
        folder: the folder of the draft.
        target: the target.
        key: the recipe key that the folder came from, which errors name.

    Raises:
        UserError: if files are missing or broken, if a tensor is missing, unknown or of another
            shape, or if the draft is for another target.
    """
    folder = Path(folder)
    check_layer_fit(read_config(folder, key), target.config.to_dict(), folder, key, target.name)
    naming = find_naming(target.config.model_type)
    return _fill_draft(
        target, read_tensors(folder, key), naming, naming.prefix(target.num_layers), folder, key
    )


def check_layer_fit(
    config: RawConfig,
    text_config: RawConfig,
    folder: Path | str,
    key: str,
    target: str,
) -> None:
    """Check that a folder's config.json describes a multi-token-prediction draft for this target.

    Args:
        config: the content of config.json.
        text_config: the text config of the target.
        folder: what errors call the draft.
        key: the recipe key to name in errors.
        target: what errors call the target.

    Raises:
        UserError: if config.json describes something else, or a draft for another target.
    """
    # The file must be of this format.
    if config.get("architectures") != [ARCHITECTURE]:
        raise UserError(
            key,
            got=f"{folder} with architectures {config.get('architectures')}",
            expected=f"a multi-token-prediction draft ({ARCHITECTURE})",
        )

    # The target that the draft was made for must agree with this one in the keys that determine
    # the shapes of the layer.
    text_keys = config.get("text_config") or {}
    for name in IDENTITY:
        if text_keys.get(name) != text_config.get(name):
            raise UserError(
                key,
                got=f"{folder}, a draft for a target with {name} {text_keys.get(name)}",
                expected=f"{text_config.get(name)}, as {target} has",
            )


def export_mtp(
    draft: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a copy of the target's checkpoint with the draft's layer in it, for an engine.

    See `Method.export` for the arguments.

    Raises:
        UserError: if engines do not load such a layer for this target (see `check_mtp_target`), or
            if the layer does not fit into the checkpoint (see `merge_mtp_weights`).
    """
    target = require_target(target, "the layer goes into its checkpoint")
    check_mtp_target(engine, target)
    merge_mtp_weights(draft, target.fetch("*"), output)


def check_mtp_target(engine: str, target: TargetFiles) -> None:
    """Check that engines load a multi-token-prediction layer from this target's checkpoint.

    Raises:
        UserError: if engines do not look for such a layer in targets of this type, or if the
            checkpoint is quantized, so that an unquantized layer cannot be added.
    """
    # Engines look for the layer only in targets of some types.
    kind = target.text_config.get("model_type")
    if kind not in tensor_names.SERVED_TYPES:
        raise UserError(
            "engine",
            got=f"{engine} for a multi-token-prediction layer of {target.name}, a {kind}",
            expected=(
                "a target of a type for which engines load such layers:"
                f" {', '.join(sorted(tensor_names.SERVED_TYPES))}"
            ),
        )

    # The config of a quantized checkpoint says how its weights are packed. Engines would expect the
    # layer's weights to be packed like that, too.
    if target.config.get("quantization_config") or target.text_config.get("quantization_config"):
        raise UserError(
            "target.model",
            got=f"{target.name}, which is quantized",
            expected=(
                "a checkpoint that is not quantized, because the multi-token-prediction layer that"
                " is added to it is not quantized"
            ),
        )


def merge_mtp_weights(draft: Path, target: Path, output: Path) -> None:
    """Write the target's checkpoint with the draft's layer in it into a new folder.

    Args:
        draft: the folder of the draft (see `save_mtp`).
        target: the folder of the checkpoint.
        output: the new folder.

    Raises:
        UserError: if the draft is for another target, if its tensors are not the ones that the
            layer in the checkpoint has, or if the checkpoint disagrees with its index. Nothing has
            been written then.
    """
    # Check the checkpoint and the draft before anything is written.
    checkpoint = Shards.open(target, "target.model")
    checkpoint.check()
    config = read_config(checkpoint.folder, checkpoint.key)
    draft_config = read_config(draft, "draft")
    merged = _convert_tensors(draft, draft_config, checkpoint, config)
    text = config.get("text_config") or config
    depth = find_depth_key(draft_config["text_config"]["model_type"])

    # Write the tensors. If config.json does not say already that there is one MTP layer, write it
    # anew (`text` is a part of `config`). Only one MTP layer is trained.
    _write_checkpoint(checkpoint, merged, output)
    if text.get(depth) != 1:
        text[depth] = 1
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _convert_tensors(
    draft: Path, draft_config: RawConfig, checkpoint: Shards, config: RawConfig
) -> dict[str, Tensor]:
    """Load the draft's tensors under the names and dtypes that they get in the target's checkpoint.

    The draft is a multi-token-prediction (MTP) layer. The target's checkpoint may already have an
    MTP layer, whose names and dtypes the draft's tensors then get. Otherwise their names are the
    ones that engines expect, and each dtype is that of a similar tensor in the checkpoint.

    Args:
        draft: the folder of the draft.
        draft_config: the draft's config.json.
        checkpoint: the target's checkpoint.
        config: the target's config.json.
    """
    target = checkpoint.folder
    text = config.get("text_config") or config

    # The target's config.json may omit values that are the defaults of its class. For these the
    # draft's values are taken, so that the check compares only values that the file states.
    check_layer_fit(
        draft_config,
        {**(draft_config.get("text_config") or {}), **text},
        draft,
        "draft",
        str(target),
    )

    # Find the names that the MTP layer has in the draft's files and in the checkpoint.
    naming = find_naming(draft_config["text_config"]["model_type"])
    num_layers = draft_config["text_config"]["num_hidden_layers"]
    shards = Shards.open(draft, "draft")
    draft_prefix = naming.prefix(num_layers)
    stored_tensors = checkpoint.build_without_content()
    prefix = naming.find_prefix(checkpoint.file_of, num_layers) or draft_prefix
    layer_names = {name for name in checkpoint.file_of if naming.has_tensor(name, prefix)}

    # Load the draft's tensors under the checkpoint's names, with experts in the checkpoint's form.
    tensors = {
        prefix + name.removeprefix(draft_prefix): tensor
        for name, tensor in shards.load(shards.file_of).items()
    }
    if has_fused_experts(layer_names or checkpoint.file_of):
        tensors = tensor_names.merge_experts(tensors)

    # If the checkpoint has an MTP layer, the draft must have the same tensors, except for those
    # that repeat the target's embedding and LM head (`naming.copies`). `^` finds the names that
    # only one of the two has. If the checkpoint has no MTP layer, the draft must have the
    # projection and the norms (`naming.names`), and the repeated tensors are added.
    if layer_names:
        replaced_names = layer_names - {prefix + name for name in naming.copies}
        wrong_names = replaced_names ^ tensors.keys()
        common_names = tensors.keys() & layer_names
        wrong_names |= {
            name for name in common_names if stored_tensors[name].shape != tensors[name].shape
        }
    else:
        wrong_names = {prefix + name for name in naming.names.values()} - tensors.keys()
        tensors |= _copy_repeated_tensors(checkpoint, naming, prefix)
    if wrong_names:
        raise UserError(
            "draft",
            got=f"{draft}, whose tensors differ in {', '.join(sorted(wrong_names)[:3])}",
            expected=f"the same tensors as the layer in {target}",
        )

    # Cast each tensor to the dtype of the tensor that it replaces, else to that of the same part of
    # another layer, else to the config's.
    config_dtype = _read_stated_dtype(config, text)
    for name, tensor in tensors.items():
        end = "." + name.removeprefix(prefix + naming.layer)
        similar_names = [candidate for candidate in checkpoint.file_of if candidate.endswith(end)]
        if name in layer_names:
            dtype = stored_tensors[name].dtype
        elif similar_names:
            dtype = stored_tensors[similar_names[0]].dtype
        else:
            dtype = config_dtype or tensor.dtype
        tensors[name] = tensor.to(dtype)
    return tensors


def _read_stated_dtype(config: RawConfig, text_config: RawConfig) -> torch.dtype | None:
    """Return the dtype that config.json or its text config states; None if neither does."""
    names = [part.get("dtype") or part.get("torch_dtype") for part in (config, text_config)]
    return next((getattr(torch, name) for name in names if name), None)


def _copy_repeated_tensors(checkpoint: Shards, naming: Naming, prefix: str) -> dict[str, Tensor]:
    """Return copies of the target's tensors that the layer repeats, by their names in the layer.

    DeepSeek-V3's format, for example, repeats the target's embedding and LM head in the layer.
    """
    # Find the source of each repeated tensor in the checkpoint. It may have one of several names:
    # a tied LM head, for example, is stored as the embedding only. The first name found is used.
    # Names may have further parts before these, such as `model.`, so the ends are compared.
    sources = {}
    for copy, ends in naming.copies.items():
        matching_names: list[str] = []
        for end in ends:
            matching_names += [
                name for name in checkpoint.file_of if f".{name}".endswith(f".{end}")
            ]
        sources[prefix + copy] = matching_names[0]

    # Clone them, because safetensors refuses to save two names for the same memory.
    tensors = checkpoint.load(sources.values())
    return {copy: tensors[source].clone() for copy, source in sources.items()}


def _write_checkpoint(checkpoint: Shards, merged: dict[str, Tensor], folder: Path) -> None:
    """Write a copy of a checkpoint into another folder, with some tensors replaced or added.

    Args:
        checkpoint: the checkpoint.
        merged: new tensors by name. Each replaces the tensor of the same name, or is added.
        folder: the folder of the copy.
    """
    # Choose the file of each tensor: the file that has it now, or a new one.
    is_sharded = (checkpoint.folder / INDEX).is_file()
    file_of = checkpoint.file_of | {
        name: checkpoint.file_of.get(name, NEW_SHARD if is_sharded else SINGLE) for name in merged
    }

    # These files hold tensors that are replaced or added.
    rewritten = {file_of[name] for name in merged}

    # Hard-link the weights that do not change, and copy the small files.
    for path in sorted(checkpoint.folder.rglob("*")):
        inside = path.relative_to(checkpoint.folder)
        # Hidden folders hold what a download or git keeps about the original.
        if (
            path.is_dir()
            or any(part.startswith(".") for part in inside.parts)
            or str(inside) in rewritten
        ):
            continue
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        copy_file = link if path.suffix == ".safetensors" else shutil.copy2
        copy_file(path, folder / inside)

    # Write the files whose tensors change.
    for file in sorted(rewritten):
        # Keep the file's own tensors, except for the replaced ones.
        kept_names = [
            name
            for name, old_file in checkpoint.file_of.items()
            if old_file == file and name not in merged
        ]
        new_tensors = {
            name: tensor.contiguous() for name, tensor in merged.items() if file_of[name] == file
        }
        # transformers writes the same metadata into its own files.
        save_file(
            checkpoint.load(kept_names) | new_tensors, folder / file, metadata={"format": "pt"}
        )

    # Write a new index, which maps each tensor's name to its file and states the total size.
    if is_sharded:
        index = read_json(checkpoint.folder / INDEX)
        index["weight_map"] = file_of
        metadata = index.setdefault("metadata", {})
        metadata["total_size"] = Shards(folder, file_of, "output_dir").num_bytes
        # Some makers record the number of parameters, which has changed.
        metadata.pop("total_parameters", None)
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
