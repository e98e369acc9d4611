"""Draft models on disk: load them, save them as transformers does, and write them for an engine.

They are loaded from any folder or Hub id. Engines take the model's own folder, with a config.json
that both older versions of transformers and version 5 can read.
"""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import peft
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdistill.common.errors import UserError, find_nearest
from specdistill.common.repositories import resolve, split_revision
from specdistill.methods.checkpoint import (
    check_finite,
    check_fit,
    check_tensors,
    link,
    read_config,
    read_tensors,
)
from specdistill.methods.sizes import RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.cache import is_recurrent
from specdistill.targets.files import TargetFiles
from specdistill.targets.loading import read_causal_lm

# Values of `draft.init` that make the draft from the target. Any other value names a trained model.
INITIALIZATIONS = ("layers", "scratch")


def save_draft_model(
    draft: PreTrainedModel | peft.PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a draft model to a folder that AutoModelForCausalLM, vLLM and SGLang can load.

    The folder gets config.json, the weights as safetensors files, and the tokenizer. LoRA's
    updates are merged into the weights.
    """
    model = merge_lora(draft)

    # With several machines transformers (5.x) writes only on the first one: it asks the model's
    # method `should_save_on_this_rank(is_main_process)`. Our caller has already chosen the process
    # that writes, so the method is replaced by `bool`, which returns the argument.
    vars(model).update(should_save_on_this_rank=bool)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_draft_model(
    path: Path | str,
    *,
    key: str = "eval.draft",
    device: str | torch.device = "cpu",
    dtype: str = "float32",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a draft model and its tokenizer.

    Args:
        path: a folder or a Hub id, also `org/name@revision`.
        key: the recipe key to name in errors.
        device: the device that the model is moved to.
        dtype: the dtype that the weights are loaded in.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        UserError: if there are no weights or no tokenizer, if the weights are cut short, incomplete
            or not finite, or if the model cannot draft (see `check_attention`).
    """
    # A name that is neither a folder nor of the form owner/name is probably a misspelled value, so
    # refuse it before the Hub is asked. `pico` is the model that the package builds itself. The key
    # `draft.init` also takes `layers` and `scratch`, so one of these may be meant there.
    name = str(path)
    if "/" not in name and not Path(name).is_dir() and name != "pico":
        further_choices = INITIALIZATIONS if key == "draft.init" else ()
        raise UserError(
            key,
            got=name,
            expected=" or ".join(("a folder", "a Hub id", *further_choices)),
            nearest=find_nearest(name, further_choices),
        )

    # Load the model, and check that it can draft before it is moved to its device.
    repository, revision = split_revision(name)
    model, tokenizer = read_causal_lm(
        resolve(repository, key), key=key, revision=revision, dtype=dtype
    )
    check_attention(model, key, name)
    check_finite(model.state_dict(), name, key)
    return model.to(device).eval(), tokenizer


def check_outline(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], *, key: str, name: str
) -> None:
    """Check that a file has the tensors that the model in its config.json needs, in their shapes.

    If the file has names that the model lacks, they may be old names, which transformers translates
    when it loads the file. Then only the tensors whose names agree are compared. Quantized models
    are not checked.

    Args:
        model: the model as config.json describes it.
        tensors: the file's tensors by name. Only their shapes are read, so they may be on the
            meta device.
        key: the recipe key to name in errors.
        name: what errors call the draft.

    Raises:
        UserError: if tensors are missing or of another shape.
    """
    # The files of a quantized model hold packed weights and scales, which do not have the names or
    # shapes of the model's parameters.
    if getattr(model.config, "quantization_config", None) is not None:
        return
    expected = model.state_dict()

    # If the file has names that the model lacks, transformers translates them when it loads the
    # file, so only the common names can be compared. With no common name, nothing can be compared.
    common_names = expected.keys() & tensors.keys()
    if not common_names:
        return
    if not tensors.keys() <= expected.keys():
        expected = {name: expected[name] for name in sorted(common_names)}
        tensors = {name: tensors[name] for name in sorted(common_names)}

    # A file may omit a tensor that is tied to a stored one, such as an LM head that is the
    # embedding. Tied parameters are the same Python object.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored_ids = {id(parameters[name]) for name in parameters.keys() & tensors.keys()}
    tied = {name for name, parameter in parameters.items() if id(parameter) in stored_ids}
    check_tensors(expected, tensors, name, key, what="the model in its config.json", optional=tied)


