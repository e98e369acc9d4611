"""Load a causal language model and its tokenizer from a folder, a GGUF file or the Hub.

transformers does the loading. This module chooses its options, and turns its errors into errors
that name the recipe key and say what to do.
"""

import logging
import struct
from collections.abc import Callable, Iterator
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
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TorchAoConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from specdistill.common.errors import UserError, join_lines
from specdistill.common.gguf_files import check_gguf
from specdistill.common.progress import hide_bars_of_transformers
from specdistill.common.repositories import convert_hub_errors, fetch, resolve, split_gguf
from specdistill.targets.anatomy import (
    CLASS_ERRORS,
    find_auto_class,
    find_backbone,
    find_layer_lists,
)
from specdistill.targets.gguf_cache import (
    convert_once,
    find_converted,
    restore_tokenizer,
    use_fast_metadata,
)
from specdistill.targets.sharding import count_processes, is_shared, shard_class

if TYPE_CHECKING:  # That module imports this one.
    from specdistill.targets.files import TargetFiles

# A broken config.json or GGUF file fails in transformers' own code, in any of these ways. A GGUF
# file that was cut short raises struct.error.
READING_ERRORS = (*CLASS_ERRORS, OSError, struct.error)
# What errors say is expected: of any target, and of a GGUF file.
TARGETS = "pico (built in), a folder with config, weights and tokenizer, a GGUF file, or a Hub id"
GGUF = (
    "a whole GGUF file of a type and architecture that transformers reads, e.g. Q8_0 or Q4_K_M of a"
    " Llama (llama-quantize makes them), or the checkpoint that it was made from"
)
# The least compute capability for fp8: that of Ada GPUs.
FP8_CAPABILITY = (8, 9)


def _locate_model(
    path: str,
    key: str,
    revision: str | None,
    trust_remote_code: bool,
    find_copy: Callable[[Path], Path | None],
) -> tuple[str, dict[str, Any]]:
    """Return the path that `from_pretrained` loads a model from, and the options that it needs.

    A folder or a Hub id is returned as it is. A GGUF file is fetched, and replaced by its copy in
    safetensors if there is one, because transformers loads the copy much faster.

    Args:
        path: a folder, a GGUF file or a Hub id.
        key: the recipe key to name in errors.
        revision: the revision of a Hub id; None for the default.
        trust_remote_code: run the repository's own code.
        find_copy: returns the folder with a copy of a GGUF file in safetensors; None if there is
            none.

    Returns:
        The folder or Hub id, and the options.

    Raises:
        UserError: for a GGUF file that is missing or broken.
    """
    folder, name = split_gguf(path)
    if name is None:
        return path, {"revision": revision, "trust_remote_code": trust_remote_code}

    # Fetch the GGUF file, and check that it is whole.
    file = fetch(folder, key=key, expected=TARGETS, revision=revision, patterns=[name]) / name
    if not file.is_file():
        raise UserError(key, got=f"{path}, which is no file", expected=GGUF)
    check_gguf(file, key)
    copy = find_copy(file)
    return (str(copy), {}) if copy else (str(file.parent), {"gguf_file": name})


def convert_gguf(file: Path, dtype: str, *, key: str = "target.model") -> Path | None:
    """Return the folder with the safetensors copy of a GGUF file, and write the copy if needed.

    Args:
        file: the GGUF file.
        dtype: the dtype of the weights.
        key: the recipe key to name in errors.

    Returns:
        The folder; None if it cannot be written.

    Raises:
        UserError: for a file that cannot be loaded, as `read_causal_lm`.
    """
    # The file itself must be loaded to be converted, so its copy is not searched again.
    return convert_once(
        file, dtype, lambda: read_causal_lm(str(file), key=key, dtype=dtype, cache=False)
    )


