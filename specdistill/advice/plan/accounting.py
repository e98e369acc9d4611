"""Count what a training step needs, and estimate how fast a device does it.

A step is counted without a device: the real objective runs forward and backward over tensors
without content. Under torch's FakeTensorMode an operation computes shapes only, so the step of an
8B target takes a second on any machine. The class `Ledger` sees every operation with its operands,
and when each storage is allocated and freed.

The count covers one micro-batch under bfloat16 autocast, from soft targets to backward. Every token
has a loss, and every row is one document. Weights, gradients and optimizer exist before and after
the step, so they are no part of its peak. The target's layers are no part of the step, because its
features are given. Autocast and kernels are those of the CPU, since a torch without CUDA cannot
pretend to have it. A GPU fuses some operations (norms) and so has less traffic than is counted
here. The GPU's allocator rounds and fragments, so it holds more memory.

The time of a pass on a GPU follows from two numbers of the GPU's maker. On a CPU it does not: the
CPU's kernels suit some numbers of rows and not others, so that verifying three tokens may take
twice as long as verifying five. So products with matrices of the target's own shape are timed for
each number of rows, which takes a few seconds.
"""

import timeit
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from specdistill.data.rows.packing import collate
from specdistill.evaluation.measurement.hardware import describe_hardware
from specdistill.methods import METHODS
from specdistill.methods.recipe import TrainedRecipe
from specdistill.methods.sizes import ModelConfigInfo, WeightlessTarget
from specdistill.recipe.load import validate_recipe
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.head_loss import BLOCK_BYTES

aten = torch.ops.aten
# Operations that return new memory without writing to it.
VIEW_OPERATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
# Operations that do not read the content of their first operand.
OVERWRITING_OPERATIONS = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.full_like,
    aten.ones_like,
    aten.rand_like,
    aten.zeros_like,
}
# The assumed shares of a device's peaks: matrix products reach MATRIX_SHARE of its arithmetic, and
# all other operations TRAFFIC_SHARE of its bandwidth. They are round numbers, not fitted to a
# measurement. Larger shares give fewer hours.
MATRIX_SHARE = 0.5
TRAFFIC_SHARE = 0.8
# Operations that read as much of a table as they return.
LOOKUPS = {aten.embedding, aten.gather, aten.index, aten.index_select}

# Total size of the timed matrices, so that they do not fit into the CPU's cache. A CPU with more
# cache looks faster than it is.
BANK_BYTES = 128 * 2**20

# So many small matrices are enough to time. Thousands would be needed to fill BANK_BYTES.
MAX_MATRICES = 64
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32)  # the numbers of input rows that are timed
# The number of input rows that stands for a training step, whose products have hundreds of rows or
# more.
TRAINING_ROWS = 512
# Runs of each timing. The fastest counts, because other work on the machine only makes runs slower.
NUM_TIMED_RUNS = 3
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Device:
    """A device, by the figures of its maker.

    Attributes:
        name: its name.
        flops: floating-point operations per second, dense bfloat16 with float32 sums.
        bandwidth: bytes of memory that it reads or writes per second.
        most_per_machine: the largest number of these devices in one machine.
    """

    name: str
    flops: float
    bandwidth: float
    most_per_machine: int = 8

    def count_pass_bytes(self, read: float, parameters: float, num_tokens: int) -> float:
        """Return the cost of a forward pass: the number of bytes that could be read in its time.

        A pass takes as long as reading its weights and KV cache, or as its arithmetic if that takes
        longer. The arithmetic of a token is two operations for each parameter.

        Args:
            read: bytes that the pass reads.
            parameters: the number of parameters that each token is multiplied with.
            num_tokens: tokens of the pass.
        """
        return max(read, 2 * parameters * num_tokens / self.flops_per_byte)

    @property
    def flops_per_byte(self) -> float:
        """The number of floating-point operations that take as long as reading one byte."""
        return MATRIX_SHARE * self.flops / (TRAFFIC_SHARE * self.bandwidth)

    def estimate_tokens_per_second(
        self, step: "Ledger", num_tokens: int, other_flops: float
    ) -> float:
        """Estimate how many tokens per second this device trains on.

        Args:
            step: the counts of a training step.
            num_tokens: tokens of the step.
            other_flops: floating-point operations that the counts do not include: those of the
                target's layers.
        """
        # Matrix products are limited by arithmetic, and all other operations by bandwidth. They
        # follow one another, so their times add up.
        product_seconds = (step.flops + other_flops) / (MATRIX_SHARE * self.flops)
        return num_tokens / (product_seconds + step.traffic / (TRAFFIC_SHARE * self.bandwidth))


