"""The family of drafters that draft a whole block of tokens in one pass (DFlash, DSpark)."""
