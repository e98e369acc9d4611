"""A process of a launch that ends with collectives still in gloo's hands. Run by test_arguments.py."""

import sys

import torch

from specdistill.training.arguments import training_arguments

if __name__ == "__main__":
    training_arguments({"output_dir": sys.argv[1], "report_to": "none"})
    parts = [torch.empty(200_000) for _ in range(2)]
    for _ in range(20):
        torch.distributed.all_gather(parts, torch.ones(200_000), async_op=True)
