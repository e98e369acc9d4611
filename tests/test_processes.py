"""Processes of a launch wait for the first on their machine, for longer than a step may take, and notice at once that one has ended."""

from pathlib import Path

import pytest

from tests.processes import run_processes

IMPORTS = """
import signal, time
import torch
from specdistill import processes
from specdistill.errors import explain
from specdistill.processes import ResourceError, UserError, agree, collectives, first_on_each_machine, of_all
"""

IN_TURN = """
begin = time.monotonic()
with first_on_each_machine("working"):
    if rank == 0:
        time.sleep(4)
    print(time.monotonic() - begin >= 4)
agree({"a": "1", "b": "2"})
print(processes._group()._get_backend(torch.device("cpu")).options._timeout >= timedelta(hours=24))
"""


@pytest.mark.long
@pytest.mark.distributed
def test_the_others_wait_for_longer_than_a_step_may_take(tmp_path: Path) -> None:
    """The last is the first of another machine."""
    first, waiting, elsewhere = ended = run_processes(tmp_path, IMPORTS, IN_TURN, 0, 1, 0)
    assert [process.code for process in ended] == [0, 0, 0], waiting.err
    assert [process.out for process in ended] == ["True\nTrue\n", "True\nTrue\n", "False\nTrue\n"]
    assert waiting.err.endswith("the first process is working, the others wait for it\n")
    assert first.err == elsewhere.err == ""


ENDS = """
try:
    with first_on_each_machine("working"):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
except ResourceError as error:
    os._exit(explain(error))
"""


@pytest.mark.long
@pytest.mark.distributed
def test_the_end_of_a_process_ends_the_others(tmp_path: Path) -> None:
    ended = run_processes(tmp_path, IMPORTS, ENDS, 0, 1, 0)
    assert [process.code for process in ended] == [3, 3, -9]
    assert "\nerror: another process of this launch has ended or cannot be reached (" in ended[1].err


DIFFER = """
try:
    agree({"a": "1", "b": "2" if rank < 2 else "3"}, otherwise=": do this")
except UserError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.distributed
def test_what_differs_is_named_with_its_process(tmp_path: Path) -> None:
    for process in run_processes(tmp_path, IMPORTS, DIFFER, 0, 1, 0):
        assert process.out.startswith("b: got 3 in process 2 on "), process.err
        assert ", expected 2, as in process 0 on " in process.out and process.out.endswith(": do this\n")


STEP = """
processes.COMES_WITHIN = 0.5
of_all(None)
try:
    with collectives("repeat it"):
        if rank == 2:
            {ends}
        distributed.all_reduce(torch.zeros(1))
except ResourceError as error:
    os._exit(explain(error))
"""


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ends", "said"), [("os.kill(os.getpid(), signal.SIGKILL)", ""), ("time.sleep(9)", "[Rank 0]: Ranks 2 failed to pass")]
)
def test_a_process_that_does_not_come_to_a_step_ends_the_others(tmp_path: Path, ends: str, said: str) -> None:
    """Dead, which its launcher says of it, or later than the step's collective operation waits: then the first names it."""
    first, second, _ = run_processes(tmp_path, IMPORTS, STEP.format(ends=ends), 0, 1, 0)
    assert first.code == second.code == 3
    for process in (first, second):
        assert process.err.count("error: another process of this launch has ended or hangs (") == 1
        assert process.err.endswith("; repeat it\n")
    assert said in first.err


OWN_MISTAKE = """
try:
    with collectives("repeat it"):
        raise RuntimeError("shapes do not fit")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.distributed
def test_other_failures_are_no_other_process_s_fault(tmp_path: Path) -> None:
    (own,) = run_processes(tmp_path, IMPORTS, OWN_MISTAKE, 0)
    assert own.out == "shapes do not fit\n"
