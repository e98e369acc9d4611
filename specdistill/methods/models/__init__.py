"""The family of drafts that are language models themselves (draft models, PARD)."""
