"""The layout of a draft in the folder that an engine loads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.engines.limits import Limit, reads_default_layers
from specdistill.errors import UserError

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
SIZES, NORMS = ("target_hidden_size", "num_aux_hidden_states"), ("fc_norm", "norm_output", "norm_before_fc")


@dataclass(frozen=True)
class HeadExport:
    """What the config.json of a head is made of.

    llama: the keys of a Llama. head: the head's own config. target: its `TargetFiles`, or None where the layout needs none.
    """

    llama: dict[str, Any]
    head: Any
    target: Any
    num_speculative_tokens: int


@dataclass(frozen=True)
class Layout:
    """The folder of a draft of one method. Without arguments: the folder of a model of its own.

    config: the config.json of a head. limits: what a head cannot have, first reason first.
    first_layer: how names of tensors in the first layer of an EAGLE-3 head begin.
    needs_target: why a head's folder repeats the target's embedding; empty where it does not.
    fc_bias: whether an EAGLE-1 head always has one in `fc`: zeros for a head without.
    gguf_types: of the weights in one GGUF file, where that is the layout.
    """

    config: Callable[[HeadExport], dict[str, Any]] = lambda export: export.llama
    limits: tuple[Limit, ...] = ()
    first_layer: str = "midlayer."
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
