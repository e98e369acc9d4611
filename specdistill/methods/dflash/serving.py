"""DFlash drafters in engines. This file does not import torch."""

from specdistill.methods.blocks.serving import (
    CAUSALITY,
    NESTED_CONFIG_KEY,
    PRUNED_VOCABULARY_LIMIT,
    SCALED_EMBEDDING,
    build_speculators_layout,
    build_vllm_loader,
)
from specdistill.serving.engines.engine import Layout, Serving
from specdistill.serving.engines.loader import Setting

# From vLLM's qwen3_dflash.py.
VLLM = build_vllm_loader(
    architecture="DFlashDraftModel",
    settings={
        "sample_from_anchor": Setting(
            (f"{NESTED_CONFIG_KEY}.sample_from_anchor", "sample_from_anchor"), False
        )
    },
)

SERVING = {
    "vllm": Serving("dflash", Layout(), (VLLM,)),
    "sglang": Serving(
        "DFLASH", Layout(limits=(PRUNED_VOCABULARY_LIMIT, CAUSALITY, SCALED_EMBEDDING))
    ),
    "speculators": Serving("dflash", build_speculators_layout("dflash", "DFlashSpeculator")),
    "gguf": Serving("draft-dflash", Layout(limits=(PRUNED_VOCABULARY_LIMIT, SCALED_EMBEDDING))),
}
