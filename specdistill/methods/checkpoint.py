"""Read and write the folder of a draft of any method: config.json and tensors.

Reading uses every tensor or names it in an error. Tensors are read bit for bit in their stored
dtype. A new module is first filled with NaN, so that a forgotten tensor shows at once.
"""

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from specdistill.common.errors import UserError, convert_errors
from specdistill.methods.layers import DraftT, HeadShape, Rotary
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import HeadExport, Layout
from specdistill.targets import files
from specdistill.targets.files import (
    EMBEDDING,
    HEAD,
    INDEX,
    SINGLE,
    Shards,
    TargetFiles,
    read_stated,
    require_target,
)
from specdistill.targets.frozen import FrozenTarget

AnyTarget = FrozenTarget | TargetFiles
ConfigT = TypeVar("ConfigT")
# Kinds of rotary embeddings whose angles do not depend on the length of the sequence. So the cached
# keys stay right as it grows.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
read_config = functools.partial(
    files.read_config, expected="the folder of a trained draft: config.json and weights"
)
PICKLE_FILE = "pytorch_model.bin"
MAPS = {"d2t", "t2d"}  # maps between the vocabularies of a head and its target
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Sizes that every config.json must state, and sizes that have a default.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
OPTIONAL_SIZES = (
    "num_key_value_heads", "head_dim", "num_hidden_layers", "max_position_embeddings",
    "draft_vocab_size", "target_hidden_size",
    "num_target_layers",
)  # fmt: skip
# Settings that change the arithmetic of a head but not the names of its tensors, each with the only
# value that is supported here.
FIXED_SETTINGS = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1,
    "logit_scale": 1,
    "quantization_config": None,
    "parallel_drafting": False,
}


def link(source: Path, link: Path) -> None:
    """Create a hard link to a file, or copy the file if the file system cannot link.

    If the source is a symbolic link, as in the Hub's cache, the file itself is linked and not the
    symbolic link.

    Args:
        source: the file.
        link: the new path.
    """
    try:
        os.link(source.resolve(), link)
    except OSError:
        shutil.copy2(source, link)


