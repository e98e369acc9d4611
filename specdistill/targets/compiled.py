"""`train.torch_compile`: the layers of target and draft are compiled one by one, and the loss of a chunk's logits; the rest is not.

Layers of a class share a graph, so a target of 80 layers compiles as fast as one of two (regional compilation). A draft's layer has a graph
for each step of the unroll, which reads one chain entry more than the step before. Elementwise operations become few kernels. Only
training is compiled: generation and decoding, whose lengths grow token by token, set `torch.compiler.set_stance("force_eager")`.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from specdistill.targets.frozen import FrozenTarget

# Of one function: for each K and size of a KV cache; for each step of an unroll, in training and in evaluation.
MOST_GRAPHS = 128


def allow_graphs() -> None:
    """MOST_GRAPHS of one function, where torch would give up after eight."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)


def compile_layers(train: Mapping[str, Any], target: FrozenTarget, objective: Any) -> None:
    """As the `train:` section of a recipe says. A layer's hooks, which read features or gather weights, stay outside of its graph."""
    if not train.get("torch_compile"):
        return
    allow_graphs()
    torch._dynamo.config.optimize_ddp = False  # it would cut layers at the borders of gradient buckets
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
    backend = train.get("torch_compile_backend") or "inductor"
    options: dict[str, Any] = {"backend": backend, "mode": train.get("torch_compile_mode")}
    target.compile(**options)
    for layer in objective.layers:
        layer.forward = torch.compile(layer.forward, **options)
    objective.row_losses = torch.compile(objective.row_losses, **options)
