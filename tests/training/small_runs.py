"""A trainer over a few rows and a tiny target, and the gradient of its first step."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from specdistill.data.rows.store import FeatureStore
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.models.checkpoint import save_draft_model
from specdistill.methods.models.create import create_draft_model
from specdistill.methods.models.objective import Distillation
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import build_training_arguments
from specdistill.training.losses.divergence import forward_kl
from specdistill.training.optimizer import MuonAdamW
from specdistill.training.trainer import DistillationTrainer
from tests.heads import build_head, save_head
from tests.tiny import tiny_target_model, tiny_tokenizer


def build_tiny_target() -> FrozenTarget:
    model = tiny_target_model()
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


def make_rows(count: int, length: int) -> Dataset:
    """Return rows whose numbers of loss tokens differ, so that a mean of means would show."""
    generator = torch.Generator().manual_seed(0)
    table = []
    for index in range(count):
        loss_mask = [0] * (index * 4) + [1] * (length - index * 4)
        ids = torch.randint(3, 200, (length,), generator=generator).tolist()
        table.append(
            {
                "input_ids": ids,
                "loss_mask": loss_mask,
                "document_ids": [0] * length,
                "position_ids": list(range(length)),
            }
        )
    return Dataset.from_list(table)


def build_trainer(
    output_dir: Path,
    data: Dataset,
    target: FrozenTarget | None = None,
    method: str = "eagle3",
    store: FeatureStore | None = None,
    **train: Any,
) -> DistillationTrainer:
    target = target or build_tiny_target()
    arguments = build_training_arguments(
        {
            "output_dir": str(output_dir),
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            **train,
        }
    )
    if method == "draft_model":
        draft: Any = create_draft_model(target, init="layers", num_layers=2)
        objective: torch.nn.Module = Distillation(draft, forward_kl)

        def save(draft: Any, folder: Path) -> None:
            save_draft_model(draft, target.tokenizer, folder)

    else:
        draft = build_head(method, target)
        objective = TrainingTimeTest(draft, forward_kl, 4, step_decay=0.8)
        save = partial(save_head, method)  # type: ignore[assignment]
    optimizer = MuonAdamW(draft, arguments.learning_rate)
    return DistillationTrainer(
        objective, target, arguments, data, data, save=save, optimizer=optimizer, store=store
    )


def record_first_gradients(
    output_dir: Path, micro_batch: int, accumulation: int
) -> dict[str, torch.Tensor]:
    """Return the gradients of the first step over four rows, as the Trainer's loop gives them to
    the optimizer."""
    batches = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
    }
    return record_gradients(
        build_trainer(
            output_dir,
            make_rows(4, 24),
            max_steps=1,
            max_grad_norm=0.0,
            learning_rate=0.0,
            **batches,
        )
    )


def record_gradients(fit: DistillationTrainer) -> dict[str, torch.Tensor]:
    """Train for one step and return its gradients by the names of the parameters."""
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        gradients.update(
            {
                name: p.grad.clone()
                for name, p in fit.objective.draft.named_parameters()
                if p.grad is not None
            }
        )

    assert fit.optimizer is not None
    fit.optimizer.register_step_pre_hook(keep)
    fit.train()
    return gradients
