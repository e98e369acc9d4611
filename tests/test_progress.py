"""Progress on a terminal is a bar; in a log file it is few lines."""

import sys

import pytest

from specdistill import progress as module
from specdistill.progress import hide_bars_of_transformers, progress


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_every_thirty_seconds_and_a_last_one(clock, capsys):
    with progress("measuring", 600, "prompts") as advance:
        for _ in range(300):
            clock[0] += 1
            advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 300 / 30  # at 300 s the last line stands for the tenth
    assert lines[0] == "measuring: 60 of 600 prompts, 0:04:30 left"
    assert lines[-1] == "measuring: 600 of 600 prompts, took 0:05:00"


def test_a_task_that_fails_leaves_the_word_to_its_error(capsys):
    def fail():
        with progress("measuring", 2, "prompts"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert capsys.readouterr().err == ""


def test_of_several_processes_one_speaks(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with progress("tokenizing", 1, "rows") as advance:
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
    with progress("measuring", 50, "prompts") as advance:
        for _ in range(50):
            advance()
    shown = capsys.readouterr().err
    assert "━" in shown and "50/50" in shown and "\x1b[" in shown and "took" not in shown
