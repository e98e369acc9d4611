"""Tiny random models of all types in `AutoModelForCausalLM`, and the tables of docs/targets.md.

The tables say what each type can be used for.

python -m tests.targets.architectures    # writes the tables
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.pages import write_between
from specdistill.common.errors import UserError
from specdistill.decoding.near_ties import compute_logits_in_float64
from specdistill.decoding.transformers_models import check_batchable, check_reads_trees
from specdistill.methods import METHODS
from specdistill.methods.eagle.module import build_eagle
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.mtp.checkpoint import build_mtp
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import choose_packing, run_by_lengths
from tests.tiny import packed_rows, tiny_tokenizer

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
LARGEST = 12_000_000  # parameters

# The names of sizes in configs, by their tiny size. Names that a config lacks are left out.
NAMES = {
    64: (
        "hidden_size n_embd d_model dim attention_hidden_size lru_width embedding_size"
        " word_embed_proj_dim"
    ),
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size dim_ff dff decoder_ffn_dim",
    256: "max_position_embeddings n_positions max_seq_len n_ctx model_max_length",
    160: "vocab_size vocab_size_per_layer_input",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank encoder_ffn_dim",
    16: (
        "head_dim dim_head qk_nope_head_dim v_head_dim kv_lora_rank hidden_size_per_layer_input"
        " linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state mamba_head_dim"
        " ssm_state_size state_size image_size"
    ),
    8: "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads patch_size sliding_window",
    4: (
        "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers"
        " num_attention_heads n_head n_heads num_heads decoder_attention_heads"
        " encoder_attention_heads linear_num_value_heads num_experts n_routed_experts"
        " num_local_experts moe_num_experts"
    ),
    # caps that show in tiny models
    3.0: "final_logit_softcapping output_logit_soft_cap logits_soft_cap",
    2: (
        "num_key_value_heads linear_num_key_heads num_experts_per_tok num_experts_per_token"
        " moe_topk moe_k eos_token_id"
    ),
    1: (
        "mamba_n_groups n_shared_experts num_shared_experts n_group num_expert_group topk_group"
        " first_k_dense_replace bos_token_id"
    ),
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
NEEDED |= set(NAMES[3.0].split())  # set even where the default is None
HYBRID, MIXED = ["linear_attention", "hybrid"] * 2, ["linear_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
}
ZAMBA = {
    "layers_block_type": HYBRID,
    "num_key_value_heads": 4,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}

# Additional settings of single kinds, and scales where the default is 1.
SPECIAL: dict[str, dict[str, Any]] = {
    **{
        kind: {"logits_scaling": 4.0}
        for kind in ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared")
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
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"layer_types": MIXED, "logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 0.25},
    "inkling2_text": {**INKLING, "unpadded_vocab_size": 160, "n_layers_per_attn_res_block": 2},
    "inkling_text": INKLING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": MIXED, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {"attention_chunk_size": 8},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    # generate() drops what lies before the window, the forward does not
    "moshi": {"sliding_window": 256},
    "roc_bert": {
        "shape_vocab_size": 160,
        "shape_embed_dim": 8,
        "pronunciation_vocab_size": 160,
        "pronunciation_embed_dim": 8,
    },
    "xlm": {"emb_dim": 64},
    "zamba": ZAMBA,
    "zamba2": {**ZAMBA, "adapter_rank": 8, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def _choose_tiny_sizes(config: Any) -> dict[str, Any]:
    """Return tiny sizes that replace those of a config with its default values."""
    config_values = config.to_dict()
    sizes = {
        name: size
        for name, size in SIZES.items()
        if config_values.get(name) is not None or (name in config_values and name in NEEDED)
    }
    published = config_values.get("layer_types") or []
    kinds = list(dict.fromkeys(published))
    # the pattern of layer types is longer than the tiny model
    if set(published[: sizes.get("num_hidden_layers")]) != set(kinds):
        sizes["layer_types"] = (kinds * sizes["num_hidden_layers"])[: sizes["num_hidden_layers"]]
    return (
        sizes | {"head_dim": 8, "num_key_value_heads": 4} if "kv_lora_rank" in sizes else sizes
    )  # multi-head latent attention


def tiny_config(kind: str) -> Any:
    """Return the config of `tiny_model`, or raise the error of transformers if there is none."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    parts = {
        name: part
        for name in config_class.sub_configs or {}
        if (part := getattr(default, name, None)) is not None
    }
    inner = {
        name: {**_choose_tiny_sizes(part), "model_type": part.model_type}
        for name, part in parts.items()
    }
    return config_class(**{**_choose_tiny_sizes(default), **inner, **SPECIAL.get(kind, {})})


def tiny_model(kind: str) -> Any:
    """Return a random model, or raise the error of transformers if there is no such model."""
    config = tiny_config(kind)
    with torch.device("meta"):
        num_parameters = AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters()
    assert num_parameters < LARGEST, f"{kind}: {num_parameters:,} parameters"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


# Heads that draft chains. The one that reads most of the target comes first.
HEADS: dict[str, Any] = {
    "eagle3": build_eagle3,
    "eagle": build_eagle,
    "mtp": lambda target: build_mtp(target, init="scratch"),
}
# Training data, for methods that read it to create a draft.
ROWS = packed_rows([range(3, 35)])
TRAINED = tuple(name for name, method in METHODS.items() if method.is_trained)
KIND = "model types"
SERVED, REFUSED, UNTRIED = "Decoded losslessly", "Refused", "Not tried"
PACKED = {None: "–", run_by_lengths: "no mask"}  # other ways: yes


