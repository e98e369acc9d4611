"""The family of methods that copy from earlier text, without a trained draft."""
