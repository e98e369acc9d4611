"""Commands write folders whole or not at all, one at a time, and remove nobody else's files."""

import logging
import os
from pathlib import Path

import pytest

from specdistill.common.errors import ResourceError
from specdistill.common.folders import create_folder, empty_output_folder, exclusive_lock
from tests.refusals import refused


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    partial_folder = tmp_path / ".out.partial"  # of a process that was killed
    (partial_folder / "sub").mkdir(parents=True)
    (partial_folder / "half").write_text("x")
    with create_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("whole")
        assert not (tmp_path / "out").exists()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "out",
        "out/file",
    ]


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with create_folder(tmp_path / "out") as partial:
            (partial / "file").write_text("half")
            raise OSError("No space left on device")

    with pytest.raises(ResourceError, match="No space left"):
        fail_halfway()
    assert not list(tmp_path.iterdir())


def test_a_second_writer_is_refused_and_the_first_one_ends_whole(tmp_path: Path) -> None:
    with create_folder(tmp_path / "out") as partial:
        (partial / "weights").write_text("the first one's")
        with (
            refused("output_dir", tmp_path / "out", holds="which another process is writing"),
            create_folder(tmp_path / "out"),
        ):
            pass
    assert (tmp_path / "out" / "weights").read_text() == "the first one's"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_path_that_exists_is_refused_as_a_new_folder(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "link": lambda: out.symlink_to("nowhere")}[kind]()
    with refused("output_dir", out), create_folder(out):
        pass


def test_a_lock_names_who_holds_it(tmp_path: Path) -> None:
    with (
        exclusive_lock(tmp_path / "lock", "data.rows", tmp_path),
        refused("data.rows", tmp_path, holds="which process "),
        exclusive_lock(tmp_path / "lock", "data.rows", tmp_path),
    ):
        pass
    with exclusive_lock(tmp_path / "lock", "data.rows", tmp_path):
        pass  # it is free again


def test_a_lock_ends_with_its_process_although_a_worker_lives(tmp_path: Path) -> None:
    (begun, begin), (ended, end) = os.pipe(), os.pipe()
    if os.fork() == 0:
        with exclusive_lock(tmp_path / "lock", "data.rows", tmp_path):
            if os.fork() == 0:  # a worker, which lives until the test closes its pipe
                os.close(end)
                os.write(begin, b"x")
                os.read(ended, 1)
            else:
                os.read(begun, 1)
            os._exit(0)
    os.wait()
    with exclusive_lock(tmp_path / "lock", "data.rows", tmp_path):
        pass
    for descriptor in (begun, begin, ended, end):
        os.close(descriptor)


def test_only_a_folder_of_earlier_output_is_emptied(tmp_path: Path) -> None:
    empty_output_folder(tmp_path / "engine", "eval.output_dir")
    (tmp_path / "engine" / "log").touch()
    empty_output_folder(tmp_path / "engine", "eval.output_dir")
    assert not (tmp_path / "engine" / "log").exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "engine")
    for name in ("thesis", "link"):
        with refused("eval.output_dir", tmp_path / name):
            empty_output_folder(tmp_path / name, "eval.output_dir")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "x"


def test_a_run_that_ended_or_failed_is_not_reported_as_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / "block.lock"
    lock.write_text("process 7 on host")  # as earlier versions left it behind

    def fail() -> None:
        with exclusive_lock(lock, "data.shard", tmp_path):
            raise KeyboardInterrupt

    with caplog.at_level(logging.WARNING):
        with exclusive_lock(lock, "data.shard", tmp_path):
            assert f"process {os.getpid()} on " in lock.read_text()
        with pytest.raises(KeyboardInterrupt):
            fail()
        with exclusive_lock(lock, "data.shard", tmp_path):
            pass
    assert caplog.messages == []
    assert lock.read_text() == ""


def test_the_lock_of_a_killed_process_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / "block.lock"
    with exclusive_lock(lock, "data.shard", tmp_path):
        lock_text = lock.read_text()
    lock.write_text(lock_text)
    with (
        caplog.at_level(logging.WARNING),
        exclusive_lock(lock, "data.shard", tmp_path, saves_memory="data.regenerate.batch_size"),
    ):
        pass
    (message,) = caplog.messages
    assert (
        lock_text in message and "137" in message and "lower data.regenerate.batch_size" in message
    )
