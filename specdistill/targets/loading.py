"""Causal language models, tokenizers and LoRA adapters from folders and the Hub, with errors that name the recipe's key."""

from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdistill.errors import UserError, one_line
from specdistill.hub import hub_errors, resolve
from specdistill.progress import hide_bars_of_transformers


def read_causal_lm(
    path: str,
    *,
    key: str = "target.model",
    revision: str | None = None,
    dtype: str = "float32",
    attn: str = "sdpa",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a folder or the Hub; `key` is the recipe key that errors name.

    Raises UserError for missing or broken files and missing weights, ResourceError when the Hub fails.
    """
    hide_bars_of_transformers()
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    expected = "pico, a folder with config, weights and tokenizer, or a Hub id"
    model_options = {"dtype": getattr(torch, dtype), "attn_implementation": attn, "output_loading_info": True, **options}
    try:
        with hub_errors(key, path, expected=expected):
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, **model_options)
    except SafetensorError as error:
        raise UserError(key, got=f"{path}: {error}", expected="whole safetensors files") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(key, got=f"{path} ({str(error).splitlines()[0]})", expected=expected) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would initialize them
        raise UserError(key, got=f"{path} without {', '.join(missing[:3])}", expected="every weight that its config asks for")
    return model, tokenizer


def read_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Any, int]:
    """A target's tokenizer and the length of its context in tokens, without its weights, which a server holds.

    Raises UserError when there is no such target, ResourceError when the Hub fails.
    """
    path, options = resolve(model), {"revision": revision, "trust_remote_code": trust_remote_code}
    expected = "pico, a folder with config and tokenizer, or a Hub id"
    try:
        with hub_errors("target.model", path, expected=expected):
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            config = AutoConfig.from_pretrained(path, **options).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError("target.model", got=f"{path} ({str(error).splitlines()[0]})", expected=expected) from error
    return tokenizer, int(config.max_position_embeddings)


def with_adapter(model: PreTrainedModel, adapter: str, *, base: str) -> PreTrainedModel:
    """The model with a peft LoRA adapter merged into its weights (arXiv 2106.09685); `base` is the name the model was loaded by.

    An adapter names its base: of a path or Hub id the last part must agree. Raises UserError for another base, for another kind of
    adapter, and for tensors other than the model takes.
    """
    key, expected = "target.adapter", "the folder or Hub id of a LoRA adapter"
    try:
        with hub_errors(key, adapter, expected=expected):
            config = peft.PeftConfig.from_pretrained(adapter)
            weights = peft.utils.load_peft_weights(adapter, device="cpu")
    except SafetensorError as error:
        raise UserError(key, got=f"{adapter}: {error}", expected="a whole safetensors file") from error
    except (OSError, ValueError) as error:
        raise UserError(key, got=f"{adapter} ({str(error).splitlines()[0]})", expected=expected) from error
    if config.peft_type != "LORA":
        raise UserError(key, got=f"{adapter}, a {config.peft_type} adapter", expected="a LoRA adapter")
    named = config.base_model_name_or_path
    if named and Path(named).name.lower() != Path(resolve(base)).name.lower():
        raise UserError(key, got=f"{adapter}, an adapter of {named}", expected=f"an adapter of {base}")
    config.inference_mode, config.base_model_name_or_path = True, None  # peft would warn about the name of the base
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        got = f"{adapter} ({one_line(str(error))[:160]})"
        raise UserError(key, got=got, expected=f"an adapter of {base}") from error
    taken = {name: tensor.shape for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    given = {name: tensor.shape for name, tensor in weights.items()}
    if taken != given:
        name = sorted({name for name, _ in taken.items() ^ given.items()})[0]
        shapes = (tuple(shape[name]) if name in shape else "nothing" for shape in (given, taken))
        raise UserError(key, got=f"{adapter} with {next(shapes)} for {name}", expected=f"{next(shapes)}, as {base} takes")
    peft.set_peft_model_state_dict(adapted, weights)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged
