"""What a step of training needs, computed without a device: the real objective, forward and backward, over tensors without content.

Under torch's FakeTensorMode an operation makes shapes alone, so the step of an 8B target takes a second on any machine. A ledger above it
sees every operation with its operands, and every storage come and go.

Counted is one micro-batch under bfloat16 autocast, soft targets to backward; every token has a loss, every row is one document. Weights,
gradients and optimizer stand before and after it and are no part of the peak. The target's layers are no part of the step: features are
given. Autocast and kernels are the CPU's, since a torch without CUDA cannot pretend to have it: a GPU fuses some of what is several
operations here (norms) and has less traffic; its allocator rounds and fragments, and holds more.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from specdistill.methods import METHODS
from specdistill.methods.sizes import Described, WeightlessTarget
from specdistill.recipe.load import validate
from specdistill.rows.packing import collate
from specdistill.targets.frozen import FrozenTarget

aten = torch.ops.aten
UNWRITTEN = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
# What is in their first operand is not read.
OVERWRITES = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.full_like,
    aten.ones_like,
    aten.rand_like,
    aten.zeros_like,
}
MATRIX_SHARE, TRAFFIC_SHARE = (
    0.5,
    0.8,
)  # of a device's peaks, reached by matrix products and by all other operations: assumed
LOOKUPS = {
    aten.embedding,
    aten.gather,
    aten.index,
    aten.index_select,
}  # they read as much of a table as they return


@dataclass(frozen=True)
class Device:
    """By its maker, dense bfloat16 with float32 sums. flops, bandwidth: a second; bandwidth in bytes."""

    name: str
    flops: float
    bandwidth: float

    def tokens_per_second(self, step: "Ledger", num_tokens: int, other_flops: float) -> float:
        """Of a step over `num_tokens`. other_flops: of what the ledger does not count, the target's layers."""
        products = (step.flops + other_flops) / (MATRIX_SHARE * self.flops)
        return num_tokens / (products + step.traffic / (TRAFFIC_SHARE * self.bandwidth))


H100 = Device("H100", 989e12, 3.35e12)


class Ledger(TorchDispatchMode):
    """Counts what the operations within it do. A storage that no operation here made stands, and counts nothing.

    live, peak: bytes held now, and at most at once. traffic: bytes read and written by all operations but matrix products and attention.
    flops: of these two alone.

    An operation whose result's shape depends on values, for which a GPU's host would have to wait, is torch's error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.traffic = self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        for tensor in given:
            self._enter(tensor, 0)
        result = func(*args, **kwargs)
        made, operation = _tensors(result), func.overloadpacket
        new = [self._enter(tensor, tensor.untyped_storage().nbytes()) for tensor in made]
        if operation in flop_registry:
            self.flops += flop_registry[operation](*args, **kwargs, out_val=result)
        elif operation in LOOKUPS:
            self.traffic += sum(min(_size(tensor), _size(result)) for tensor in given) + _size(
                result
            )
        elif (any(new) or func._schema.is_mutable) and operation not in UNWRITTEN:  # else a view
            self.traffic += sum(map(_size, given[operation in OVERWRITES :])) + sum(
                map(_size, made)
            )
        return result

    def _enter(self, tensor: Tensor, size: int) -> bool:
        """Take in the tensor's storage until nothing holds it any more; whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return False
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key, size).atexit = False
        return True

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """In bytes; no more than there are where a tensor repeats its elements."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def training_step(
    method: str,
    build: Callable[[FrozenTarget], Any],
    draft: Mapping[str, Any],
    target: Described,
    *,
    rows: int,
    length: int,
    prepare: Callable[[Any], None] = lambda objective: None,
    ledger: Ledger | None = None,
) -> Ledger:
    """The ledger of a micro-batch of `rows` rows of `length` tokens, with the loss of a recipe of the method with these keys of `draft:`.

    build: (the target, its tensors without content) -> the draft. prepare: what is done with the objective before the step. ledger: one
    that counts more.
    """
    values = {
        "method": method,
        "target": {"model": method},
        "data": {"source": method},
        "train": {"output_dir": method},
    }
    recipe = validate(METHODS[method].recipe(), {**values, "draft": dict(draft)})
    row = {"input_ids": [0], "loss_mask": [1], "document_ids": [0]}
    packed = {name: value * length for name, value in row.items()} | {
        "position_ids": list(range(length))
    }
    mode = FakeTensorMode()
    with mode:
        weightless = WeightlessTarget(target)
        objective: Any = (
            METHODS[method].implementation().objective(build(weightless), recipe, weightless)
        )
        prepare(objective)
        for parameter in objective.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    batch = objective.prepare(collate([packed] * rows), None)  # which looks at the tokens
    with mode:
        batch = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        ledger = Ledger() if ledger is None else ledger
        with ledger:  # as the Trainer takes the loss
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    target_outputs = objective.read_target(weightless, batch)
                loss: Tensor = objective(**batch, **target_outputs)[0]
            loss.backward()
    return ledger
