"""Write a plain Llama or Qwen2 with pico's tokenizer as a GGUF file, a target for tests.

The file is as llama.cpp's converter writes it. llama.cpp rotates neighbouring pairs where
transformers rotates halves, so rows of a Llama's q and k are permuted. Norms stay in float32.
"""

from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

TYPES = {
    "f32": (Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def write_gguf(folder: Path, path: Path, dtype: str) -> Path:
    """Write the model in a folder to a file, and return that."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    config: Any = model.config
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[config.model_type]
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_file_type(TYPES[dtype][1])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    special = dict.fromkeys(tokenizer.all_special_ids, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(config.vocab_size))))
    writer.add_token_types(
        [special.get(token, gguf.TokenType.NORMAL) for token in range(config.vocab_size)]
    )
    vocabulary = gguf.SpecialVocab(folder, load_merges=True, n_vocab=config.vocab_size)
    vocabulary.add_special_token["bos"] = False
    vocabulary.add_to_gguf(writer, quiet=True)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if f".{part}." in name and config.model_type == "llama":
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = TYPES[dtype][0] if tensor.dim() > 1 else Type.F32
        values: Any = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(
            str(names.get_name(name, try_suffixes=(".weight", ".bias"))), values, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
