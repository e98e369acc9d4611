"""What inference engines do with a draft's folder, as data: names they load, rename and leave, and what they read of config.json.

Read in the sources of vLLM 0.33.0 (llama_eagle3.py, llama_eagle.py, models/utils.py, configs/speculators, gpu_model_runner.py), SGLang
0.5.23 (llama_eagle3.py, llama_eagle.py, llama.py, spec_aux_hidden_state.py, eagle_worker_v2.py) and TensorRT-LLM's PyTorch backend
(modeling_speculative.py, speculative/eagle3.py, at 00679c6 of 2026). `specdistill.engines.loader_check` replays it.

None of them says when a tensor is missing, but for TensorRT-LLM; names that are not known are an error in vLLM alone.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What becomes of something that should not be."""

    REFUSED = "stops with an error"
    SILENT = "goes on without a word"


class Source(StrEnum):
    """Where a parameter's values come from."""

    FILE = "the file"
    SHARED = "the file, or the target's where the file has none and the shape is the same"
    TARGET = "the target's, whatever the file has"
    UNUSED = "the file, and nothing reads it"


@dataclass(frozen=True)
class Slot:
    """A parameter. name: {i} stands for a layer after the first, {a} for an auxiliary state.

    shape: sizes, as in `FUSED A*D`: H draft hidden, D target hidden, A auxiliary states, I intermediate, Q and K rows of queries and keys,
    V and W target and draft vocabulary. when: a switch that must be on, or off after `!`.
    """

    name: str
    shape: str
    when: str = ""
    source: Source = Source.FILE


@dataclass(frozen=True)
class Setting:
    """What is read of config.json: the first of these dotted keys that is there and not null, else the default.

    A key that ends in `#` stands for the length of a list there. Without keys the engine always does as the default says.
    """

    keys: tuple[str, ...] = ()
    default: Any = None


@dataclass(frozen=True)
class AuxLayers:
    """Where a version of an engine finds the layers to read: a dotted key, and what it adds to each; None where it reads no key.

    What it finds counts "after L layers" then, and is read in ascending order; without it, 2, n//2 and n-3.
    """

    keys: tuple[tuple[str, int], ...] = ()
    version: str = ""


@dataclass(frozen=True)
class Loader:
    """How an engine loads the drafts of one method in one layout.

    inner: the key of the dictionary that holds the Llama's keys, which stand beside `taken` from outside.
    architectures: those that lead to this loader; empty where it is chosen otherwise.
    required: keys without which it stops; never_null: keys that it takes literally when they are there.
    renamed: (part of a name, what it becomes, switch). ignored: parts of names of what is left without a word.
    settings: by their names in the head's config. arguments: settings that a command line gives, and its words.
    skips_equal_fc: `fc` is left out where what it reads is as wide as what it writes. reads_last_state: after the target's last layer.
    """

    engine: str
    version: str
    architectures: frozenset[str]
    slots: tuple[Slot, ...]
    unknown: Outcome
    unset: Outcome
    settings: dict[str, Setting]
    aux_layers: tuple[AuxLayers, ...] = ()
    inner: str | None = None
    taken: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    never_null: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    skips_equal_fc: bool = False
    reads_last_state: bool = True


IDS = "eagle_aux_hidden_state_layer_ids"

# What transformers' LlamaConfig, through which all of them read the file, makes of keys that are not there.
LLAMA = {
    "vocab_size": Setting(("vocab_size",), 32000),
    "hidden_size": Setting(("hidden_size",), 4096),
    "intermediate_size": Setting(("intermediate_size",), 11008),
    "num_attention_heads": Setting(("num_attention_heads",), 32),
    "num_key_value_heads": Setting(("num_key_value_heads", "num_attention_heads"), 32),
    "head_dim": Setting(("head_dim",)),
    "num_layers": Setting(("num_hidden_layers",), 32),
    "rms_norm_eps": Setting(("rms_norm_eps",), 1e-6),
    "tie_word_embeddings": Setting(("tie_word_embeddings",), False),
    "attention_bias": Setting(("attention_bias",), False),
    "bias": Setting(("bias",), False),
}


