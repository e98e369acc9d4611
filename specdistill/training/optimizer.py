"""Muon for matrices, AdamW for the rest, as one optimizer (Muon: Jordan et al. 2024; learning-rate matching: arXiv 2502.16982).

Muon orthogonalises the momentum of each hidden weight matrix. Its update is rescaled to the root mean square of an AdamW update, so
that one learning rate, schedule and weight decay serve both parts. Embeddings, heads, norms and biases stay with AdamW.

Under data parallelism every process has the same gradients. What costs is to orthogonalise: no two processes do that to one matrix.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import Trainer, TrainingArguments

from specdistill.errors import UserError, refusing
from specdistill.processes import share
from specdistill.training.arguments import is_sharded


class SharedMuon(torch.optim.Muon):
    """torch's Muon; each process takes the step of its share of the matrices, and the others receive their weights.

    The weights are those of one process with the same gradients, bit for bit. Every process keeps the momentum of all matrices: then the
    first writes checkpoints alone, and a run resumes with any number of processes.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank, num_processes = share()
        (group,) = self.param_groups
        matrices = group["params"]
        shares = divide([matrix for matrix in matrices if matrix.grad is not None], num_processes)
        for matrix in (
            matrix for owner, others in enumerate(shares) if owner != rank for matrix in others
        ):
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            self.state[matrix]["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
        group["params"] = shares[rank]
        super().step()  # type: ignore[no-untyped-call]
        group["params"] = matrices
        if num_processes > 1:
            sent = [
                distributed.broadcast(matrix, owner, async_op=True)
                for owner, own in enumerate(shares)
                for matrix in own
            ]
            for broadcast in sent:
                broadcast.wait()


def divide(matrices: Sequence[Tensor], num_processes: int) -> list[list[Tensor]]:
    """The matrices of each process: the costliest first, each to the process with least to do."""
    loads = [0] * num_processes
    shares: list[list[Tensor]] = [[] for _ in loads]
    for matrix in sorted(matrices, key=cost, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(matrix)
        loads[rank] += cost(matrix)
    return shares


def cost(matrix: Tensor) -> int:
    """Floating-point operations of one Newton-Schulz step."""
    short, long = sorted(matrix.shape)
    return 2 * short**2 * (2 * long + short)


class MuonAdamW(torch.optim.Optimizer):
    """Two torch optimizers behind the interface of one: shared schedule, one state dict. There is no part without parameters.

    Of a model's trainable parameters, matrices of linear layers go to Muon, the language-model head and the rest to AdamW. Muon needs
    whole matrices: refuse it under ZeRO or FSDP, where parameters are shards.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.0) -> None:
        linear = {
            id(module.weight)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not name.endswith("lm_head")
        }
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if matrices := [parameter for parameter in trainable if id(parameter) in linear]:
            self.parts["muon"] = SharedMuon(
                matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        if others := [parameter for parameter in trainable if id(parameter) not in linear]:
            self.parts["adamw"] = torch.optim.AdamW(
                others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            )
        super().__init__(self._groups(), defaults={"lr": lr})
        self.param_groups = self._groups()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = self._groups()

    def _groups(self) -> list[dict[str, Any]]:
        """The parts' own dictionaries, not copies: schedulers change `param_groups`, and the parts must see it."""
        return [group for part in self.parts.values() for group in part.param_groups]


def build_optimizer(
    name: str, model: nn.Module, arguments: TrainingArguments
) -> torch.optim.Optimizer | None:
    """The optimizer a recipe names; None leaves `train.optim` to the Trainer.

    Raises UserError where Muon cannot work, and for a `train.optim` that is not installed or lacks options.
    """
    if name != "muon_adamw":
        chosen: Any = arguments.optim
        expected = "an optimizer that is installed, with what it needs"
        with refusing((ImportError, ValueError), "train.optim", chosen.value, expected):
            Trainer.get_optimizer_cls_and_kwargs(arguments, model)  # type: ignore[arg-type]
        return None
    if arguments.deepspeed or arguments.fsdp or is_sharded():
        expected = "adamw: Muon needs whole matrices, not shards"
        raise UserError("optimizer", got="muon_adamw under DeepSpeed or FSDP", expected=expected)
    return MuonAdamW(model, arguments.learning_rate, arguments.weight_decay)
