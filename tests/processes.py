"""Python code in several processes of one group, as a launcher on each of several machines would start them."""

import os
import subprocess
import sys

from accelerate.utils.other import get_free_port

from specdistill.project import ROOT

JOIN = """
import os
from datetime import timedelta
from torch import distributed
rank = int(os.environ["RANK"])
distributed.init_process_group("gloo", timeout=timedelta(seconds=3))
"""


def run_processes(code: str, *local_ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """Run `code` in a process for each local rank, at once. It finds its `rank`, and a group that waits three seconds for the late."""
    common = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    running = []
    for rank, local_rank in enumerate(local_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(len(local_ranks))}
        line = [sys.executable, "-c", JOIN + code]
        running.append(subprocess.Popen(line, env={**common, **own}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    ended = [(process, *process.communicate(timeout=120)) for process in running]
    return [subprocess.CompletedProcess(process.args, process.returncode, out, err) for process, out, err in ended]
