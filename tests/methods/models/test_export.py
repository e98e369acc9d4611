"""Draft models: their own folder for vLLM and SGLang, a GGUF file for llama.cpp."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdistill.export import export
from specdistill.methods.models.checkpoint import load_draft_model, save_draft_model, with_both_spellings
from specdistill.methods.models.gguf import WORDS_OF_LLAMA3, WORDS_OF_QWEN2
from specdistill.project import PICO
from specdistill.targets.files import TargetFiles
from tests.draft_models import LLAMA3
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer


def save(folder: Path, model: PreTrainedModel | None = None, tokenizer: Any = None) -> PreTrainedModel:
    model = model or tiny_target_model(num_layers=2)
    save_draft_model(model, tokenizer or tiny_tokenizer(), folder)
    return model


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Keys, and tensors in float32 with rows first."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = values.reshape(tuple(reversed(tensor.shape.tolist())))
    return keys, tensors


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_small_draft_comes_back_bit_for_bit(engine: str, tmp_path: Path) -> None:
    save(tmp_path / "ours", tiny_target_model(num_layers=2).bfloat16())
    assert export(tmp_path / "ours", engine, tmp_path / "out").method == "draft_model"
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    load_draft_model(tmp_path / "out")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"SERVE.md"}


def test_its_config_is_for_older_and_newer_readers(tmp_path: Path) -> None:
    save(tmp_path / "ours")
    export(tmp_path / "ours", "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_both_spellings_of_a_rotary_embedding() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    both = {"rope_theta": 10000.0, "rope_scaling": scaling, "rope_parameters": LLAMA3}
    assert with_both_spellings({"rope_parameters": LLAMA3}) == both
    older = with_both_spellings({"rope_theta": 10000.0, "rope_scaling": scaling})
    assert older == {**both, "rope_parameters": LLAMA3}
    by_kind = {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": LLAMA3}}
    assert with_both_spellings(by_kind) == by_kind


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "ours")
    for engine in ("vllm", "sglang", "gguf"):
        with refused("engine", f"{engine} for"):
            export(tmp_path / "ours", engine, tmp_path / "out", TargetFiles.of("pico"))


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k, row by row: the two halves of a head take turns."""
    size = weight.shape[0] // heads
    order = [head * size + half * (size // 2) + index for head in range(heads) for index in range(size // 2) for half in (0, 1)]
    return weight[order]


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 0.0), ("f16", 1e-3), ("q8_0", 1e-2)])
def test_gguf_holds_the_weights_by_hand(dtype: str, tolerance: float, tmp_path: Path) -> None:
    model = save(tmp_path / "ours")
    export(tmp_path / "ours", "gguf", tmp_path / "out", dtype=dtype)
    keys, tensors = read_gguf(tmp_path / "out" / f"draft-{dtype}.gguf")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    expected = {"token_embd": state["model.embed_tokens.weight"], "output_norm": state["model.norm.weight"]}
    expected["output"] = state["lm_head.weight"]
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(2):
        expected |= {f"blk.{layer}.{here}": state[f"model.layers.{layer}.{there}.weight"] for here, there in parts.items()}
        expected[f"blk.{layer}.attn_q"] = permuted(expected[f"blk.{layer}.attn_q"], 2)
        expected[f"blk.{layer}.attn_k"] = permuted(expected[f"blk.{layer}.attn_k"], 1)
    assert tensors.keys() == {f"{name}.weight" for name in expected}
    for name, tensor in expected.items():
        difference = np.abs(tensors[f"{name}.weight"] - tensor.numpy()).max()
        assert difference <= (0 if tensor.dim() == 1 else tolerance), name
    sizes = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 260,
        "general.file_type": {"f32": 0, "f16": 1, "q8_0": 7}[dtype],
    }
    assert {name: keys[name] for name in sizes} == sizes


