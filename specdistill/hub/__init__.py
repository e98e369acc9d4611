"""Drafts on the Hugging Face Hub: fetched for a target, and released with the evidence for them."""
