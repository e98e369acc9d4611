"""Train a draft model by distillation: a language model with the target's own vocabulary (DistillSpec, arXiv 2310.08461).

accelerate launch --config_file accelerate_configs/cpu.yaml train/draft.py recipe=pico/draft
"""

import sys
from pathlib import Path

import torch

from specdistill import command
from specdistill.data import training_data
from specdistill.losses.divergence import build_divergence
from specdistill.methods.draft_model.create import create_draft_model, load_alike, save_draft_model
from specdistill.methods.draft_model.lora import merged, with_lora
from specdistill.methods.draft_model.objective import Distillation
from specdistill.methods.draft_model.on_policy import OnPolicyGeneration
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run import TrainingRun
from specdistill.training.trainer import DraftTrainer

CALIBRATION_ROWS = 16  # rows of training data whose activations say what a pruned width keeps


def main(recipe: Recipe) -> None:
    check_trainable(recipe, "train/draft.py")
    run = TrainingRun.open(recipe)
    loss, on_policy = recipe.loss, recipe.on_policy
    divergence = build_divergence(loss.divergence, jsd_beta=loss.jsd_beta)

    # Target
    target = FrozenTarget.load(**vars(recipe.target))
    reference = load_alike(loss.reference, target, key="loss.reference") if loss.reference else None

    # Data
    train_set, eval_set = training_data(recipe.data, target.tokenizer, target.model, fingerprint=target.fingerprint())

    # Draft
    calibration = torch.tensor(train_set[:CALIBRATION_ROWS]["input_ids"], device=target.device)
    draft = with_lora(
        create_draft_model(target, calibration=calibration, seed=run.seed, **recipe.draft.small()),
        **vars(recipe.draft.lora),
    )

    run.record(target, train_set)

    # Trainer
    def save(folder: Path) -> None:
        save_draft_model(merged(draft), target.tokenizer, folder)

    trainer = DraftTrainer(
        Distillation(
            draft,
            divergence,
            temperature=loss.temperature,
            labels=loss.labels,
            num_positions=recipe.eval.num_speculative_tokens,
            reference=reference,
            selected=loss.selected,
        ),
        target,
        run.arguments,
        train_set,
        eval_set,
        save=save,
        optimizer=build_optimizer(recipe.optimizer, draft, run.arguments),
        on_policy=OnPolicyGeneration(draft, **vars(on_policy), end_ids=tuple(target.eos_token_ids), seed=run.seed),
        callbacks=run.callbacks,
    )

    run.train(trainer)


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
