"""Muon for matrices, AdamW for the rest, as one optimizer (Muon: Jordan et al. 2024; learning-rate matching: arXiv 2502.16982).

Muon orthogonalises the momentum of each hidden weight matrix. Its update is rescaled to the root mean square of an AdamW update, so
that one learning rate, schedule and weight decay serve both parts. Embeddings, heads, norms and biases stay with AdamW.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from specdistill.errors import UserError


class MuonAdamW(torch.optim.Optimizer):
    """Two torch optimizers behind the interface of one: shared schedule, one state dict.

    Muon needs whole matrices: refuse it under ZeRO or FSDP, where parameters are shards.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=0.0)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], defaults={"lr": lr})
        # Schedulers write into `param_groups`: the parts must see the very same dictionaries.
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.muon.step()
        self.adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]


def muon_adamw(model: nn.Module, lr: float, weight_decay: float = 0.0) -> MuonAdamW:
    """Split a model's trainable parameters: matrices of linear layers to Muon, but not the head that writes logits."""
    matrices = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("lm_head")
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return MuonAdamW(
        [parameter for parameter in trainable if id(parameter) in matrices],
        [parameter for parameter in trainable if id(parameter) not in matrices],
        lr=lr,
        weight_decay=weight_decay,
    )


def build_optimizer(name: str, model: nn.Module, arguments: TrainingArguments) -> torch.optim.Optimizer | None:
    """The optimizer a recipe names; None leaves `train.optim` to the Trainer. Raises UserError where Muon cannot work."""
    if name != "muon_adamw":
        return None
    if (
        arguments.deepspeed
        or arguments.fsdp
        or os.environ.get("ACCELERATE_USE_DEEPSPEED")
        or os.environ.get("ACCELERATE_USE_FSDP")
    ):
        raise UserError(
            "optimizer", got="muon_adamw under DeepSpeed or FSDP", expected="adamw: Muon needs whole matrices, not shards"
        )
    return muon_adamw(model, arguments.learning_rate, arguments.weight_decay)
