"""DSpark (arXiv 2607.05147): a block drafter with a Markov correction and a confidence head."""
