"""Train a draft, from the checks of its recipe to the saved draft.

`train_draft` trains the drafts of every method, and calls each step in order. The method says which
draft is created and what the draft learns.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback

from specdistill.advice.plan.run_estimate import print_estimate
from specdistill.data.produce.features import open_feature_store
from specdistill.data.rows.packing import check_coverage
from specdistill.data.rows.row_set import RowTarget
from specdistill.evaluation.measurement.loading import measure_checkpoints
from specdistill.evaluation.suites.conversations import use_template
from specdistill.methods.load import create_draft, load_method
from specdistill.methods.recipe import TrainedRecipe
from specdistill.methods.target_record import save_draft
from specdistill.recipe.load import merge_values
from specdistill.recipe.sections import HiddenStatesConfig, OnlineStates, StoredStates
from specdistill.serving.export import check_engines
from specdistill.targets.frozen import FrozenTarget, compile_layers
from specdistill.training.arguments import find_autocast_dtype
from specdistill.training.history import read_history
from specdistill.training.length import print_length
from specdistill.training.loss_tokens import select_learnable_rows
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run import TrainingRun
from specdistill.training.trainer import DistillationTrainer
from specdistill.workflows.check_training import check_training, warn_few_eval_prompts
from specdistill.workflows.make_data import open_rows
from specdistill.workflows.next_step import describe_after


def train_draft(recipe: TrainedRecipe, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """Train the draft of a recipe, or resume its interrupted training.

    Every process of a launch calls this function.

    Args:
        recipe: the recipe of a method that is trained.
        callbacks: callbacks of transformers' Trainer.

    Returns:
        The folder of the run. Its folder `draft` holds the draft.

    Raises:
        UserError: for a recipe that cannot be trained. The error names the key.
        ResourceError: if memory, the disk or the Hub fails.
    """
    # Open the run folder, or resume the run in it.
    hidden_states = _find_hidden_states(recipe)
    run = _open_run(recipe, hidden_states)
    is_first_process = run.arguments.process_index == 0

    # Check everything that can be checked without loading weights. Then print the estimated cost of
    # the training, unless the run is resumed: the estimate was printed when the run began.
    job = check_training(recipe)
    size = job.run_size()
    announces = run.checkpoint is None and is_first_process
    if announces:
        warn_few_eval_prompts(recipe)
        print_length(recipe.train, recipe.data.max_length, size, run.arguments.world_size)
        print_estimate(recipe, run.arguments, size, job.folder)

    # Load the target. Its layers run to compute hidden states, and to measure checkpoints by
    # decoding (`selection`). If neither is needed, the weights of the layers stay on the disk.
    runs_layers = hidden_states.runs_layers or recipe.selection is not None
    target = FrozenTarget.load(**vars(recipe.target), layers_on_disk=not runs_layers)
    check_engines(recipe, target)
    use_template(target.tokenizer, recipe)

    # Open the packed rows. They are generated first if they do not exist.
    train_rows, eval_rows = open_rows(job.load_target(RowTarget.from_target(target)))
    if announces and size.num_rows is None:  # The rows have been made, so now they are counted.
        size = job.run_size()
        print_length(recipe.train, recipe.data.max_length, size, run.arguments.world_size)

    # Create the draft, and its objective, the module that computes its loss. Leave out rows from
    # which the draft can learn nothing with this objective.
    draft = create_draft(recipe, target, train_rows)
    initialization = getattr(recipe.draft, "init", None)
    coverage = check_coverage(train_rows, target.vocab_size, draft, initialization)
    objective = load_method(recipe.method).build_objective(draft, recipe, target)
    train_rows, eval_rows = select_learnable_rows([train_rows, eval_rows], objective, recipe.data)
    compile_layers(recipe.train, target, objective)

    # Record what the run depends on, before its first step.
    run.record(
        target=target.name,
        target_revision=target.revision,
        target_weights=target.identity.weights,
        data_fingerprint=train_rows._fingerprint,
        rows=len(train_rows),
        vocabulary_coverage=coverage,
    )

    # Train, and save the best draft.
    trainer = _build_trainer(recipe, run, target, draft, objective, train_rows, eval_rows)
    for callback in callbacks:
        trainer.add_callback(callback)
    run.train(trainer)

    # Print where the draft is, and what to type next.
    if is_first_process:
        _print_trained(run.path)
    return run.path


def _find_hidden_states(recipe: TrainedRecipe) -> HiddenStatesConfig:
    """Return the section `hidden_states` of a recipe, which says where the hidden states come from.

    Methods whose drafts read no hidden states have no such section. For these methods the default
    section is returned: with its mode `online`, the target runs in each step of training.
    """
    section: HiddenStatesConfig = getattr(recipe, "hidden_states", OnlineStates())
    return section


def _open_run(recipe: TrainedRecipe, hidden_states: HiddenStatesConfig) -> TrainingRun:
    """Open the folder of a run, or resume the run in it.

    If hidden states are read from a store, two further processes read them while the GPU trains. On
    a CPU these processes would take cores from the training, so there are none.
    """
    reads_store = isinstance(hidden_states, StoredStates)
    num_workers = 2 if reads_store and torch.cuda.is_available() else 0
    return TrainingRun.open(
        recipe,
        target_dtype=recipe.target.dtype,
        eval_on_start=recipe.evaluates_first,
        dataloader_num_workers=num_workers,
    )


def _build_trainer(
    recipe: TrainedRecipe,
    run: TrainingRun,
    target: FrozenTarget,
    draft: nn.Module,
    objective: nn.Module,
    train_rows: Dataset,
    eval_rows: Dataset,
) -> DistillationTrainer:
    """Open the store of hidden states, and build the trainer of a draft.

    Args:
        recipe: the recipe of the training.
        run: the open run, which has the arguments of transformers' Trainer.
        target: the target.
        draft: the module that is trained.
        objective: the module that computes the loss of the draft.
        train_rows: the packed rows to train on.
        eval_rows: the packed rows to evaluate on.
    """
    # Without a store (`store` is None), the target computes the hidden states in each step. A draft
    # that reads hidden states of inner layers of the target lists these layers in `aux_layers`.
    store = open_feature_store(
        _find_hidden_states(recipe),
        target,
        getattr(draft, "aux_layers", ()),
        [train_rows, eval_rows],
        autocast=find_autocast_dtype(run.arguments),
        batch_size=run.arguments.train_batch_size,
        force=recipe.data.force,
    )

    # With a section `selection`, the trainer measures checkpoints by decoding with them (`decode`),
    # to find the best one.
    method = load_method(recipe.method)
    return DistillationTrainer(
        objective,
        target,
        run.arguments,
        train_rows,
        eval_rows,
        save=partial(save_draft, method, target, chat_template=recipe.data.chat_template),
        decode=measure_checkpoints(recipe, target),
        optimizer=build_optimizer(recipe.optimizer, draft, run.arguments),
        store=store,
    )


def _print_trained(run: Path) -> None:
    """Print where the draft is, its simulated acceptance length, and what to type next."""
    # Each evaluation during the training has estimated the acceptance length of the draft on
    # held-out data. The curve holds these estimates as (step, acceptance length).
    history = read_history(run / "draft", key="train.output_dir")
    assert history is not None
    acceptance_lengths = dict(history.summary()["curve"])
    # The saved draft may be of a step without an evaluation. Then no acceptance length is printed.
    step = history.saved_step
    sentence = f"The draft of step {step} of {history.steps} is in {run / 'draft'}"
    if acceptance_lengths.get(step):
        length = acceptance_lengths[step]
        sentence += f", acceptance length {length:.2f} (simulated on held-out data)"
    print(f"{sentence}.")

    # The commands that continue this run, usually `eval`.
    recipe = merge_values([f"recipe={run / 'run' / 'recipe.yaml'}"])
    message, commands = describe_after(run, recipe)
    print(message)
    for command in commands:
        print(f"  {command}")
