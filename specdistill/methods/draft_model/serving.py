"""Draft models in engines, which take them as any model. This file does not import torch."""

from specdistill.serving.engines.engine import Layout, Serving

SERVING = {
    "vllm": Serving("draft_model", Layout()),
    "sglang": Serving("STANDALONE", Layout()),
    "gguf": Serving("draft-simple", Layout()),
}
