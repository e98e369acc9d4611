"""Compare several drafts for one target, side by side on the same prompts."""
