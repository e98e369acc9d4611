"""Train a draft: the Trainer, its arguments and optimizer, checkpoints and the run folder."""
