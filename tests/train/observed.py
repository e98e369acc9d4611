"""A training script in one process of a launch, and what this process held of draft and optimizer when it saved the draft.

Run by test_launches.py: accelerate launch … observed.py FOLDER train/eagle.py recipe=…
"""

import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from specdistill.training.trainer import DraftTrainer

if __name__ == "__main__":
    observations, script, *arguments = sys.argv[1:]
    save_draft = DraftTrainer.save_draft

    def num_bytes(tensors: Iterable[Any]) -> int:
        """Of the parts that are this process's own: ZeRO-3 keeps them next to the parameter, which is whole or empty."""
        own = [
            getattr(tensor, "ds_tensor", tensor) for tensor in tensors if isinstance(tensor, Tensor)
        ]
        return sum((part.to_local() if isinstance(part, DTensor) else part).nbytes for part in own)

    def observed(trainer: Any, folder: Path) -> None:
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
        (Path(observations) / f"process-{state.process_index}.json").write_text(
            json.dumps(seen), encoding="utf-8"
        )
        save_draft(trainer, folder)

    DraftTrainer.save_draft = observed  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
