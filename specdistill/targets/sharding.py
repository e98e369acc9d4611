"""Divide the weights of a frozen target between the processes of a launch.

Each process loads its own part of every decoder layer, and none ever holds the whole model. It
passes its own batch through layers that are gathered one at a time (torch's `fully_shard`), so the
results are those of the whole model.

Embedding, final norm and head stay whole in every process: drafts are initialized from them, and
soft targets need them.

A pass is a collective operation: all processes have to make the same number of passes, in the same
order. Otherwise they wait for each other forever.
"""

import os
from itertools import chain

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdistill.common.errors import UserError
from specdistill.targets.anatomy import find_auto_class, find_backbone, find_layer_lists

KEY = "target.shard"


def count_processes() -> int:
    """Return the number of processes of the launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_shared(model: nn.Module) -> bool:
    """Return whether processes share the model's weights, so that each pass is a collective."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def gather_whole(tensor: Tensor) -> Tensor:
    """Return a whole parameter, which is gathered from all processes if each holds a part of it.

    Gathering is a collective operation, so every process has to call this.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_class(
    config: PreTrainedConfig, *, is_quantized: bool, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """Return a model class whose `from_pretrained` loads only this process's part of the layers.

    The parameters are divided when the model is constructed, while they have no storage yet.
    transformers then reads from each file only what this process keeps.

    Args:
        config: the target's config.
        is_quantized: whether the weights are quantized, which is not supported.
        trust_remote_code: run the repository's own code.

    Raises:
        UserError: outside a group of processes, and for quantized weights.
    """
    if not distributed.is_initialized():
        raise UserError(
            KEY,
            got="layers, which divides the target among a group of processes, but this process is"
            " in no group",
            expected="target.shard=none, or a training script started by `accelerate launch`",
        )
    if is_quantized:
        raise UserError(
            KEY,
            got="layers with a quantized checkpoint",
            expected="target.shard=none, or a checkpoint in floating point",
        )

    # An auto class does not tell which class it will load, so the model is built once without
    # storage.
    with torch.device("meta"):
        model_class = type(
            find_auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        )

    def init(self: PreTrainedModel, *args: object, **options: object) -> None:
        """Initialize a model of the original class, and divide its layers between the processes.

        This is the `__init__` of the subclass that `shard_class` returns.
        """
        model_class.__init__(self, *args, **options)
        # The subclass is only needed for this method, so the model gets its original class back.
        self.__class__ = model_class
        self.requires_grad_(False)

        # Shard each decoder layer by itself, so that layers are gathered one at a time.
        backbone = find_backbone(self)
        mesh = init_device_mesh(
            "cuda" if torch.cuda.is_available() else "cpu", (count_processes(),)
        )
        layers = list(chain.from_iterable(find_layer_lists(self, backbone)))
        for layer in layers:
            fully_shard(layer, mesh=mesh)

        # Wrap the backbone, too. As the common root, it gives the layers one schedule of when each
        # is gathered and freed again; otherwise each layer would be a root of its own. All
        # parameters of the model that are outside of the layers stay whole.
        sharded_parameters = set[nn.Parameter]()
        for layer in layers:
            sharded_parameters.update(layer.parameters())
        remaining_parameters = set(self.parameters()) - sharded_parameters
        fully_shard(backbone, mesh=mesh, ignored_params=remaining_parameters)

        # Since torch 2.13, fully_shard records each forward pass until the backward pass. A frozen
        # target has none, so the records would pile up.
        if hasattr(backbone, "reset_iter_state"):
            backbone.register_forward_hook(lambda module, *_: module.reset_iter_state())

    attributes = {"__init__": init, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), attributes)
