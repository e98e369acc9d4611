"""A tiny random model of every kind that `AutoModelForCausalLM` knows; docs/targets.md, which says what each can be used for.

python -m tests.targets.architectures    # writes the page
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.decoding.decoder import in_float64
from specdistill.decoding.transformers_models import check_batchable, check_reads_trees
from specdistill.errors import UserError
from specdistill.methods.eagle.module import build_eagle
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.mtp.checkpoint import build_mtp
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import by_lengths, packing
from tests.tiny import tiny_tokenizer

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
LARGEST = 12_000_000  # parameters

# What configs call their sizes. Those that a config does not have are left out.
NAMES = {
    64: "hidden_size n_embd d_model dim attention_hidden_size lru_width embedding_size word_embed_proj_dim",
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size dim_ff dff decoder_ffn_dim",
    256: "max_position_embeddings n_positions max_seq_len n_ctx model_max_length",
    160: "vocab_size vocab_size_per_layer_input",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank encoder_ffn_dim",
    16: "head_dim dim_head qk_nope_head_dim v_head_dim kv_lora_rank hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim "
    "mamba_d_head mamba_d_state mamba_head_dim ssm_state_size state_size image_size",
    8: "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads patch_size sliding_window",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads linear_num_value_heads num_experts n_routed_experts num_local_experts moe_num_experts",
    3.0: "final_logit_softcapping output_logit_soft_cap logits_soft_cap",  # caps that show in tiny models
    2: "num_key_value_heads linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k eos_token_id",
    1: "mamba_n_groups n_shared_experts num_shared_experts n_group num_expert_group topk_group first_k_dense_replace bos_token_id",
    0: "pad_token_id",
    0.1: "initializer_range",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
NEEDED = {
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
}
NEEDED |= set(NAMES[3.0].split())  # given also where the default is None
HYBRID, MIXED = ["linear_attention", "hybrid"] * 2, ["linear_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 8}
ZAMBA = {"layers_block_type": HYBRID, "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32}

# What single kinds need besides, and scales where the default is 1.
SPECIAL: dict[str, dict[str, Any]] = {
    **{
        kind: {"logits_scaling": 4.0} for kind in ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared")
    },
    "bailing_hybrid": {"layer_types": MIXED},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": ROPE},
        "logit_scale": 0.25,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, **ROPE},
        "ffn_config": {"ffn_hidden_size": 96, "moe_top_k": 2},
        "rope_parameters": ROPE,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "lm_head_multiplier": 0.25},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"layer_types": MIXED, "logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 0.25},
    "inkling2_text": {**INKLING, "unpadded_vocab_size": 160, "n_layers_per_attn_res_block": 2},
    "inkling_text": INKLING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": MIXED, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "moshi": {"sliding_window": 256},  # generate() drops what lies before the window, the forward does not
    "roc_bert": {"shape_vocab_size": 160, "shape_embed_dim": 8, "pronunciation_vocab_size": 160, "pronunciation_embed_dim": 8},
    "xlm": {"emb_dim": 64},
    "zamba": ZAMBA,
    "zamba2": {**ZAMBA, "adapter_rank": 8, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def _sizes(config: Any) -> dict[str, Any]:
    """Tiny sizes in place of those of a config with its default values."""
    has = config.to_dict()
    sizes = {name: size for name, size in SIZES.items() if has.get(name) is not None or (name in has and name in NEEDED)}
    return (
        sizes | {"head_dim": 8, "num_key_value_heads": 4} if "kv_lora_rank" in sizes else sizes
    )  # multi-head latent attention


def tiny_model(kind: str) -> Any:
    """A random model. Raises what transformers raises where there is no such model."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    parts = {name: part for name in config_class.sub_configs or {} if (part := getattr(default, name, None)) is not None}
    inner = {name: {**_sizes(part), "model_type": part.model_type} for name, part in parts.items()}
    config = config_class(**{**_sizes(default), **inner, **SPECIAL.get(kind, {})})
    with torch.device("meta"):
        num_parameters = AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters()
    assert num_parameters < LARGEST, f"{kind}: {num_parameters:,} parameters"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


