"""Draft models on disk: read from any folder or Hub id, saved as transformers does, and written for an engine.

Engines take the model's own folder, with a config.json for transformers before and since version 5.
"""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdistill.engines.engine import Layout
from specdistill.errors import UserError, nearest
from specdistill.methods.checkpoint import (
    check_finite,
    check_fit,
    check_tensors,
    link,
    read_config,
    read_tensors,
)
from specdistill.repositories import resolve, split_revision
from specdistill.targets.cache import is_recurrent
from specdistill.targets.files import TargetFiles
from specdistill.targets.loading import read_causal_lm

INITIALIZATIONS = ("layers", "scratch")


def save_draft_model(draft: PreTrainedModel | peft.PeftModel, tokenizer: Any, folder: Path) -> None:
    """config.json, safetensors and tokenizer: what AutoModelForCausalLM, vLLM and SGLang load. LoRA's updates are merged."""
    model = merged(draft)
    # Of several machines transformers writes on the first alone, whoever calls.
    vars(model).update(should_save_on_this_rank=bool)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_draft_model(
    path: Path | str,
    *,
    key: str = "eval.draft",
    device: str | torch.device = "cpu",
    dtype: str = "float32",
) -> tuple[PreTrainedModel, Any]:
    """A draft model and its tokenizer from a folder or a Hub id (`org/name@revision` too); `key` is the recipe key that errors name.

    Raises UserError when there are no weights or no tokenizer, or when the weights are cut short, incomplete or not finite.
    """
    name = str(path)
    if "/" not in name and not Path(name).is_dir() and name != "pico":
        others = INITIALIZATIONS if key == "draft.init" else ()
        expected = " or ".join(("a folder", "a Hub id", *others))
        raise UserError(key, got=name, expected=expected, nearest=nearest(name, others))
    place, revision = split_revision(name)
    model, tokenizer = read_causal_lm(resolve(place, key), key=key, revision=revision, dtype=dtype)
    check_attention(model, key, name)
    check_finite(model.state_dict(), name, key)
    return model.to(device).eval(), tokenizer


def check_outline(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], *, key: str, name: str
) -> None:
    """Raises UserError where a file's tensors, which need have no content, are not those of the model that its config.json describes.

    Names that transformers would rename are left to it, and so are the shapes of quantized weights.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return
    expected = model.state_dict()
    if both := expected.keys() & tensors.keys():
        if not tensors.keys() <= expected.keys():
            expected, tensors = (
                {each: of[each] for each in sorted(both)} for of in (expected, tensors)
            )
        in_file = {
            id(parameter)
            for each, parameter in model.named_parameters(remove_duplicate=False)
            if each in tensors
        }
        tied = {
            each
            for each, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in in_file
        }
        check_tensors(
            expected, tensors, name, key, what="the model in its config.json", optional=tied
        )


def check_attention(model: PreTrainedModel, key: str, name: str) -> None:
    """Raises UserError, naming `key`, for a draft that could not take rejected tokens back, or whose logits depend on later tokens."""
    pairs = torch.tensor([[0, 1], [0, 2]], device=model.device)
    with torch.no_grad():
        first, other = (model(input_ids=pair.unsqueeze(0)).logits[0, 0].float() for pair in pairs)
    if (first - other).abs().max() > 1e-4 * first.abs().max():
        raise UserError(
            key,
            got=f"{name}, an encoder: its tokens see later ones",
            expected="a causal language model",
        )
    if is_recurrent(model.config.get_text_config()):
        got = f"{name}, whose layers carry a state from token to token"
        raise UserError(key, got=got, expected="a draft whose layers are all attention")


def merged(draft: PreTrainedModel | peft.PeftModel) -> PreTrainedModel:
    """The plain model: W + B A * alpha / rank, in a copy, so that training can continue. A draft without LoRA is returned as it is."""
    if not isinstance(draft, peft.PeftModel):
        return draft
    return copy.deepcopy(draft).merge_and_unload().eval().requires_grad_(True)


def export(
    folder: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a draft model for an engine.

    Raises UserError, before anything is written, when its weights are broken, or when its vocabulary is not as large as the target's
    (engines compare token ids).
    """
    config = read_config(folder, "draft")
    if target is not None:
        check_fit(
            {"vocab_size": config.get("vocab_size")}, target, f"{engine} for {folder}", "engine"
        )
    read_tensors(folder, "draft")
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".py":
            (link if path.suffix in (".safetensors", ".bin") else shutil.copy2)(
                path, output / path.name
            )
    config.pop(
        "auto_map", None
    )  # code of its own, which an engine that runs the target's would run too
    (output / "config.json").write_text(
        json.dumps(with_both_spellings(config), indent=2) + "\n", encoding="utf-8"
    )


def with_both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with `rope_theta`, `rope_scaling` and `torch_dtype` next to `rope_parameters` and `dtype`, or the other way round."""
    rope = config.get("rope_parameters")
    if rope is None and "rope_theta" in config:
        rope = {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
            **(config.get("rope_scaling") or {}),
        }
    both = dict(config)
    if rope and "rope_theta" in rope:  # not those of layers of several kinds
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        both["rope_parameters"] = rope
        both["rope_theta"] = rope["rope_theta"]
        both["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {**both, "dtype": dtype, "torch_dtype": dtype} if dtype else both
