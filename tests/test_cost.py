"""What a pass costs: one table before it, and a refusal where the disk has no room."""

from pathlib import Path

import pytest

from specdistill.cost import Cost, announce
from specdistill.errors import ResourceError

SAMPLE = Cost(rows=10, tokens=1000, loss_tokens=600, num_bytes=50_000, seconds=2.0)


def test_a_sample_is_scaled_to_the_whole() -> None:
    assert SAMPLE.times(100) == Cost(1000, 100_000, 60_000, 5_000_000, 200.0)


def test_the_table_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announce("generating", SAMPLE.times(100), "10 rows in 2.0 s", tmp_path / "not" / "yet")
    said = capsys.readouterr().err
    rows = dict(tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in said.splitlines() if "│" in line)
    assert "generating" in said and (rows["rows"], rows["tokens"], rows["loss tokens"]) == ("1,000", "100,000", "60,000")
    assert rows["disk"].startswith("5.0 MB (") and rows["time"] == "3.3 min" and rows["estimated from"] == "10 rows in 2.0 s"


def test_what_has_no_room_is_refused_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = SAMPLE.times(1e15)
    with pytest.raises(ResourceError, match=rf"{tmp_path}.*data\.force=true"):
        announce("generating", huge, "", tmp_path)
    announce("generating", huge, "", tmp_path, force=True)
    assert capsys.readouterr().err.count("generating") == 2
