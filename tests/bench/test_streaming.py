"""A stream of many rows takes no more memory than one of few."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

bench: Any = load_script("bench/streaming.py")


@pytest.mark.long  # 200,000 rows
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    points = bench.measure(tmp_path, 200_000, every=20_000)
    assert [point["read"] // 20_000 for point in points][:9] == [*range(1, 10)] and points[-1]["read"] == 200_000
    settled = [point["mebibytes"] for point in points[2:]]
    assert max(settled) - settled[0] < 12, settled  # of what is read in between, the token ids alone are 20 MiB
    assert bench.page({"points": points, "hardware": {"name": "a machine"}}).count("MiB") == len(points)
