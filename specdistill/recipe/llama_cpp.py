"""The recipe's keys of llama.cpp: the GGUF files that its server loads, and the options that it is started with, in its own words."""

from typing import Literal

from specdistill.recipe.fields import Section, option

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]


class LlamaCppConfig(Section):
    """Each option reaches the command line of `llama-server` under its own name, both with the draft and without; null: its default."""

    model: str | None = option(None, "the target as a GGUF file; null: target.model is one")
    model_draft: str | None = option(None, "the draft as a GGUF file, which llama.cpp's converter makes of its export")
    ctx_size: int | None = option(
        None, "tokens of all slots together, in the target and in the draft; null: the longest sequence in each slot", ge=1
    )
    parallel: int | None = option(None, "slots, requests decoded together; null: one for each request in flight", ge=1)
    batch_size: int | None = option(None, "most tokens in a batch", ge=1)
    ubatch_size: int | None = option(None, "most tokens computed together", ge=1)
    threads: int | None = option(None, "CPU threads", ge=1)
    spec_draft_threads: int | None = option(None, "CPU threads of the draft", ge=1)
    device: str | None = option(None, "devices, e.g. CUDA0,CUDA1; none: the CPU")
    spec_draft_device: str | None = option(None, "devices of the draft")
    gpu_layers: int | None = option(None, "layers on the devices", ge=0)
    spec_draft_ngl: int | None = option(None, "layers of the draft on its devices", ge=0)
    cache_type_k: CacheType | None = option(None, "type of the keys that are kept")
    cache_type_v: CacheType | None = option(None, "type of the values that are kept")
    spec_draft_type_k: CacheType | None = option(None, "type of the draft's keys")
    spec_draft_type_v: CacheType | None = option(None, "type of the draft's values")
