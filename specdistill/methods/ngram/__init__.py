"""N-gram lookup: draft what followed the last tokens when they occurred before."""
