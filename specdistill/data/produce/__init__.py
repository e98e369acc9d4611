"""Turn sources of text into row sets: read, clean, generate answers, encode and merge."""