def write_draft(folder: Path, config: RawConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors of a draft into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that are not contiguous.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_head(output: Path, layout: Layout, head: HeadExport, tensors: dict[str, Tensor]) -> None:
    """Write the config.json and weights of a head in the form that an engine loads.

    Some engines expect the target's embedding among the head's weights. For them the embedding is
    added, unless the head has one of its own.

    Args:
        output: the folder to write.
        layout: the engine's layout.
        head: the data that config.json is built from.
        tensors: the tensors of the head, by their names in the layout.

    Raises:
        UserError: if the layout needs the target and it is not given (see `require_target`).
    """
    # If the layout repeats the target's embedding, `needs_target` is a text: why it needs the
    # target. The error for a missing target has this text. It is empty for other layouts.
    reason = layout.needs_target
    if reason:
        # `**tensors` comes last, so an embedding of the head itself replaces the target's.
        embedding = require_target(head.target, reason).tensor(EMBEDDING)
        tensors = {EMBEDDING: embedding.to(choose_stored_dtype(tensors.values())), **tensors}
    write_draft(output, layout.config(head), tensors)


def read_tensors(folder: Path, key: str) -> dict[str, Tensor]:
    """Load the weights of a draft's folder, from one safetensors file, its shards, or a pickle.

    A pickle may hold plain tensors only, because other objects could run code when they are loaded.

    Args:
        folder: the folder of the draft.
        key: the recipe key to name in errors.

    Returns:
        The tensors by name.

    Raises:
        UserError: if files are missing or broken, if the index names other tensors than the files
            hold, or if a weight is not finite.
    """
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        shards = Shards.open(folder, key)
        shards.check()
        tensors = shards.load(shards.file_of)
    elif (folder / PICKLE_FILE).is_file():
        tensors = load_pickle(folder / PICKLE_FILE, key)
    else:
        raise UserError(
            key,
            got=f"{folder}, which has no weights",
            expected=f"{SINGLE}, {INDEX} or {PICKLE_FILE}",
        )
    check_finite(tensors, folder, key)
    return tensors


def read_outline(folder: Path, key: str) -> dict[str, Tensor]:
    """Read names, shapes and dtypes of a folder's weights, as tensors on the meta device.

    Only `d2t` and `t2d`, the maps between the draft's and the target's vocabulary, are loaded with
    their values. A pickle that holds such maps is loaded whole.

    Args:
        folder: the folder of the draft.
        key: the recipe key to name in errors.

    Returns:
        The tensors by name. Empty if the folder has only pickles in several files.

    Raises:
        UserError: if files are missing or broken, or if the index names other tensors than the
            files hold.
    """
    # The headers of safetensors hold all that is needed except the maps.
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        shards = Shards.open(folder, key)
        shards.check()
        return {**shards.build_without_content(), **shards.load(MAPS & shards.file_of.keys())}
    # A pickle is read only if it is a single file. Its tensors cannot be loaded one by one, so a
    # pickle with maps is loaded a second time, with all values.
    if not (folder / PICKLE_FILE).is_file():
        return {}
    outline = load_pickle(folder / PICKLE_FILE, key, device="meta")
    return load_pickle(folder / PICKLE_FILE, key) if MAPS & outline.keys() else outline


def check_finite(tensors: Mapping[str, Tensor], folder: Path | str, key: str) -> None:
    """Raise UserError if a weight is NaN or infinite.

    Args:
        tensors: the weights by name.
        folder: what the error calls the draft.
        key: the recipe key to name in errors.
    """
    # Least and greatest number of a tensor are finite only if all its numbers are.
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS and not all(map(math.isfinite, find_extremes(tensor))):
            raise UserError(
                key, got=f"{folder} with NaN or infinity in {name}", expected="finite weights"
            )


def find_extremes(tensor: Tensor) -> tuple[float, float]:
    """Return the least and the greatest number of a tensor, computed in one pass.

    Both are NaN if the tensor holds a NaN, and both are 0 if the tensor is empty.
    """
    if not tensor.numel():
        return 0.0, 0.0
    least, greatest = tensor.aminmax()
    return float(least), float(greatest)


def load_pickle(path: Path, key: str, device: str = "cpu") -> dict[str, Tensor]:
    """Load a pickle that holds tensors by name and no other objects.

    Args:
        path: the file.
        key: the recipe key to name in errors.
        device: where to load the tensors; on `meta` they have no content.

    Raises:
        UserError: for a file that holds other objects or cannot be read.
    """
    with convert_errors(
        (RuntimeError, ValueError, EOFError, OSError, UnpicklingError),
        key,
        path,
        "plain tensors (weights_only)",
    ):
        tensors: object = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, Tensor) for tensor in tensors.values()
    ):
        raise UserError(
            key,
            got=f"{path}, which holds other objects than tensors",
            expected="plain tensors by name (weights_only)",
        )
    return tensors