def check_attention(model: PreTrainedModel, key: str, name: str) -> None:
    """Check that a model can draft: it sees earlier tokens only, and can forget rejected ones.

    Args:
        model: the model.
        key: the recipe key to name in errors.
        name: what errors call the model.

    Raises:
        UserError: if the logits depend on later tokens, or if layers carry a recurrent state from
            token to token, from which rejected tokens cannot be removed.
    """
    # Run two prompts that differ in their second token only. In a causal model the logits of the
    # first token are the same for both, up to rounding.
    prompts = torch.tensor([[0, 1], [0, 2]], device=model.device)
    with torch.no_grad():
        first_logits, second_logits = (
            model(input_ids=prompt.unsqueeze(0)).logits[0, 0].float() for prompt in prompts
        )
    if (first_logits - second_logits).abs().max() > 1e-4 * first_logits.abs().max():
        raise UserError(
            key,
            got=f"{name}, an encoder, in which tokens attend to later tokens",
            expected="a causal language model",
        )

    # Attention can drop the keys and values of rejected tokens. A recurrent state cannot be rolled
    # back.
    if is_recurrent(model.config.get_text_config()):
        raise UserError(
            key,
            got=f"{name}, whose layers carry a state from token to token",
            expected="a draft with attention layers only, which can forget rejected tokens",
        )


def merge_lora(draft: PreTrainedModel | peft.PeftModel) -> PreTrainedModel:
    """Return a copy of a draft with LoRA's updates added to its weights.

    Each updated weight W becomes W + B A * alpha / rank. The draft itself stays as it is, so that
    its training can continue. A draft without LoRA is returned without copying it.
    """
    if not isinstance(draft, peft.PeftModel):
        return draft

    # LoRA has frozen the weights. The copy is a plain model again, all of whose weights can be
    # trained.
    merged: PreTrainedModel = copy.deepcopy(draft).merge_and_unload().eval().requires_grad_(True)
    return merged


def export_draft_model(
    folder: Path,
    engine: str,
    layout: Layout,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
) -> None:
    """Write a draft model for an engine; see `Method.export` for the arguments.

    Raises:
        UserError: if the weights are broken, or if the vocabulary is not as large as the target's.
            Engines need equal sizes, because they compare the token ids of draft and target.
            Nothing has been written then.
    """
    # Check the vocabulary and the weights before anything is written.
    config = read_config(folder, "draft")
    if target is not None:
        check_fit(
            {"vocab_size": config.get("vocab_size")}, target, f"{engine} for {folder}", "engine"
        )
    read_tensors(folder, "draft")

    # Weights are large, so they are hard-linked, not copied. Code of the repository (.py) is not
    # exported, and hidden files are not part of the model.
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".py":
            copy_file = link if path.suffix in (".safetensors", ".bin") else shutil.copy2
            copy_file(path, output / path.name)

    # An engine that is allowed to run the target's own code would run the draft's too.
    config.pop("auto_map", None)

    # Older versions of transformers, which engines may pin, do not read the keys of version 5.
    (output / "config.json").write_text(
        json.dumps(add_both_spellings(config), indent=2) + "\n", encoding="utf-8"
    )


def add_both_spellings(config: RawConfig) -> RawConfig:
    """Return a config.json with the key names of both transformers 4 and transformers 5.

    Version 4 reads `rope_theta`, `rope_scaling` and `torch_dtype`; version 5 reads
    `rope_parameters` and `dtype`. The names that are missing are added.
    """
    # Before version 5, transformers spread the rotary embedding's parameters over two keys. Join
    # them, as in version 5.
    rope = config.get("rope_parameters")
    if rope is None and "rope_theta" in config:
        rope = {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
            **(config.get("rope_scaling") or {}),
        }
    keys = dict(config)

    # Add the keys of both versions. If layers of several kinds have parameters for each kind, there
    # is no single `rope_theta`, and nothing is added. Version 4 writes `rope_scaling` as null if
    # the embedding is a plain one, of the type `default`.
    if rope and "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        keys["rope_parameters"] = rope
        keys["rope_theta"] = rope["rope_theta"]
        keys["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling

    # Version 5 of transformers renamed `torch_dtype` to `dtype`.
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {**keys, "dtype": dtype, "torch_dtype": dtype} if dtype else keys
