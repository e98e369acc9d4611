"""Train draft models for speculative decoding, and prove them by decoding with them."""

__version__ = "0.1.0"
