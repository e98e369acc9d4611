"""Training data: packed rows, and how they are produced."""