def test_gguf_holds_the_tokenizer(tmp_path: Path) -> None:
    export(PICO, "gguf", tmp_path / "out", TargetFiles.of("pico"))
    keys, tensors = read_gguf(tmp_path / "out" / "draft-f16.gguf")
    _, tokenizer = load_draft_model("pico")
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(list(range(1024)))
    assert keys["tokenizer.ggml.token_type"] == [3] * 4 + [1] * 1020  # four special ones
    merges = json.loads((PICO / "tokenizer.json").read_text())["model"]["merges"]
    assert keys["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert keys["tokenizer.ggml.eos_token_id"] == 0 and keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["tokenizer.chat_template"] == (PICO / "chat_template.jinja").read_text()
    assert "output.weight" not in tensors  # tied


def test_gguf_pads_the_tokens_to_the_embedding(tmp_path: Path) -> None:
    save(tmp_path / "ours", tiny_target_model(num_layers=2, vocab_size=264))
    export(tmp_path / "ours", "gguf", tmp_path / "out")
    keys, _ = read_gguf(tmp_path / "out" / "draft-f16.gguf")
    assert keys["tokenizer.ggml.tokens"][260:] == ["[PAD260]", "[PAD261]", "[PAD262]", "[PAD263]"]
    assert keys["tokenizer.ggml.token_type"][260:] == [gguf.TokenType.UNUSED] * 4


def test_gguf_holds_llama_3s_rotary_factors(tmp_path: Path) -> None:
    model: Any = tiny_target_model(num_layers=2)
    model.config.rope_parameters = LLAMA3
    save(tmp_path / "ours", model)
    export(tmp_path / "ours", "gguf", tmp_path / "out")
    _, tensors = read_gguf(tmp_path / "out" / "draft-f16.gguf")
    plain = 10000.0 ** -(np.arange(0, 32, 2) / 32)
    scaled = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path / "ours")).inv_freq.numpy()
    assert np.allclose(plain / tensors["rope_freqs.weight"], scaled, rtol=1e-6) and not np.allclose(plain, scaled)


def digits_first() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    steps = pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence(list(steps))


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignores_merges", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), False, "gpt-2"),
        (digits_first(), False, "smollm"),
        (split(WORDS_OF_LLAMA3), True, "llama-bpe"),
        (split(WORDS_OF_LLAMA3), False, "smaug-bpe"),
        (split(WORDS_OF_QWEN2), False, "qwen2"),
        (split(r"\w+|\W+"), False, None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), False, None),
        (pre_tokenizers.Whitespace(), False, None),
    ],
)
def test_gguf_names_how_text_is_cut(
    pre_tokenizer: pre_tokenizers.PreTokenizer, ignores_merges: bool, name: str | None, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.backend_tokenizer.model.ignore_merges = ignores_merges
    save(tmp_path / "ours", tokenizer=tokenizer)
    if name is None:
        with refused("engine", "gguf for"):
            export(tmp_path / "ours", "gguf", tmp_path / "out")
        return
    export(tmp_path / "ours", "gguf", tmp_path / "out")
    assert read_gguf(tmp_path / "out" / "draft-f16.gguf")[0]["tokenizer.ggml.pre"] == name


def test_gguf_refuses_other_models(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3Config(vocab_size=260, num_hidden_layers=1, **sizes)
    save(tmp_path / "qwen", Qwen3ForCausalLM(config))
    model: Any = tiny_target_model(num_layers=2)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model.config.rope_parameters = yarn
    save(tmp_path / "yarn", model)
    for name in ("qwen", "yarn"):
        with refused("engine", "gguf for"):
            export(tmp_path / name, "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "key", "got"),
    [
        ({"engine": "gguf", "dtype": "q4_k"}, "dtype", "q4_k"),
        ({"engine": "vllm", "dtype": "f16"}, "dtype", "f16 with engine vllm"),
        ({"engine": "speculators"}, "engine", "speculators for "),
    ],
)
def test_settings_that_do_not_apply(arguments: dict[str, str], key: str, got: str, tmp_path: Path) -> None:
    save(tmp_path / "ours")
    with refused(key, got):
        export(tmp_path / "ours", output_dir=tmp_path / "out", **arguments)
