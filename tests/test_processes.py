"""Processes of a launch wait for the first on their machine, for longer than a step may take, and notice at once that one has ended."""

import pytest

from tests.processes import run_processes

IN_TURN = """
import time
from specdistill.processes import agree, first_on_each_machine
begin = time.monotonic()
with first_on_each_machine("working"):
    if rank == 0:
        time.sleep(4)
    print(time.monotonic() - begin >= 4)
agree({"a": "1", "b": "2"})
distributed.destroy_process_group()
"""


@pytest.mark.distributed
def test_the_others_wait_for_longer_than_a_step_may_take() -> None:
    first, waiting, elsewhere = run_processes(IN_TURN, 0, 1, 0)
    assert [process.returncode for process in (first, waiting, elsewhere)] == [0, 0, 0], waiting.stderr
    assert [process.stdout for process in (first, waiting, elsewhere)] == ["True\n", "True\n", "False\n"]
    assert waiting.stderr.endswith("the first process is working, the others wait for it\n")
    assert first.stderr == elsewhere.stderr == ""


ENDS = """
import signal, time
from specdistill.command import run
from specdistill.errors import explain
from specdistill.processes import ResourceError, first_on_each_machine
try:
    with first_on_each_machine("working"):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
except ResourceError as error:
    os._exit(explain(error))
"""


@pytest.mark.distributed
def test_the_end_of_a_process_ends_the_others() -> None:
    """Process 2 is the first of another machine."""
    first, waiting, killed = run_processes(ENDS, 0, 1, 0)
    assert [process.returncode for process in (first, waiting, killed)] == [3, 3, -9]
    assert waiting.stderr.endswith("error: another process of this launch has ended; what it said tells why\n")


DIFFER = """
from specdistill.processes import UserError, agree
try:
    agree({"a": "1", "b": "2" if rank < 2 else "3"}, otherwise=": do this")
except UserError as error:
    print(error)
    os._exit(0)
"""


@pytest.mark.distributed
def test_what_differs_is_named_with_its_process() -> None:
    for process in run_processes(DIFFER, 0, 1, 0):
        assert process.stdout.startswith("b: got 3 in process 2 on "), process.stderr
        assert ", expected 2, as in process 0 on " in process.stdout and process.stdout.endswith(": do this\n")
