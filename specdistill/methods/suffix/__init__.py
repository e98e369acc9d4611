"""SuffixDecoding (arXiv 2411.04975): lookup in a suffix tree of this and earlier outputs."""
