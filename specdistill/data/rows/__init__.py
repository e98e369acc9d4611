"""Row sets, the training data on disk: packed token rows with loss masks, and their features."""
