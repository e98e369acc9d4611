"""Check a draft against its target: one check for all commands that use a draft.

`eval`, `compare`, `doctor`, `export`, `publish`, `acquire` and training from `draft.init` decode
with a draft, write it or train from it. With this check they refuse the same drafts and give the
same warnings. A method's own `check` refuses drafts by their tensors, sizes, layers or tokenizer.
`find_mismatches` adds what all methods have in common: vocabulary maps, context, rotary embedding
and dtype. The checks read config.json, tokenizers and the headers of weights. Of the weights
themselves they read only the vocabulary maps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specdistill.common.errors import UserError, logger
from specdistill.common.processes import is_first
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config, read_outline
from specdistill.methods.layers import FeatureShape, HeadShape
from specdistill.methods.rope import (
    CONTRADICTION_ADVICE,
    THETA,
    choose_entry,
    find_contradiction,
    find_differing_names,
    normalize,
    read_entries,
)
from specdistill.methods.sizes import RawConfig
from specdistill.methods.target_record import check_target
from specdistill.targets.files import NESTED_SECTIONS, TargetFiles


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: `problem` if the draft cannot be used as it is, `warning` if it may draft worse,
            `note` for information.
        what: the fact.
        do: what the user can do about the fact; empty if unknown.
    """

    severity: Literal["problem", "warning", "note"]
    what: str
    do: str = ""


problem = partial(Finding, "problem")
warning = partial(Finding, "warning")
note = partial(Finding, "note")


def check_draft(
    method: str,
    folder: Path,
    target: TargetFiles | None,
    key: str,
    *,
    name: Path | str | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    reads_record: bool = True,
    logs: bool = True,
    **options: Any,
) -> list[Finding]:
    """Check a draft against its target, log warnings, and return all findings.

    Args:
        method: the name of the draft's method.
        folder: the folder of the draft.
        target: the target's files. None: only compare the draft's files with each other.
        key: the recipe key to name in errors.
        name: what messages call the draft; None: its folder.
        tensors: the draft's tensors by name; they may be on the meta device. None: read the outline
            of the folder's weights.
        reads_record: whether to check that the draft was trained for this target, if its files
            record the target.
        logs: whether to log the warnings.
        **options: the method's options of decoding. With `heterogeneous_vocab` a draft model may
            have another tokenizer than the target.

    Raises:
        UserError: naming `key`, for a draft that is broken or not one for the target.
    """
    name = name or folder

    # A draft records the target that it was trained for. Compare that first: the error is clearer
    # than the errors about sizes that would follow from a wrong target.
    if target is not None and reads_record:
        check_target(folder, target, key, **options)

    # Check what only the method knows: its tensors, sizes and layers.
    if tensors is None:
        tensors = read_outline(folder, key)
    shape = METHODS[method].load().check(folder, tensors, target, key=key, name=name, **options)

    # Check what all methods have in common. The first problem is an error; warnings are logged by
    # one process only.
    findings = list(
        find_mismatches(method, read_config(folder, key), tensors, shape, target, **options)
    )
    for finding in findings:
        if finding.severity == "problem":
            raise UserError(
                key,
                got=f"{name}: {finding.what}",
                expected=finding.do,
                text=f"{key}: {name}: {finding.what}; {finding.do}",
            )
    if logs and is_first():
        for finding in findings:
            logger.warning(f"warning: {name}: {finding.what}; {finding.do}")
    return findings


def find_mismatches(
    method: str,
    config: RawConfig,
    tensors: Mapping[str, Tensor],
    shape: HeadShape | None,
    target: TargetFiles | None,
    **options: object,
) -> Iterator[Finding]:
    """Find faults of a draft that can occur with every method, and differences from its target.

    Args:
        method: the name of the draft's method.
        config: the content of the draft's config.json.
        tensors: the draft's tensors by name; they may be on the meta device.
        shape: the shape of a head; None for other drafts.
        target: the target's files. None: only compare the draft's files with each other.
        **options: the method's options of decoding. Only `heterogeneous_vocab` is read.
    """
    # Compare config.json with the weights and with itself. Some layouts nest the keys of the model
    # in a section of config.json.
    sections = [config[section] for section in NESTED_SECTIONS if config.get(section)]
    model_config = sections[0] if sections else config
    yield from _check_dtype(config, model_config, tensors)
    contradiction = find_contradiction(model_config)
    if contradiction:
        yield problem(f"config.json says {contradiction}", CONTRADICTION_ADVICE)

    # Compare the draft with its target: vocabulary and rotary embedding. A draft model (standalone)
    # may be padded to another width, and has a rotary embedding of its own.
    if isinstance(shape, FeatureShape):
        yield from _check_maps(tensors, shape)
    if target is None:
        return
    vocab_size = model_config.get("vocab_size")
    if not METHODS[method].standalone:
        yield from _compare_rope(model_config, shape, target)
    elif vocab_size != target.vocab_size and not options.get("heterogeneous_vocab"):
        yield warning(
            f"the draft's vocabulary is {vocab_size} wide, the target's"
            f" {target.vocab_size}: the same tokens with other padding",
            "engines need the same width; train from this draft (draft.init) to give it that width",
        )

    # Compare the longest sequences that both can read.
    draft_length = (
        shape.max_position_embeddings
        if isinstance(shape, HeadShape)
        else model_config.get("max_position_embeddings")
    )
    target_length = target.text_config.get("max_position_embeddings")
    if draft_length is not None and target_length is not None and draft_length < target_length:
        yield warning(
            f"the draft's context (max_position_embeddings) is {draft_length:,} tokens, the"
            f" target's {target_length:,}",
            "beyond that, engines stop drafting or use positions that were never trained; train"
            " from this draft (draft.init) with a larger data.max_length",
        )