def _layer(prefix: str, width: str, *norms: str, when: str = "") -> tuple[Slot, ...]:
    """A Llama layer whose queries, keys and values are `width` wide, with these norms."""
    shapes = {
        "self_attn.q_proj": f"Q {width}",
        "self_attn.k_proj": f"K {width}",
        "self_attn.v_proj": f"K {width}",
        "self_attn.o_proj": "H Q",
        "mlp.gate_proj": "I H",
        "mlp.up_proj": "I H",
        "mlp.down_proj": "H I",
        **dict.fromkeys((*norms, "post_attention_layernorm"), "H"),
    }
    return tuple(Slot(f"{prefix}.{name}.weight", shape, when) for name, shape in shapes.items())


# EAGLE-3: what the three have in common.
EAGLE3 = (
    Slot("fc.weight", "H A*D"),
    Slot("fc_norm.{a}.weight", "D", "fc_norm"),
    Slot("input_norm.weight", "A*D", "norm_before_fc"),
    *_layer("layers.0", "2*H", "hidden_norm", "input_layernorm"),
    Slot("norm.weight", "H"),
)
EAGLE3_SETTINGS = {
    **LLAMA,
    "draft_vocab_size": Setting(("draft_vocab_size", "vocab_size")),
    "target_hidden_size": Setting(("target_hidden_size", "hidden_size")),
    "num_aux_hidden_states": Setting(("num_aux_hidden_states", f"eagle_config.{IDS}#"), 3),
    "use_aux_hidden_state": Setting(("eagle_config.use_aux_hidden_state",), True),
    "fc_norm": Setting(("fc_norm",), False),
    "norm_output": Setting(("norm_output",), False),
    "norm_before_fc": Setting(("eagle_config.norm_before_fc", "norm_before_fc"), False),
    "norm_before_residual": Setting(default=False),
}

