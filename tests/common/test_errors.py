import doctest
import pickle
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdistill.common import errors
from specdistill.common.errors import (
    ExitCode,
    ResourceError,
    UserError,
    announce_resumption,
    find_nearest,
    run_and_report,
)


def test_exit_codes_are_the_public_ones():
    assert {code.name: code.value for code in ExitCode} == {
        "DONE": 0,
        "CHECK_FAILED": 1,
        "USER_ERROR": 2,
        "RESOURCE_ERROR": 3,
        "INCONCLUSIVE": 4,
        "INTERRUPTED": 130,
    }


def test_user_error_is_one_line_whatever_it_is_told():
    error = UserError(
        "data.source", got="a\n  multi-line\tvalue", expected="one\nline", nearest="data.split"
    )
    assert (
        str(error)
        == "data.source: got a multi-line value, expected one line; did you mean data.split?"
    )
    assert error.key == "data.source"


def test_an_unexpected_error_is_a_line_and_a_log_file(capsys: pytest.CaptureFixture[str]):
    def broken() -> int:
        raise RecursionError("deep\n" * 1000)

    assert run_and_report(broken) == ExitCode.RESOURCE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: RecursionError: deep deep") and len(line) < 1000
    log = Path(line.rpartition(" ")[2])
    assert "in broken" in log.read_text(encoding="utf-8")
    log.unlink()


@pytest.mark.parametrize(
    ("number", "line", "code"),
    [
        (signal.SIGINT, "interrupted; the same command resumes", 130),
        (signal.SIGTERM, "terminated; the same command resumes", 143),
    ],
)
def test_a_signal_ends_what_resumes_with_a_line_that_says_so(
    number: signal.Signals, line: str, code: int, capsys: pytest.CaptureFixture[str]
):
    def measure() -> int:
        with announce_resumption():
            signal.raise_signal(number)
        return 0

    handler = signal.getsignal(signal.SIGTERM)
    try:
        exit_code = run_and_report(measure)
    except SystemExit as error:
        exit_code = error.code
    assert (exit_code, capsys.readouterr().err) == (code, f"{line}\n")
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_reader_who_has_seen_enough_ends_a_command_quietly():
    code = (
        "from specdistill.cli.main import main; import sys;"
        " sys.exit(main(['--help'] if len(sys.argv) < 2 else ['train', '--help']))"
    )
    for argument in ("", " more"):
        line = (
            f"{sys.executable} -c {shlex.quote(code)}{argument} | head -1; exit ${{PIPESTATUS[0]}}"
        )
        process = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert (process.returncode, process.stderr) == (0, "") and process.stdout.count("\n") == 1


def test_text_of_others_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    def raise_hostile_error() -> int:
        raise UserError("gate", got="\x1b[2J\x1b]0;title\x07" + "x" * 5000, expected="a gate")

    assert run_and_report(raise_hostile_error) == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert (
        error.startswith("error: gate: got \ufffd[2J\ufffd]0;title\ufffdxxx")
        and error.rstrip("\n").isprintable()
        and len(error) < 1000
    )


def test_resource_error_says_what_to_do_next():
    error = ResourceError(
        "the disk is\nfull", next_step="free 3 GB and start again: the run resumes"
    )
    assert str(error) == "the disk is full; free 3 GB and start again: the run resumes"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("learning_rte", "learning_rate"),
        ("eagle", "eagle3"),
        ("learn", "learning_rate"),
        ("logging_dir", None),  # half of its letters are a name's: not close
        ("zzz", None),
    ],
)
def test_the_nearest_name_is_close_or_none(name: str, expected: str | None):
    assert (
        find_nearest(name, ["learning_rate", "eagle3", "ngram", "validation", "logging_first_step"])
        == expected
    )


def test_the_examples_in_docstrings_are_right():
    assert doctest.testmod(errors).failed == 0


@pytest.mark.parametrize(
    "error",
    [
        UserError("data.source", got="x", expected="y", nearest="z"),
        ResourceError("full", next_step="free some"),
    ],
)
def test_an_error_arrives_whole_from_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
