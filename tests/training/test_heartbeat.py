"""Which process is named when another waits for it: one that was killed, in a launch; stopped and late ones, in threads of this one."""

import os
import re
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch

from specdistill.training import heartbeat
from specdistill.training.heartbeat import Heartbeat
from tests.launches import finish, start, tiny_files, wait_for


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    monkeypatch.setattr(heartbeat, "BEAT", 0.01)
    store = torch.distributed.HashStore()
    return [Heartbeat(rank, 3, 100.0, store) for rank in range(3)]


def test_a_process_that_is_not_heard_is_named(three: list[Heartbeat]) -> None:
    first, second, _ = three
    with second.beating():
        assert re.fullmatch(r"process 2 \(\S+, \d+\) has died or hangs", first.culprit())


def test_a_process_that_is_behind_is_named_with_its_place(three: list[Heartbeat]) -> None:
    first, second, third = three
    for one in (first, third):
        one.mark()
    with second.beating(), third.beating():
        said = first.culprit()
    assert re.fullmatch(r"process 1 \(\S+, \d+\) in \w+, \S+\.py:\d+ is behind the others", said)


def test_a_process_that_comes_no_further_ends_before_its_collective_does(
    three: list[Heartbeat], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = three
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), first.ended.set()))
    first.timeout = 1.0
    with second.beating():
        first._watch()
    assert codes == [3]
    said = r"error: no progress for 1 s: process 2 \(\S+, \d+\) has died or hangs; the same command .*\n"
    assert re.fullmatch(said, capfd.readouterr().err)


def test_without_the_launcher_that_keeps_the_store_a_process_still_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT", 0.01)
    launcher = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    machine = torch.distributed.TCPStore("127.0.0.1", launcher.port, is_master=False)
    own = Heartbeat(1, 2, 1.0, machine)
    del launcher
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), own.ended.set()))
    own._watch()
    assert codes == [3]
    assert "error: no progress for 1 s: the launcher of machine 0 cannot be reached; the same" in capfd.readouterr().err


def test_only_failures_of_collective_operations_are_another_process_s_fault(three: list[Heartbeat]) -> None:
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="shapes"), three[0].beating():
        raise RuntimeError("shapes do not fit")
    assert threading.active_count() == before


@pytest.mark.long  # a launch of a thousand steps
@pytest.mark.distributed
def test_a_process_that_is_killed_is_named_and_the_other_ends(tmp_path: Path) -> None:
    process = start(*tiny_files(tmp_path), f"train.output_dir={tmp_path / 'run'}", "train.max_steps=1000")
    wait_for(tmp_path / "run" / "checkpoint-2", process)
    workers = psutil.Process(process.pid).children()
    victim = next(worker for worker in workers if worker.environ()["RANK"] == "1")
    victim.send_signal(signal.SIGKILL)
    output = finish(process)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.match(rf"error: process 1 \(\S+, {victim.pid}\) has died or hangs; the same", errors[0]), (
        output
    )
    assert not any(worker.is_running() for worker in workers)
