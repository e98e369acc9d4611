"""Task metrics of `evaluate`, each a configuration: `evaluate.load("eval/metrics/answers", "exact_match")`, `pass_rate` or `python_syntax`.

Computing `pass_rate` runs the predictions as programs.
"""

from specdistill.measurement.quality import Answers

__all__ = ["Answers"]
