"""A toy block drafter in a folder of its own: it drafts K tokens in one pass, each of them from the
last token alone."""