def check_tensors(
    expected: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    folder: Path | str,
    key: str,
    *,
    what: str,
    optional: Collection[str] = (),
) -> None:
    """Check that a draft has exactly the expected tensors, with their shapes and kinds of dtypes.

    All floating-point dtypes count as the same kind, and so do int64 and int32.

    Args:
        expected: tensors by name, of which only shape and dtype are read.
        tensors: the draft's tensors by name.
        folder: what errors call the draft.
        key: the recipe key to name in errors.
        what: the kind of draft, for errors.
        optional: names of tensors that may be missing.

    Raises:
        UserError: if a tensor is missing and not optional, is unknown, or has another shape or
            kind.
    """
    # Collect all problems as two parts of an error, what was got -> what was expected: missing
    # tensors first, then unknown ones (of which nothing was expected), then wrong shapes and
    # dtypes.
    missing = expected.keys() - tensors.keys() - set(optional)
    problems = {
        f"without {name}": f"{name} of shape {tuple(expected[name].shape)}"
        for name in sorted(missing)
    }
    problems |= {f"with unknown {name}": "" for name in sorted(tensors.keys() - expected.keys())}
    for name in sorted(expected.keys() & tensors.keys()):
        shape = tuple(tensors[name].shape)
        expected_shape = tuple(expected[name].shape)
        if shape != expected_shape:
            problems[f"with {name} of shape {shape}"] = f"{name} of shape {expected_shape}"
        expected_kind = _name_dtype_kind(expected[name])
        if _name_dtype_kind(tensors[name]) != expected_kind:
            problems[f"with {name} in {tensors[name].dtype}"] = f"{name} in {expected_kind}"

    # Report the first three problems, because all of them can be hundreds of lines. If there are
    # only unknown tensors, there is no expectation to report, so the error gets a general one.
    if problems:
        expectations = [expectation for expectation in problems.values() if expectation][:3]
        expectations = expectations or [f"the tensors of {what} alone"]
        raise UserError(
            key, got=f"{folder} {', '.join(list(problems)[:3])}", expected="; ".join(expectations)
        )


def _name_dtype_kind(tensor: Tensor) -> str:
    """Return the kind of a tensor's dtype, as error messages call it."""
    if tensor.dtype in FLOATS:
        return "float32, bfloat16 or float16"
    return "integers" if tensor.dtype in (torch.int64, torch.int32) else str(tensor.dtype)


def load_feature_draft(
    check: Callable[..., tuple[ConfigT, Mapping[str, Tensor]]],
    make: Callable[[ConfigT], DraftT],
    folder: Path | str,
    target: FrozenTarget,
    *,
    key: str = "eval.draft",
) -> DraftT:
    """Load a draft that reads the target's features, after checking it.

    If the draft's files omit embedding or LM head, the target's are taken.

    Args:
        check: the check of the method: (folder, tensors, target, key=, name=) -> config and
            tensors.
        make: the class of the draft: config -> draft.
        folder: the folder of the draft.
        target: the target.
        key: the recipe key that the folder came from.

    Returns:
        The draft, in the dtype of its file.

    Raises:
        UserError: if files are missing or broken; if a tensor is missing, unknown, or of another
            shape or kind; if the config has a setting that is not supported; or if the draft is for
            another hidden size, vocabulary or depth than the target's.
    """
    config, tensors = check(
        Path(folder), read_tensors(Path(folder), key), target, key=key, name=folder
    )

    # Create the draft filled with NaN, so that a weight that is not loaded shows at once.
    draft = make(config)
    for parameter in draft.parameters():
        nn.init.constant_(parameter, torch.nan)

    # Load the weights. The draft's own tables replace the target's. `strict` is off because a draft
    # may have no use for one of the target's tables; `check` has compared the names.
    tensors_with_target = {
        EMBEDDING: target.tensor(EMBEDDING),
        HEAD: target.tensor(HEAD),
        **tensors,
    }
    draft.to(choose_stored_dtype(tensors.values())).load_state_dict(
        tensors_with_target, strict=False
    )
    return draft


