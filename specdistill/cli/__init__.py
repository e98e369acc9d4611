"""The command line: one file per verb (`specdistill VERB`), with its options, help and output."""
