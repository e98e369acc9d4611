"""How engines are given EAGLE-3 heads: the layouts of exports, and what each engine's loader makes of a folder. No torch.

Read in the sources that `specdistill.engines` names.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specdistill.engines.engine import HeadExport, Layout, Serving
from specdistill.engines.loader import (
    AUX_LAYERS,
    LLAMA_SETTINGS,
    Loader,
    Setting,
    Slot,
    engine_aux_layers,
    layer_slots,
)
from specdistill.engines.vllm import speculators_config
from specdistill.methods.chains import limits

NORMS = ("fc_norm", "norm_output", "norm_before_fc")


def head_config(
    export: HeadExport,
    *keys: str,
    aux_layers: Callable[[list[int]], dict[str, Any]] = lambda layers: {AUX_LAYERS: layers},
) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head: a Llama's keys, the head's sizes, and its own `keys` that the engine reads.

    aux_layers: where the layers that it reads are stated; asked only for other layers than the default ones.
    """
    head, layers = export.head, list(export.head.aux_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **export.llama,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "num_aux_hidden_states": len(layers),
        **{key: getattr(head, key) for key in keys},
        **({} if layers == engine_aux_layers(head.target_num_layers) else aux_layers(layers)),
    }


def of_speculators(export: HeadExport) -> dict[str, Any]:
    head = export.head
    # vLLM carries over what stands in there, and counts three states otherwise, whatever layers are listed.
    counted = {} if len(head.aux_layers) == 3 else {"num_aux_hidden_states": len(head.aux_layers)}
    return {
        **speculators_config(export, "eagle3", "Eagle3Speculator", {**export.llama, **counted}),
        "target_hidden_size": None
        if head.hidden_size == head.target_hidden_size
        else head.target_hidden_size,
        "norm_before_residual": head.norm_before_residual,
        **{norm: getattr(head, norm) for norm in NORMS},
        AUX_LAYERS: list(head.aux_layers),
        "embed_requires_grad": head.owns_embedding,
    }


def in_eagle_config(layers: list[int]) -> dict[str, Any]:
    return {
        "eagle_config": {"use_aux_hidden_state": True, AUX_LAYERS: [layer - 1 for layer in layers]}
    }


