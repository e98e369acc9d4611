"""The jobs of the project, one per file. Each reads from top to bottom."""
