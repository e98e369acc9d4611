"""Train a draft model by distillation: a language model with the target's own vocabulary (DistillSpec, arXiv 2310.08461).

accelerate launch --config_file accelerate_configs/cpu.yaml train/draft.py recipe=pico/draft
"""

import sys
from pathlib import Path

import torch
from transformers import set_seed

from specdistill.command import run
from specdistill.data import training_data
from specdistill.losses.divergence import build_divergence
from specdistill.methods.draft_model.create import create_draft_model, load_alike, save_draft_model
from specdistill.methods.draft_model.lora import merged, with_lora
from specdistill.methods.draft_model.objective import Distillation
from specdistill.methods.draft_model.on_policy import OnPolicyGeneration
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import check_precision, training_arguments
from specdistill.training.history import TrainingCurve
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run_directory import RunDirectory
from specdistill.training.trainer import DraftTrainer

CALIBRATION_ROWS = 16  # rows of training data whose activations say what a pruned width keeps


def main(recipe: Recipe) -> None:
    check_trainable(recipe, "train/draft.py")
    arguments = training_arguments(recipe.train)
    check_precision(arguments, recipe.target.dtype)
    directory = RunDirectory.open(arguments.output_dir, recipe)
    set_seed(arguments.seed)
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
        create_draft_model(target, calibration=calibration, seed=arguments.seed, **recipe.draft.small()),
        **vars(recipe.draft.lora),
    )

    # The run's record, before the first step
    if arguments.process_index == 0:
        directory.record(
            target=target.name, target_revision=target.revision, data_fingerprint=train_set._fingerprint, rows=len(train_set)
        )

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
        arguments,
        train_set,
        eval_set,
        save=save,
        optimizer=build_optimizer(recipe.optimizer, draft, arguments),
        on_policy=OnPolicyGeneration(draft, **vars(on_policy), end_ids=tuple(target.eos_token_ids), seed=arguments.seed),
        callbacks=[TrainingCurve(directory.path / "training_curve.png")],
    )

    # Train and save
    trainer.train(resume_from_checkpoint=directory.last_checkpoint())
    if trainer.is_world_process_zero():
        save(directory.draft)  # the best one: the Trainer has loaded it back


if __name__ == "__main__":
    sys.exit(run(main, Recipe))
