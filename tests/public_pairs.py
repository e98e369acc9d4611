"""Public targets with their drafts, as config.json and tensors without content.

Further pairs are wrong in one thing each.

Names, shapes and dtypes are the published checkpoints'; sizes that are known from elsewhere are
checked in tests/advice/plan/test_public_pairs.py. A file's header is true and its data is a hole in
the file: gigabytes in a few blocks of disk. Weights of drafts have one element that is not zero,
and vocabulary maps are written whole, since readers look at both.

    target, draft = PAIRS["llama-eagle3"].write(tmp_path)

Symbols: H hidden size, I MLP width, V vocabulary, W draft vocabulary, N query heads, G key/value
heads, d head size.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I64": 8, "BOOL": 1}
FLOATS = ("F32", "BF16", "F16", "F8_E4M3")
SHARD = 5 * 10**9
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape, by name


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub.

    base: the model that its card names as what it is for. filled: whether every tensor has a number
    that is not zero. written: bytes of tensors that are not a hole. files: further ones, by name.
    tokenizer: the name of a family, whose members have equal tokenizers of a few tokens; None for a
    head, which has none.
    """

    name: str
    config: dict[str, Any]
    tensors: Tensors
    base: str | None = None
    tokenizer: str | None = None
    filled: bool = False
    written: Mapping[str, bytes] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    pickled: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(map(_size, self.tensors.values()))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for dtype, shape in self.tensors.values())

    def write(self, folder: Path) -> Path:
        """Write the repository's files and return their folder."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            json.dumps(self.config, indent=2) + "\n", encoding="utf-8"
        )
        (folder / "README.md").write_text(self._card(), encoding="utf-8")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if self.tokenizer:
            _tokenizer(self.tokenizer).save_pretrained(folder)
        if self.pickled:
            dtypes = {"F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}
            weights = {
                name: torch.ones(1, dtype=dtypes[dtype]).expand(shape)
                for name, (dtype, shape) in self.tensors.items()
            }
            torch.save(weights, folder / "pytorch_model.bin")
            return folder
        split = split_state_dict_into_shards_factory(
            self.tensors,
            get_storage_size=_size,
            get_storage_id=lambda tensor: None,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=SHARD,
        )
        for name, inside in (split.filename_to_tensors or {"model.safetensors": []}).items():
            _write_sparse(
                folder / name,
                {each: self.tensors[each] for each in inside},
                self.written,
                filled=self.filled,
            )
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(
                json.dumps(index), encoding="utf-8"
            )
        return folder

    def _card(self) -> str:
        base = f"base_model: {self.base}\n" if self.base else ""
        return f"---\nlibrary_name: transformers\n{base}---\n"


def _size(tensor: tuple[str, tuple[int, ...]]) -> int:
    return BYTES[tensor[0]] * math.prod(tensor[1])


def _write_sparse(
    path: Path, tensors: Tensors, written: Mapping[str, bytes], *, filled: bool
) -> None:
    """Write a safetensors file whose data is a hole but for `written` tensors.

    The file is an eight-byte length, a JSON header, and data. filled: the last byte of every
    floating tensor's first element is written, too, which makes that 2^-7; so is that of every
    embedding, of which a draft's may be a copy of its target's.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _size((dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, (dtype, shape) in tensors.items():
            first = 8 + len(text) + header[name]["data_offsets"][0]
            if name in written:
                assert len(written[name]) == _size((dtype, shape)), name
                file.seek(first)
                file.write(written[name])
            elif dtype in FLOATS and (filled or name.endswith("embed_tokens.weight")):
                file.seek(first + BYTES[dtype] - 1)
                file.write(b"\x20" if dtype == "F16" else b"\x3c")


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes; families differ in their order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=family < "n")
    tokens = ["<|end|>", family, *letters]
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token=None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )


