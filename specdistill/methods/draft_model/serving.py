"""How engines are given draft models: as any model, or as one GGUF file. No torch."""

from specdistill.engines.engine import Layout, Serving

SERVING = {
    "vllm": Serving("draft_model", Layout()),
    "sglang": Serving("STANDALONE", Layout()),
    "gguf": Serving("draft-simple", Layout(gguf_types=("f32", "f16", "q8_0"))),
}
