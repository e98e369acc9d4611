"""The metrics of `eval/metrics` as the `evaluate` library loads them: by the path of their module, offline.

A module's docstring says what it measures and, under `Args:`, of what.
"""

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate


def metric(name: str, about: str | None, inputs: Any, compute: Callable[..., dict[str, Any]]) -> type[evaluate.Metric]:
    """A class that `evaluate.load` finds. about: the module's docstring. inputs: datasets' type of a prediction and of a reference."""
    description, _, arguments = str(about).partition("Args:")

    def info(self: Any) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": inputs, "references": inputs})
        return evaluate.MetricInfo(description, "", features, inputs_description=f"Args:{arguments}")

    return type(name, (evaluate.Metric,), {"_info": info, "_compute": lambda self, **given: compute(**given)})


def share(name: str, about: str | None, is_right: Callable[[str, str], bool]) -> type[evaluate.Metric]:
    """The share of texts that are right beside their references, under the metric's name, and `outcomes`, one by one."""

    def compute(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        outcomes = [is_right(text, reference) for text, reference in zip(predictions, references, strict=True)]
        return {name: sum(outcomes) / len(outcomes), "outcomes": outcomes}

    return metric(name, about, datasets.Value("string"), compute)
