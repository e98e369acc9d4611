"""Decide by rules on a report whether a draft may be released."""
