"""Python code in several processes of one group, as a launcher on each of several machines would start them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from accelerate.utils.other import get_free_port

from specdistill.project import ROOT

# Imports once, then forks: imports take longer than what is tested.
FORK = """
import os, sys, traceback
from datetime import timedelta
from torch import distributed
{imports}
folder, port, *local_ranks = sys.argv[1:]
started = []
for rank, local_rank in enumerate(local_ranks):
    started.append(os.fork())
    if started[-1] == 0:
        own = {{"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": len(local_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}}
        os.environ.update({{name: str(value) for name, value in own.items()}})
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{folder}}/{{rank}}.{{name}}", os.O_CREAT | os.O_WRONLY), number)
        try:
            distributed.init_process_group("gloo", timeout=timedelta(seconds=3))
            exec({code!r})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
print([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started])
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def run_processes(folder: Path, imports: str, code: str, *local_ranks: int) -> list[Ended]:
    """Run `code` in a process for each local rank, at once. It finds its `rank`, and a group that waits three seconds for the late."""
    line = [
        sys.executable,
        "-c",
        FORK.format(imports=imports, code=code),
        str(folder),
        str(get_free_port()),
        *map(str, local_ranks),
    ]
    result = subprocess.run(
        line, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=200
    )
    return [
        Ended(code, *((folder / f"{rank}.{name}").read_text(encoding="utf-8") for name in ("out", "err")))
        for rank, code in enumerate(json.loads(result.stdout))
    ]