@contextmanager
def _convert_reading_errors(key: str, name: str, expected: str) -> Iterator[None]:
    """Turn errors of transformers into errors of this project while the block reads files.

    Args:
        key: the recipe key to name in errors.
        name: the name of the model in errors.
        expected: the text in errors that says what was expected.

    Raises:
        UserError: for missing or broken files.
        ResourceError: when the Hub fails.
    """
    # Each kind of error gets its own advice. The order of the clauses matters, because
    # READING_ERRORS includes ImportError and RuntimeError.
    try:
        with convert_hub_errors(key, name, expected=expected, patterns=("*.safetensors",)):
            yield
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        # These are RuntimeErrors too, but the files are not at fault.
        raise
    except SafetensorError as error:
        raise UserError(key, got=f"{name}: {error}", expected="whole safetensors files") from error
    except ImportError as error:
        # An attention implementation, a quantization or remote code may need another package.
        raise UserError(
            key,
            got=f"{name} ({join_lines(str(error))})",
            expected="the missing package installed, another checkpoint, or another target.attn",
        ) from error
    except READING_ERRORS as error:
        # With a ValueError, transformers asks for consent to run remote code. A recipe can give
        # this consent only for the target.
        if "trust_remote_code" in str(error):
            consent = (
                "target.trust_remote_code=true, if you have read that code, or "
                if key == "target.model"
                else ""
            )
            raise UserError(
                key,
                got=f"{name}, which brings Python code of its own; it would run with your rights",
                expected=f"{consent}a checkpoint of a class of transformers",
            ) from error
        raise UserError(
            key,
            got=f"{name}"
            f" ({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})",
            expected=expected,
        ) from error


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
    cache: bool = True,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer from a folder, a GGUF file or the Hub.

    Args:
        path: a folder, a GGUF file or a Hub id.
        key: the recipe key to name in errors.
        revision: the revision of a Hub id; None for the default.
        dtype: the dtype of the weights, by its name in torch.
        attn: the attention implementation; None for the default of the class.
        trust_remote_code: run the repository's own code.
        shard: `layers` divides the decoder layers between the processes of a launch; with `none`
            each process holds the whole model, and so does a single process.
        device_map: the device, or a map of devices, as transformers takes it.
        layers_on_disk: leave the weights of the decoder layers in their files, and read them
            whenever the layers are run. Only for weights in floating point.
        quantize: the value of `target.quantization`; None for none.
        cache: load a GGUF file from its copy in safetensors, and write the copy if there is none.

    Returns:
        The model and its tokenizer.

    Raises:
        UserError: for missing or broken files, missing weights, and models that cannot be shared or
            quantized.
        ResourceError: when the Hub fails.
    """
    # Find the files, and a safetensors copy of a GGUF file.
    hide_bars_of_transformers()
    _, gguf_name = split_gguf(path)
    is_gguf = gguf_name is not None
    find_copy = (lambda file: convert_gguf(file, dtype, key=key)) if cache else (lambda _: None)
    folder, options = _locate_model(path, key, revision, trust_remote_code, find_copy)
    expected = (GGUF if is_gguf else TARGETS) + (
        "" if attn is None else ", and a target.attn that its class has"
    )
    load_options = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": attn,
        "output_loading_info": True,
        **options,
    }
    if "gguf_file" in options:
        load_options["quantization_config"] = GgufConfig(dequantize=True)

    # Load tokenizer and config before any weights.
    with _convert_reading_errors(key, path, expected), use_fast_metadata():
        tokenizer = load_working_tokenizer(folder, **options)
        config = AutoConfig.from_pretrained(folder, **options)
        _check_generates(config, key, path)
        # A GGUF file that is loaded itself, and not from its copy, counts as quantized, too.
        is_quantized = (
            "gguf_file" in options or getattr(config, "quantization_config", None) is not None
        )

        # Quantize on loading, if the recipe says so.
        if quantize is not None:
            _check_can_quantize(quantize, is_gguf, is_quantized, dtype)
            load_options["quantization_config"] = build_quantization(quantize)
            is_quantized = True

        # Choose where the layers go: to the disk, divided between processes, or to the device.
        disk_map = None
        if layers_on_disk and not is_quantized:
            disk_map = _build_disk_map(config, device_map, trust_remote_code)
        if disk_map is not None:
            # accelerate warns about parameters that are offloaded, which is intended here.
            logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        if shard == "none" or disk_map is not None or count_processes() == 1:
            model_class = find_auto_class(config)
        else:
            model_class = shard_class(
                config, is_quantized=is_quantized, trust_remote_code=trust_remote_code
            )

        # Load the weights. `end_tokens` raises an error for end tokens that are no token ids.
        model, report = model_class.from_pretrained(
            folder, device_map=disk_map or device_map, **load_options
        )
        end_tokens(model.generation_config, model.config.get_text_config())

    _check_no_missing_weights(report["missing_keys"], key, path)
    if dtype == "float32" and is_plain(model):
        model.float()  # Weights that transformers had to dequantize are in bfloat16.
    return model, tokenizer


def _check_can_quantize(kind: str, is_gguf: bool, is_quantized: bool, dtype: str) -> None:
    """Raise UserError if the weights of a model cannot be quantized while they are loaded.

    Args:
        kind: the value of `target.quantization`.
        is_gguf: whether the weights are in a GGUF file.
        is_quantized: whether the weights of the checkpoint are quantized already.
        dtype: the dtype that weights are loaded in.
    """
    if is_gguf or is_quantized or dtype != "bfloat16":
        obstacle = f"target.dtype={dtype}"
        if is_gguf:
            obstacle = "a GGUF file"
        elif is_quantized:
            obstacle = "a quantized checkpoint"
        raise UserError(
            "target.quantization",
            got=f"{kind} with {obstacle}",
            expected="null, or a checkpoint in floating point and target.dtype=bfloat16",
        )


def _check_no_missing_weights(missing_names: set[str], key: str, name: str) -> None:
    """Raise UserError if weights are missing in the files of a model.

    transformers initializes missing weights at random and only warns about them.
    """
    if missing_names:
        raise UserError(
            key,
            got=f"{name} without {', '.join(sorted(missing_names)[:3])}",
            expected="every weight that its config asks for",
        )


def _check_generates(config: PreTrainedConfig, key: str, name: str) -> None:
    """Raise UserError for an encoder-decoder, which does not continue its prompt.

    A model that is only an encoder (e.g. BERT) cannot be recognized by its config. `examine_model`
    refuses it later, once it is loaded, because of its logits.
    """
    if config.is_encoder_decoder:
        raise UserError(
            key,
            got=f"{name}, an encoder-decoder"
            f" ({', '.join(config.architectures or [config.model_type])})",
            expected="a causal language model (decoder only)",
        )


def build_quantization(kind: str) -> BitsAndBytesConfig | TorchAoConfig:
    """Return transformers' config for a kind of `target.quantization`.

    Args:
        kind: `fp8` or `bitsandbytes-8bit`.

    Raises:
        UserError: if the package or the hardware that it needs is missing.
    """
    # Check that the package for this kind is installed.
    key = "target.quantization"
    package = {"fp8": "torchao", "bitsandbytes-8bit": "bitsandbytes"}[kind]
    if find_spec(package) is None:
        raise UserError(
            key,
            got=f"{kind} without {package}",
            expected="an installed package",
            text=f"{key}: {package} is not installed. Run: pip install {package}",
        )
    if kind != "fp8":
        return BitsAndBytesConfig(load_in_8bit=True)

    # fp8 needs a GPU with tensor cores for it.
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise UserError(
            key,
            got="fp8 without a GPU that supports it",
            expected="null, or a GPU with compute capability 8.9 or higher",
        )

    # This import is slow, so it is only made where it is needed. With PerRow, weights get one scale
    # per output channel and activations one per token.
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))


def load_working_tokenizer(
    folder: str | Path, **options: str | bool | None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer, and check that it can tokenize a text.

    AutoTokenizer accepts settings of a wrong type, which fail only when a text is tokenized. So one
    letter is tokenized here. If the folder is the safetensors copy of a GGUF file,
    `restore_tokenizer` first removes rules that the GGUF file does not have.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    restore_tokenizer(tokenizer, folder)
    tokenizer("a")
    return tokenizer


def read_without_weights(
    folder: Path, *, key: str, name: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model on the meta device, and its tokenizer.

    Args:
        folder: the folder with the config and the tokenizer.
        key: the recipe key to name in errors.
        name: the name of the model in errors.

    Returns:
        The model without weights, and the tokenizer.

    Raises:
        UserError: if the files are not those of a causal language model.
    """
    with _convert_reading_errors(
        key, name, "the config and the tokenizer of a causal language model"
    ):
        # An explicit False also keeps transformers from asking for consent at a terminal.
        tokenizer = load_working_tokenizer(folder, trust_remote_code=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return find_auto_class(config).from_config(config), tokenizer


def read_gguf_config(folder: Path, file: str, *, key: str, name: str) -> PreTrainedConfig:
    """Read the config of a GGUF file with transformers.

    Args:
        folder: the folder of the file.
        file: the name of the file.
        key: the recipe key to name in errors.
        name: the name of the model in errors.

    Raises:
        UserError: if transformers cannot read the file.
    """
    check_gguf(folder / file, key)
    with _convert_reading_errors(key, name, GGUF), use_fast_metadata():
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=file)
        return config