H100 = Device("H100", 989e12, 3.35e12)


@dataclass(frozen=True)
class Machine(Device):
    """A CPU, as it was measured.

    Attributes:
        dtype: the faster of the two dtypes for decoding on this CPU.
        row_costs: n -> the time of a product with n input rows, relative to one input row.
        memory_gb: the memory of the machine, in GiB.
    """

    most_per_machine: int = 1
    dtype: str = "float32"
    row_costs: Mapping[int, float] | None = None
    memory_gb: float = 0.0

    def count_pass_bytes(self, read: float, parameters: float, num_tokens: int) -> float:
        """Return the cost of a forward pass: the number of bytes that could be read in its time.

        A pass over one token takes as long as its reads, so its cost is `read`. The cost of a pass
        over more tokens is `read`, multiplied by the time of the pass relative to one token. This
        factor was measured for some numbers of tokens. Between two of these numbers it is
        interpolated. Beyond the largest it grows in proportion to the number of tokens.

        Args:
            read: bytes that the pass reads.
            parameters: not used here: the measured times include the arithmetic.
            num_tokens: tokens of the pass.
        """
        # `row_costs` has the measured times: number of tokens -> time relative to one token. Beyond
        # the largest number, `np.interp` returns the time of that number. There the factor
        # `excess`, which is 1 otherwise, makes the time grow.
        assert self.row_costs is not None
        measured_numbers = [*self.row_costs]
        measured_times = [*self.row_costs.values()]
        relative_time = float(np.interp(num_tokens, measured_numbers, measured_times))
        excess = max(1.0, num_tokens / measured_numbers[-1])
        return read * excess * relative_time


class Ledger(TorchDispatchMode):
    """A mode that counts what the operations within it do.

    Memory that existed before the mode was entered does not count. torch raises an error for an
    operation whose result has a shape that depends on values. On a GPU, such an operation would
    make the host wait.

    Attributes:
        live: bytes held now.
        peak: the most bytes held at once.
        traffic: bytes read and written by all operations except matrix products and attention.
        flops: floating-point operations of matrix products and attention.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.traffic = self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation and count its memory, traffic and arithmetic.

        torch calls this method for every operation that runs while the ledger is active.
        """
        # Operands that are not known yet existed before the ledger became active. They are known
        # from now on, and their memory counts as 0 bytes.
        kwargs = kwargs or {}
        inputs = list_tensors((args, kwargs))
        for tensor in inputs:
            self._enter(tensor, 0)

        # Run the operation. The memory of its results counts until they are released.
        result = func(*args, **kwargs)
        outputs = list_tensors(result)
        operation = func.overloadpacket
        are_new = [self._enter(tensor, tensor.untyped_storage().nbytes()) for tensor in outputs]

        # Matrix products and attention count as arithmetic, everything else as traffic. A lookup,
        # such as an embedding, reads only as much of each operand as it returns.
        if operation in flop_registry:
            self.flops += flop_registry[operation](*args, **kwargs, out_val=result)
        elif operation in LOOKUPS:
            result_bytes = _count_tensor_bytes(result)
            self.traffic += result_bytes + sum(
                min(_count_tensor_bytes(tensor), result_bytes) for tensor in inputs
            )
        # An operation that allocates nothing and changes no operand returns a view, without
        # traffic. All other operations read their operands and write their results. Those in
        # OVERWRITING_OPERATIONS do not read the first operand.
        elif (any(are_new) or func._schema.is_mutable) and operation not in VIEW_OPERATIONS:
            read_inputs = inputs[1:] if operation in OVERWRITING_OPERATIONS else inputs
            self.traffic += sum(map(_count_tensor_bytes, [*read_inputs, *outputs]))
        return result

    def _enter(self, tensor: Tensor, size: int) -> bool:
        """Count the memory of a tensor as live from now until it is freed.

        Args:
            tensor: the tensor.
            size: bytes to count, if the tensor's storage is not counted yet.

        Returns:
            Whether the storage was not counted yet.
        """
        # Views share a storage. It counts once, for as long as any tensor refers to it. Its address
        # in memory, `_cdata`, identifies it.
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return False
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        # Python calls `_release` when the storage is freed, but not when the program ends.
        weakref.finalize(storage, self._release, key, size).atexit = False
        return True

    def _release(self, key: int, size: int) -> None:
        """Subtract a storage from the live bytes, because it was freed."""
        self._known.discard(key)
        self.live -= size


