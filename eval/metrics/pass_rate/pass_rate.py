"""Programs that pass their tests, as a local metric of the `evaluate` library: load it by its path, it works offline.

Computing it runs generated code.
"""

import datasets
import evaluate

from specdistill.measurement.programs import passes

DESCRIPTION = (
    """The share of programs that run to their end with their test, each in a process with limits of time and memory."""
)

INPUTS = """
Args:
    predictions: programs.
    references: for each of them, the code that tests it and raises where it fails.
"""


class PassRate(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        code = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": code, "references": code}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, object]:
        outcomes = [passes(f"{program}\n{test}\n") for program, test in zip(predictions, references, strict=True)]
        return {"pass_rate": sum(outcomes) / len(outcomes), "outcomes": outcomes}
