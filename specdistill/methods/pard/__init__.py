"""PARD (arXiv 2504.18583): a draft model that drafts all its tokens in one pass."""
