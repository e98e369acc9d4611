"""A long task shows its cost first, then a bar on a terminal or a few lines in a log file.

It is refused where the disk has no room.
"""

import sys
from pathlib import Path

import pytest

from specdistill.common import progress as module
from specdistill.common.errors import ResourceError
from specdistill.common.progress import (
    Cost,
    announce,
    format_speed,
    hide_bars_of_transformers,
    show_progress,
)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when a test sets it."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_every_thirty_seconds_and_a_last_one(clock, capsys):
    with show_progress("measuring", 600, "prompts") as advance:
        for _ in range(300):
            clock[0] += 1
            advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 300 / 30  # at 300 s the last line stands for the tenth
    assert lines[0] == "measuring: 60 of 600 prompts, 0:04:30 left"
    assert lines[-1] == "measuring: 600 of 600 prompts, took 0:05:00"


def test_no_time_is_left_before_three_parts_are_done(clock, capsys):
    with show_progress("measuring", 600, "prompts") as advance:
        for _ in range(4):
            clock[0] += 40
            advance(3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "measuring: 3 of 600 prompts, after 0:00:40",
        "measuring: 6 of 600 prompts, after 0:01:20",
    ]
    assert lines[2] == "measuring: 9 of 600 prompts, 2:11:20 left"


def test_a_bar_shows_no_time_before_three_parts_are_done(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress("measuring", 50, "prompts") as advance:
        advance()
        advance()
    assert "-:--:--" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("speed", "shown"),
    [(None, "–"), (12345.6, "12,346"), (10.4, "10"), (2.46, "2.5"), (0.463, "0.46"), (0, "0.00")],
)
def test_a_slow_speed_has_decimals(speed, shown):
    assert format_speed(speed) == shown


def test_a_task_that_fails_prints_no_last_line(capsys):
    def fail():
        with show_progress("measuring", 2, "prompts"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert capsys.readouterr().err == ""


def test_only_the_first_of_several_processes_shows_progress(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with show_progress("tokenizing", 1, "rows") as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_without_a_terminal_transformers_shows_no_bars_of_its_own(capsys):
    from transformers.utils import logging

    logging.enable_progress_bar()
    hide_bars_of_transformers()
    assert not logging.is_progress_bar_enabled()
    assert list(logging.tqdm(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress("measuring", 50, "prompts") as advance:
        for _ in range(50):
            advance()
    shown = capsys.readouterr().err
    assert "━" in shown and "50/50" in shown and "\x1b[" in shown and "took" not in shown


SAMPLE = Cost(rows=10, tokens=1000, loss_tokens=600, num_bytes=50_000, seconds=2.0)


def test_a_sample_is_scaled_to_the_whole() -> None:
    assert SAMPLE.times(100) == Cost(1000, 100_000, 60_000, 5_000_000, 200.0)


def test_the_table_shows_the_cost_of_a_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    announce("generating", SAMPLE.times(100), "10 rows in 2.0 s", tmp_path / "not" / "yet")
    output = capsys.readouterr().err
    rows = dict(
        tuple(cell.strip() for cell in line.split("│")[1:-1])
        for line in output.splitlines()
        if "│" in line
    )
    assert "generating" in output and (rows["rows"], rows["tokens"], rows["loss tokens"]) == (
        "1,000",
        "100,000",
        "60,000",
    )
    assert (
        rows["disk"].startswith("5.0 MB (")
        and rows["time"] == "3.3 min"
        and rows["estimated from"] == "10 rows in 2.0 s"
    )


def test_a_task_without_disk_space_is_refused_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = SAMPLE.times(1e15)
    with pytest.raises(ResourceError, match=rf"{tmp_path}.*data\.force=true"):
        announce("generating", huge, "", tmp_path)
    with pytest.raises(ResourceError, match=r"set hidden_states\.path to"):
        announce("storing features", huge, "", tmp_path, folder_key="hidden_states.path")
    announce("generating", huge, "", tmp_path, force=True)
    assert capsys.readouterr().err.count("generating") == 2
