"""The share of programs that run to their end with their test, each in a process with limits of time and memory.

Computing it runs generated code.

Args:
    predictions: programs.
    references: for each of them, the code that tests it and raises where it fails.
"""

from specdistill.measurement.quality import passes, share

PassRate = share("pass_rate", __doc__, lambda program, test: passes(f"{program}\n{test}\n"))
