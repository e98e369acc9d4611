"""DFlash (arXiv 2602.06036): a block drafter that reads hidden states of the target."""
