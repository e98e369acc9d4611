"""Check a training before any weights are loaded.

Only configs, file headers, the tokenizer and rows are read, which takes seconds.
"""

import torch
from transformers import PreTrainedTokenizerBase

from specdistill.advice.plan.reading import read_model_config
from specdistill.common.errors import UserError
from specdistill.common.processes import is_first
from specdistill.data.produce.job import Job
from specdistill.data.rows.row_set import RowTarget, is_whole
from specdistill.evaluation.gate.rules import load_gate
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
    """Check a training as far as files allow.

    Returns:
        The job that makes the rows of the training.

    Raises:
        UserError: for a target, draft, engine or data that cannot work, naming the key.
        ResourceError: when the Hub fails.
    """
    # Check what the configs, the tokenizer and the recipe say, in the order of what is quickest.
    target = recipe.target
    files = TargetFiles.from_config(target)
    tokenizer, end_ids, max_length = read_tokenizer(files)
    check_engine_names(recipe)
    check_initialization(recipe, files)
    check_recipe_mask(recipe, tokenizer, end_ids, files)
    use_template(tokenizer, recipe)
    check_judgement(recipe, tokenizer, max_length)
    check_new_draft(recipe, files, tokenizer)
    positions = files.text_config.get("max_position_embeddings")
    is_served = isinstance(recipe.data.regenerate, ServerRegeneration)
    if positions and recipe.data.max_length > positions and not is_served:
        expected = f"at most {positions}, the target's context length"
        raise UserError("data.max_length", got=recipe.data.max_length, expected=expected)

    # Check the sources, unless the rows are complete already.
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
    """Check the gate and the suites that will judge the draft.

    The prompts of suites on this machine are tokenized here. So prompts that are too long fail
    before any weights are loaded.

    Args:
        recipe: the recipe of the training.
        tokenizer: the target's tokenizer.
        max_length: the context length of the target, in tokens.

    Raises:
        UserError: for what selection or `specdistill eval` would refuse later.
    """
    load_gate(recipe.gate)
    for key, section in (("eval.suite", recipe.eval), ("selection.suite", recipe.selection)):
        suite = check_suite(section.suite, key=key) if section is not None else None
        if section is None or suite is None:
            continue
        num_prompts = (
            count_measured(suite, section.num_prompts, logs=False)
            if section is recipe.eval
            else section.num_prompts
        )
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
            error.rename_key("eval.suite", key)
            raise


def check_new_draft(recipe: TrainedRecipe, files: TargetFiles, tokenizer: object) -> None:
    """Build the draft of a recipe from its target's config, on the meta device if its method can.

    This is skipped if the target's class cannot be built without weights; loading the weights then
    checks the draft.

    Raises:
        UserError: for a target that the method does not support, for shapes that do not fit each
            other or the target, and for engines that cannot serve such a draft.
    """
    if getattr(recipe.draft, "init", None) not in FRESH_INITIALIZATIONS:
        return
    target = recipe.target
    described = read_model_config(
        target.model,
        key="target.model",
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )
    if described.tiny_random is None:
        return
    settings = recipe.draft.model_dump(exclude_unset=True)
    planned = load_method(recipe.method).advice.plan_draft(described, None, settings)
    if planned.build is None:
        return
    weightless = described.weightless
    vars(weightless).update(tokenizer=tokenizer, files=files)
    # On the meta device only the CPU's generator is used.
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        draft = load_method(recipe.method).create(recipe, weightless, NO_ROWS)
    check_engines(recipe, weightless, draft)