def list_tensors(tree: object) -> list[Tensor]:
    """Return the tensors among the leaves of nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _count_tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor.

    An expanded tensor repeats its elements, so it has fewer bytes in memory than its shape says.
    """
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


@contextmanager
def use_gpu_block_sizes() -> Iterator[None]:
    """Let the loss compute logits in blocks of the size that it uses on a GPU.

    The counted tensors are on the CPU, where the loss would use smaller blocks. The memory of a
    training step on a GPU depends on this size.
    """
    cpu_block_bytes = BLOCK_BYTES["cpu"]
    BLOCK_BYTES["cpu"] = BLOCK_BYTES["cuda"]
    try:
        yield
    finally:
        BLOCK_BYTES["cpu"] = cpu_block_bytes


def count_training_step(
    method: str,
    build: Callable[[FrozenTarget], nn.Module],
    draft: Mapping[str, object],
    target: ModelConfigInfo,
    *,
    rows: int,
    length: int,
    prepare: Callable[[nn.Module], None] = lambda objective: None,
    ledger: Ledger | None = None,
    is_mixed: bool = True,
) -> Ledger:
    """Count the memory, traffic and arithmetic of the training step of one micro-batch.

    The step's own code runs forward and backward over tensors without content, which takes no
    memory and little time.

    Args:
        method: the method, which decides on the draft's loss.
        build: a function that builds the draft for a target.
        draft: keys of the recipe's section `draft`.
        target: the target, by its config.json.
        rows: rows of the micro-batch.
        length: tokens of each row.
        prepare: a function that is called with the training objective before the step.
        ledger: the object that counts, e.g. of a subclass that counts more; None for a new Ledger.
        is_mixed: whether the step runs under bfloat16 autocast.

    Returns:
        The ledger with the counts.
    """
    # Build a recipe, of which only the section `draft` matters here. The other keys are required,
    # and may have any value.
    values = {
        "method": method,
        "target": {"model": method},
        "data": {"source": method},
        "train": {"output_dir": method},
    }
    recipe = validate_recipe(METHODS[method].recipe(), {**values, "draft": dict(draft)})
    assert isinstance(recipe, TrainedRecipe)

    # Every row is one document, and all of its tokens have a loss.
    packed = {
        "input_ids": [0] * length,
        "loss_mask": [1] * length,
        "document_ids": [0] * length,
        "position_ids": list(range(length)),
    }

    # Build target, draft and training objective. Their tensors have shapes, but no content.
    mode = FakeTensorMode()
    with mode:
        weightless = WeightlessTarget(target)
        objective: Any = (
            METHODS[method].load().build_objective(build(weightless), recipe, weightless)
        )
        prepare(objective)
        # Gradients exist before the step, so that they are no part of its peak.
        for parameter in objective.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    # `prepare` reads the values of the tokens, so it runs outside of the mode, on real tensors.
    batch = objective.prepare(collate([packed] * rows), None)

    # Run forward and backward as the Trainer does, and count their operations.
    with mode:
        batch = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        ledger = Ledger() if ledger is None else ledger
        with ledger, use_gpu_block_sizes():
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                with torch.no_grad():
                    target_outputs = objective.read_target(weightless, batch)
                loss: Tensor = objective(**batch, **target_outputs)[0]
            loss.backward()
    return ledger


def can_hold_target(num_parameters: int) -> bool:
    """Return whether this machine has no GPU, but enough memory to hold a target on its CPU.

    Estimates are then made for this CPU. The target's float32 weights may take at most half of the
    memory; the rest is for training.

    Args:
        num_parameters: parameters of the target.
    """
    return (
        not torch.accelerator.is_available()
        and 4 * num_parameters < psutil.virtual_memory().total / 2
    )


