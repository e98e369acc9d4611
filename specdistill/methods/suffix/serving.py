"""How vLLM is told to look suffixes up. No torch.

vLLM has this lookup built in, by the package arctic-inference, so no draft is exported.
"""

from specdistill.serving.engines.engine import Serving

# vLLM's own keys. Its depth counts the tokens that agree and the drafted tokens together.
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
