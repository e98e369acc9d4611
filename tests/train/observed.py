"""Training scripts in one process of a launch, one after the other.

The process records the bytes of draft and optimizer that it held when it saved each draft.

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

    def count_bytes(tensors: Iterable[Any]) -> int:
        """Return the bytes of the parts that this process holds.

        ZeRO-3 keeps its part next to the parameter, which is whole or empty.
        """
        local_parts = [
            getattr(tensor, "ds_tensor", tensor) for tensor in tensors if isinstance(tensor, Tensor)
        ]
        return sum(
            (part.to_local() if isinstance(part, DTensor) else part).nbytes for part in local_parts
        )

    def make_save_draft(place: Path) -> Callable[[Any, Path], None]:
        """Return a save_draft that also writes its observations into `place`."""

        def save_observations(trainer: Any, output: Path) -> None:
            optimizer = trainer.optimizer
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            state = trainer.accelerator.state
            seen = {
                "num_processes": state.num_processes,
                "distributed_type": state.distributed_type.value,
                "parameters": count_bytes(trainer.model.parameters()),
                "optimizer": count_bytes(
                    tensor for entry in optimizer.state.values() for tensor in entry.values()
                ),
            }
            (place / f"process-{state.process_index}.json").write_text(
                json.dumps(seen), encoding="utf-8"
            )
            save_draft(trainer, output)

        return save_observations

    for name, (script, *arguments) in commands.items():
        DistillationTrainer.save_draft = make_save_draft(folder / name)  # type: ignore[method-assign]
        sys.argv = [script, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        gc.collect()  # frees the memory of this training for the next one
