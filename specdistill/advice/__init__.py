"""Advice before and after training: a plan for a target, a diagnosis of a draft."""