@dataclass(frozen=True)
class KindRow:
    """A row of the page, for one kind.

    Attributes:
        part: SERVED, REFUSED or UNTRIED, the section of the page.
        cells: The kind, then the other columns of that section.
    """

    part: str
    cells: tuple[str, ...]


@cache
def recipe_of(method: str) -> Any:
    """Return the recipe with the method's default values, which creates a fresh draft."""
    fresh = ["draft.init=scratch"] if method == "mtp" else []
    return load_recipe(
        Recipe, [f"method={method}", "target.model=pico", "train.output_dir=runs", *fresh]
    )


def accepted(target: FrozenTarget) -> list[str]:
    """Return the methods that can create a draft and its objective from this target."""
    return [
        method
        for method in TRAINED
        if _is_supported(lambda method=method: _create_draft(method, target))
    ]


def _create_draft(method: str, target: FrozenTarget) -> None:
    loaded = METHODS[method].load()
    draft = loaded.create(recipe_of(method), target, ROWS)
    loaded.build_objective(draft, recipe_of(method), target)


def make_row(kind: str) -> tuple[KindRow, FrozenTarget | None]:
    """Return a kind's row, and its target unless it is refused."""
    try:
        model = tiny_model(kind)
    except Exception as error:
        # transformers refuses sizes that do not go together: the kind cannot be tried
        return KindRow(UNTRIED, (kind, type(error).__name__)), None
    try:
        target = FrozenTarget(model, tiny_tokenizer(), name=kind)
        compute_logits_in_float64(target, [3, 4, 5], 3)
    except UserError as error:
        return KindRow(REFUSED, (kind, _extract_reason(error))), None
    head = target.logits
    cells = (
        "recurrent" if target.is_recurrent else "attention",
        " ".join(("scaled",) * (head.scale != 1) + ("capped",) * (head.cap is not None)) or "–",
        described(accepted(target)),
        "yes" if _is_supported(lambda: check_reads_trees(target)) else "–",
        "yes" if _is_supported(lambda: check_batchable(target.model, kind)) else "–",
        PACKED.get(choose_packing(target.model), "yes"),
    )
    return KindRow(SERVED, (kind, *cells)), target


def described(methods: Sequence[str]) -> str:
    """Return the cell of the page for these methods."""
    return "all" if len(methods) == len(TRAINED) else ", ".join(methods) or "–"


def read_page() -> list[KindRow]:
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    lines = (
        (part.partition(":")[0], line)
        for part in parts
        for line in part.splitlines()
        if line.startswith("| ")
    )
    cells = (
        (part, line.removeprefix("| ").removesuffix(" |").split(" | ")) for part, line in lines
    )
    grouped_rows = [
        (part, kinds.split(", "), rest)
        for part, (kinds, *rest) in cells
        if kinds not in (KIND, "---")
    ]
    return [
        KindRow(part, (kind, *rest))
        for part, kinds, rest in grouped_rows
        if part in (SERVED, REFUSED, UNTRIED)
        for kind in kinds
    ]


def _is_supported(attempt: Any) -> bool:
    try:
        attempt()
    except UserError:
        return False
    return True


def _extract_reason(error: UserError) -> str:
    """Return the reason of a refusal: what was got, without the name of the model before it."""
    return error.got.partition(": ")[2] or error.got


def format_tables(rows: list[KindRow]) -> str:
    """Return the tables of docs/targets.md."""
    served, refused, untried = (
        [row for row in rows if row.part == part] for part in (SERVED, REFUSED, UNTRIED)
    )
    return f"""`python -m tests.targets.architectures` tried a tiny random model of each type that `AutoModelForCausalLM` knows (transformers {transformers.__version__});
the type is `model_type` in config.json. [A test](../tests/targets/test_architectures.py) decodes with each model and compares its
output with that of `generate()`.

## {SERVED}: {len(served)}

N-gram and suffix lookup work for all of these types, and so does a trained smaller model: `method=draft_model` or `pard` with `draft.init=PATH`.

- *Layers*: recurrent layers keep a state; decoding copies it to undo rejected draft tokens.
- *Logits*: what the class does to its head's output.
- *Drafts made from the target*: methods whose draft is built from the target alone. *All* are
  {", ".join(TRAINED)}. Methods are missing where the class lacks RMS norms, a rotary
  embedding, a single residual stream or plain attention. `specdistill plan` says which methods are possible for a checkpoint, and with
  `details=true` why others are not. An engine may serve drafts of fewer methods, as for [Gemma 3 and 4](#heads-for-gemma-3-and-4).
- *Trees*, *batches* and *packing* say whether `eval.tree`, `eval.batch_size` above 1 and `data.packing` work.
  *No mask*: attention separates packed documents without a mask.

| {KIND} | layers | logits | drafts made from the target | trees | batches | packing |
| --- | --- | --- | --- | --- | --- | --- |
{_format_lines(served)}

## {REFUSED}: {len(refused)}

| {KIND} | reason |
| --- | --- |
{_format_lines(refused)}

## {UNTRIED}: {len(untried)}

The test could not make a tiny model of these types; loading a model tests its class.

| {KIND} | error of the config |
| --- | --- |
{_format_lines(untried)}"""  # noqa: E501


def _format_lines(rows: list[KindRow]) -> str:
    """Return a line for all kinds with the same cells; the line with most kinds comes first."""
    kinds_by_cells: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        kinds_by_cells.setdefault(row.cells[1:], []).append(row.cells[0])
    ordered = sorted(kinds_by_cells.items(), key=lambda entry: -len(entry[1]))
    return "\n".join(
        f"| {' | '.join((', '.join(sorted(kinds)), *cells))} |" for cells, kinds in ordered
    )


if __name__ == "__main__":
    write_between(PAGE, "kinds", format_tables([make_row(kind)[0] for kind in KINDS]))