def choose_stored_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the smallest dtype in which all floating-point tensors can be stored exactly.

    For tensors of one dtype it is that dtype; for bfloat16 and float16 together it is float32.
    Integer tensors such as `d2t` do not count.
    """
    return functools.reduce(
        torch.promote_types, [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    )


def is_copy(draft_tensor: Tensor, target_tensor: Tensor) -> bool:
    """Return whether a draft's tensor is a copy of a target's tensor, perhaps in another dtype.

    Args:
        draft_tensor: the tensor that may be a copy, perhaps rounded.
        target_tensor: the original.
    """
    # Round the original to the dtype of the copy, then compare both in the original's dtype.
    return draft_tensor.shape == target_tensor.shape and torch.equal(
        draft_tensor.to(target_tensor), target_tensor.to(draft_tensor.dtype).to(target_tensor)
    )


def check_fit(
    sizes: Mapping[str, int | None], target: AnyTarget, folder: Path | str, key: str
) -> None:
    """Raise UserError if one of a draft's sizes differs from the target's.

    Args:
        sizes: the draft's sizes by their names in config.json. The target has the same names
            without `target_`: `num_target_layers` is compared with its `num_layers`.
        target: the target.
        folder: what errors call the draft.
        key: the recipe key to name in errors.
    """
    for name, got in sizes.items():
        expected = getattr(target, name.replace("target_", ""))
        if got != expected:
            raise UserError(
                key, got=f"{folder} with {name} {got}", expected=f"{expected}, as {target.name} has"
            )


def build_vocabulary_maps(d2t_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return the maps between the draft's and the target's vocabulary, as checkpoints store them.

    Args:
        d2t_W: [W], offsets from draft ids to target ids.
        vocab_size: V, the size of the target's vocabulary.

    Returns:
        `d2t` [W] int64, the same offsets, and `t2d` [V] bool, the target tokens that the draft can
        propose.
    """
    # An offset is target id minus draft id.
    target_ids = torch.arange(len(d2t_W)) + d2t_W
    return {"d2t": d2t_W.long(), "t2d": torch.isin(torch.arange(vocab_size), target_ids)}


def write_shape(shape: HeadShape, dtype: torch.dtype) -> dict[str, object]:
    """Return the keys of a Llama's config.json that describe the layers of a head.

    The rotary embedding is written in the spellings of transformers 5 and of earlier versions.
    """
    # A shape with a sliding window states the kind of every layer, because vLLM applies the window
    # only to layers that `layer_types` marks.
    layer_types = (
        {}
        if shape.sliding_window is None
        else {"layer_types": ["sliding_attention"] * shape.num_layers}
    )

    # Most fields of the shape have the same name in config.json, among them `rope_theta` and
    # `rope_scaling`, the earlier spelling. The scale of embeddings is written only if it is not 1.
    same_names = [
        field.name for field in dataclasses.fields(HeadShape) if field.name != "num_layers"
    ]
    if shape.embedding_scale == 1:
        same_names.remove("embedding_scale")
    return {
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "num_hidden_layers": shape.num_layers,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            **(shape.rope_scaling or {}),
        },
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        **{name: getattr(shape, name) for name in same_names},
        **layer_types,
    }


def read_speculators_layers(raw: RawConfig, kind: str, key: str) -> RawConfig | None:
    """Return the section of a speculators config.json that describes the draft's layers.

    Args:
        raw: the content of config.json.
        kind: the `speculators_model_type` that is expected.
        key: the recipe key to name in errors.

    Returns:
        The section `transformer_layer_config`; None for a folder that is not speculators'.

    Raises:
        UserError: for a draft of another `speculators_model_type`, and for one without the section.
    """
    method_name = raw.get("speculators_model_type")
    if method_name is None:
        return None
    if method_name != kind:
        raise UserError(
            key,
            got=f"a draft whose config.json has speculators_model_type {method_name}",
            expected=f"a draft with speculators_model_type {kind}",
        )
    layer_config: RawConfig | None = raw.get("transformer_layer_config")
    if not layer_config:
        raise UserError(
            key,
            got="a draft whose config.json has no section transformer_layer_config",
            expected="a config.json with this section, which describes the draft's layers",
        )
    return layer_config


