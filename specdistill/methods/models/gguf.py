"""A draft model as one GGUF file for llama.cpp: sizes, tokenizer and weights of a Llama with a byte-level BPE tokenizer.

llama.cpp rotates neighbouring pairs where transformers rotates halves, so rows of q and k are permuted. Norms stay in float32. How text
is split before BPE is code in llama.cpp, chosen by a name; only splits that it is known to share are exported.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdistill.errors import UserError, refusing
from specdistill.files.documents import read_json
from specdistill.methods.checkpoint import check_tensors, read_tensors
from specdistill.methods.models.layers import is_plain_llama
from specdistill.methods.target_record import as_keys, recorded_target
from specdistill.targets.loading import read_without_weights

# Of the weights, and of the file that has most of them so.
TYPES = {
    "f32": (Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
ROPES = ("default", "linear", "llama3")
WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS_OF_QWEN2 = WORDS_OF_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Steps of the split, and whether a word that is a token is taken without merging -> llama.cpp's name.
PRE_TOKENIZERS = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((WORDS_OF_LLAMA3, "bytes"), True): "llama-bpe",
    ((WORDS_OF_LLAMA3, "bytes"), False): "smaug-bpe",
    ((WORDS_OF_QWEN2, "bytes"), False): "qwen2",
}


def write_gguf(folder: Path, output: Path, dtype: str) -> None:
    """Write `draft-<dtype>.gguf` into a folder. Raises UserError, before that, for a model or a tokenizer of another kind."""
    model, tokenizer = read_without_weights(folder, key="draft", name=str(folder))
    config, pre_tokenizer = model.config, check_gguf(model, folder, folder)
    record = as_keys(recorded_target(folder, "draft"))
    tensors = read_tensors(folder, "draft")
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    check_tensors(model.state_dict(), tensors, folder, "draft", what="a Llama", optional=tied)
    for name in tied & tensors.keys():
        del tensors[name]
    writer = gguf.GGUFWriter(output / f"draft-{dtype}.gguf", "llama")
    _add_sizes(writer, config, folder.name, dtype)
    _add_tokenizer(writer, folder, tokenizer, config.vocab_size, pre_tokenizer)
    _add_weights(writer, config, tensors, dtype)
    for name, value in record.items():
        writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_gguf(model: Any, tokenizer: Path, name: Path | str) -> str:
    """llama.cpp's name for how the tokenizer of a folder splits text. Raises UserError, calling the draft `name`, where there is none, and
    for a model of another kind.
    """
    config = model.config
    if not is_plain_llama(model) or config.rope_parameters.get("rope_type", "default") not in ROPES:
        got = f"gguf for {name}, a {config.model_type} with rotary frequencies {config.rope_parameters}"
        raise UserError("engine", got=got, expected="a Llama without biases, with plain, linear or Llama-3 frequencies")
    return _pre_tokenizer(tokenizer, name)


def _add_sizes(writer: gguf.GGUFWriter, config: Any, name: str, dtype: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(TYPES[dtype][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, tokenizer: Any, vocab_size: int, pre_tokenizer: str) -> None:
    name_of = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for index in range(vocab_size):  # a padded embedding has rows of no token
        tokens.append(name_of.get(index, f"[PAD{index}]"))
        kind = gguf.TokenType.NORMAL if index in name_of else gguf.TokenType.UNUSED
        if index in added:
            kind = gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    special.add_special_token["bos"] = (
        tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    )
    special.add_to_gguf(writer, quiet=True)


def _add_weights(writer: gguf.GGUFWriter, config: Any, tensors: dict[str, Tensor], dtype: str) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    if config.rope_parameters.get("rope_type") == "llama3":
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / LlamaRotaryEmbedding(config).inv_freq).numpy())
    for name, tensor in tensors.items():
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f".{part}." in name:
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = TYPES[dtype][0] if tensor.dim() > 1 else Type.F32
        if kind == Type.Q8_0 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[Type.Q8_0][0]:
            kind = Type.F16  # as llama.cpp falls back for rows that are no whole number of blocks
        values: np.ndarray[Any, Any] = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight",))), values, raw_dtype=kind)


def _pre_tokenizer(folder: Path, name: Path | str) -> str:
    """llama.cpp's name for the tokenizer's split; raises UserError when none is known to be the same."""
    path = folder / "tokenizer.json"
    with refusing(
        (OSError, ValueError, KeyError, TypeError, AttributeError), "draft", path, "the tokenizer.json of a fast tokenizer"
    ):
        tokenizer = read_json(path)
        model, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {}
        # llama.cpp normalises nothing; that Qwen composes accents first is ignored by its own converter, too.
        steps = _steps(tokenizer.get("pre_tokenizer") or {}) if normalizer.get("type", "NFC") == "NFC" else ()
        split = PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges")))) if model.get("type") == "BPE" else None
    if split is None:
        got = f"gguf for {name}, whose tokenizer is a {model.get('type')} over {' then '.join(steps) or 'unknown parts'}"
        raise UserError("engine", got=got, expected="byte-level BPE that splits text as GPT-2, SmolLM, Llama 3 or Qwen 2 do")
    return split


def _steps(pre_tokenizer: dict[str, Any]) -> tuple[str, ...]:
    """A pre-tokenizer's steps as `PRE_TOKENIZERS` names them; an unknown one by its own type."""
    kind = pre_tokenizer.get("type", "nothing")
    if kind == "Sequence":
        return tuple(step for part in pre_tokenizer["pretokenizers"] for step in _steps(part))
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space"):
        return ("words" if pre_tokenizer.get("use_regex", True) else "bytes",)
    if kind == "Digits" and pre_tokenizer.get("individual_digits"):
        return ("digits",)
    if kind == "Split" and pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert"):
        return (pre_tokenizer["pattern"].get("Regex", kind),)
    return (kind,)
