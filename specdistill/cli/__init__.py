"""The command line: one file per verb, with its options, help and output."""
