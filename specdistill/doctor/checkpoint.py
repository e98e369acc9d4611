"""Whether a draft's files are whole, fit the target, and are loaded by an engine as the draft was trained.

What readers refuse is a finding. So are values that no training leaves, a vocabulary whose two maps do not agree, settings that differ
from the target's, and what an engine's loader makes of the folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specdistill.engines import ENGINES
from specdistill.engines.engine import Engine
from specdistill.engines.loader import check_loader, loader_of
from specdistill.errors import UserError
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import FLOATS, read_config, read_tensors, stored_dtype
from specdistill.methods.layers import HeadShape
from specdistill.methods.load import implementation, method_of
from specdistill.targets.files import TargetFiles

KEY = "draft"
LARGE = 1000.0  # weights of trained drafts stay far below


@dataclass(frozen=True)
class Finding:
    """A problem makes a draft useless or worse than it is; a warning may; a note says what to know.

    what: the fact. do: what to do about it, where that is known.
    """

    severity: Literal["problem", "warning", "note"]
    what: str
    do: str = ""


problem, warning, note = partial(Finding, "problem"), partial(Finding, "warning"), partial(Finding, "note")


@dataclass
class Examination:
    """method and config: None where they were not understood; only heads have a config here.

    refused: by a reader, so that nothing can be decoded with it.
    """

    folder: Path
    method: str | None = None
    config: HeadShape | None = None
    num_tensors: int = 0
    dtype: torch.dtype | None = None
    refused: bool = False
    findings: list[Finding] = field(default_factory=list)


def examine(folder: Path, target: TargetFiles | None = None, engine: str | None = None) -> Examination:
    """Examine a folder that holds a draft. `target`: what it drafts for; `engine`: one with `loaders`.

    Raises UserError for a target that is none, ResourceError when the Hub fails.
    """
    seen = Examination(folder)
    with refusals(seen):
        config, seen.method = read_config(folder, KEY), method_of(folder, key=KEY)
        tensors, method = read_tensors(folder, KEY), implementation(seen.method)
        seen.config = method.head_shape(config, target.num_layers if target else None)
    if seen.refused:
        return seen
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    seen.num_tensors, seen.dtype = len(tensors), stored_dtype(floats) if floats else None
    seen.findings += [*_values(tensors), *_config(config, seen)]
    with refusals(seen):
        seen.config = method.inspect(folder, target)
    if isinstance(seen.config, HeadShape):
        seen.findings += _vocabulary(tensors, seen.config)
        if target is not None:
            seen.findings += _against(target, seen.config)
    if engine is not None:
        seen.findings += _engine(ENGINES[engine], seen, config, tensors, target)
    return seen


@contextmanager
def refusals(seen: Examination) -> Iterator[None]:
    """What a reader says of the draft, as a finding, without the key that an argument has on the command line."""
    try:
        yield
    except UserError as error:
        if error.key != KEY:
            raise
        seen.refused = True
        seen.findings.append(problem(str(error).removeprefix(f"{KEY}: got ")))


def _values(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Weights that no training leaves so; NaN and infinity are refused by the readers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            continue
        if not tensor.any() and not name.endswith(".bias"):
            yield problem(f"{name} is all zeros", "it was not saved, or not trained: save the draft again")
        elif tensor.abs().max() > LARGE:
            yield warning(f"{name} has a weight of {float(tensor.abs().max()):.3g}", "look at how training ended")


def _config(config: Mapping[str, Any], seen: Examination) -> Iterator[Finding]:
    """What config.json says of itself."""
    flat = config.get("model") or config.get("transformer_layer_config") or config
    if not (config.get("architectures") or flat.get("architectures")):
        yield problem("config.json names no architectures", "engines choose the code that loads a draft by them")
    stated = config.get("dtype") or config.get("torch_dtype") or flat.get("dtype") or flat.get("torch_dtype")
    held = str(seen.dtype).removeprefix("torch.")
    if stated is not None and stated != held:
        yield warning(f"config.json says {stated}, the weights are {held}", "engines convert them to what it says")
    rope = flat.get("rope_parameters") or {}
    newer, older = rope.get("rope_theta"), flat.get("rope_theta")
    if newer is not None and older is not None and newer != older:
        what = f"config.json says rope_parameters.rope_theta {newer} and rope_theta {older}"
        yield warning(what, "they are read before and since transformers 5: make them the same")


def _vocabulary(tensors: Mapping[str, Tensor], config: HeadShape) -> Iterator[Finding]:
    """Whether d2t is what it should be: offsets, and the same tokens as in t2d."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.is_floating_point() or len(d2t) == config.vocab_size:
        return
    num = len(d2t)
    ids = torch.arange(num) + d2t
    if num > 1 and bool((d2t.diff() > 0).all()):
        what = f"d2t grows with every token, so no two of the {num} draft tokens stand side by side in the target's vocabulary"
        yield warning(what, "d2t holds offsets, target id - draft id: it seems to hold the ids themselves")
    if t2d is not None and t2d.shape == (config.vocab_size,):
        named = t2d.nonzero().flatten()
        if named.shape != ids.shape or not torch.equal(named, ids.to(named)):
            yield problem("d2t and t2d name different tokens", "make d2t again: the ids that t2d marks, less 0, 1, 2, …")


