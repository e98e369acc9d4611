"""Speculative decoding: propose, verify, and keep the KV caches of target and draft in step."""
