"""A process of a launch that ends with collectives still in gloo's hands; with `cpu=false` it is
told not to train on the CPU.

Run by test_arguments.py: accelerate launch … open_collectives.py FOLDER [cpu=false]
"""

import sys
from pathlib import Path

import torch

from specdistill.training.arguments import build_training_arguments

if __name__ == "__main__":
    folder, *without_cpu = sys.argv[1:]
    build_training_arguments(
        {"output_dir": folder, "report_to": "none", **({"use_cpu": False} if without_cpu else {})}
    )
    (Path(folder) / "accepted").touch()
    parts = [torch.empty(200_000) for _ in range(2)]
    for _ in range(20):
        torch.distributed.all_gather(parts, torch.ones(200_000), async_op=True)
