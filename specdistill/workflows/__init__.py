"""The jobs that commands run, one job per file: its steps stand in order in one function."""