HEADS: dict[str, Any] = {
    "eagle": build_eagle,
    "eagle3": build_eagle3,
    "mtp": lambda target: build_mtp(target, init="scratch"),
}
SERVED, REFUSED, UNTRIED = "Decoded losslessly", "Refused", "Not tried"
PACKED = {None: "–", by_lengths: "no mask"}  # other ways: yes


@dataclass(frozen=True)
class Row:
    """A line of the page. part: SERVED, REFUSED or UNTRIED. cells: kind, class, and what its part says of it."""

    part: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {' | '.join(self.cells)} |"


def row_of(kind: str) -> tuple[Row, FrozenTarget | None]:
    """A kind's row, and its target unless it is refused."""
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    name = (kind, f"`{named if isinstance(named, str) else named[0]}`")
    try:
        model = tiny_model(kind)
    except Exception as error:  # of transformers' own, for sizes that do not go together: nothing can be said of the kind
        return Row(UNTRIED, (*name, type(error).__name__)), None
    try:
        target = FrozenTarget(model, tiny_tokenizer(), name=kind)
        in_float64(target, [3, 4, 5])
    except UserError as error:
        return Row(REFUSED, (*name, _reason(error))), None
    head = target.logits
    cells = (
        "recurrent" if target.is_recurrent else "attention",
        " ".join(("scaled",) * (head.scale != 1) + ("capped",) * (head.cap is not None)) or "–",
        ", ".join(name for name, build in HEADS.items() if _works(lambda build=build: build(target))) or "–",
        "yes" if _works(lambda: check_reads_trees(target)) else "–",
        "yes" if _works(lambda: check_batchable(target.model, kind)) else "–",
        PACKED.get(packing(target.model), "yes"),
    )
    return Row(SERVED, (*name, *cells)), target


def read_page() -> list[Row]:
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    lines = ((part.partition(":")[0], line) for part in parts for line in part.splitlines() if line.startswith("| "))
    rows = [Row(part, tuple(line.removeprefix("| ").removesuffix(" |").split(" | "))) for part, line in lines]
    return [row for row in rows if row.cells[0] not in ("kind", "---")]


def _works(attempt: Any) -> bool:
    try:
        attempt()
    except UserError as error:
        return not _reason(error)
    return True


def _reason(error: UserError) -> str:
    """What a refusal says of the class."""
    text = str(error)
    assert "\n" not in text, text
    got = text.partition(": got ")[2].rpartition(", expected")[0]
    return got.partition(": ")[2] or got