def read_shape(raw: RawConfig, key: str, *, what: str) -> HeadShape:
    """Read a draft's shape from config.json, with the defaults that engines assume.

    Args:
        raw: the content of config.json.
        key: the recipe key to name in errors.
        what: the kind of draft, for errors.

    Raises:
        UserError: for a size that is missing, and for a setting that a head cannot have.
    """
    # A null means the same as an absent key.
    raw = {name: value for name, value in raw.items() if value is not None}
    check_settings(raw, FIXED_SETTINGS, key, what=what)
    rope, theta = _read_rope(raw, key, what=what)

    # All layers must have full attention, or all must have a sliding window.
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if len(kinds) > 1 or not kinds <= {"full_attention", "sliding_attention"}:
        raise UserError(
            key,
            got=f"layer_types {raw['layer_types']}",
            expected=f"only full_attention, or only sliding_attention, in {what}",
        )

    # Check that each size is a valid number, then collect the fields. Absent sizes have the
    # defaults of engines.
    read_stated(raw, "embedding_scale", float, key)
    read_sizes(raw, SIZES, key, what=what)
    read_sizes(raw, [name for name in OPTIONAL_SIZES if name in raw], key, what=what)
    fields = {
        field.name: raw[field.name] for field in dataclasses.fields(HeadShape) if field.name in raw
    } | {
        "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "num_layers": raw.get("num_hidden_layers", 1),
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        # A config may state a window although none of its layers has one.
        "sliding_window": raw.get("sliding_window") if kinds == {"sliding_attention"} else None,
    }

    # Compute the rotary frequencies once, because only that shows whether the settings are valid.
    with convert_errors(
        (KeyError, ValueError, TypeError),
        key,
        f"rotary frequencies {rope}",
        "those of a Llama in transformers",
    ):
        shape = HeadShape(**fields)
        Rotary(shape)
    return shape


def _read_rope(raw: RawConfig, key: str, *, what: str) -> tuple[dict[str, Any], float]:
    """Read the rotary embedding from config.json.

    transformers 5 writes `rope_parameters`, earlier versions write `rope_scaling` and `rope_theta`.
    If both are present, transformers takes `rope_scaling`, so here its values replace those of
    `rope_parameters`.

    Args:
        raw: the content of config.json.
        key: the recipe key to name in errors.
        what: the kind of draft, for errors.

    Returns:
        The settings with their `rope_type`, and the base (theta).

    Raises:
        UserError: for a kind of rotary embedding that is not supported.
    """
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    older_name = rope.pop("type", None)  # the name of `rope_type` in old versions
    rope["rope_type"] = rope.get("rope_type") or older_name or "default"
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    check_settings(rope, FIXED_SETTINGS, key, what=what)
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(
            key,
            got=f"a config.json with rope_type {rope['rope_type']}",
            expected=f"one of {', '.join(ROPE_TYPES)}",
        )
    return rope, theta


def read_sizes(raw: RawConfig, names: Iterable[str], key: str, *, what: str) -> dict[str, int]:
    """Return the sizes of these names in a config.json.

    Args:
        raw: the content of config.json.
        names: keys of config.json.
        key: the recipe key to name in errors.
        what: the kind of draft, for errors.

    Raises:
        UserError: for a size that is missing, and for a value that is not a size.
    """
    sizes = {name: read_stated(raw, name, define_size_type(1), key) for name in names}
    for name, size in sizes.items():
        if size is None:
            raise UserError(
                key, got=f"a config.json without {name}", expected=f"the keys of {what}"
            )
    return sizes


@functools.cache
def define_size_type(least: int) -> Any:
    """Return the pydantic type of an integer that is at least `least` and below 2 ** 31.

    The upper bound keeps the product of two sizes within the 64 bits in which torch counts
    elements.
    """
    return Annotated[int, Field(ge=least, lt=2**31)]


def check_settings(raw: RawConfig, fixed: Mapping[str, object], key: str, *, what: str) -> None:
    """Raise UserError if a setting differs from its fixed value.

    An absent or null setting counts as the fixed value.

    Args:
        raw: the content of config.json, or a part of it.
        fixed: the settings by name, with the values that they must have.
        key: the recipe key to name in errors.
        what: the kind of draft, for errors.
    """
    for name, value in fixed.items():
        got = raw.get(name)
        if got is not None and got != value:
            raise UserError(key, got=f"{name} {got}", expected=f"{json.dumps(value)} in {what}")
