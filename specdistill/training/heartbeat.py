"""Which process of a launch has died, hangs or is late: named on the others, which then end.

A collective operation only says that it failed, or waits. So each process has a thread that tells the others every second, through the
launch's key-value store, that it lives, how many marks it has passed, and where it is.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from transformers import TrainerCallback, TrainingArguments

from specdistill.errors import ExitCode, ResourceError

BEAT = 1.0  # seconds
SILENT = 4  # beats; a process that leaves out so many does not run
EARLY = 0.9  # of train.ddp_timeout, before the collective operation itself gives up and NCCL ends the process without a word
NEXT_STEP = "the same command goes on from the last checkpoint"


def is_collective(error: Exception) -> bool:
    """Whether it is of a collective operation, which fails because of another process."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


@dataclass(frozen=True)
class Said:
    """What a process said last. place: where its main thread is; waits: in a collective operation, for others."""

    beats: int
    marks: int
    waits: bool
    place: str
    name: str


class Heartbeat(TrainerCallback):
    """Of one process among `world_size`. timeout: seconds without a mark after which it ends, naming who keeps it waiting."""

    def __init__(self, rank: int, world_size: int, timeout: float, store: Any) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.store = PrefixStore("specdistill/heartbeat", store.clone())
        self.marks, self.marked, self.beats = 0, time.monotonic(), 0
        self.ended = threading.Event()
        self.beat()

    def mark(self, *_: Any, **__: Any) -> None:
        """This process has come further: what all processes do as often, in one order."""
        self.marks, self.marked = self.marks + 1, time.monotonic()

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = mark

    def beat(self) -> None:
        self.beats += 1
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        file = Path(frame.f_code.co_filename)
        name = f"process {self.rank} ({socket.gethostname()}, {os.getpid()})"
        place = f"{frame.f_code.co_name}, {file.name}:{frame.f_lineno}"
        said = Said(self.beats, self.marks, "torch/distributed" in file.as_posix(), place, name)
        self.store.set(str(self.rank), json.dumps(asdict(said)))

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Raises ResourceError for a collective operation that failed because of another process."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError as error:
            if not is_collective(error):
                raise
            raise ResourceError(self.culprit(), next_step=NEXT_STEP) from error
        finally:
            self.ended.set()
            thread.join()

    def culprit(self) -> str:
        """The processes that do not run; else those that are behind; takes SILENT beats to see."""
        try:
            before = self._heard()
            for _ in range(SILENT):
                time.sleep(BEAT)
                self.beat()
            heard = self._heard()
        except torch.distributed.DistError:  # of the key-value store
            return "the launcher of machine 0 cannot be reached"
        silent = [said.name for rank, said in heard.items() if said == before.get(rank)]
        silent += [f"process {rank}" for rank in range(self.world_size) if rank not in heard]
        if silent:
            return f"{', '.join(silent)} has died or hangs"
        last = min(said.marks for said in heard.values())
        behind = [said for said in heard.values() if said.marks == last and not said.waits]
        places = ", ".join(f"{said.name} in {said.place}" for said in behind or heard.values())
        return f"{places} is behind the others" if behind else f"all processes live: {places}"

    def _heard(self) -> dict[int, Said]:
        known = [rank for rank in range(self.world_size) if self.store.check([str(rank)])]
        return {rank: Said(**json.loads(self.store.get(str(rank)))) for rank in known}

    def _watch(self) -> None:
        while not self.ended.wait(BEAT):
            with suppress(torch.distributed.DistError):  # without the launcher of machine 0 steps go on, and may still save
                self.beat()
            if time.monotonic() - self.marked > EARLY * self.timeout - SILENT * BEAT:  # which culprit() takes
                waited = f"no progress for {EARLY * self.timeout:.0f} s"
                print(f"error: {waited}: {self.culprit()}; {NEXT_STEP}", file=sys.stderr, flush=True)
                os._exit(ExitCode.RESOURCE_ERROR)


@contextmanager
def heartbeat(trainer: Any, arguments: TrainingArguments) -> Iterator[None]:
    """While a trainer trains in several processes."""
    if arguments.world_size == 1:
        yield
        return
    own = Heartbeat(arguments.process_index, arguments.world_size, arguments.ddp_timeout, _get_default_store())
    trainer.add_callback(own)
    with own.beating():
        yield
