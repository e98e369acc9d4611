"""How engines are given draft models: as any model. No torch."""

from specdistill.engines.engine import Layout, Serving

SERVING = {
    "vllm": Serving("draft_model", Layout()),
    "sglang": Serving("STANDALONE", Layout()),
    "gguf": Serving("draft-simple", Layout()),
}
