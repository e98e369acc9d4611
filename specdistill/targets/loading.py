"""A causal language model and its tokenizer, read by transformers from a folder, a GGUF file or the Hub."""

import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    TorchAoConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from specdistill.errors import UserError, one_line
from specdistill.progress import hide_bars_of_transformers
from specdistill.repositories import hub_errors, resolve, split_gguf
from specdistill.targets.anatomy import CLASS_ERRORS, auto_class, backbone_of, layer_lists
from specdistill.targets.sharding import is_shared, num_processes, sharded

if TYPE_CHECKING:  # it imports this
    from specdistill.targets.files import TargetFiles

# A broken config.json or GGUF file (one that was cut short: struct's) fails in transformers' own code, and in any of these ways.
READING_ERRORS = (*CLASS_ERRORS, OSError, struct.error)
TARGETS = "pico, a folder with config, weights and tokenizer, a GGUF file, or a Hub id"
GGUF = (
    "a whole GGUF file of a type and architecture that transformers reads, e.g. Q8_0 or Q4_K_M of a Llama (llama-quantize makes them), or "
    "the checkpoint that it was made from"
)
FP8_CAPABILITY = (8, 9)  # Ada's


def _place(path: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """(folder or Hub id, options) of transformers' `from_pretrained`."""
    folder, file = split_gguf(path)
    return folder, {**options, "gguf_file": file} if file else options


@contextmanager
def _reading(key: str, name: str, expected: str) -> Iterator[None]:
    """Raises UserError for missing or broken files of what `name` stands for, ResourceError when the Hub fails."""
    try:
        with hub_errors(key, name, expected=expected):
            yield
    except (
        torch.OutOfMemoryError,
        torch.distributed.DistError,
    ):  # RuntimeErrors, and no fault of the files
        raise
    except SafetensorError as error:
        raise UserError(key, got=f"{name}: {error}", expected="whole safetensors files") from error
    except ImportError as error:  # of an attention implementation, a quantization or remote code
        got = f"{name} ({one_line(str(error))})"
        expected = "packages that are installed, or another checkpoint or target.attn"
        raise UserError(key, got=got, expected=expected) from error
    except READING_ERRORS as error:
        if "trust_remote_code" in str(error):
            consent = (
                "target.trust_remote_code=true, if you have read that code, or "
                if key == "target.model"
                else ""
            )
            expected = f"{consent}a checkpoint of a class of transformers"
            got = f"{name}, which brings Python code of its own; it would run with your rights"
            raise UserError(key, got=got, expected=expected) from error
        got = f"{name} ({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})"
        raise UserError(key, got=got, expected=expected) from error


def read_causal_lm(
    path: str,
    *,
    key: str = "target.model",
    revision: str | None = None,
    dtype: str = "float32",
    attn: str | None = None,
    trust_remote_code: bool = False,
    shard: str = "none",
    device_map: str = "cpu",
    layers_on_disk: bool = False,
    quantize: str | None = None,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a folder, a GGUF file or the Hub; `key` is the recipe key that errors name.

    quantize: a kind of `quantization`. shard: how the processes of a launch share it; one process holds it whole. layers_on_disk: of
    weights in floating point, leave those of the decoder layers in their files, to be read whenever they are run.
    Raises UserError for missing or broken files, missing weights and what cannot be shared, ResourceError when the Hub fails.
    """
    hide_bars_of_transformers()
    folder, options = _place(path, revision=revision, trust_remote_code=trust_remote_code)
    expected = (GGUF if "gguf_file" in options else TARGETS) + (
        "" if attn is None else ", and a target.attn that its class has"
    )
    wanted = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": attn,
        "output_loading_info": True,
        **options,
    }
    if "gguf_file" in options:
        wanted["quantization_config"] = GgufConfig(dequantize=True)
    with _reading(key, path, expected):
        tokenizer = working_tokenizer(folder, **options)
        config = AutoConfig.from_pretrained(folder, **options)
        if (
            config.is_encoder_decoder
        ):  # an encoder alone is refused once it is loaded, by its logits
            got = f"{path}, an encoder-decoder ({', '.join(config.architectures or [config.model_type])})"
            raise UserError(
                key,
                got=got,
                expected="a causal language model, which generates by itself what follows a prompt",
            )
        is_quantized = (
            "gguf_file" in options or getattr(config, "quantization_config", None) is not None
        )
        if quantize is not None:
            if is_quantized or dtype != "bfloat16":
                got = f"{quantize} with {'a quantized checkpoint' if is_quantized else f'target.dtype={dtype}'}"
                expected = "null, or a checkpoint in floating point and target.dtype=bfloat16"
                raise UserError("target.quantization", got=got, expected=expected)
            wanted["quantization_config"], is_quantized = quantization(quantize), True
        places = (
            _layers_on_disk(config, device_map, trust_remote_code)
            if layers_on_disk and not is_quantized
            else None
        )
        if places is not None:
            # It warns of parameters that are where they are wanted.
            logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        if shard == "none" or places is not None or num_processes() == 1:
            model_class: Any = auto_class(config)
        else:
            model_class = sharded(
                config, is_quantized=is_quantized, trust_remote_code=trust_remote_code
            )
        loaded: Any = model_class.from_pretrained(folder, device_map=places or device_map, **wanted)
        model, report = loaded
        end_tokens(model.generation_config, model.config.get_text_config())
    if missing := sorted(report["missing_keys"]):  # transformers would initialize them
        raise UserError(
            key,
            got=f"{path} without {', '.join(missing[:3])}",
            expected="every weight that its config asks for",
        )
    if dtype == "float32" and is_plain(model):
        model.float()  # what transformers had to dequantize is in bfloat16
    return model, tokenizer


def quantization(kind: str) -> Any:
    """transformers' config of a kind of `target.quantization`. Raises UserError without its package or its hardware."""
    key = "target.quantization"
    package = {"fp8": "torchao", "bitsandbytes-8bit": "bitsandbytes"}[kind]
    if find_spec(package) is None:
        missing = f"{key}: {package} is not installed. Run: pip install {package}"
        raise UserError(
            key, got=f"{kind} without {package}", expected="an installed package", text=missing
        )
    if kind != "fp8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise UserError(
            key,
            got="fp8 without a GPU that has it",
            expected="null, or compute capability 8.9 and more",
        )
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
    )  # slow to import

    return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))


