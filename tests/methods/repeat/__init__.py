"""A toy method in a folder of its own: it repeats the last token, with a confidence that it learns."""
