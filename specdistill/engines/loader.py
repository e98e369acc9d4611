"""How an engine loads the drafts of one method, as data: names it loads, renames and ignores, and what it reads of config.json.

Read in the engines' sources; `specdistill.engines.loader_check` applies it. Here are the types and what the engines have in common.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from specdistill.engines.layout import AUX_LAYERS
from specdistill.engines.limits import Limit


class Outcome(Enum):
    """What an engine does about a tensor that should not be there, or is missing."""

    REFUSED = auto()  # stops with an error
    SILENT = auto()  # goes on, and says nothing


class Source(Enum):
    """Where a parameter's values come from."""

    FILE = auto()
    SHARED = auto()  # the file, or the target's where the file has none and the shape is the same
    TARGET = auto()  # the target's, whatever the file has
    UNUSED = auto()  # the file, and nothing reads it


@dataclass(frozen=True)
class Slot:
    """A parameter. name: {i} stands for a layer after the first, {a} for an auxiliary state.

    shape: sizes, as in `H A*D`: H draft hidden, D target hidden, A auxiliary states, I intermediate, Q and K rows of queries and keys,
    V and W target and draft vocabulary. when: a switch that must be on, or off after `!`.
    """

    name: str
    shape: str
    when: str = ""
    source: Source = Source.FILE


@dataclass(frozen=True)
class Setting:
    """What is read of config.json: the first of these dotted keys that is there and not null, else the default.

    A key that ends in `#` stands for the length of a list there. Without keys the engine always takes the default.
    """

    keys: tuple[str, ...] = ()
    default: Any = None


@dataclass(frozen=True)
class AuxLayers:
    """Where a version of an engine finds the layers to read: dotted keys, and what it adds to each layer.

    The sum counts "after L layers", and layers are read in ascending order; without such a key, 2, n//2 and n-3.
    """

    keys: tuple[tuple[str, int], ...] = ()
    version: str = ""


@dataclass(frozen=True)
class Loader:
    """How an engine loads the drafts of one method in one layout.

    inner: the key of the dictionary that holds the Llama's keys, which stand beside `taken` from outside.
    architectures: those that lead to this loader; empty where it is chosen otherwise.
    required: keys without which it stops; never_null: keys whose null it takes for a value.
    renamed: (part of a name, what it becomes, switch). ignored: parts of names of tensors that are left alone.
    unknown, unset: what becomes of a tensor without a parameter, of a parameter without a tensor.
    settings: by their names in the head's config. arguments: settings that its command line has, and the words there.
    limits: of its code, whatever is in the folder.
    """

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
    limits: tuple[Limit, ...] = ()


def layer_slots(prefix: str, width: str, *norms: str) -> tuple[Slot, ...]:
    """A Llama layer whose queries, keys and values are projected from `width`, with these norms."""
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
    return tuple(Slot(f"{prefix}.{name}.weight", shape) for name, shape in shapes.items())


# What transformers' LlamaConfig, through which all engines read the file, makes of keys that are not there.
LLAMA_SETTINGS = {
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

EAGLE3_SLOTS = (
    Slot("fc.weight", "H A*D"),
    Slot("fc_norm.{a}.weight", "D", "fc_norm"),
    Slot("input_norm.weight", "A*D", "norm_before_fc"),
    *layer_slots("layers.0", "2*H", "hidden_norm", "input_layernorm"),
    Slot("norm.weight", "H"),
    Slot("d2t", "W", "pruned"),
)
EAGLE3_SETTINGS = {
    **LLAMA_SETTINGS,
    "draft_vocab_size": Setting(("draft_vocab_size", "vocab_size")),
    "target_hidden_size": Setting(("target_hidden_size", "hidden_size")),
    "num_aux_hidden_states": Setting(("num_aux_hidden_states", f"eagle_config.{AUX_LAYERS}#"), 3),
    "use_aux_hidden_state": Setting(("eagle_config.use_aux_hidden_state",), True),
    "fc_norm": Setting(("fc_norm",), False),
    "norm_output": Setting(("norm_output",), False),
    "norm_before_fc": Setting(("eagle_config.norm_before_fc", "norm_before_fc"), False),
    "norm_before_residual": Setting(default=False),
}
# SGLang and TensorRT-LLM: no embedding of its own as wide as the target's, no window from the file, `bias` taken for one of fc.
PLAIN_EAGLE3_SLOTS = (
    *EAGLE3_SLOTS,
    Slot("fc.bias", "H", "bias"),
    *layer_slots("layers.{i}", "H", "hidden_norm"),
    Slot("embed_tokens.weight", "V H", "own_width"),
    Slot("embed_tokens.weight", "V H", "!own_width", Source.TARGET),
)
PLAIN_EAGLE3_SETTINGS = {**EAGLE3_SETTINGS, "sliding_window": Setting(), "own_embedding": Setting(default=False)}

# EAGLE-1. The first layer has no norm before its attention; the head is the target's.
EAGLE_SLOTS = (
    Slot("fc.weight", "H 2*H"),
    *layer_slots("layers.0", "H"),
    *layer_slots("layers.{i}", "H", "input_layernorm"),
)
EAGLE_SETTINGS = {**LLAMA_SETTINGS, "sliding_window": Setting()}
