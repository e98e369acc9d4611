"""Drafts in inference engines: exports, engines, the vLLM plugin and monitoring."""
