"""A frozen target shared by the processes of a launch: each loads its own part of the decoder layers, and none ever holds the whole.

    layers   each process passes its own batch through layers that are gathered one at a time (torch's fully_shard); exact
    tensor   each process multiplies with its part of every matrix (transformers' tensor parallelism); equal up to rounding

Embedding, final norm and head stay whole in every process: drafts are initialized from them, and soft targets need them.

A pass is a collective: every process has to make as many as the others, in the same order.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from specdistill.errors import UserError
from specdistill.targets.anatomy import auto_class, backbone_of, layer_lists

KEY = "target.shard"
R = TypeVar("R")


def num_processes() -> int:
    """Of the launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_shared(model: Any) -> bool:
    """Whether a pass of the model is a collective."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a parameter, which every process has to ask for, if it is shared."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(
    shard: str, config: Any, device_map: str, *, is_quantized: bool, trust_remote_code: bool
) -> tuple[Any, dict[str, Any]]:
    """(class, options) whose `from_pretrained` loads this process's part alone.

    The parameters are cut when the model is made, without storage; transformers then reads of each file what this process keeps.
    Raises UserError outside a group of processes, and for a model whose parts could not be told.
    """
    if not distributed.is_initialized():
        raise UserError(KEY, got=f"{shard} in processes that form no group", expected="a training script in accelerate launch")
    if is_quantized:
        raise UserError(KEY, got=f"{shard} with a quantized checkpoint", expected="none, or a checkpoint in floating point")
    with torch.device("meta"):
        plain = type(auto_class(config).from_config(config, trust_remote_code=trust_remote_code))
    cut = _cut_layers if shard == "layers" else _plan_layers

    def init(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        plain.__init__(self, *args, **options)
        self.__class__ = plain
        cut(self.requires_grad_(False))

    sharded_class = type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})
    parallel = {"distributed_config": DistributedConfig(tp_size=num_processes())}  # knows this process's device
    return sharded_class, {"device_map": device_map} if shard == "layers" else parallel


def _cut_layers(model: Any) -> None:
    backbone = backbone_of(model)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (num_processes(),))
    layers = [layer for layers in layer_lists(model, backbone) for layer in layers]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    cut = {parameter for layer in layers for parameter in layer.parameters()}
    fully_shard(backbone, mesh=mesh, ignored_params=set(model.parameters()) - cut)  # one schedule for all layers
    if hasattr(backbone, "reset_iter_state"):  # since torch 2.13: notes for a backward pass, which never comes, would pile up
        backbone.register_forward_hook(lambda module, *_: module.reset_iter_state())


def _plan_layers(model: Any) -> None:
    """Leave to tensor parallelism what a class plans for its layers: rules whose names hold a layer's number."""
    model.tp_plan = {name: style for name, style in (model.tp_plan or {}).items() if "*" in name}
    if not model.tp_plan:
        got = f"tensor for a {type(model).__name__}, which has no plan for it"
        raise UserError(KEY, got=got, expected="layers, or none")
    config: Any = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % num_processes():
        got = f"tensor in {num_processes()} processes for {heads} key/value heads"
        raise UserError(KEY, got=got, expected="layers, or a number of processes that divides the heads")


def in_turn(run: Callable[[Tensor, Tensor | None], R], ids: Tensor, positions: Tensor | None) -> R:
    """run(ids, positions) of this process, between those of the others: under tensor parallelism all have to read one batch."""
    own = None
    for rank in range(num_processes()):
        box = [(ids.cpu(), None if positions is None else positions.cpu())]
        distributed.broadcast_object_list(box, src=rank)
        their_ids, their_positions = box[0]
        result = run(their_ids.to(ids.device), None if their_positions is None else their_positions.to(ids.device))
        own = result if rank == distributed.get_rank() else own
    assert own is not None
    return own