def find_matrix_sizes(target: ModelConfigInfo) -> tuple[int, int]:
    """Return the sizes of a weight matrix in a target's MLP: hidden size and intermediate size."""
    width = target.text.hidden_size
    # If the config does not name the intermediate size, four times the hidden size is assumed.
    return width, getattr(target.text, "intermediate_size", None) or 4 * width


@torch.inference_mode()
def measure_machine(
    width: int, inner_width: int, num_parameters: int, training_dtype: torch.dtype = torch.float32
) -> Machine:
    """Measure how fast this machine's CPU multiplies matrices of a target's size.

    Args:
        width: columns of a weight matrix of the target, such as one in its MLP.
        inner_width: rows of that matrix.
        num_parameters: parameters of the target. If they fit into the CPU's cache, so do the
            matrices that are timed.
        training_dtype: the dtype of matrix products in a training step.

    Returns:
        The CPU with its measured speeds.
    """
    # Time products with few rows in float32 and bfloat16, and take the dtype that decodes faster.
    facts = describe_hardware(torch.device("cpu"))
    times = {
        name: time_products(getattr(torch, name), width, inner_width, num_parameters)
        for name in DTYPES
    }
    # Decoding has passes over one token, and rounds over a few tokens. Five tokens stand for such a
    # round: four draft tokens and the one before them.
    dtype = min(DTYPES, key=lambda name: times[name][1] + times[name][5])
    seconds = times[dtype]

    # Time what a training step does: products with many rows, and copies. A product with one row
    # has two operations per element of the matrix.
    training = time_products(training_dtype, width, inner_width, num_parameters, [TRAINING_ROWS])
    # A copy reads and writes every byte. BANK_BYTES are more than the CPU's cache holds.
    bytes_per_second = 2 * BANK_BYTES / time_fastest(torch.ones(BANK_BYTES // 4).clone)
    return Machine(
        name=f"this machine ({facts['name']}, {facts['cpu_threads']} threads)",
        # A Device has peak rates, which estimates multiply by MATRIX_SHARE and TRAFFIC_SHARE. The
        # measured rates are really reached, so they are divided by these shares first.
        flops=2 * TRAINING_ROWS / training[TRAINING_ROWS] / MATRIX_SHARE,
        bandwidth=bytes_per_second / TRAFFIC_SHARE,
        dtype=dtype,
        row_costs={rows: max(1.0, seconds[rows] / seconds[1]) for rows in NUM_ROWS},
        memory_gb=psutil.virtual_memory().total / 2**30,
    )


def time_products(
    dtype: torch.dtype,
    width: int,
    inner_width: int,
    num_parameters: int,
    row_counts: Sequence[int] = NUM_ROWS,
) -> dict[int, float]:
    """Time products of inputs with weight matrices, for several numbers of input rows.

    Args:
        dtype: the dtype of inputs and matrices.
        width: columns of a matrix.
        inner_width: rows of a matrix.
        num_parameters: parameters of the target. The timed matrices have no more elements in total.
        row_counts: the numbers of input rows to time.

    Returns:
        For each number of input rows, the seconds per element of the matrices.
    """
    # Take so many matrices that they exceed the CPU's cache. But for a small target, take no more
    # elements than it has parameters.
    num_elements = min(BANK_BYTES // dtype.itemsize, num_parameters)
    num_matrices = max(1, min(MAX_MATRICES, num_elements // (width * inner_width)))
    matrices = torch.ones(num_matrices, inner_width, width, dtype=dtype)
    seconds = {}
    for rows in row_counts:
        inputs = torch.ones(1, rows, width, dtype=dtype)
        # A product with many input rows takes longer, so four matrices are enough.
        timed_matrices = matrices[:4] if rows > NUM_ROWS[-1] else matrices

        # The default values keep the tensors of this iteration for the function.
        def multiply(inputs: Tensor = inputs, timed_matrices: Tensor = timed_matrices) -> None:
            """Multiply the inputs with each matrix in turn."""
            for matrix in timed_matrices:
                torch.nn.functional.linear(inputs, matrix)

        seconds[rows] = time_fastest(multiply) / timed_matrices.numel()
    return seconds


def time_fastest(work: Callable[[], object]) -> float:
    """Run a function a few times, and return the seconds of the fastest run."""
    return min(timeit.repeat(work, number=1, repeat=NUM_TIMED_RUNS))