VLLM_EAGLE3 = Loader(
    engine="vLLM",
    version="0.33",
    unknown=Outcome.REFUSED,
    unset=Outcome.SILENT,
    # Those that are no name of a class get `Eagle3` in front.
    architectures=frozenset(
        {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen2_5vlForCausalLM"}
        | {"Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"}
    ),
    slots=(
        *EAGLE3,
        *_layer("layers.{i}", "H", "input_layernorm"),
        Slot("layers.{i}.hidden_norm.weight", "H", source=Source.UNUSED),
        Slot("lm_head.weight", "W H", source=Source.SHARED),
        Slot("embed_tokens.weight", "V H", source=Source.SHARED),
        Slot("d2t", "W", "pruned"),
    ),
    settings={**EAGLE3_SETTINGS, "norm_before_residual": Setting(("norm_before_residual",), False)},
    aux_layers=(
        AuxLayers(((IDS, 0), (f"eagle_config.{IDS}", 0)), "V1 runner"),
        AuxLayers(((IDS, 0), ("eagle_config.layer_ids", 0)), "V2 runner"),
    ),
    never_null=("target_hidden_size",),
    renamed=(("midlayer.", "layers.0.", ""),),
    ignored=("t2d", "mask_hidden", ".bias", "rotary_emb."),
)
SPECULATORS_EAGLE3 = replace(
    VLLM_EAGLE3,
    architectures=frozenset(),
    settings={**VLLM_EAGLE3.settings, "norm_before_residual": Setting(("norm_before_residual",), True)},
    inner="transformer_layer_config",
    taken=("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", IDS),
    required=(
        "speculators_config.proposal_methods.0.speculative_tokens",
        "speculators_config.verifier.name_or_path",
        "transformer_layer_config",
    ),
)
SGLANG_EAGLE3 = Loader(
    engine="SGLang",
    version="0.5.23",
    unknown=Outcome.SILENT,
    unset=Outcome.SILENT,
    architectures=frozenset({"LlamaForCausalLMEagle3"}),
    slots=(
        *EAGLE3,
        Slot("fc.bias", "H", "bias"),
        *_layer("layers.{i}", "H", "hidden_norm"),
        Slot("layers.{i}.input_layernorm.weight", "H", source=Source.UNUSED),
        Slot("lm_head.weight", "W H", "states_vocabulary"),
        Slot("lm_head.weight", "V H", "!states_vocabulary", Source.TARGET),
        Slot("embed_tokens.weight", "V H", "own_width"),
        Slot("embed_tokens.weight", "V H", "!own_width", Source.TARGET),
        Slot("d2t", "W", "pruned"),
    ),
    settings={**EAGLE3_SETTINGS, "sliding_window": Setting(), "own_embedding": Setting(default=False)}
    | {"fc_norm": Setting(("fc_norm", "use_aux_norm"), False)},
    aux_layers=(AuxLayers(((f"eagle_config.{IDS}", 1),)),),
    required=("draft_vocab_size",),  # may be null
    never_null=("target_hidden_size",),
    renamed=(
        ("midlayer", "layers.0", ""),
        ("aux_norm_low", "fc_norm.0", ""),
        ("aux_norm_mid", "fc_norm.1", ""),
        ("aux_norm_high", "fc_norm.2", ""),
    ),
    ignored=("t2d", "d2t"),  # d2t is taken whatever the vocabulary
    arguments={"sliding_window": "--speculative-draft-window-size"},
    skips_equal_fc=True,
    reads_last_state=False,
)
# ModelOpt writes for it `layers.0.*`, without t2d and embedding; SpecForge's names are read as well.
TENSORRT_EAGLE3 = Loader(
    engine="TensorRT-LLM",
    version="PyTorch backend at 00679c6",
    unknown=Outcome.SILENT,
    unset=Outcome.REFUSED,
    architectures=frozenset({"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}),
    slots=(
        *EAGLE3,
        Slot("fc.bias", "H", "bias"),
        *_layer("layers.{i}", "H", "hidden_norm"),
        Slot("lm_head.weight", "W H", source=Source.SHARED),
        Slot("embed_tokens.weight", "V H", "own_width"),
        Slot("embed_tokens.weight", "V H", "!own_width", Source.TARGET),
        Slot("d2t", "W", "pruned"),
    ),
    settings={**EAGLE3_SETTINGS, "sliding_window": Setting(), "own_embedding": Setting(default=False)}
    | {"norm_before_fc": Setting(("eagle_config.norm_before_fc",), False)}
    | {"norm_output": Setting(("eagle_config.return_hidden_post_norm", "norm_output"), False)},
    never_null=("target_hidden_size",),
    renamed=(("midlayer.", "layers.0.", "one_layer"),),
    ignored=("t2d",),
    arguments={"aux_layers": "eagle3_layers_to_capture"},
    skips_equal_fc=True,
)

# EAGLE-1. The first layer has no norm before its attention; the head is the target's.
EAGLE = (
    Slot("fc.weight", "H 2*H"),
    *_layer("layers.0", "H"),
    *_layer("layers.{i}", "H", "input_layernorm"),
)
EAGLE_SETTINGS = {**LLAMA, "sliding_window": Setting()}
VLLM_EAGLE = Loader(
    engine="vLLM",
    version="0.33",
    unknown=Outcome.REFUSED,
    unset=Outcome.SILENT,
    architectures=frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}),
    slots=(*EAGLE, Slot("embed_tokens.weight", "V H", source=Source.SHARED)),
    settings={**EAGLE_SETTINGS, "fc_bias": Setting(default=False)},
    ignored=(".bias", "rotary_emb."),
)
WRAPPED_EAGLE = replace(VLLM_EAGLE, inner="model", required=("model",))
SGLANG_EAGLE = Loader(
    engine="SGLang",
    version="0.5.23",
    unknown=Outcome.SILENT,
    unset=Outcome.SILENT,
    architectures=frozenset({"LlamaForCausalLMEagle"}),
    slots=(*EAGLE, Slot("fc.bias", "H"), Slot("embed_tokens.weight", "V H", source=Source.TARGET)),
    settings=EAGLE_SETTINGS,
    ignored=("lm_head", "rotary_emb.", "projector"),
)

# Engine -> method -> its loaders; the first whose `inner` key is in config.json (or None) is taken.
LOADERS: dict[str, dict[str, tuple[Loader, ...]]] = {
    "vllm": {"eagle3": (SPECULATORS_EAGLE3, VLLM_EAGLE3), "eagle": (WRAPPED_EAGLE, VLLM_EAGLE)},
    "sglang": {"eagle3": (SGLANG_EAGLE3,), "eagle": (SGLANG_EAGLE,)},
    "trtllm": {"eagle3": (TENSORRT_EAGLE3,)},
}