def _build_disk_map(
    config: PreTrainedConfig, device: str, trust_remote_code: bool
) -> dict[str, str] | None:
    """Return a device map with the decoder layers on the disk, and all other parts on a device.

    Args:
        config: the config of the model.
        device: the device.
        trust_remote_code: run the repository's own code.

    Returns:
        The device map, which names the place of each part. None for a class that converts its
        weights when they are loaded, such as one that stacks experts, because transformers would
        write the converted weights to the disk.
    """
    # A class with converters stores its weights in another form than it computes with.
    with torch.device("meta"):
        model = find_auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    if any(
        isinstance(conversion, WeightConverter)
        for conversion in get_model_conversion_mapping(model)
    ):
        return None

    # Walk down from the whole model. A list of layers goes to the disk as one part, and a part
    # without such a list goes to the device as one part.
    lists = find_layer_lists(model, find_backbone(model))
    places: dict[str, str] = {}
    for name, part in model.named_modules():
        # The place of a part covers everything inside it.
        if any(name.startswith(f"{module_name}.") for module_name in places):
            continue
        if part in lists or not any(submodule in lists for submodule in part.modules()):
            places[name] = "disk" if part in lists else device
        else:
            # A part around such a list is divided further. Only its own parameters and buffers,
            # outside of any submodule, get their place here.
            places |= {
                f"{name}.{tensor}".removeprefix("."): device
                for tensor, _ in (
                    *part.named_parameters(recurse=False),
                    *part.named_buffers(recurse=False),
                )
            }
    return places


