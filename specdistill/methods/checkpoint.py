"""Reading and writing a draft's folder, whatever its method: config.json and tensors, each of them consumed or named.

Tensors are read bit for bit in their stored dtype. A module is filled with NaN first, so that what is forgotten shows at once.
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
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from specdistill.engines.engine import HeadExport, Layout
from specdistill.errors import UserError, refusing
from specdistill.methods.layers import HeadShape, Rotary
from specdistill.targets import files
from specdistill.targets.files import (
    EMBEDDING,
    HEAD,
    INDEX,
    SINGLE,
    Shards,
    TargetFiles,
    needed,
    stated,
)
from specdistill.targets.frozen import FrozenTarget

AnyTarget = FrozenTarget | TargetFiles
# Whose angles do not depend on the sequence's length, so that cached keys stay right as it grows.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
read_config = functools.partial(
    files.read_config, expected="the folder of a trained draft: config.json and weights"
)
PICKLED = "pytorch_model.bin"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
OPTIONAL_SIZES = (
    "num_key_value_heads", "head_dim", "num_hidden_layers", "max_position_embeddings", "draft_vocab_size", "target_hidden_size",
    "num_target_layers",
)  # fmt: skip
# What would change a head's arithmetic without a trace in its tensors' names, and the value that heads have here.
FIXED = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1,
    "logit_scale": 1,
    "quantization_config": None,
    "parallel_drafting": False,
}


def link(source: Path, link: Path) -> None:
    """A hard link to the file itself (the Hub's cache holds symbolic links), or a copy where there can be none."""
    try:
        os.link(source.resolve(), link)
    except OSError:
        shutil.copy2(source, link)


def write_draft(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_head(output: Path, layout: Layout, head: HeadExport, tensors: dict[str, Tensor]) -> None:
    """Write a head in an engine's layout, with the target's embedding where that repeats it. Raises as `needed`."""
    if layout.needs_target:
        embedding = needed(head.target, layout.needs_target).tensor(EMBEDDING)
        tensors = {EMBEDDING: embedding.to(stored_dtype(tensors.values())), **tensors}
    write_draft(output, layout.config(head), tensors)


def read_tensors(folder: Path, key: str) -> dict[str, Tensor]:
    """The weights of a folder, in one file or in shards; pickles only as plain tensors (`weights_only`).

    Raises UserError when files are missing or broken, when the index names others than are there, or when a weight is not finite.
    """
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        shards = Shards.open(folder, key)
        shards.check()
        tensors = shards.load(shards.file_of)
    elif (folder / PICKLED).is_file():
        tensors = unpickled(folder / PICKLED, key)
    else:
        raise UserError(
            key, got=f"{folder}, which has no weights", expected=f"{SINGLE}, {INDEX} or {PICKLED}"
        )
    check_finite(tensors, folder, key)
    return tensors


def check_finite(tensors: Mapping[str, Tensor], folder: Path | str, key: str) -> None:
    """Raises UserError for weights that are NaN or infinite."""
    floats = ((name, tensor) for name, tensor in tensors.items() if tensor.dtype in FLOATS)
    broken = next(
        (name for name, tensor in floats if not all(map(math.isfinite, extremes(tensor)))), None
    )
    if broken:
        raise UserError(
            key, got=f"{folder} with NaN or infinity in {broken}", expected="finite weights"
        )


def extremes(tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest of the numbers, in one pass; both NaN where one of them is."""
    if not tensor.numel():
        return 0.0, 0.0
    least, greatest = tensor.aminmax()
    return float(least), float(greatest)


def unpickled(path: Path, key: str, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a pickle that holds no other objects; on the meta device without content. Raises UserError for any other."""
    with refusing(
        (RuntimeError, ValueError, EOFError, OSError, UnpicklingError),
        key,
        path,
        "plain tensors (weights_only)",
    ):
        tensors: Any = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, Tensor) for tensor in tensors.values()
    ):
        raise UserError(
            key,
            got=f"{path}, which holds other things",
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
    """Raises UserError when a tensor is missing that is not `optional`, unknown, or of another shape or kind than expected.

    Floating-point dtypes stand for each other, and so do integers. `what` is the kind of draft that it is, for errors.
    """
    missing = expected.keys() - tensors.keys() - set(optional)
    problems = {
        f"without {name}": f"{name} of shape {tuple(expected[name].shape)}"
        for name in sorted(missing)
    }
    problems |= {f"with unknown {name}": "" for name in sorted(tensors.keys() - expected.keys())}
    for name in sorted(expected.keys() & tensors.keys()):
        wanted, found = expected[name], tensors[name]
        if wanted.shape != found.shape:
            problems[f"with {name} of shape {tuple(found.shape)}"] = (
                f"{name} of shape {tuple(wanted.shape)}"
            )
        if _kind(wanted) != _kind(found):
            problems[f"with {name} in {found.dtype}"] = f"{name} in {_kind(wanted)}"
    if problems:
        instead = list(filter(None, problems.values()))[:3] or [f"the tensors of {what} alone"]
        raise UserError(
            key, got=f"{folder} {', '.join(list(problems)[:3])}", expected="; ".join(instead)
        )


def _kind(tensor: Tensor) -> str:
    """Of its dtype, as errors name it."""
    if tensor.dtype in FLOATS:
        return "float32, bfloat16 or float16"
    return "integers" if tensor.dtype in (torch.int64, torch.int32) else str(tensor.dtype)


def load_reading(
    check: Callable[..., tuple[Any, Mapping[str, Tensor]]],
    make: Callable[[Any], nn.Module],
    folder: Path | str,
    target: FrozenTarget,
    *,
    key: str = "eval.draft",
) -> Any:
    """A draft that reads the target's features; the target has what its files omit. check: a method's. key: that the folder came from.

    Raises UserError when files are missing or broken, when a tensor is missing, unknown or of another shape or kind, when the config asks
    for what such drafts do not have here, or when the draft is for another hidden size, vocabulary or depth than the target's.
    """
    config, tensors = check(
        Path(folder), read_tensors(Path(folder), key), target, key=key, name=folder
    )
    draft = make(config)
    for parameter in draft.parameters():
        nn.init.constant_(parameter, torch.nan)
    own = {EMBEDDING: target.tensor(EMBEDDING), HEAD: target.tensor(HEAD), **tensors}
    draft.to(stored_dtype(tensors.values())).load_state_dict(own, strict=False)
    return draft


def stored_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The smallest dtype that holds all weights exactly: their own, where they have but one."""
    return functools.reduce(
        torch.promote_types, [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    )


def is_copy(given: Tensor, own: Tensor) -> bool:
    """Whether one tensor is the other in another dtype."""
    return given.shape == own.shape and torch.equal(given.to(own), own.to(given.dtype).to(own))


def check_fit(
    sizes: Mapping[str, int | None], target: AnyTarget, folder: Path | str, key: str
) -> None:
    """Raises UserError for the first of a draft's sizes that is not the target's; their names in config.json may say `target_`."""
    for name, got in sizes.items():
        expected = getattr(target, name.replace("target_", ""))
        if got != expected:
            raise UserError(
                key, got=f"{folder} with {name} {got}", expected=f"{expected}, as {target.name} has"
            )


def check_offsets(d2t_W: Tensor, vocab_size: int, folder: Path | str, key: str) -> None:
    """Raises UserError for offsets from draft ids to target ids that are not those of ascending tokens."""
    ids = torch.arange(len(d2t_W)) + d2t_W
    if ids[0] < 0 or ids[-1] >= vocab_size or not (ids.diff() > 0).all():
        expected = f"offsets to ascending token ids below {vocab_size}"
        raise UserError(key, got=f"{folder} with a d2t of other numbers", expected=expected)


def vocabulary_maps(d2t_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t [W] int64, offsets from draft ids to target ids, and t2d [V] bool, the target tokens that the draft can propose."""
    target_ids = torch.arange(len(d2t_W)) + d2t_W
    return {"d2t": d2t_W.long(), "t2d": torch.isin(torch.arange(vocab_size), target_ids)}


def shape_to_json(shape: HeadShape, dtype: torch.dtype) -> dict[str, Any]:
    """The keys of a Llama's config.json, with the rotary embedding for readers before transformers 5 and since."""
    # vLLM gives a layer its window by `layer_types` alone.
    windowed = (
        {}
        if shape.sliding_window is None
        else {"layer_types": ["sliding_attention"] * shape.num_layers}
    )
    same_names = [
        field.name for field in dataclasses.fields(HeadShape) if field.name != "num_layers"
    ]
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
        **windowed,
    }


def layers_of_speculators(raw: Mapping[str, Any], kind: str, key: str) -> dict[str, Any] | None:
    """What the config.json of a folder of speculators says of a draft's layers; None in any other folder.

    Raises UserError for a draft of another `speculators_model_type` than `kind`.
    """
    if (named := raw.get("speculators_model_type")) is None:
        return None
    layers: dict[str, Any] | None = raw.get("transformer_layer_config")
    if named != kind or not layers:
        got = f"speculators_model_type {named} with {'a' if layers else 'no'} transformer_layer_config"
        raise UserError(key, got=got, expected=f"{kind}, with one")
    return layers


def shape_from_json(raw: Mapping[str, Any], key: str, *, what: str) -> dict[str, Any]:
    """The fields of `HeadShape`, with the defaults that engines assume for absent keys.

    Raises UserError for a size that is not there, and for a setting that a head cannot have.
    """
    raw = {
        name: value for name, value in raw.items() if value is not None
    }  # null is as if it were absent
    check_settings(raw, FIXED, key, what=what)
    rope = {
        **(raw.get("rope_parameters") or {}),
        **(raw.get("rope_scaling") or {}),
    }  # of both, transformers takes the second
    older_name = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or older_name or "default"
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    check_settings(rope, FIXED, key, what=what)
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(
            key,
            got=f"a config.json with rope_type {rope['rope_type']}",
            expected=f"one of {', '.join(ROPE_TYPES)}",
        )
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if len(kinds) > 1 or not kinds <= {"full_attention", "sliding_attention"}:
        raise UserError(
            key, got=f"layer_types {raw['layer_types']}", expected=f"one kind of layer in {what}"
        )
    stated_sizes(raw, SIZES, key, what=what)
    stated_sizes(raw, filter(raw.__contains__, OPTIONAL_SIZES), key, what=what)
    shape = {
        field.name: raw[field.name] for field in dataclasses.fields(HeadShape) if field.name in raw
    } | {
        "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "num_layers": raw.get("num_hidden_layers", 1),
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        # Many configs repeat a window that no layer has.
        "sliding_window": raw.get("sliding_window") if kinds == {"sliding_attention"} else None,
    }
    with refusing(
        (KeyError, ValueError, TypeError),
        key,
        f"rotary frequencies {rope}",
        "those of a Llama in transformers",
    ):
        Rotary(HeadShape(**shape))
    return shape


def stated_sizes(
    raw: Mapping[str, Any], names: Iterable[str], key: str, *, what: str
) -> dict[str, int]:
    """The sizes of these names in a config.json. Raises UserError for one that is missing, and for what is no size."""
    sizes = {name: stated(raw, name, size_from(1), key) for name in names}
    if missing := next((name for name, size in sizes.items() if size is None), None):
        raise UserError(key, got=f"a config.json without {missing}", expected=f"the keys of {what}")
    return sizes


@functools.cache
def size_from(least: int) -> Any:
    """pydantic's kind of a size, so that the product of two is a size that torch can hold."""
    return Annotated[int, Field(ge=least, lt=2**31)]


def check_settings(
    raw: Mapping[str, Any], fixed: Mapping[str, Any], key: str, *, what: str
) -> None:
    """Raises UserError for the first setting with another value than the fixed one; absent and null stand for that."""
    for name, value in fixed.items():
        got = raw.get(name)
        if got is not None and got != value:
            raise UserError(key, got=f"{name} {got}", expected=f"{json.dumps(value)} in {what}")
