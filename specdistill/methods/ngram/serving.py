"""How engines are told to look n-grams up: they have it built in, and no draft is exported for it. No torch."""

from specdistill.engines.engine import Serving
from specdistill.engines.llama_cpp import NGRAM_SIMPLE

SERVING = {
    "vllm": Serving(
        "ngram",
        options=lambda lengths: {
            "prompt_lookup_min": lengths["min"],
            "prompt_lookup_max": lengths["max"],
        },
    ),
    "gguf": Serving(NGRAM_SIMPLE),
}