SLOTS = (
    Slot("fc.weight", "H A*D"),
    Slot("fc_norm.{a}.weight", "D", "fc_norm"),
    Slot("input_norm.weight", "A*D", "norm_before_fc"),
    *layer_slots("layers.0", "2*H", "hidden_norm", "input_layernorm"),
    Slot("norm.weight", "H"),
    Slot("d2t", "W", "pruned"),
)
SETTINGS = {
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
PLAIN_SLOTS = (
    *SLOTS,
    Slot("fc.bias", "H", "bias"),
    *layer_slots("layers.{i}", "H", "hidden_norm"),
    Slot("embed_tokens.weight", "V H", "own_width"),
    Slot("embed_tokens.weight", "V H", "!own_width", "target"),
)
PLAIN_SETTINGS = {**SETTINGS, "sliding_window": Setting(), "own_embedding": Setting(default=False)}

VLLM = Loader(
    never_null=("target_hidden_size",),
    unknown="refused",
    unset="silent",
    # A name that is none of its classes gets `Eagle3` in front.
    architectures=frozenset(
        {
            "LlamaForCausalLM",
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Qwen2_5vlForCausalLM",
        }
        | {"Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"}
    ),
    slots=(
        *SLOTS,
        *layer_slots("layers.{i}", "H", "input_layernorm"),
        Slot("layers.{i}.hidden_norm.weight", "H", source="unused"),
        Slot("lm_head.weight", "W H", source="shared"),
        Slot("embed_tokens.weight", "V H", source="shared"),
    ),
    settings={**SETTINGS, "norm_before_residual": Setting(("norm_before_residual",), False)},
    aux_layers={
        "V1 runner": {AUX_LAYERS: 0, f"eagle_config.{AUX_LAYERS}": 0},
        "V2 runner": {AUX_LAYERS: 0, "eagle_config.layer_ids": 0},
    },
    renamed=(("midlayer.", "layers.0.", ""),),
    ignored=("t2d", "mask_hidden", ".bias", "rotary_emb."),
)
SPECULATORS_IN_VLLM = replace(
    VLLM,
    architectures=frozenset(),
    settings={**VLLM.settings, "norm_before_residual": Setting(("norm_before_residual",), True)},
    inner="transformer_layer_config",
    taken=("draft_vocab_size", "target_hidden_size", "norm_before_residual", *NORMS, AUX_LAYERS),
    required=(
        "speculators_config.proposal_methods.0.speculative_tokens",
        "speculators_config.verifier.name_or_path",
        "transformer_layer_config",
    ),
)
SGLANG = Loader(
    never_null=("target_hidden_size",),
    unknown="silent",
    unset="silent",
    architectures=frozenset({"LlamaForCausalLMEagle3"}),
    slots=(
        *PLAIN_SLOTS,
        Slot("layers.{i}.input_layernorm.weight", "H", source="unused"),
        Slot("lm_head.weight", "W H", "states_vocabulary"),
        Slot("lm_head.weight", "V H", "!states_vocabulary", "target"),
    ),
    settings={**PLAIN_SETTINGS, "fc_norm": Setting(("fc_norm", "use_aux_norm"), False)},
    aux_layers={"": {f"eagle_config.{AUX_LAYERS}": 1}},
    required=("draft_vocab_size",),  # may be null
    renamed=(
        ("midlayer", "layers.0", ""),
        ("aux_norm_low", "fc_norm.0", ""),
        ("aux_norm_mid", "fc_norm.1", ""),
        ("aux_norm_high", "fc_norm.2", ""),
    ),
    ignored=("t2d", "d2t"),  # d2t is taken whatever the vocabulary
    arguments={"sliding_window": "--speculative-draft-window-size"},
    limits=(limits.LAST_STATE_READ, limits.WIDTH_OF_FC_INPUT),
)
TENSORRT_LLM = Loader(
    never_null=("target_hidden_size",),
    unknown="silent",
    unset="refused",
    architectures=frozenset(
        {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
    ),
    slots=(*PLAIN_SLOTS, Slot("lm_head.weight", "W H", source="shared")),
    settings={
        **PLAIN_SETTINGS,
        "norm_before_fc": Setting(("eagle_config.norm_before_fc",), False),
        "norm_output": Setting(("eagle_config.return_hidden_post_norm", "norm_output"), False),
    },
    renamed=(("midlayer.", "layers.0.", "one_layer"),),
    ignored=("t2d",),
    arguments={"aux_layers": "eagle3_layers_to_capture"},
    limits=(limits.LAYERS_OUT_OF_ORDER, limits.WIDTH_OF_FC_INPUT),
)

SERVING = {
    "vllm": Serving(
        "eagle3",
        Layout(
            lambda export: head_config(export, *NORMS, "norm_before_residual"),
            limits=(limits.LAYERS_OUT_OF_ORDER,),
        ),
        (SPECULATORS_IN_VLLM, VLLM),
    ),
    "sglang": Serving(
        "EAGLE3",
        Layout(
            lambda export: head_config(export, *NORMS, aux_layers=in_eagle_config),
            limits=(
                limits.NORM_BEFORE_RESIDUAL,
                limits.SEVERAL_LAYERS,
                limits.OWN_EMBEDDING,
                limits.LAST_STATE_READ,
                limits.LAYERS_OUT_OF_ORDER,
                limits.WIDTH_OF_FC_INPUT,
            ),
        ),
        (SGLANG,),
        lambda config: (
            {"speculative_draft_window_size": config["sliding_window"]}
            if config.get("layer_types")
            else {}
        ),
    ),
    "speculators": Serving(
        "eagle3",
        Layout(
            of_speculators,
            limits=(limits.LAYERS_OUT_OF_ORDER,),
            first_layer="layers.0.",
            needs_target="speculators' config.json names it",
        ),
    ),
    "gguf": Serving(
        "draft-eagle3",
        Layout(
            lambda export: head_config(export, "norm_before_fc", "norm_before_residual"),
            limits=(
                limits.FC_NORM,
                limits.NORM_OUTPUT,
                limits.SEVERAL_LAYERS,
                limits.SLIDING_WINDOW,
                limits.NOT_THREE_LAYERS_READ,
                limits.LAST_STATE_READ,
                limits.LAYERS_OUT_OF_ORDER,
            ),
        ),
    ),
    "trtllm": Serving(loaders=(TENSORRT_LLM,)),
}
