"""The layout of a draft in an engine's folder (`Layout`), and what engines cannot express (`Limit`).

A limit is stated once, here, and listed by the layouts and loaders it applies to. It looks at the config of a head, `Eagle3Config` or
`EagleConfig`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specdistill.errors import UserError

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


def engine_aux_layers(num_layers: int) -> list[int]:
    """Low, middle and high: [2, n//2, n-3] after-L-layers, which every engine assumes when a checkpoint does not say."""
    return [2, num_layers // 2, num_layers - 3]


@dataclass(frozen=True)
class Limit:
    """A setting that an engine cannot express, whether a head has it, and what heads have there instead."""

    setting: str
    has: Callable[[Any], bool]
    instead: str


def reads_default_layers(head: Any) -> bool:
    return list(head.aux_layers) == engine_aux_layers(head.target_num_layers)


NORM_BEFORE_RESIDUAL = Limit(
    "norm_before_residual", lambda head: head.norm_before_residual, "a head whose residual is the state before its norm"
)
FC_NORM = Limit("fc_norm", lambda head: head.fc_norm, "a head without the norms of EAGLE-3.1")
NORM_OUTPUT = Limit("norm_output", lambda head: head.norm_output, "a head that feeds back the state before its norm")
NORM_BEFORE_FC = Limit("norm_before_fc", lambda head: head.norm_before_fc, "a head without a norm before fc")
SEVERAL_LAYERS = Limit(
    "more than one layer", lambda head: head.num_layers > 1, "one layer: there are no others, or others with other norms"
)
SLIDING_WINDOW = Limit("a sliding window", lambda head: head.sliding_window is not None, "attention to all positions")
OWN_EMBEDDING = Limit(
    "an embedding of its own, as wide as the target's",
    lambda head: head.own_embedding,
    "the target's embedding; target= tells a copy of it from another",
)
NOT_THREE_LAYERS_READ = Limit("other than three auxiliary layers", lambda head: len(head.aux_layers) != 3, "three")
CHOSEN_LAYERS_READ = Limit("chosen auxiliary layers", lambda head: not reads_default_layers(head), "2, n//2 and n-3")
LAST_STATE_READ = Limit(
    "the state after the target's last layer",
    lambda head: head.target_num_layers in head.aux_layers,
    "states that enter a layer",
)
LAYERS_OUT_OF_ORDER = Limit(
    "auxiliary layers out of order",
    lambda head: list(head.aux_layers) != sorted(set(head.aux_layers)),
    "ascending layers",
)
WIDTH_OF_FC_INPUT = Limit(
    "a state as wide as what fc reads",
    lambda head: len(head.aux_layers) * head.target_hidden_size == head.hidden_size,
    "different widths: of equal ones fc is left out",
)
SCALED_ROPE = Limit("scaled rotary frequencies", lambda head: head.rope_scaling is not None, "plain ones")
FC_BIAS = Limit("a bias in fc", lambda head: head.fc_bias, "a head without one")
WIDTH_OF_HEADS = Limit(
    "attention heads that are together not as wide as the state",
    lambda head: head.num_attention_heads * head.head_dim != head.hidden_size,
    "num_attention_heads x head_dim = hidden_size",
)


class Target(Protocol):
    """What a config.json says of a target: its name, and its own config.json."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class HeadExport:
    """What the config.json of a head is made of.

    llama: the keys of a Llama. head: the head's own config. target: its target, always there where the layout `needs_target`.
    """

    llama: dict[str, Any]
    head: Any
    target: Target | None
    num_speculative_tokens: int


@dataclass(frozen=True)
class Layout:
    """The folder of a draft of one method. Without arguments: the folder of a model of its own.

    config: the config.json of a head. limits: what a head cannot have, first reason first.
    first_layer: how names of tensors in a head's first layer begin.
    needs_target: why a head's folder repeats the target's embedding; empty where it does not.
    fc_bias: whether an EAGLE-1 head always has one in `fc`: zeros for a head without.
    gguf_types: of the weights in one GGUF file, where that is the layout.
    """

    config: Callable[[HeadExport], dict[str, Any]] = lambda export: export.llama
    limits: tuple[Limit, ...] = ()
    first_layer: str = "layers.0."
    needs_target: str = ""
    fc_bias: bool = False
    gguf_types: tuple[str, ...] = ()

    def check(self, engine: str, head: Any, folder: Path) -> None:
        """Raises UserError for a head that the engine cannot express."""
        for limit in self.limits:
            if limit.has(head):
                raise UserError("engine", got=f"{engine} for {folder}, a head with {limit.setting}", expected=limit.instead)


def eagle3_config(
    export: HeadExport,
    *keys: str,
    architecture: str = "LlamaForCausalLMEagle3",
    aux_layers: Callable[[list[int]], dict[str, Any]] = lambda layers: {AUX_LAYERS: layers},
) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head: a Llama's keys, `draft_vocab_size`, and the head's own `keys` that the engine reads.

    aux_layers: where the layers that it reads are stated; asked only for other layers than the default ones.
    """
    head, layers = export.head, list(export.head.aux_layers)
    own = {**vars(head), "num_aux_hidden_states": len(layers)}
    if head.hidden_size != head.target_hidden_size and "target_hidden_size" not in keys:
        keys = (*keys, "target_hidden_size")
    return {
        "architectures": [architecture],
        **export.llama,
        "draft_vocab_size": head.draft_vocab_size,
        **{key: own[key] for key in keys},
        **({} if reads_default_layers(head) else aux_layers(layers)),
    }
