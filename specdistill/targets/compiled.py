"""`train.torch_compile`: each layer of target and draft is compiled, and the loss of a chunk's logits; what lies between stays as it is.

A graph for each layer of a step, not one for the step: layers of a class share it, and a target of 80 layers compiles as fast as one of two
(regional compilation). An unroll has a graph for each of its steps, whose layer sees one chain entry more. Elementwise operations, most of
what is no matrix product, become few kernels. Only training is compiled: generation and decoding, whose lengths grow token by token, set
`torch.compiler.set_stance("force_eager")`.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from specdistill.targets.frozen import FrozenTarget

MOST_GRAPHS = (
    128  # of one function: for each K and size of a KV cache; for each step of an unroll, in training and in evaluation
)


def allow_graphs() -> None:
    """MOST_GRAPHS of one function, where torch would give up after eight."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)


def compile_layers(train: Mapping[str, Any], target: FrozenTarget, objective: Any) -> None:
    """As the `train:` section of a recipe says. Hooks of a layer, which read features or gather weights, stay outside of its graph."""
    backend, mode = train.get("torch_compile_backend"), train.get("torch_compile_mode")
    if not (train.get("torch_compile") or backend or mode):
        return
    allow_graphs()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
    options: dict[str, Any] = {"backend": backend or "inductor", "mode": mode}
    for layer in (*target.layers, *objective.layers):
        layer.forward = torch.compile(layer.forward, **options)
    objective.row_losses = torch.compile(objective.row_losses, **options)
