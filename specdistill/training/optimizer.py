"""Combine Muon for matrices and AdamW for all other parameters in one optimizer.

Muon: Jordan et al. 2024. Learning-rate matching: arXiv 2502.16982.

Muon orthogonalises the momentum of each hidden weight matrix. Its update is rescaled to the root
mean square of an AdamW update, so that one learning rate, schedule and weight decay serve both
parts. Embeddings, heads, norms and biases stay with AdamW.

Under data parallelism every process has the same gradients. The orthogonalisation is the costly
part, so the processes divide the matrices among them.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, distributed, nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from specdistill.common.errors import UserError, join_lines
from specdistill.common.processes import find_rank_and_world_size
from specdistill.training.arguments import is_sharded


class SharedMuon(torch.optim.Muon):
    """torch's Muon, with the matrices divided among the processes.

    Each process updates its own matrices, and sends the new weights to the other processes. The
    weights are those of one process with the same gradients, bit for bit. Every process keeps the
    momentum of all matrices. So the first process can write checkpoints alone, and a run resumes
    with any number of processes.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices of this process, and receive those of the other processes."""
        # Divide the matrices that have a gradient. Every process computes the same division. All
        # matrices are in one parameter group.
        rank, num_processes = find_rank_and_world_size()
        (group,) = self.param_groups
        matrices = group["params"]
        shares = divide([matrix for matrix in matrices if matrix.grad is not None], num_processes)

        # Every process keeps the momentum of all matrices. Update it for the other processes'
        # matrices with the formula of torch's Muon. For the matrices of this process, torch's step
        # below updates it.
        other_matrices: list[Tensor] = []
        for owner, share in enumerate(shares):
            if owner != rank:
                other_matrices += share
        for matrix in other_matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            self.state[matrix]["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])

        # Let torch's step see the matrices of this process only.
        group["params"] = shares[rank]
        super().step()  # type: ignore[no-untyped-call]
        group["params"] = matrices

        # Each process sends the new weights of its matrices to the other processes. All transfers
        # are started before any is waited for.
        if num_processes > 1:
            broadcasts = []
            for owner, share in enumerate(shares):
                for matrix in share:
                    broadcasts.append(distributed.broadcast(matrix, owner, async_op=True))
            for broadcast in broadcasts:
                broadcast.wait()


def divide(matrices: Sequence[Tensor], num_processes: int) -> list[list[Tensor]]:
    """Divide the matrices among the processes, so that each process has about the same work.

    Matrices are assigned one by one, the costliest first. Each goes to the process that has least
    work so far.

    Returns:
        The matrices of each process, by its rank.
    """
    # The work of each process so far, in floating-point operations.
    loads = [0] * num_processes
    shares: list[list[Tensor]] = [[] for _ in loads]
    for matrix in sorted(matrices, key=count_flops, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(matrix)
        loads[rank] += count_flops(matrix)
    return shares


def count_flops(matrix: Tensor) -> int:
    """Return the floating-point operations of one Newton-Schulz step of Muon on a matrix.

    For a matrix X [short, long], the step computes three matrix products: A = X Xᵀ, then A · A, and
    then (b A + c A · A) X with constants b and c.
    """
    # A product of [m, n] and [n, p] takes 2 m n p operations.
    short, long = sorted(matrix.shape)
    return 2 * short**2 * (2 * long + short)


class MuonAdamW(torch.optim.Optimizer):
    """Two torch optimizers, Muon and AdamW, behind the interface of one.

    They share a schedule and a state dict. A part without parameters does not exist.

    Of a model's trainable parameters, the weights of linear layers go to Muon. The language-model
    head and all other parameters go to AdamW. Muon needs whole matrices, so `build_optimizer`
    refuses it under ZeRO and FSDP, where parameters are shards.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.0) -> None:
        """Divide the trainable parameters of a model between Muon and AdamW.

        Args:
            model: the model.
            lr: the learning rate of both parts.
            weight_decay: the weight decay of Muon; AdamW has none.
        """
        # Find the weights of linear layers, without the head.
        linear_weights = {
            id(module.weight)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not name.endswith("lm_head")
        }
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

        # Create one torch optimizer for the matrices, and one for all other parameters. Muon's step
        # is rescaled to the size of an AdamW step, so that both use the same learning rate.
        self.parts: dict[str, torch.optim.Optimizer] = {}
        matrices = [parameter for parameter in trainable if id(parameter) in linear_weights]
        if matrices:
            self.parts["muon"] = SharedMuon(
                matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        remaining_parameters = [
            parameter for parameter in trainable if id(parameter) not in linear_weights
        ]
        if remaining_parameters:
            self.parts["adamw"] = torch.optim.AdamW(
                remaining_parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            )

        # The groups must be the parts' own dictionaries (see `_list_groups`), also if the
        # constructor copies them.
        super().__init__(self._list_groups(), defaults={"lr": lr})
        self.param_groups = self._list_groups()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters of both parts, Muon and AdamW."""
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, object]:
        """Return the states of both parts, by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, dict[str, object]]) -> None:
        """Load the states of both parts, Muon and AdamW."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        # Loading replaced the parameter groups of the parts.
        self.param_groups = self._list_groups()

    def _list_groups(self) -> list[dict[str, object]]:
        """Return the parameter groups of both parts: their own dictionaries, not copies.

        Learning-rate schedulers change these dictionaries, and the parts must see the changes.
        """
        return list(chain.from_iterable(part.param_groups for part in self.parts.values()))


def build_optimizer(
    name: str, model: nn.Module, arguments: TrainingArguments
) -> torch.optim.Optimizer | None:
    """Build the optimizer that a recipe names, or check that the Trainer can build it.

    Args:
        name: the recipe's `optimizer`. `muon_adamw` is built here. With any other name, the Trainer
            builds the optimizer that `train.optim` names.
        model: the model whose trainable parameters are optimized.
        arguments: the Trainer's arguments.

    Returns:
        The optimizer; None for one that the Trainer builds.

    Raises:
        UserError: for Muon under DeepSpeed or FSDP, and for a `train.optim` that is not installed
            or lacks options.
    """
    # The Trainer builds its optimizer late. It is tried out here, so that an error comes early.
    if name != "muon_adamw":
        optimizer_name = OptimizerNames(arguments.optim).value
        try:
            Trainer.get_optimizer_cls_and_kwargs(arguments, model)  # type: ignore[arg-type]
        except (ImportError, ValueError) as error:
            raise UserError(
                "train.optim",
                got=optimizer_name,
                text=f"train.optim: {optimizer_name} cannot be used: {join_lines(str(error))}",
            ) from error
        return None

    # Muon needs whole matrices.
    if arguments.deepspeed or arguments.fsdp or is_sharded():
        raise UserError(
            "optimizer",
            got="muon_adamw under DeepSpeed or FSDP",
            expected="adamw: Muon needs whole matrices, not shards",
        )
    return MuonAdamW(model, arguments.learning_rate, arguments.weight_decay)
