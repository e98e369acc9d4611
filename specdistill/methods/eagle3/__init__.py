"""EAGLE-3 (arXiv 2503.01840): a head over hidden states of three target layers."""