def is_plain(model: PreTrainedModel) -> bool:
    """Return whether a model's weights are neither quantized nor sharded between processes.

    Only such weights can be converted to another dtype.
    """
    return getattr(model, "hf_quantizer", None) is None and not is_shared(model)


def read_tokenizer(files: "TargetFiles") -> tuple[PreTrainedTokenizerBase, tuple[int, ...], int]:
    """Read the tokenizer of a target, its end tokens and its longest context, but no weights.

    This is enough for a target that runs in a server.

    Args:
        files: the target's files.

    Returns:
        The tokenizer, the ids of all tokens that end a generation, and the longest context in
        tokens.

    Raises:
        UserError: if there is no such target.
        ResourceError: when the Hub fails.
    """
    # Find the files. A GGUF file that was converted before is read from its copy.
    key = "target.model"
    path, options = _locate_model(
        files.name, key, files.revision, files.trust_remote_code, find_converted
    )
    with (
        _convert_reading_errors(key, files.name, GGUF if "gguf_file" in options else TARGETS),
        use_fast_metadata(),
    ):
        tokenizer = load_working_tokenizer(path, **options)
        config = AutoConfig.from_pretrained(path, **options)
        _check_generates(config, key, files.name)

        # The generation config, the config and the tokenizer may each declare end tokens that the
        # other two do not declare.
        try:
            generation = GenerationConfig.from_pretrained(path, **options)
        except OSError:  # A checkpoint may have no generation config.
            generation = GenerationConfig.from_model_config(config)
        ends = end_tokens(generation, config, tokenizer)
    return tokenizer, tuple(sorted(ends)), find_max_length(config.get_text_config(), tokenizer)


