"""Suites: the prompts that measurements decode, and how they become token ids."""