def page(rows: list[Row]) -> str:
    served, refused, untried = ([row for row in rows if row.part == part] for part in (SERVED, REFUSED, UNTRIED))
    return f"""# Targets

A target is any causal language model of transformers whose logits and KV cache can be followed. How a class computes them is not looked up
but tried when the target is loaded ([targets/anatomy.py](../specdistill/targets/anatomy.py)): one pass of the model's own forward, with
known numbers in place of its head's output, shows how it scales or caps its logits, and steps over a KV cache must give what one pass
gives. What does not hold is refused in one line that names the class and the reason.

## What is read

`target.model` names pico, a folder or Hub id with safetensors, or a GGUF file (`folder/model.gguf`, `org/name/model.gguf`), which brings
its own tokenizer and is dequantized. Quantized checkpoints (FP8, compressed-tensors, bitsandbytes and others) are read where
transformers can read them on this machine: a missing package or GPU is named in one line, and without a GPU FP8 is dequantized. Drafts
are in floating point whatever the target is; near-ties of a quantized or shared target are not broken in float64.

Models for text and images (Qwen2.5-VL, Mistral Small 3.1) are targets for their text: prompts and training rows hold no images.

`target.attn` is an attention of transformers (`sdpa`, `eager`, `flex_attention`, `flash_attention_2`, `flash_attention_3`) or a kernel on
the Hub (`kernels-community/flash-attn2`), of those that a class has: gpt-oss, with its sinks, has `eager`, the kernels and, on a GPU,
`flex_attention`. null is the class's own default, `sdpa` of most.

## The pass over training rows

Every decoder layer is run, since soft targets are made from the last hidden state, and the head is applied to loss tokens alone. Features
stay in the target's dtype.

However rows are packed, documents never see each other. `sdpa` would keep them apart by a mask of a row's length squared. A class is told
where documents begin instead, if that is seen to work (*no mask* below): kernels for documents of many lengths then do what `sdpa` would,
in memory that grows with the tokens, however long a row is. They compute causal attention with a sliding window and a scale; classes that
ask for more (soft caps, sinks, chunks, masks of their own) keep their own attention, and so does every pass that decodes, bit for bit.
Any other `target.attn` is used as it is: flash attention, which mixes documents in a batch of several rows, is given one long row; classes
that do not look at position ids (gpt-oss) are given masks; what none of this helps is refused with `data.packing`.

`target.fp8=true` multiplies the matrices of the layers in FP8 (e4m3, a scale for each row of a matrix and each token) while a draft is
trained; with `target.dtype=bfloat16`, on a GPU of compute capability 8.9 or more. What that does to the features is measured on the first
rows, printed, and kept in `run/history.json`: how far features are off, and how many top-1 tokens are the same. Embedding, norms, routers
and the head stay in bfloat16, and so do experts that a class keeps in one parameter. Rows are generated and the draft is initialized
before, by the target as it is, and no draft is measured with it: `specdistill eval` and `eval/compare.py` take `target.fp8=false` alone.

## A target larger than one device

- `target.shard=layers`, in `accelerate launch` of several processes, under any configuration: each process reads from the files, and holds,
  its part of every layer, and gathers one layer at a time. Features are those of the whole target, bit for bit, and each process passes
  its own batch. Of a 70B target in bfloat16 each of eight GPUs holds 21.3 GB, 4.2 GB of which are embedding and head, and 1.71 GB of a
  gathered layer. (On CPUs set `MALLOC_MMAP_THRESHOLD_=1000000`: glibc keeps the memory of gathered layers otherwise.)
- `target.shard=tensor` divides the matrices instead (transformers' tensor parallelism), where a class has a plan for it and the processes
  divide its key/value heads. The processes pass the batches of all of them in turn, and wait for each other in every layer: for machines
  whose GPUs are closely connected. Features agree up to rounding.
- `target.device_map=auto` spreads the layers over the GPUs of one process: for measuring, and for `specdistill data`. `cpu` keeps the
  target off the GPU.

Under either shard the embedding, the final norm and the head stay whole in every process, and a single process holds the whole target, so
that `specdistill eval` reads the recipe of a run as it is. ZeRO-3 and FSDP of `accelerate_configs/` shard the draft and leave the target
alone. A shared target generates no data: generate first, in one process (`specdistill data`, `target.shard=none`), and training finds the
rows. It takes neither an adapter nor a quantized checkpoint.

This page is written by `python -m tests.targets.architectures` from tiny random models, one of each kind that `AutoModelForCausalLM`
knows (transformers {transformers.__version__}). [A test](../tests/targets/test_architectures.py) decodes with each and compares
with `generate()`; where logits are scaled or capped it compares distributions with those of the model's own logits. A checkpoint is tried
again when it is loaded.

## {SERVED}: {len(served)}

N-gram look-up and draft models work for all of them. *Layers*: recurrent ones keep a state, of which decoding takes copies. *Logits*:
what the class does to its head's output, and so decoding, soft targets and near-ties. *Heads*: which can be made; a class may lack RMS
norms, one rotary embedding, one residual stream, or attention that takes plain queries, keys and values. *Trees*, *batches*, *packing*:
`eval.tree`, `eval.batch_size` above 1, and `data.packing` (*no mask*: by kernels); a class that does not read masks or position ids is
refused there alone.

| kind | class | layers | logits | heads | trees | batches | packing |
| --- | --- | --- | --- | --- | --- | --- | --- |
{_lines(served)}

## {REFUSED}: {len(refused)}

| kind | class | why |
| --- | --- | --- |
{_lines(refused)}

## {UNTRIED}: {len(untried)}

No tiny model of these was made: the config that the test gives them raises the error named here. They are tried when they are loaded.

| kind | class | error |
| --- | --- | --- |
{_lines(untried)}
"""


def _lines(rows: list[Row]) -> str:
    return "\n".join(map(str, rows))


if __name__ == "__main__":
    PAGE.write_text(page([row_of(kind)[0] for kind in KINDS]), encoding="utf-8")
