"""A frozen target shared by the processes of a launch: each loads its own part of the decoder layers, and none ever holds the whole. It
passes its own batch through layers that are gathered one at a time (torch's fully_shard), which is exact.

Embedding, final norm and head stay whole in every process: drafts are initialized from them, and soft targets need them.

A pass is a collective: every process has to make as many as the others, in the same order.
"""

import os
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from specdistill.errors import UserError
from specdistill.targets.anatomy import auto_class, backbone_of, layer_lists

KEY = "target.shard"


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_shared(model: Any) -> bool:
    """Whether a pass of the model is a collective."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a parameter, which every process has to ask for, if it is shared."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(config: Any, *, is_quantized: bool, trust_remote_code: bool) -> Any:
    """A class whose `from_pretrained` loads this process's part alone.

    The parameters are cut when the model is made, without storage; transformers then reads of each file what this process keeps.
    Raises UserError outside a group of processes, and for weights that are quantized.
    """
    if not distributed.is_initialized():
        raise UserError(
            KEY,
            got="layers in processes that form no group",
            expected="a training script in accelerate launch",
        )
    if is_quantized:
        raise UserError(
            KEY,
            got="layers with a quantized checkpoint",
            expected="none, or a checkpoint in floating point",
        )
    with torch.device("meta"):
        plain = type(auto_class(config).from_config(config, trust_remote_code=trust_remote_code))

    def init(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        plain.__init__(self, *args, **options)
        self.__class__ = plain
        self.requires_grad_(False)
        backbone = backbone_of(self)
        mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (num_processes(),))
        layers = [layer for layers in layer_lists(self, backbone) for layer in layers]
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        cut = {parameter for layer in layers for parameter in layer.parameters()}
        fully_shard(
            backbone, mesh=mesh, ignored_params=set(self.parameters()) - cut
        )  # one schedule for all layers
        # Since torch 2.13: notes for a backward pass, which never comes, would pile up.
        if hasattr(backbone, "reset_iter_state"):
            backbone.register_forward_hook(lambda module, *_: module.reset_iter_state())

    return type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})
