"""How engines are given DSpark drafters. No torch."""

from specdistill.engines.engine import Layout, Serving
from specdistill.engines.loader import Setting, Slot
from specdistill.methods.blocks.serving import CAUSALITY, CORRECTION, loader, of_speculators

# vLLM's qwen3_dspark.py; its runner V2 alone runs it. The confidence head may be there or not.
VLLM = loader(
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
LIMITED = Layout(limits=(CORRECTION,))

SERVING = {
    "vllm": Serving("dspark", LIMITED, (VLLM,)),
    "sglang": Serving("DSPARK", Layout(limits=(CORRECTION, CAUSALITY))),
    "speculators": Serving("dspark", of_speculators("dspark", "DSparkSpeculator")),
    "gguf": Serving("draft-dspark", LIMITED),
}
