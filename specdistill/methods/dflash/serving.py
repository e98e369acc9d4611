"""How engines are given DFlash drafters. No torch."""

from specdistill.engines.engine import Layout, Serving
from specdistill.engines.loader import Setting
from specdistill.methods.blocks.serving import CAUSALITY, NESTED, PRUNED, loader, of_speculators

VLLM = loader(
    architecture="DFlashDraftModel",
    settings={
        "sample_from_anchor": Setting((f"{NESTED}.sample_from_anchor", "sample_from_anchor"), False)
    },
)

SERVING = {
    "vllm": Serving("dflash", Layout(), (VLLM,)),
    "sglang": Serving("DFLASH", Layout(limits=(PRUNED, CAUSALITY))),
    "speculators": Serving("dflash", of_speculators("dflash", "DFlashSpeculator")),
    "gguf": Serving("draft-dflash", Layout(limits=(PRUNED,))),
}
