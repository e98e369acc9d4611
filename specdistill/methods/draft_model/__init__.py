"""Draft models: a small language model, distilled from the target, drafts its tokens."""
