"""How vLLM is told to look suffixes up: it has this built in, by the package arctic-inference, and no draft is exported. No torch."""

from specdistill.engines.engine import Serving

# vLLM's own keys; its depth is of the tokens that agree and those that are drafted together.
KEYS = {
    "max": "suffix_decoding_max_tree_depth",
    "max_cached_requests": "suffix_decoding_max_cached_requests",
    "max_spec_factor": "suffix_decoding_max_spec_factor",
    "min_token_prob": "suffix_decoding_min_token_prob",
}
SERVING = {
    "vllm": Serving(
        "suffix", options=lambda settings: {theirs: settings[ours] for ours, theirs in KEYS.items()}
    ),
}
