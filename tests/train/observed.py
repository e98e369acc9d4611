"""Training scripts in one process of a launch, one after the other, and what this process held of
draft and optimizer when it saved each draft.

Run by test_launches.py: accelerate launch … observed.py FOLDER, where commands.json holds each
script with its arguments by the name of a folder next to it.
"""

import gc
import json
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from specdistill.training.trainer import DistillationTrainer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    commands = json.loads((folder / "commands.json").read_text(encoding="utf-8"))
    save_draft = DistillationTrainer.save_draft

    def num_bytes(tensors: Iterable[Any]) -> int:
        """Of the parts that are this process's own: ZeRO-3 keeps them next to the parameter, which
        is whole or empty."""
        own = [
            getattr(tensor, "ds_tensor", tensor) for tensor in tensors if isinstance(tensor, Tensor)
        ]
        return sum((part.to_local() if isinstance(part, DTensor) else part).nbytes for part in own)

    def observing(place: Path) -> Callable[[Any, Path], None]:
        """Return a save_draft that writes what it saw into `place`."""

        def observed(trainer: Any, output: Path) -> None:
            optimizer = trainer.optimizer
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            state = trainer.accelerator.state
            seen = {
                "num_processes": state.num_processes,
                "distributed_type": state.distributed_type.value,
                "parameters": num_bytes(trainer.model.parameters()),
                "optimizer": num_bytes(
                    tensor for entry in optimizer.state.values() for tensor in entry.values()
                ),
            }
            (place / f"process-{state.process_index}.json").write_text(
                json.dumps(seen), encoding="utf-8"
            )
            save_draft(trainer, output)

        return observed

    for name, (script, *arguments) in commands.items():
        DistillationTrainer.save_draft = observing(folder / name)  # type: ignore[method-assign]
        sys.argv = [script, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        gc.collect()  # the next training has the memory of this one
