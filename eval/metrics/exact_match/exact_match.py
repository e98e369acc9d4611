"""Right answers, as a local metric of the `evaluate` library: load it by its path, it works offline."""

import datasets
import evaluate

from specdistill.measurement.answers import is_match

DESCRIPTION = """The share of texts whose answer is the reference's: the last number of both (the one after `####` in GSM8K), or, where
the reference has no number, the whole text ignoring case and white space."""

INPUTS = """
Args:
    predictions: texts.
    references: answers, or texts that end in them.
"""


class ExactMatch(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, object]:
        outcomes = [is_match(text, reference) for text, reference in zip(predictions, references, strict=True)]
        return {"exact_match": sum(outcomes) / len(outcomes), "outcomes": outcomes}
