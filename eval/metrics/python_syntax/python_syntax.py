"""Python without a syntax error, as a local metric of the `evaluate` library: load it by its path, it works offline."""

import datasets
import evaluate

from specdistill.measurement.answers import is_python_so_far

DESCRIPTION = """The share of texts that are valid Python so far: a text that breaks off in the middle counts, one with a syntax error does
not. Nothing is run."""

INPUTS = """
Args:
    predictions: texts.
    references: the source that each of them continues; empty where it continues none.
"""


class PythonSyntax(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        source = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": source, "references": source}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, object]:
        outcomes = [is_python_so_far(prompt + text) for text, prompt in zip(predictions, references, strict=True)]
        return {"python_syntax": sum(outcomes) / len(outcomes), "outcomes": outcomes}
