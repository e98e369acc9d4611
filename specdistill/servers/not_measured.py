"""Why numbers are absent from the report of a server: what another process does inside is not seen from here."""

from collections.abc import Mapping
from types import MappingProxyType

_HIDDEN = "a server does not time its steps one by one"
_SUMS = "a server counts over whole texts, not round by round"
_HF = "transformers' generate() is not timed beside a server"
_HF_NUMBERS = (
    "hf_generate_tokens_per_second",
    "hf_generate_num_prompts",
    "baseline_over_hf_generate",
    "speedup_over_hf_generate",
)

ROW_REASONS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("draft_ms", "verify_ms", "baseline_step_ms", "predicted_speedup", "prediction_gap"), _HIDDEN)
    | dict.fromkeys(("num_rounds", "tokens_per_round", "context_ratio"), _SUMS)
    | dict.fromkeys(_HF_NUMBERS, _HF)
    | {
        "decode_speedup": "a server answers with the whole text: its prefill is not timed apart",
        "num_looping": "the server does not return its tokens",
        "vocabulary_coverage": "a server does not tell its draft's vocabulary",
    }
)
NO_BASELINE = "no eval.baseline_server was given"
NO_BASELINE_ROW: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("baseline_tokens_per_second", "speedup", "overhead_factor"), NO_BASELINE)
)
DOCUMENT_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "theory": _HIDDEN,
        "context": _SUMS,
        "lossless.sampling_test": "the rule that must be caught cannot be put into a server",
        "hardware": "a server does not say what it runs on",
        "target.parameters": "a server does not say",
        "target.dtype": "a server does not say",
        "draft.parameters": "a server does not say",
        "draft.bytes": "a server does not say",
        "measurement.peak_memory_bytes": "a server does not say",
        "settings.draft_sampling": "a server does not say",
    }
)
