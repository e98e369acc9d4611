"""Errors, files, processes and the terminal, used by every other package; imports none of them."""
