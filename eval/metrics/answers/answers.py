"""Provide the task metrics to the library `evaluate`, each as a configuration.

Load one with `evaluate.load("eval/metrics/answers", "exact_match")`, or with `"python_syntax"`.
"""

from specdistill.evaluation.measurement.quality import Answers

__all__ = ["Answers"]