def end_tokens(*declaring: object) -> set[int]:
    """Return the ids of all tokens that end a generation.

    Args:
        *declaring: configs or tokenizers, whose attribute `eos_token_id` names such tokens.

    Raises:
        ValueError: for an `eos_token_id` that is no token id.
    """
    # `eos_token_id` is one id, a list of ids, or None.
    ends: list[Any] = []
    for config in declaring:
        ids = getattr(config, "eos_token_id", None)
        if isinstance(ids, list):
            ends.extend(ids)
        elif ids is not None:
            ends.append(ids)
    invalid_ids = [token for token in ends if type(token) is not int]
    if invalid_ids:
        raise ValueError(f"eos_token_id {invalid_ids[0]!r}")
    return set(ends)


def find_max_length(text_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the longest context of a target in tokens.

    The config of a model without positions, or with relative positions, does not name a longest
    context. Then the tokenizer's `model_max_length` is returned.
    """
    return int(getattr(text_config, "max_position_embeddings", None) or tokenizer.model_max_length)


def merge_adapter(model: PreTrainedModel, adapter: str, *, base: str) -> PreTrainedModel:
    """Merge a peft LoRA adapter into the weights of a model (arXiv 2106.09685).

    An adapter names the model that it was trained for, by a path or a Hub id. The last part of this
    name must equal the last part of `base`; small and capital letters count as equal.

    Args:
        model: the model.
        adapter: folder or Hub id of the adapter.
        base: the path or Hub id that the model was loaded from.

    Returns:
        The merged model.

    Raises:
        UserError: for an adapter of another model, for an adapter of another kind, and for tensors
            that the model does not take.
    """
    key = "target.adapter"

    # Read the adapter, which must be a LoRA adapter of this base.
    with _convert_reading_errors(key, adapter, "the folder or Hub id of a LoRA adapter"):
        config = peft.PeftConfig.from_pretrained(adapter)
        weights = peft.utils.load_peft_weights(adapter, device="cpu")
    if config.peft_type != "LORA":
        raise UserError(
            key, got=f"{adapter}, a {config.peft_type} adapter", expected="a LoRA adapter"
        )
    base_name = config.base_model_name_or_path
    if base_name and Path(base_name).name.lower() != Path(resolve(base)).name.lower():
        raise UserError(
            key, got=f"{adapter}, an adapter of {base_name}", expected=f"an adapter of {base}"
        )
    # The adapter is only merged, so its weights need no gradients. Without the name of the base,
    # peft does not warn that the model has another name; the name was checked above.
    config.inference_mode = True
    config.base_model_name_or_path = None

    # Put the adapter on the model. All of its tensors must fit, and no LoRA tensor may be missing.
    with _convert_reading_errors(key, adapter, f"an adapter of {base}"):
        adapted = peft.get_peft_model(model, config)
        # This raises an error for tensors of another shape.
        loaded: Any = peft.set_peft_model_state_dict(adapted, weights)
    missing_names = [name for name in loaded.missing_keys if "lora_" in name]
    unfit_names = [*loaded.unexpected_keys, *missing_names]
    if unfit_names:
        raise UserError(
            key,
            got=f"{adapter}, whose tensors do not fit {base} ({unfit_names[0]})",
            expected=f"an adapter of {base}",
        )
    # Add each product of LoRA matrices to its weight, and remove peft's wrappers.
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged
