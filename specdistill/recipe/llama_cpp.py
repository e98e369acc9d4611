"""The recipe's keys of llama.cpp: the GGUF files that its server loads."""

from specdistill.recipe.fields import Section, option


class LlamaCppConfig(Section):
    model: str | None = option(None, "the target as a GGUF file; null: target.model is one")
    model_draft: str | None = option(None, "the draft as a GGUF file, which llama.cpp's converter makes of its export")
