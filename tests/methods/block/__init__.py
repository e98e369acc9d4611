"""A toy method that drafts K tokens in one pass, each of them from the last token alone."""
