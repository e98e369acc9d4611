"""A step of training needs no more than bench/results/memory.json says."""

from typing import Any

import pytest

from tests.scripts import load_script

memory: Any = load_script("bench/memory.py")
RECORD = memory.load_record()
TRIED = [
    RECORD[index] for index in (0, 3, 5, 6, 9, 10)
]  # each layout with each vocabulary, once recomputed and once not


@pytest.mark.long  # a step of a draft for 8B parameters, operation by operation; tests/planning counts those of small ones
@pytest.mark.parametrize(
    "recorded", TRIED, ids=lambda need: "-".join(str(need[key]) for key in memory.SHAPES[0])
)
def test_a_step_needs_no_more_than_its_record(recorded: dict[str, Any]):
    assert (
        memory.growth(memory.need(**{key: recorded[key] for key in memory.SHAPES[0]}), recorded)
        == []
    )


def test_the_record_is_of_these_shapes():
    assert [
        {key: need[key] for key in shape} for need, shape in zip(RECORD, memory.SHAPES, strict=True)
    ] == memory.SHAPES


@pytest.mark.parametrize("key", ["peak_gib", "traffic_gb", "tflop"])
def test_five_percent_are_allowed(key: str):
    recorded = RECORD[0]
    assert memory.growth({**recorded, key: 1.049 * recorded[key]}, recorded) == []
    (line,) = memory.growth({**recorded, key: 1.051 * recorded[key]}, recorded)
    assert key in line and "method eagle3, rows 4, length 2048" in line
