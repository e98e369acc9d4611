"""Fetch drafts for a target from the Hugging Face Hub, and release drafts with their evidence."""