@dataclass(frozen=True)
class Pair:
    """A target and its draft.

    method: what a user names. draft: None where its layer is in the target's own checkpoint.
    """

    method: str
    target: Repository
    draft: Repository | None

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both, and return the target's folder and the draft's, which may be the same one."""
        target = self.target.write(folder / "target")
        return target, self.draft.write(folder / "draft") if self.draft else target


# Tensors


def attention(
    prefix: str, H: int, N: int, G: int, d: int, *, inputs: int | None = None, norms: bool = False
) -> Tensors:
    """Return q, k, v that read `inputs` (H), and o; with a norm of queries and of keys."""
    read = inputs or H
    shapes = {"q": (N * d, read), "k": (G * d, read), "v": (G * d, read), "o": (H, N * d)}
    tensors: Tensors = {
        f"{prefix}self_attn.{part}_proj.weight": ("BF16", shape) for part, shape in shapes.items()
    }
    return tensors | (
        {f"{prefix}self_attn.{part}_norm.weight": ("BF16", (d,)) for part in "qk"} if norms else {}
    )


def mlp(prefix: str, H: int, I: int) -> Tensors:  # noqa: E741
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    return {f"{prefix}{part}_proj.weight": ("BF16", shape) for part, shape in shapes.items()}


def norms(prefix: str, H: int, *names: str) -> Tensors:
    return {f"{prefix}{name}.weight": ("BF16", (H,)) for name in names}


LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def table(name: str, V: int, H: int) -> Tensors:
    return {name: ("BF16", (V, H))}


def decoder(
    H: int,
    I: int,  # noqa: E741
    N: int,
    G: int,
    d: int,
    V: int,
    depth: int,
    *,
    tied: bool,
    norms_of_qk: bool = False,
) -> Tensors:
    """Return the tensors of a Llama or a Qwen3."""
    tensors = table("model.embed_tokens.weight", V, H)
    for index in range(depth):
        layer = f"model.layers.{index}."
        tensors |= (
            attention(layer, H, N, G, d, norms=norms_of_qk)
            | mlp(f"{layer}mlp.", H, I)
            | norms(layer, H, *LAYER_NORMS)
        )
    return tensors | norms("model.", H, "norm") | ({} if tied else table("lm_head.weight", V, H))


def in_dtype(tensors: Tensors, dtype: str) -> Tensors:
    return {
        name: (dtype if was == "BF16" else was, shape) for name, (was, shape) in tensors.items()
    }


def eagle3(layer: str, H: int, I: int, N: int, G: int, d: int, V: int, W: int | None) -> Tensors:  # noqa: E741
    """Return the tensors of a head whose first layer is called `layer`.

    W: of its own output layer; None for a head that borrows the target's.
    """
    tensors: Tensors = {"fc.weight": ("BF16", (H, 3 * H))}
    tensors |= attention(layer, H, N, G, d, inputs=2 * H) | mlp(f"{layer}mlp.", H, I)
    tensors |= norms(layer, H, "hidden_norm", *LAYER_NORMS) | norms("", H, "norm")
    if W is not None:
        tensors |= table("lm_head.weight", W, H) | {"d2t": ("I64", (W,)), "t2d": ("BOOL", (V,))}
    return tensors


def vocabulary_maps(V: int, W: int) -> dict[str, bytes]:
    """Return the vocabulary maps of a draft.

    The first half of the draft's tokens are the target's first; the others are spread over the rest
    of its vocabulary.
    """
    half = W // 2
    ids = np.concatenate([np.arange(half), np.linspace(half, V - 1, W - half).astype(np.int64)])
    in_draft = np.zeros(V, dtype=bool)
    in_draft[ids] = True
    return {"d2t": (ids - np.arange(W)).tobytes(), "t2d": in_draft.tobytes()}


# Llama-3.1-8B and its drafts

LLAMA_8B = Repository(
    "meta-llama/Llama-3.1-8B-Instruct",
    {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    decoder(4096, 14336, 32, 8, 128, 128256, 32, tied=False),
    tokenizer="llama3",
)  # fmt: skip

LLAMA_1B = Repository(
    "meta-llama/Llama-3.2-1B-Instruct",
    LLAMA_8B.config | {
        "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA_8B.config["rope_scaling"] | {"factor": 32.0},
    },
    decoder(2048, 8192, 32, 8, 64, 128256, 16, tied=True),
    tokenizer="llama3",
    filled=True,
)  # fmt: skip

# As SafeAILab writes heads: a plain Llama's config with one layer
LLAMA_HEAD = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 2048, "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16", "vocab_size": 128256,
}  # fmt: skip
LLAMA_EAGLE = Repository(
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    LLAMA_HEAD | {"rope_theta": 500000.0, "bias": False},
    in_dtype(
        table("embed_tokens.weight", 128256, 4096)
        | {"fc.weight": ("BF16", (4096, 8192))}
        | attention("layers.0.", 4096, 32, 8, 128)
        | mlp("layers.0.mlp.", 4096, 14336)
        | norms("layers.0.", 4096, "post_attention_layernorm"),
        "F16",
    ),
    base=LLAMA_8B.name,
    filled=True,
)
LLAMA_EAGLE3 = Repository(
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    LLAMA_HEAD | {"draft_vocab_size": 32000},
    in_dtype(eagle3("midlayer.", 4096, 14336, 32, 8, 128, 128256, 32000), "F16"),
    base=LLAMA_8B.name,
    filled=True,
    written=vocabulary_maps(128256, 32000),
)

# Qwen3-8B and its drafts

QWEN3_8B = Repository(
    "Qwen/Qwen3-8B",
    {
        "architectures": ["Qwen3ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    decoder(4096, 12288, 32, 8, 128, 151936, 36, tied=False, norms_of_qk=True),
    tokenizer="qwen3",
)  # fmt: skip

# As speculators writes heads
QWEN3_EAGLE3 = Repository(
    "RedHatAI/Qwen3-8B-speculator.eagle3",
    {
        "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "norm_before_residual": True, "speculators_model_type": "eagle3",
        "target_hidden_size": None, "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3,
                    "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "transformer_layer_config": {
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
            "vocab_size": 151936,
        },
    },
    table("embed_tokens.weight", 151936, 4096)
    | eagle3("layers.0.", 4096, 12288, 32, 8, 128, 151936, 32000),
    base=QWEN3_8B.name,
    filled=True,
    written=vocabulary_maps(151936, 32000),
)  # fmt: skip


def dflash(H: int, I: int, N: int, G: int, d: int, depth: int, num_aux: int) -> Tensors:  # noqa: E741
    tensors: Tensors = {"fc.weight": ("BF16", (H, num_aux * H))} | norms(
        "", H, "hidden_norm", "norm"
    )
    for index in range(depth):
        layer = f"layers.{index}."
        tensors |= (
            attention(layer, H, N, G, d, norms=True)
            | mlp(f"{layer}mlp.", H, I)
            | norms(layer, H, *LAYER_NORMS)
        )
    return tensors


QWEN3_DFLASH = Repository(
    "z-lab/Qwen3-8B-DFlash-b16",
    QWEN3_8B.config | {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "layer_types": ["full_attention"] * 5, "num_hidden_layers": 5, "num_target_layers": 36,
    },
    dflash(4096, 12288, 32, 8, 128, 5, 5),
    base=QWEN3_8B.name,
    filled=True,
)  # fmt: skip

# In the layout of AMD's models that draft in one pass; sizes and the mask's id were not read in a
# published file.
QWEN3_PARD = Repository(
    "amd/PARD-Qwen3-0.6B",
    QWEN3_8B.config | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "pard_token": 151670, "spd_type": "pard", "tie_word_embeddings": True,
    },
    decoder(1024, 3072, 16, 8, 128, 151936, 28, tied=True, norms_of_qk=True),
    tokenizer="qwen3",
    filled=True,
)  # fmt: skip

# DeepSeek-V3, which has its draft as layer 61


def fp8(name: str, *shape: int) -> Tensors:
    """Return a matrix in FP8 with a scale for each block of 128 by 128."""
    blocks = tuple(-(-size // 128) for size in shape)
    return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.weight_scale_inv": ("F32", blocks)}


def deepseek_layer(layer: str, *, experts: bool) -> Tensors:
    H, N, rank, rank_of_q, nope, rope, value = 7168, 128, 512, 1536, 128, 64, 128
    tensors = norms(layer, H, *LAYER_NORMS) | fp8(f"{layer}self_attn.q_a_proj", rank_of_q, H)
    tensors |= fp8(f"{layer}self_attn.q_b_proj", N * (nope + rope), rank_of_q)
    tensors |= fp8(f"{layer}self_attn.kv_a_proj_with_mqa", rank + rope, H)
    tensors |= fp8(f"{layer}self_attn.kv_b_proj", N * (nope + value), rank) | fp8(
        f"{layer}self_attn.o_proj", H, N * value
    )
    tensors |= norms(f"{layer}self_attn.", rank_of_q, "q_a_layernorm") | norms(
        f"{layer}self_attn.", rank, "kv_a_layernorm"
    )
    gated = [(f"{layer}mlp.", 18432)]
    if experts:
        tensors |= {
            f"{layer}mlp.gate.weight": ("BF16", (256, H)),
            f"{layer}mlp.gate.e_score_correction_bias": ("F32", (256,)),
        }
        gated = [
            (f"{layer}mlp.shared_experts.", 2048),
            *((f"{layer}mlp.experts.{index}.", 2048) for index in range(256)),
        ]
    for prefix, width in gated:
        tensors |= (
            fp8(f"{prefix}gate_proj", width, H)
            | fp8(f"{prefix}up_proj", width, H)
            | fp8(f"{prefix}down_proj", H, width)
        )
    return tensors


def deepseek() -> Tensors:
    tensors = table("model.embed_tokens.weight", 129280, 7168)
    for index in range(62):
        tensors |= deepseek_layer(f"model.layers.{index}.", experts=index >= 3)
    mtp = "model.layers.61."
    tensors |= table(f"{mtp}embed_tokens.weight", 129280, 7168) | norms(
        mtp, 7168, "enorm", "hnorm", "shared_head.norm"
    )
    tensors |= {f"{mtp}eh_proj.weight": ("BF16", (7168, 14336))} | table(
        f"{mtp}shared_head.head.weight", 129280, 7168
    )
    return tensors | norms("model.", 7168, "norm") | table("lm_head.weight", 129280, 7168)


DEEPSEEK_V3 = Repository(
    "deepseek-ai/DeepSeek-V3",
    {
        "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128,
        "vocab_size": 129280,
    },
    deepseek(),
    tokenizer="deepseek",
)  # fmt: skip

# gpt-oss and its heads


def gpt_oss_tensors(depth: int, experts: int) -> Tensors:
    """Return tensors with experts in MXFP4.

    These are blocks of 32 numbers in 16 bytes, and a byte of scale for each.
    """
    H, N, G, d, V = 2880, 64, 8, 64, 201088
    tensors = table("model.embed_tokens.weight", V, H)
    for index in range(depth):
        layer = f"model.layers.{index}."
        weights = attention(layer, H, N, G, d)
        tensors |= weights | norms(layer, H, *LAYER_NORMS)
        tensors |= {
            name.replace(".weight", ".bias"): (dtype, shape[:1])
            for name, (dtype, shape) in weights.items()
        }
        tensors |= {
            f"{layer}self_attn.sinks": ("BF16", (N,)),
            f"{layer}mlp.router.weight": ("BF16", (experts, H)),
            f"{layer}mlp.router.bias": ("BF16", (experts,)),
        }
        for part, width in (("gate_up_proj", 2 * H), ("down_proj", H)):
            tensors |= {
                f"{layer}mlp.experts.{part}_blocks": ("U8", (experts, width, H // 32, 16)),
                f"{layer}mlp.experts.{part}_scales": ("U8", (experts, width, H // 32)),
                f"{layer}mlp.experts.{part}_bias": ("BF16", (experts, width)),
            }
    return tensors | norms("model.", H, "norm") | table("lm_head.weight", V, H)


def gpt_oss(name: str, depth: int, experts: int) -> Repository:
    config = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": ["sliding_attention",
        "full_attention"] * (depth // 2),
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": depth, "num_key_value_heads": 8, "num_local_experts": experts,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head"
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip
    return Repository(name, config, gpt_oss_tensors(depth, experts), tokenizer="gpt-oss")


GPT_OSS_20B = gpt_oss("openai/gpt-oss-20b", 24, 32)
GPT_OSS_120B = gpt_oss("openai/gpt-oss-120b", 36, 128)
GPT_OSS_HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 64, "hidden_size": 2880,
    "intermediate_size": 17280,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}  # fmt: skip
# As SpecForge writes heads
GPT_OSS_20B_EAGLE3 = Repository(
    "zhuyksir/EAGLE3-gpt-oss-20b-bf16",
    GPT_OSS_HEAD
    | {
        "draft_vocab_size": 32000,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]},
    },
    eagle3("midlayer.", 2880, 17280, 64, 8, 64, 201088, 32000),
    base=GPT_OSS_20B.name,
    filled=True,
    written=vocabulary_maps(201088, 32000),
)
# As ModelOpt writes them, here without a vocabulary and an output layer of its own
GPT_OSS_120B_EAGLE3 = Repository(
    "nvidia/gpt-oss-120b-Eagle3",
    GPT_OSS_HEAD | {
        "draft_vocab_size": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 17, 32], "next_layer_regular": True,
            "parallel_draft_step": 1,
            "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        "rope_scaling": None, "rope_theta": 150000,
    },
    eagle3("layers.0.", 2880, 17280, 64, 8, 64, 201088, None),
    base=GPT_OSS_120B.name,
    filled=True,
)  # fmt: skip

# Qwen3.5, for text and images, which has its draft next to the language model


def qwen35_tensors() -> Tensors:
    H, I, N, G, d, V = 4096, 12288, 16, 4, 256, 248320  # noqa: E741
    keys, values = 16 * 128, 32 * 128
    text = "model.language_model."
    tensors = table(f"{text}embed_tokens.weight", V, H)

    def block(layer: str) -> Tensors:
        queries = attention(layer, H, N, G, d, norms=True) | {
            f"{layer}self_attn.q_proj.weight": ("BF16", (2 * N * d, H))
        }
        return queries | mlp(f"{layer}mlp.", H, I) | norms(layer, H, *LAYER_NORMS)

    for index in range(32):
        layer = f"{text}layers.{index}."
        if index % 4 == 3:
            tensors |= block(layer)
            continue
        linear: Tensors = {
            "in_proj_qkv.weight": ("BF16", (2 * keys + values, H)),
            "in_proj_z.weight": ("BF16", (values, H)),
            "in_proj_b.weight": ("BF16", (32, H)), "in_proj_a.weight": ("BF16", (32, H)),
            "conv1d.weight": ("BF16", (2 * keys + values, 1, 4)), "dt_bias": ("BF16", (32,)),
            "A_log": ("F32", (32,)),
            "norm.weight": ("F32", (128,)), "out_proj.weight": ("BF16", (H, values)),
        }  # fmt: skip
        tensors |= {f"{layer}linear_attn.{name}": tensor for name, tensor in linear.items()}
        tensors |= mlp(f"{layer}mlp.", H, I) | norms(layer, H, *LAYER_NORMS)
    tensors |= norms(text, H, "norm") | table("lm_head.weight", V, H)  # without the vision tower
    fuse: Tensors = {"mtp.fc.weight": ("BF16", (H, 2 * H))}
    return (
        tensors
        | fuse
        | block("mtp.layers.0.")
        | norms("mtp.", H, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    )


QWEN35_9B = Repository(
    "Qwen/Qwen3.5-9B",
    {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256, "hidden_size": 4096, "intermediate_size": 12288,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 16,
            "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": False, "vocab_size": 248320,
        },
        "tie_word_embeddings": False, "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_5", "num_heads": 16,
            "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054, "vision_start_token_id": 248053,
    },
    qwen35_tensors(),
    tokenizer="qwen35",
)  # fmt: skip

PAIRS = {
    "llama-eagle": Pair("eagle", LLAMA_8B, LLAMA_EAGLE),
    "llama-eagle3": Pair("eagle3", LLAMA_8B, LLAMA_EAGLE3),
    "llama-1b": Pair("draft_model", LLAMA_8B, LLAMA_1B),
    "qwen3-eagle3": Pair("eagle3", QWEN3_8B, QWEN3_EAGLE3),
    "qwen3-dflash": Pair("dflash", QWEN3_8B, QWEN3_DFLASH),
    "qwen3-pard": Pair("pard", QWEN3_8B, QWEN3_PARD),
    "deepseek-mtp": Pair("mtp", DEEPSEEK_V3, None),
    "gpt-oss-20b-eagle3": Pair("eagle3", GPT_OSS_20B, GPT_OSS_20B_EAGLE3),
    "gpt-oss-120b-eagle3": Pair("eagle3", GPT_OSS_120B, GPT_OSS_120B_EAGLE3),
    "qwen3.5-mtp": Pair("mtp", QWEN35_9B, None),
}

# one of each method
QUICK = {"llama-eagle", "llama-eagle3", "llama-1b", "qwen3-dflash", "qwen3-pard", "qwen3.5-mtp"}


def one_a_method(names: Iterable[str], *, but: Iterable[str] = ()) -> list[Any]:
    """Return the parameters of a test: these pairs, long but for one of each method.

    but: quick ones that are long, too.
    """
    return [
        name if name in QUICK.difference(but) else pytest.param(name, marks=pytest.mark.long)
        for name in names
    ]


# Wrong ones


def _with(repository: Repository, **config: Any) -> Repository:
    """Return the repository with other keys of its config.json; None takes one out."""
    changed = {
        name: value for name, value in {**repository.config, **config}.items() if value is not None
    }
    return replace(repository, config=changed)


def _without(repository: Repository, *endings: str) -> Repository:
    return replace(
        repository,
        tensors={
            name: tensor
            for name, tensor in repository.tensors.items()
            if not name.endswith(endings)
        },
    )


ENCODER = Repository(
    "google-t5/t5-small",
    {
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
        "is_encoder_decoder": True,
        "model_type": "t5", "num_heads": 8, "num_layers": 6, "vocab_size": 32128,
        "tie_word_embeddings": True,
    },
    table("shared.weight", 32128, 512),
    tokenizer="t5",
)  # fmt: skip
NARROW = replace(
    _with(LLAMA_EAGLE3, hidden_size=2048, intermediate_size=8192, head_dim=64),
    tensors=in_dtype(eagle3("midlayer.", 2048, 8192, 32, 8, 64, 128256, 32000), "F16"),
)
SHORT_VOCABULARY = replace(
    _with(LLAMA_EAGLE3, vocab_size=32000, draft_vocab_size=16000),
    tensors=in_dtype(eagle3("midlayer.", 4096, 14336, 32, 8, 128, 32000, 16000), "F16"),
    written=vocabulary_maps(32000, 16000),
)
# the vocabulary
BEYOND = (np.linspace(0, 130000, 32000).astype(np.int64) - np.arange(32000)).tobytes()
WRONG_PAIRS = {
    "width": Pair("eagle3", LLAMA_8B, NARROW),
    "vocabulary": Pair("eagle3", LLAMA_8B, SHORT_VOCABULARY),
    "other-family": Pair("eagle3", QWEN3_8B, LLAMA_EAGLE3),
    "other-family-model": Pair("draft_model", QWEN3_8B, LLAMA_1B),
    "other-tokenizer": Pair("draft_model", LLAMA_8B, replace(LLAMA_1B, tokenizer="qwen3")),
    "eagle-as-eagle3": Pair("eagle3", LLAMA_8B, LLAMA_EAGLE),
    "eagle3-as-eagle": Pair("eagle", LLAMA_8B, LLAMA_EAGLE3),
    "model-as-eagle3": Pair("eagle3", LLAMA_8B, LLAMA_1B),
    "pard-as-draft-model": Pair("draft_model", QWEN3_8B, QWEN3_PARD),
    "pard-without-a-row": Pair("pard", QWEN3_8B, _with(QWEN3_PARD, pard_token=151936)),
    "dflash-as-eagle3": Pair("eagle3", QWEN3_8B, QWEN3_DFLASH),
    "other-depth": Pair("eagle3", LLAMA_8B, _with(LLAMA_EAGLE3, num_target_layers=80)),
    # 2, 18 and 33 of 24
    "aux-layers": Pair("eagle3", GPT_OSS_20B, _with(GPT_OSS_120B_EAGLE3, draft_vocab_size=None)),
    "missing-tensor": Pair("eagle3", LLAMA_8B, _without(LLAMA_EAGLE3, "mlp.down_proj.weight")),
    "no-d2t": Pair("eagle3", LLAMA_8B, _without(LLAMA_EAGLE3, "d2t")),
    "d2t-range": Pair(
        "eagle3", LLAMA_8B, replace(LLAMA_EAGLE3, written={**LLAMA_EAGLE3.written, "d2t": BEYOND})
    ),
    # A config.json that says other sizes than the tensors have.
    "lying-config": Pair("eagle3", LLAMA_8B, _with(LLAMA_EAGLE3, intermediate_size=11008)),
    "lying-vocabulary": Pair("eagle3", LLAMA_8B, _with(LLAMA_EAGLE3, draft_vocab_size=64000)),
    "zeros": Pair("eagle3", LLAMA_8B, replace(LLAMA_EAGLE3, filled=False)),
    "pickled": Pair("eagle3", LLAMA_8B, replace(LLAMA_EAGLE3, pickled=True)),
    "no-weights": Pair("eagle3", LLAMA_8B, replace(LLAMA_EAGLE3, tensors={})),
    "encoder-decoder": Pair("eagle3", ENCODER, LLAMA_EAGLE3),
    "no-mtp": Pair("mtp", LLAMA_8B, None),
    # A config.json that counts a layer which no file has.
    "mtp-not-saved": Pair(
        "mtp",
        _without(QWEN35_9B, *(name for name in QWEN35_9B.tensors if name.startswith("mtp."))),
        None,
    ),
}
