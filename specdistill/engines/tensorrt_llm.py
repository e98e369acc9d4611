"""TensorRT-LLM's PyTorch backend, read at 00679c6 (2026): modeling_speculative.py, speculative/eagle3.py. Drafts are checked, not exported.

It reads what ModelOpt writes: `layers.0.*`, without t2d and embedding; SpecForge's names, too. The layers that a head reads are an
argument of its own. A tensor that is missing is an error, one that is unknown is not.
"""

from specdistill.engines import limits, loader
from specdistill.engines.engine import Engine
from specdistill.engines.loader import Loader, Setting, Slot

EAGLE3 = Loader(
    unknown="silent",
    unset="refused",
    architectures=frozenset({"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}),
    slots=(*loader.PLAIN_EAGLE3_SLOTS, Slot("lm_head.weight", "W H", source="shared")),
    settings={
        **loader.PLAIN_EAGLE3_SETTINGS,
        "norm_before_fc": Setting(("eagle_config.norm_before_fc",), False),
        "norm_output": Setting(("eagle_config.return_hidden_post_norm", "norm_output"), False),
    },
    renamed=(("midlayer.", "layers.0.", "one_layer"),),
    ignored=("t2d",),
    arguments={"aux_layers": "eagle3_layers_to_capture"},
    limits=(limits.LAYERS_OUT_OF_ORDER, limits.WIDTH_OF_FC_INPUT),
)
TENSORRT_LLM = Engine(name="trtllm", title="TensorRT-LLM", versions="PyTorch backend at 00679c6", loaders={"eagle3": (EAGLE3,)})
