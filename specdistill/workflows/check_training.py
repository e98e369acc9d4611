"""Check a training before any weights are loaded.

The checks read configs, file headers, the tokenizer and the source data, and hash the target's
files.
"""

import torch
from transformers import PreTrainedTokenizerBase

from specdistill.advice.plan.reading import read_model_config
from specdistill.common.errors import UserError
from specdistill.common.processes import is_first
from specdistill.data.produce.job import Job
from specdistill.data.rows.row_set import RowTarget, is_whole
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.text import warn_few_prompts
from specdistill.evaluation.suites.conversations import use_template
from specdistill.evaluation.suites.suite import check_suite, count_measured, tokenize
from specdistill.methods.load import FRESH_INITIALIZATIONS, check_initialization, load_method
from specdistill.methods.mask_token import check_recipe_mask
from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.sections import ServerRegeneration
from specdistill.serving.export import NO_ROWS, check_engine_names, check_engines
from specdistill.targets.files import TargetFiles
from specdistill.targets.loading import read_tokenizer


def check_training(recipe: TrainedRecipe) -> Job:
    """Check everything about a training that can be checked without loading weights.

    Args:
        recipe: the recipe of the training.

    Returns:
        The job, which knows how the training rows are made and where they are stored.

    Raises:
        UserError: for a target, draft, engine or data that cannot work. The error names the key.
        ResourceError: if the Hub fails.
    """
    # Check the target's files, the engines, the initial weights and the mask token of the draft,
    # and the chat template. The quickest checks come first.
    target = recipe.target
    files = TargetFiles.from_config(target)
    tokenizer, end_ids, max_length = read_tokenizer(files)
    check_engine_names(recipe)
    check_initialization(recipe, files)
    check_recipe_mask(recipe, tokenizer, end_ids, files)
    use_template(tokenizer, recipe)

    # Check what will measure the draft, and whether the draft can be built at all.
    check_judgement(recipe, tokenizer, max_length)
    check_new_draft(recipe, files, tokenizer)

    # Check that a row fits into the target's context. For rows that a server generates, this is
    # only checked later, when training opens the rows (`check_row_set`).
    context_length = files.text_config.get("max_position_embeddings")
    is_served = isinstance(recipe.data.regenerate, ServerRegeneration)
    if context_length and recipe.data.max_length > context_length and not is_served:
        expected = f"at most {context_length}, the target's context length"
        raise UserError("data.max_length", got=recipe.data.max_length, expected=expected)

    # Check the data, unless the rows exist already. Reading the property `job.sources` loads and
    # filters the sources, and keeps them for the job. One process does it, because its result is
    # cached on the disk.
    job = Job(
        recipe.data,
        RowTarget(target.model, files.identity.weights, tokenizer, end_ids),
        recipe.measured_on,
        recipe.states_folder,
    )
    if recipe.data.rows is None and not is_whole(job.folder):
        job.check()
        if is_first():
            _ = job.sources
    return job


def check_judgement(
    recipe: TrainedRecipe, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> None:
    """Check the gate and the suites (files of prompts) that the draft will be judged by.

    The prompts of suites on this machine are tokenized here. So prompts that are too long for the
    target are refused before weights are loaded and hours are spent on training.

    Args:
        recipe: the recipe of the training.
        tokenizer: the target's tokenizer.
        max_length: the context length of the target, in tokens.

    Raises:
        UserError: for a gate or a suite that the selection of the best checkpoint, or
            `specdistill eval`, would refuse after the training.
    """
    # Reading the gate checks its rules.
    load_gate(recipe.gate)
    for key, section in (("eval.suite", recipe.eval), ("selection.suite", recipe.selection)):
        # A recipe may have no section `selection`. `check_suite` returns None if a section names no
        # suite, or if the prompts of its suite are not on this machine.
        if section is None:
            continue
        suite = check_suite(section.suite, key=key)
        if suite is None:
            continue

        # Without `num_prompts`, `selection` takes all prompts of a suite. `eval` takes only some of
        # a long file (`count_measured`).
        num_prompts = section.num_prompts
        if section is recipe.eval:
            num_prompts = count_measured(suite, num_prompts, logs=False)

        # Tokenize these prompts, to find those that leave no room for new tokens.
        try:
            tokenize(
                suite,
                tokenizer,
                num_prompts=num_prompts,
                max_new_tokens=section.max_new_tokens,
                max_length=max_length,
                logs=False,
            )
        except UserError as error:
            # `tokenize` names keys of `eval`. Name the key of the section that is checked.
            error.rename_key("eval.suite", key)
            raise


def warn_few_eval_prompts(recipe: TrainedRecipe) -> None:
    """Warn if the gate will judge the draft on few prompts.

    A suite may name a URL for its prompts. They are not downloaded here. `specdistill eval` counts
    them later.
    """
    suite = check_suite(recipe.eval.suite)
    if suite is not None:
        num_prompts = count_measured(suite, recipe.eval.num_prompts, logs=False)
        warn_few_prompts(min(len(suite.rows), num_prompts or len(suite.rows)))


def check_new_draft(recipe: TrainedRecipe, files: TargetFiles, tokenizer: object) -> None:
    """Build the draft of a recipe without weights, to check that it fits its target.

    The target is built from its config, too. The target and the draft are built on the meta device,
    where tensors have shapes and no content.

    The check is skipped for a draft that starts from a checkpoint, for a method that cannot build
    its draft without weights, and for a target whose class cannot be built without weights. Such
    drafts are checked later, when the weights are loaded.

    Args:
        recipe: the recipe of the training.
        files: the files of the target.
        tokenizer: the tokenizer of the target.

    Raises:
        UserError: for a target that the method does not support, for shapes that do not fit each
            other or the target, and for engines that cannot serve such a draft.
    """
    # A draft that continues from a checkpoint has the shapes of that checkpoint.
    if getattr(recipe.draft, "init", None) not in FRESH_INITIALIZATIONS:
        return

    # Read the target's config. `tiny_random` is a tiny model of the target's class with random
    # weights. If it is None, no model of this class can be built from a config.
    target = recipe.target
    target_info = read_model_config(
        target.model,
        key="target.model",
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )
    if target_info.tiny_random is None:
        return

    # Ask the method how it builds the draft. `build` is None if the method needs weights for that.
    settings = recipe.draft.model_dump(exclude_unset=True)
    planned_draft = load_method(recipe.method).advice.plan_draft(target_info, None, settings)
    if planned_draft.build is None:
        return

    # Add the tokenizer and the files to the full-size target without weights, because some drafts
    # read them while they are built.
    weightless_target = target_info.weightless
    vars(weightless_target).update(tokenizer=tokenizer, files=files)

    # Build the draft. Initializing weights advances the CPU's random generator even on the meta
    # device, so its state is restored afterwards.
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        draft = load_method(recipe.method).create(recipe, weightless_target, NO_ROWS)
    check_engines(recipe, weightless_target, draft)
