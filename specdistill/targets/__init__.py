"""The frozen target model: read its files, load it, run it and capture its hidden states."""
