"""EAGLE-1 heads in engines: the layouts of exports, and how each engine loads a folder.

The facts were read in the sources that `specdistill.serving.engines` names. This file does not
import torch.
"""

from dataclasses import replace

from specdistill.methods.chains import serving as heads
from specdistill.serving.engines.engine import HeadExport, Layout, Serving
from specdistill.serving.engines.loader import (
    LLAMA_SETTINGS,
    Loader,
    Setting,
    Slot,
    list_layer_slots,
)

# The tensors of a head. The first layer has no norm before its attention, and lm_head is the
# target's.
SLOTS = (
    Slot("fc.weight", "H 2*H"),
    *list_layer_slots("layers.0", "H"),
    *list_layer_slots("layers.{i}", "H", "input_layernorm"),
)
SETTINGS = {**LLAMA_SETTINGS, "sliding_window": Setting()}

# How vLLM loads a head whose keys are at the top level of config.json, and one that it wraps.
VLLM = Loader(
    unknown="refused",
    unset="silent",
    architectures=frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}),
    slots=(*SLOTS, Slot("embed_tokens.weight", "V H", source="shared")),
    settings={**SETTINGS, "fc_bias": Setting(default=False)},
    ignored=(".bias", "rotary_emb."),
)
WRAPPED_LAYOUT = replace(VLLM, inner="model", required=("model",))
# SGLang's model has a bias in fc, and takes the embedding from the target whatever the file holds.
SGLANG = Loader(
    unknown="silent",
    unset="silent",
    architectures=frozenset({"LlamaForCausalLMEagle"}),
    slots=(*SLOTS, Slot("fc.bias", "H"), Slot("embed_tokens.weight", "V H", source="target")),
    settings=SETTINGS,
    ignored=("lm_head", "rotary_emb.", "projector"),
)


def build_wrapped_config(export: HeadExport) -> dict[str, object]:
    """Return a head's config.json as vLLM expects it: with the head's keys nested under `model`."""
    # `truncated_vocab_size` is None, because the vocabulary is the target's. vLLM loads no bias of
    # fc, so the head has none.
    return {
        "model_type": "eagle",
        "model": {"architectures": ["LlamaForCausalLM"], **export.llama, "bias": False},
        "truncated_vocab_size": None,
        "method": "eagle",
    }


# How each engine is given EAGLE-1 heads: the engine's name of the method, the layout of the folder
# and how the engine loads it.
SERVING = {
    "vllm": Serving(
        "eagle",
        Layout(build_wrapped_config, limits=(heads.FC_BIAS, heads.SLIDING_WINDOW)),
        (WRAPPED_LAYOUT, VLLM),
    ),
    "sglang": Serving(
        "EAGLE",
        Layout(
            lambda export: {"architectures": ["LlamaForCausalLMEagle"], **export.llama},
            limits=(heads.SLIDING_WINDOW,),
            fc_bias=True,
        ),
        (SGLANG,),
    ),
}
