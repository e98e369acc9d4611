"""Confidence intervals, acceptance metrics and the predicted speedup. No torch here."""
