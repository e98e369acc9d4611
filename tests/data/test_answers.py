"""Answers on disk: what is added is there, whatever happens to the process that adds."""

import errno
import itertools
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

import pytest

from specdistill.data.answers import PATTERN, Answer, Answers, Question
from specdistill.errors import ResourceError
from tests.processes import fork

ANSWER = Answer(prompt_ids=(1, 2), token_ids=(3, 4), reason="stop", model="m", server="s", template={}, sampling={"top_k": -1})


def question(number: int) -> Question:
    return Question(f"prompt {number}", 0, 0.8, 7)


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    with Answers(tmp_path / "a") as answers:
        answers.add(question(0), ANSWER)
        assert answers.get(question(0)) == ANSWER and answers.get(question(1)) is None
    assert Answers(tmp_path / "a").get(question(0)) == ANSWER
    with Answers(tmp_path / "a"):
        pass
    assert len(list((tmp_path / "a").glob(PATTERN))) == 1  # a writer without answers leaves no file


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    with Answers(tmp_path) as answers:
        for number in range(2):
            answers.add(question(number), ANSWER)
    (path,) = tmp_path.glob(PATTERN)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        left = Answers(tmp_path)
        assert len(left) == 1 and left.get(question(0)) == ANSWER


def test_two_writers_of_one_answer_are_read_alike(tmp_path: Path) -> None:
    with Answers(tmp_path) as one, Answers(tmp_path) as two:
        one.add(question(0), ANSWER)
        two.add(question(0), Answer((1,), (9,), "stop", "m", "s", {}, {}))
    assert Answers(tmp_path).get(question(0)) == Answers(tmp_path).get(question(0))
    assert len(Answers(tmp_path)) == 1


def test_a_kill_loses_no_answer_that_was_added(tmp_path: Path) -> None:
    """The writer tells each answer once `add` has returned."""
    told, teller = multiprocessing.Pipe(duplex=False)

    def write() -> None:
        with Answers(tmp_path) as answers:
            for number in itertools.count():
                answers.add(question(number), ANSWER)
                teller.send(number)

    process = fork(write)
    teller.close()
    while (last := told.recv()) < 20:
        pass
    process.kill()
    with suppress(EOFError):
        while True:
            last = told.recv()
    left = Answers(tmp_path)
    assert all(left.get(question(number)) == ANSWER for number in range(last + 1))


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Answers(tmp_path) as answers:
        answers.add(question(0), ANSWER)
        real = answers._file

        class Full:
            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

            def write(self, line: bytes) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(answers, "_file", Full())
        with pytest.raises(ResourceError, match=r"answers could not be kept in .* \(.*No space left.*\); free disk space"):
            answers.add(question(1), ANSWER)
        monkeypatch.setattr(answers, "_file", real)
    assert len(Answers(tmp_path)) == 1
