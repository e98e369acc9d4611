"""EAGLE-3 heads in engines: the layouts of exports, and how each engine loads a folder.

The facts were read in the sources that `specdistill.serving.engines` names. This file does not
import torch.
"""

from collections.abc import Callable
from dataclasses import replace

from specdistill.methods.chains import serving as heads
from specdistill.serving.engines.engine import HeadExport, Layout, Serving
from specdistill.serving.engines.loader import (
    AUX_LAYERS,
    LLAMA_SETTINGS,
    Loader,
    Setting,
    Slot,
    choose_aux_layers,
    list_layer_slots,
)
from specdistill.serving.engines.vllm import build_speculators_config

# The switches for norms, by their names in files and in `Eagle3Config`.
NORMS = ("fc_norm", "norm_output", "norm_before_fc")


def build_head_config(
    export: HeadExport,
    *keys: str,
    aux_layers: Callable[[list[int]], dict[str, object]] = lambda layers: {AUX_LAYERS: layers},
) -> dict[str, object]:
    """Return the config.json of an EAGLE-3 head for an engine.

    It has the keys of a Llama model, the head's sizes and the settings that the engine reads.

    Args:
        export: the head.
        *keys: fields of the head's config that are written in addition.
        aux_layers: a function that returns the keys for the list of target layers that the head
            reads, because engines expect different keys. Not called for the default layers.
    """
    # Engines assume the default layers if config.json states none. So the layers that the head
    # reads are written only if they are others.
    head = export.head
    layers = list(export.head.aux_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **export.llama,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "num_aux_hidden_states": len(layers),
        **{key: getattr(head, key) for key in keys},
        **({} if layers == choose_aux_layers(head.target_num_layers) else aux_layers(layers)),
    }


def build_eagle3_speculators_config(export: HeadExport) -> dict[str, object]:
    """Return the config.json of a head in the layout of the speculators library.

    The keys of a Llama model are nested in `transformer_layer_config`; those of the head are at the
    top level.
    """
    head = export.head
    # For other than three auxiliary layers, `transformer_layer_config` must state their number.
    # Without the key vLLM assumes three, whatever layers are listed.
    counted = {} if len(head.aux_layers) == 3 else {"num_aux_hidden_states": len(head.aux_layers)}
    return {
        **build_speculators_config(
            export, "eagle3", "Eagle3Speculator", {**export.llama, **counted}
        ),
        "target_hidden_size": None
        if head.hidden_size == head.target_hidden_size
        else head.target_hidden_size,
        "norm_before_residual": head.norm_before_residual,
        **{norm: getattr(head, norm) for norm in NORMS},
        AUX_LAYERS: list(head.aux_layers),
        "embed_requires_grad": head.owns_embedding,
    }


def format_eagle_config(layers: list[int]) -> dict[str, object]:
    """Return the section `eagle_config`, which lists the target's layers that a head reads.

    This section counts layers from 0, so it holds L - 1 for the hidden state after L layers.
    """
    return {
        "eagle_config": {"use_aux_hidden_state": True, AUX_LAYERS: [layer - 1 for layer in layers]}
    }


# The tensors and the keys of config.json that all engines read in the same way.
SLOTS = (
    Slot("fc.weight", "H A*D"),
    Slot("fc_norm.{a}.weight", "D", "fc_norm"),
    Slot("input_norm.weight", "A*D", "norm_before_fc"),
    *list_layer_slots("layers.0", "2*H", "hidden_norm", "input_layernorm"),
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
# What SGLang and TensorRT-LLM have in common: they take the target's embedding if the head is as
# wide, take no window from the file, and take `bias` for a bias of fc.
PLAIN_SLOTS = (
    *SLOTS,
    Slot("fc.bias", "H", "bias"),
    *list_layer_slots("layers.{i}", "H", "hidden_norm"),
    Slot("embed_tokens.weight", "V H", "own_width"),
    Slot("embed_tokens.weight", "V H", "!own_width", "target"),
)
PLAIN_SETTINGS = {**SETTINGS, "sliding_window": Setting(), "own_embedding": Setting(default=False)}

# How vLLM loads a head in the layout of SpecForge, whose keys are at the top level of config.json.
VLLM = Loader(
    never_null=("target_hidden_size",),
    unknown="refused",
    unset="silent",
    # vLLM puts `Eagle3` in front of a name that is none of its classes.
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
        *list_layer_slots("layers.{i}", "H", "input_layernorm"),
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
# How vLLM loads a head in the layout of speculators, which also names the target and K.
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
# SGLang reports neither unknown tensors nor missing ones. It takes the target's LM head if
# config.json states no draft vocabulary.
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
    required=("draft_vocab_size",),  # it may be null
    renamed=(
        ("midlayer", "layers.0", ""),
        ("aux_norm_low", "fc_norm.0", ""),
        ("aux_norm_mid", "fc_norm.1", ""),
        ("aux_norm_high", "fc_norm.2", ""),
    ),
    ignored=("t2d", "d2t"),  # d2t is loaded whatever the vocabulary
    arguments={"sliding_window": "--speculative-draft-window-size"},
    limits=(heads.LAST_STATE_READ, heads.WIDTH_OF_FC_INPUT),
)
# TensorRT-LLM takes the auxiliary layers from its own options instead of config.json.
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
    limits=(heads.LAYERS_OUT_OF_ORDER, heads.WIDTH_OF_FC_INPUT),
)

# How each engine is given EAGLE-3 heads: the engine's name of the method, the layout of the folder
# with the limits of the engine, and how the engine loads the folder.
SERVING = {
    "vllm": Serving(
        "eagle3",
        Layout(
            lambda export: build_head_config(export, *NORMS, "norm_before_residual"),
            limits=(heads.LAYERS_OUT_OF_ORDER,),
        ),
        (SPECULATORS_IN_VLLM, VLLM),
    ),
    "sglang": Serving(
        "EAGLE3",
        Layout(
            lambda export: build_head_config(export, *NORMS, aux_layers=format_eagle_config),
            limits=(
                heads.NORM_BEFORE_RESIDUAL,
                heads.SEVERAL_LAYERS,
                heads.OWN_EMBEDDING,
                heads.LAST_STATE_READ,
                heads.LAYERS_OUT_OF_ORDER,
                heads.WIDTH_OF_FC_INPUT,
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
            build_eagle3_speculators_config,
            limits=(heads.LAYERS_OUT_OF_ORDER,),
            first_layer="layers.0.",
            needs_target="speculators' config.json names it",
        ),
    ),
    "gguf": Serving(
        "draft-eagle3",
        Layout(
            lambda export: build_head_config(export, "norm_before_fc", "norm_before_residual"),
            limits=(
                heads.FC_NORM,
                heads.NORM_OUTPUT,
                heads.SEVERAL_LAYERS,
                heads.SLIDING_WINDOW,
                heads.NOT_THREE_LAYERS_READ,
                heads.LAST_STATE_READ,
                heads.LAYERS_OUT_OF_ORDER,
            ),
        ),
    ),
    "trtllm": Serving(loaders=(TENSORRT_LLM,)),
}
