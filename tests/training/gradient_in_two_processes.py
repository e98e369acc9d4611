"""One optimizer step in each of two launched processes; saves the gradient that each one saw. Run by test_trainer.py."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState

from tests.training.small_runs import gradient_of_one_step

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    gradients = gradient_of_one_step(folder / "two", 2, 1)
    state = PartialState()
    assert state.num_processes == 2
    torch.save(gradients, folder / f"gradients-{state.process_index}.pt")