def working_tokenizer(folder: str | Path, **options: Any) -> Any:
    """A tokenizer that has split a text: settings of a wrong kind are loaded, and fail then."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer("a")
    return tokenizer


def read_without_weights(folder: Path, *, key: str, name: str) -> tuple[Any, Any]:
    """A causal language model on the meta device, and its tokenizer, from a folder's config and tokenizer. `name` is what errors call it.

    Raises UserError for files of which none can be made.
    """
    with _reading(key, name, "the config and the tokenizer of a causal language model"):
        tokenizer = working_tokenizer(
            folder, trust_remote_code=False
        )  # nor asked for at a terminal
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return auto_class(config).from_config(config), tokenizer


def read_gguf_config(folder: Path, file: str, *, key: str, name: str) -> Any:
    """The config of a GGUF file, as transformers reads it. `name` is what errors call it. Raises UserError where it cannot."""
    with _reading(key, name, GGUF):
        return AutoConfig.from_pretrained(folder, gguf_file=file)


def _layers_on_disk(config: Any, device: str, trust_remote_code: bool) -> dict[str, str] | None:
    """A device map: every part of a model on the device, but for its decoder layers. None for a class whose files hold its weights in
    another form, e.g. those of most experts: transformers would write them to the disk once more.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    if any(
        isinstance(conversion, WeightConverter)
        for conversion in get_model_conversion_mapping(model)
    ):
        return None
    lists = layer_lists(model, backbone_of(model))
    places: dict[str, str] = {}
    for name, part in model.named_modules():
        if any(name.startswith(f"{whole}.") for whole in places):
            continue
        if part in lists or not any(each in lists for each in part.modules()):
            places[name] = "disk" if part in lists else device
        else:
            own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            places |= {f"{name}.{tensor}".removeprefix("."): device for tensor, _ in own}
    return places


