"""Train an EAGLE head for a frozen target (EAGLE arXiv 2401.15077, EAGLE-3 arXiv 2503.01840).

accelerate launch --config_file accelerate_configs/cpu.yaml train/eagle.py recipe=pico/eagle3
"""

import sys
from functools import partial

from specdistill import command
from specdistill.data import training_data
from specdistill.data.draft_vocabulary import draft_vocabulary
from specdistill.losses.divergence import build_divergence
from specdistill.methods.heads.table import HEADS
from specdistill.methods.heads.unroll import TrainingTimeTest
from specdistill.methods.layers import check_window
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.targets.frozen import FrozenTarget, check_aux_layers
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run import TrainingRun
from specdistill.training.trainer import DraftTrainer


def main(recipe: Recipe) -> None:
    check_trainable(recipe, "train/eagle.py")
    run = TrainingRun.open(recipe)
    method, loss = HEADS[recipe.method], recipe.loss
    divergence = build_divergence(loss.divergence, jsd_beta=loss.jsd_beta)

    # Target
    target = FrozenTarget.load(**vars(recipe.target))
    check_aux_layers(recipe.draft.aux_layers, target.num_layers)

    # Data
    train_set, eval_set = training_data(recipe.data, target.tokenizer, target.model, fingerprint=target.fingerprint())

    # Draft
    if recipe.draft.init:
        draft = method.load(recipe.draft.init, target, key="draft.init")
        recipe.draft.check_shape(recipe.method, draft.config)
    else:
        vocabulary = draft_vocabulary(train_set, target.vocab_size, recipe.draft.vocab_size)
        shape = recipe.draft.shape(recipe.method) | ({} if vocabulary is None else {"draft_vocabulary": vocabulary})
        draft = method.build(target, seed=run.seed, **shape)
    check_window(draft.config, recipe.draft.ttt_steps, key="draft.ttt_steps")

    run.record(target, train_set)

    # Trainer
    trainer = DraftTrainer(
        TrainingTimeTest(
            draft,
            divergence,
            recipe.draft.ttt_steps,
            loss.step_decay,
            loss.temperature,
            feature_weight=loss.feature_weight,
            noise=loss.noise,
        ),
        target,
        run.arguments,
        train_set,
        eval_set,
        save=partial(method.save, draft),
        optimizer=build_optimizer(recipe.optimizer, draft, run.arguments),
        callbacks=run.callbacks,
    )

    run.train(trainer)


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
