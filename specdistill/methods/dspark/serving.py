"""DSpark drafters in engines. This file does not import torch."""

from specdistill.methods.blocks.serving import (
    CAUSALITY,
    CORRECTION,
    SCALED_EMBEDDING,
    build_speculators_layout,
    build_vllm_loader,
)
from specdistill.serving.engines.engine import Layout, Serving
from specdistill.serving.engines.loader import Setting, Slot

# From vLLM's qwen3_dspark.py, which only vLLM's runner V2 runs. The confidence head may be there or
# not.
VLLM = build_vllm_loader(
    Slot("markov_head.markov_w1.weight", "V R"),
    Slot("markov_head.markov_w2.weight", "W R"),
    architecture="Qwen3DSparkModel",
    settings={
        "sample_from_anchor": Setting(("sample_from_anchor",), True),
        "markov_rank": Setting(("markov_rank",)),
        "enable_confidence_head": Setting(("enable_confidence_head",), False),
        "confidence_head_with_markov": Setting(("confidence_head_with_markov",), False),
    },
    ignored=("confidence_head",),
    limits=(CORRECTION,),
)
LIMITED_LAYOUT = Layout(limits=(CORRECTION,))

# How each engine is given DSpark drafts: the engine's name of the method, the layout of the folder
# and, if known, how the engine loads it.
SERVING = {
    "vllm": Serving("dspark", LIMITED_LAYOUT, (VLLM,)),
    "sglang": Serving("DSPARK", Layout(limits=(CORRECTION, CAUSALITY, SCALED_EMBEDDING))),
    "speculators": Serving("dspark", build_speculators_layout("dspark", "DSparkSpeculator")),
    "gguf": Serving("draft-dspark", Layout(limits=(CORRECTION, SCALED_EMBEDDING))),
}
