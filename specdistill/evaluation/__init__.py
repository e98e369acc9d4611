"""Measuring a draft against its target, and deciding whether it may be released."""