def _check_dtype(
    config: RawConfig, model_config: RawConfig, tensors: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Yield a warning if config.json names another dtype than the weights have.

    Quantized drafts are not compared, because their weights have integer dtypes.

    Args:
        config: the content of config.json.
        model_config: the part of it that describes the draft's layers, which may be all of it.
        tensors: the draft's tensors by name.
    """
    # Collect the dtypes of the weights as config.json writes them, such as `bfloat16`.
    weight_dtypes = {
        str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors.values()
        if tensor.is_floating_point()
    }
    # Read the dtype at the top level first. If a draft is a layer of its target (mtp), the nested
    # section describes the target, which may have another dtype.
    section = config if config.get("dtype") or config.get("torch_dtype") else model_config
    stated_dtypes = {section[name] for name in ("dtype", "torch_dtype") if section.get(name)}
    is_quantized = config.get("quantization_config") or model_config.get("quantization_config")
    if weight_dtypes and stated_dtypes - weight_dtypes and not is_quantized:
        yield warning(
            f"config.json says {' and '.join(sorted(stated_dtypes))}, the weights are"
            f" {' and '.join(sorted(weight_dtypes))}",
            "engines load the weights in config.json's dtype; if that is not intended, correct"
            " dtype in config.json",
        )


def _check_maps(tensors: Mapping[str, Tensor], shape: FeatureShape) -> Iterator[Finding]:
    """Yield problems of the maps between draft and target vocabulary, `d2t` and `t2d`.

    `d2t` must hold offsets to ascending tokens of the target, and `t2d` must mark the same tokens.
    """
    # A draft without `d2t` has the target's vocabulary, which is the same as offsets of zero. A map
    # whose values were not loaded (on the meta device) cannot be checked, nor can one of a wrong
    # shape or dtype, which the method's own check reports.
    num_tokens = shape.draft_vocab_size
    d2t = tensors.get("d2t", torch.zeros(num_tokens, dtype=torch.long))
    t2d = tensors.get("t2d")
    if d2t.is_meta or d2t.shape != (num_tokens,) or d2t.is_floating_point():
        return

    # Check d2t by itself: its tokens must ascend within the target's vocabulary. If they ascend,
    # the first and the last one show whether all of them are inside.
    target_ids = torch.arange(num_tokens) + d2t
    is_inside = target_ids[0] >= 0 and target_ids[-1] < shape.vocab_size
    if not is_inside or bool((target_ids.diff() <= 0).any()):
        yield problem(
            "d2t does not map the draft's tokens to ascending token ids of the target",
            "store target id - draft id in d2t, for ascending target ids from 0 to"
            f" {shape.vocab_size - 1}",
        )
        return

    # Warn if d2t may hold target ids instead of offsets. Ids grow with every token. Offsets stay
    # the same between two tokens with consecutive target ids.
    if shape.prunes_vocabulary and num_tokens > 1 and bool((d2t.diff() > 0).all()):
        yield warning(
            "d2t seems to hold target ids, and not target id - draft id: it grows with each of the"
            f" {num_tokens} draft tokens, as ids do",
            "store target id - draft id in d2t; or, if no two draft tokens have consecutive target"
            " ids, ignore this warning, because d2t may then be correct",
        )
    if t2d is None or t2d.is_meta:
        return

    # Check that t2d marks the tokens that d2t leads to.
    marked = t2d.nonzero().flatten()
    if t2d.shape != (shape.vocab_size,) or not torch.equal(marked, target_ids.to(marked)):
        yield problem(
            "d2t and t2d name different tokens",
            "rebuild d2t: entry i is the i-th target id that t2d marks, minus i (both counted from"
            " 0)",
        )


def _compare_rope(
    model_config: RawConfig, shape: HeadShape | None, target: TargetFiles
) -> Iterator[Finding]:
    """Yield a warning for each rotary setting of a draft that differs from the target's.

    A draft that reads hidden states of the target is usually trained with the target's rotary
    embedding. (A draft model has its own, which is just as good. The caller leaves it out.)

    Args:
        model_config: the keys of the draft's config.json that describe its layers.
        shape: the shape of a head; None for other drafts.
        target: the target's files.
    """
    # Read the draft's rotary embeddings: from the shape of a head, else from config.json. There
    # may be several, one for each kind of layer (full and sliding attention), or none.
    if isinstance(shape, HeadShape):
        draft_ropes = [
            normalize({**(shape.rope_scaling or {}), THETA: shape.rope_theta}, vars(shape))
        ]
    else:
        has_rope = model_config.get("rope_parameters") or model_config.get(THETA)
        draft_ropes = read_entries(model_config) if has_rope else []

    # List the rotary embeddings that the draft may have. Those of the target are allowed. A head
    # may also have the embedding that `choose_entry` makes for new heads. That embedding rotates
    # all dimensions. So it may differ from the target's, whose layers may rotate only some.
    allowed_ropes = read_entries(target.text_config)
    parameters = target.text_config.get("rope_parameters")
    if isinstance(shape, HeadShape) and parameters:
        allowed_ropes.append(normalize(choose_entry(parameters), target.text_config))

    # Compare each embedding of the draft with the allowed one that is closest: the one that differs
    # from it in the fewest settings.
    for rope in draft_ropes:
        closest = min(allowed_ropes, key=lambda allowed: len(find_differing_names(rope, allowed)))
        for name in find_differing_names(rope, closest):
            what = (
                f"the draft's rotary embedding ({name}) is {rope.get(name)}, the target's"
                f" {closest.get(name)}"
            )
            # A target that states no base uses the default of its class.
            if name != THETA or closest[THETA] is not None:
                yield warning(
                    what,
                    "if the draft was trained with the target's value, correct the draft's"
                    " config.json; otherwise ignore this warning",
                )
