"""How engines are told to look n-grams up. No torch.

Engines have this lookup built in, so no draft is exported for it.
"""

from specdistill.serving.engines.engine import Serving
from specdistill.serving.engines.llama_cpp import NGRAM_SIMPLE

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