def is_plain(model: Any) -> bool:
    """Whether a model's weights are whole and in floating point, so that they can be converted."""
    return getattr(model, "hf_quantizer", None) is None and not is_shared(model)


def read_tokenizer(files: "TargetFiles") -> tuple[Any, tuple[int, ...], int]:
    """(a target's tokenizer, every token that ends its generations, its context in tokens), without its weights, which a server holds.

    Raises UserError when there is no such target, ResourceError when the Hub fails.
    """
    path, options = _place(
        files.name, revision=files.revision, trust_remote_code=files.trust_remote_code
    )
    with _reading("target.model", files.name, GGUF if "gguf_file" in options else TARGETS):
        tokenizer = working_tokenizer(path, **options)
        config = AutoConfig.from_pretrained(path, **options)
        try:
            generation = GenerationConfig.from_pretrained(path, **options)
        except OSError:  # a checkpoint may have none
            generation = GenerationConfig.from_model_config(config)
        ends = end_tokens(generation, config, tokenizer)
    return tokenizer, tuple(sorted(ends)), max_length(config.get_text_config(), tokenizer)


def end_tokens(*declaring: Any) -> set[int]:
    """All tokens that end a generation, by the `eos_token_id` of configs. Raises ValueError for one that is no token."""
    declared = (getattr(each, "eos_token_id", None) for each in declaring)
    ends = [
        token
        for ids in declared
        for token in (ids if isinstance(ids, list) else [] if ids is None else [ids])
    ]
    if wrong := [token for token in ends if type(token) is not int]:
        raise ValueError(f"eos_token_id {wrong[0]!r}")
    return set(ends)


def max_length(text_config: Any, tokenizer: Any) -> int:
    """Tokens of a target's context. Models without positions, or with relative ones, have no such number: their tokenizer names one."""
    return int(getattr(text_config, "max_position_embeddings", None) or tokenizer.model_max_length)


def with_adapter(model: PreTrainedModel, adapter: str, *, base: str) -> PreTrainedModel:
    """The model with a peft LoRA adapter merged into its weights (arXiv 2106.09685); `base` is the name the model was loaded by.

    An adapter names its base: of a path or Hub id the last part must agree. Raises UserError for another base, for another kind of
    adapter, and for tensors other than the model takes.
    """
    key = "target.adapter"
    with _reading(key, adapter, "the folder or Hub id of a LoRA adapter"):
        config = peft.PeftConfig.from_pretrained(adapter)
        weights = peft.utils.load_peft_weights(adapter, device="cpu")
    if config.peft_type != "LORA":
        raise UserError(
            key, got=f"{adapter}, a {config.peft_type} adapter", expected="a LoRA adapter"
        )
    named = config.base_model_name_or_path
    if named and Path(named).name.lower() != Path(resolve(base)).name.lower():
        raise UserError(
            key, got=f"{adapter}, an adapter of {named}", expected=f"an adapter of {base}"
        )
    config.inference_mode, config.base_model_name_or_path = (
        True,
        None,
    )  # peft would warn about the name of the base
    with _reading(key, adapter, f"an adapter of {base}"):
        adapted = peft.get_peft_model(model, config)
        loaded: Any = peft.set_peft_model_state_dict(adapted, weights)  # raises for another shape
    if wrong := [
        *loaded.unexpected_keys,
        *(name for name in loaded.missing_keys if "lora_" in name),
    ]:
        got = f"{adapter}, whose tensors are not those that {base} takes ({wrong[0]})"
        raise UserError(key, got=got, expected=f"an adapter of {base}")
    return adapted.merge_and_unload()
