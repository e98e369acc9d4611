"""Features of a target kept on disk, for a draft to be trained without the target's passes."""
