"""The losses of training: divergences of one token, and their sum through an output head."""
