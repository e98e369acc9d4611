"""Measure drafts by decoding: acceptance, speed, losslessness and answer quality."""
