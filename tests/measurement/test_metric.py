"""What the modules of `eval/metrics` are made with."""

from operator import eq

from specdistill.measurement.metric import share


def test_a_share_of_outcomes_described_by_a_docstring() -> None:
    same = share("same", "The share of equal texts.\n\nArgs:\n    predictions: texts.\n", eq)()
    assert same.compute(predictions=["a", "b"], references=["a", "c"]) == {"same": 0.5, "outcomes": [True, False]}
    assert same.description.startswith("The share of equal texts.") and "Args:" not in same.description
    assert "predictions: texts." in same.inputs_description
