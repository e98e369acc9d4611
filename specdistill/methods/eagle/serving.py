"""How engines are given EAGLE-1 heads: the layouts of exports, and what each engine's loader makes of a folder. No torch.

Read in the sources that `specdistill.engines` names.
"""

from dataclasses import replace
from typing import Any

from specdistill.engines.engine import HeadExport, Layout, Serving
from specdistill.engines.loader import LLAMA_SETTINGS, Loader, Setting, Slot, layer_slots
from specdistill.methods.chains import limits

# EAGLE-1. The first layer has no norm before its attention; the head is the target's.
SLOTS = (
    Slot("fc.weight", "H 2*H"),
    *layer_slots("layers.0", "H"),
    *layer_slots("layers.{i}", "H", "input_layernorm"),
)
SETTINGS = {**LLAMA_SETTINGS, "sliding_window": Setting()}

VLLM = Loader(
    unknown="refused",
    unset="silent",
    architectures=frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}),
    slots=(*SLOTS, Slot("embed_tokens.weight", "V H", source="shared")),
    settings={**SETTINGS, "fc_bias": Setting(default=False)},
    ignored=(".bias", "rotary_emb."),
)
WRAPPED = replace(VLLM, inner="model", required=("model",))
SGLANG = Loader(
    unknown="silent",
    unset="silent",
    architectures=frozenset({"LlamaForCausalLMEagle"}),
    slots=(*SLOTS, Slot("fc.bias", "H"), Slot("embed_tokens.weight", "V H", source="target")),
    settings=SETTINGS,
    ignored=("lm_head", "rotary_emb.", "projector"),
)


def wrapped_config(export: HeadExport) -> dict[str, Any]:
    return {
        "model_type": "eagle",
        "model": {"architectures": ["LlamaForCausalLM"], **export.llama, "bias": False},
        "truncated_vocab_size": None,
        "method": "eagle",
    }


SERVING = {
    "vllm": Serving(
        "eagle",
        Layout(wrapped_config, limits=(limits.FC_BIAS, limits.SLIDING_WINDOW)),
        (WRAPPED, VLLM),
    ),
    "sglang": Serving(
        "EAGLE",
        Layout(
            lambda export: {"architectures": ["LlamaForCausalLMEagle"], **export.llama},
            limits=(limits.SLIDING_WINDOW,),
            fc_bias=True,
        ),
        (SGLANG,),
    ),
}
