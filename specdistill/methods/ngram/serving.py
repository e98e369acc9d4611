"""How engines are told to look n-grams up: they have it built in, and no draft is exported for it. No torch."""

from specdistill.engines.engine import Serving

SERVING = {
    "vllm": Serving(
        "ngram", options=lambda lengths: {"prompt_lookup_min": lengths["min"], "prompt_lookup_max": lengths["max"]}
    ),
}