def _against(target: TargetFiles, config: HeadShape) -> Iterator[Finding]:
    """Settings that usually are the target's own."""
    text = target.text_config
    rope = text.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or text.get("rope_theta")
    if theta is not None and float(theta) != config.rope_theta:
        what = f"the draft's rotary base (rope_theta) is {config.rope_theta:g}, the target's {theta:g}"
        yield warning(what, "heads are trained with the target's, unless this one was not")
    length = text.get("max_position_embeddings")
    if isinstance(length, int) and config.max_position_embeddings < length:
        what = f"the draft's max_position_embeddings is {config.max_position_embeddings}, the target's {length}"
        yield warning(what, "beyond it engines cap the sequence, or draft at positions that were never trained")


def _engine(
    engine: Engine, seen: Examination, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetFiles | None
) -> Iterator[Finding]:
    """What an engine would make of the folder. It loads a draft model as any model, and compares its tokens with the target's."""
    assert seen.method is not None
    exported = f"specdistill export engine={engine.name} writes a draft as it loads it" if seen.method in engine.layouts else ""
    loader = loader_of(engine.loaders.get(seen.method, ()), config)
    artifact, size = METHODS[seen.method].artifact, config.get("vocab_size")
    if artifact == "layer":
        yield problem(f"{engine.title} loads such a layer from its target's checkpoint alone", exported)
    elif artifact == "model":
        if target is not None and size != target.vocab_size:
            wanted = f"{engine.title} needs a vocabulary of {target.vocab_size}, as the target has"
            yield problem(f"{wanted}, and the draft's is {size}")
    elif seen.config is None:
        yield problem(f"method {seen.method} does not say what its heads look like, so no loader can be checked", exported)
    elif loader is None:
        yield problem(f"{engine.title} is not known to load method {seen.method} in this layout", exported)
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        result = check_loader(loader, config, shapes, seen.config, target)
        name = f"{engine.title} {engine.loader_version or engine.versions}"
        yield from (problem(f"{name} stops: {what}", exported) for what in result.refused)
        yield from (problem(f"{name} does not say so, but {what}", exported) for what in result.silent)
        yield from (note(f"{name}: {what}") for what in result.notes)


def describe(seen: Examination) -> str:
    """What the draft is, in a line."""
    if seen.method is None:
        return "not recognised"
    parts = [f"method {seen.method}", f"{seen.num_tensors} tensors"]
    parts += [str(seen.dtype).removeprefix("torch.")] if seen.dtype else []
    if isinstance(seen.config, HeadShape):
        layers = seen.config.num_layers
        parts += [f"{layers} layer{'s' * (layers != 1)} of {seen.config.hidden_size}"]
        aux: Sequence[int] = getattr(seen.config, "aux_layers", ())
        parts += [f"reads the target after layers {', '.join(map(str, aux))}"] if aux else []
    return ", ".join(parts)
