"""Load a target and its draft for a measurement, and measure the checkpoints of a training.

Everything that can be checked without weights is checked before the weights are loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdistill.common.errors import UserError
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import GREEDY
from specdistill.evaluation.measurement.configurations import (
    MeasurementPlan,
    Settings,
    plan_measurement,
)
from specdistill.evaluation.measurement.hardware import fit_threads
from specdistill.evaluation.statistics.records import ALL_PROMPTS
from specdistill.evaluation.suites.conversations import use_template
from specdistill.evaluation.suites.suite import Suite, count_measured, load_suite, tokenize
from specdistill.methods import METHODS
from specdistill.methods.compatibility import check_draft
from specdistill.methods.load import load_proposer, locate, locate_trained
from specdistill.methods.recipe import Recipe, TrainedRecipe
from specdistill.methods.target_record import read_target_record, use_recorded_template
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer

# The method of a draft, its folder, and the options with which it decodes.
DraftFolder = tuple[str, Path, Mapping[str, Any]]


class LoadedDraft(NamedTuple):
    """A target and its draft, loaded.

    Attributes:
        target: the target.
        proposer: the draft.
        draft: the folder or Hub id of the draft; None for a method without weights.
    """

    target: FrozenTarget
    proposer: Proposer
    draft: str | None


def check_measurement(
    target: TargetFiles,
    drafts: Sequence[DraftFolder],
    suite: Suite,
    options: Any,
    *,
    key: str,
    recipe: Any = None,
) -> None:
    """Check that drafts and a suite of prompts fit a target, without loading weights.

    Args:
        target: the files of the target that the drafts were made for.
        drafts: for each draft its method, its folder and the options with which it decodes.
        suite: the suite that is measured.
        options: an object with `num_prompts` and `max_new_tokens`, such as a recipe's `eval:`.
        key: the key of the recipe or command that names the drafts; errors start with it.
        recipe: the recipe, if `options` is its section `eval`. Then the prompts are rendered by the
            recipe's chat template, and the prompts of all configurations that the recipe measures
            are checked. None for other commands.

    Raises:
        UserError: for a draft of another target, or prompts that the target cannot be given.
        ResourceError: when the Hub fails.
    """
    # Check every draft.
    tokenizer, _, max_length = read_tokenizer(target)
    for method, folder, draft_settings in drafts:
        check_draft(method, folder, target, key, logs=False, **draft_settings)

    # Choose the chat template: the one with which the drafts were trained, or else the target's
    # own. If the recipe names a template, that one replaces it.
    use_recorded_template([folder for _, folder, _ in drafts], tokenizer, key)
    use_template(tokenizer, recipe)

    # Check every prompt by tokenizing it: a prompt that is too long raises an error. Planning all
    # configurations of a recipe tokenizes its prompts, too.
    if recipe is not None:
        plan_measurement(options, suite, tokenizer, max_length=max_length, logs=False)
        return
    tokenize(
        suite,
        tokenizer,
        num_prompts=count_measured(suite, options.num_prompts, logs=False),
        max_new_tokens=options.max_new_tokens,
        max_length=max_length,
        logs=False,
    )


def check_processes(recipe: Recipe) -> None:
    """Check that several processes can share the prompts of a measurement.

    The prompts cannot be shared if an engine measures, or if the target is sharded over the
    processes or has several adapters. Nor can they if tokens are looked up in earlier outputs
    (method `suffix`), because each process would know only its own outputs.

    Raises:
        UserError: for the first key whose value does not allow several processes.
    """
    # Collect the keys that do not allow several processes.
    config = recipe.eval
    lookup = config.lookup_first
    refused: dict[str, object] = {}
    if config.engine != "specdistill":
        refused["eval.engine"] = config.engine
    if recipe.target.shard != "none":
        refused["target.shard"] = recipe.target.shard
    if isinstance(recipe.target.adapter, list):
        refused["target.adapter"] = recipe.target.adapter
    if recipe.method == "suffix":
        refused["method"] = recipe.method
    if lookup and lookup.method == "suffix":
        refused["eval.lookup_first.method"] = lookup.method

    # If there is such a key, raise an error that names the first one.
    for key, value in refused.items():
        raise UserError(
            key,
            got=f"{value} in several processes",
            expected="another value, or a command without launch=",
        )


def find_draft(recipe: Recipe) -> str | None:
    """Return the folder or Hub id of the draft that a recipe measures.

    It is the draft that `eval.draft` names, or else the draft that this recipe has trained. It is
    None for a method without weights.

    Raises:
        UserError: when the recipe names no draft and has not trained one.
    """
    if not METHODS[recipe.method].is_trained:
        return None

    # If the recipe names no draft, its training must have written one.
    trained_here = Path(recipe.train["output_dir"]) / "draft"
    if recipe.eval.draft is None and not trained_here.is_dir():
        raise UserError(
            "eval.draft",
            got="null",
            text=(
                f"eval.draft: no trained draft in {trained_here}. Run specdistill train with this"
                " recipe first, or pass draft=PATH"
            ),
        )
    return recipe.eval.draft or str(trained_here)


def load_recipe_draft(
    recipe: Recipe, suite: Suite | None = None, made_for: TargetFiles | None = None
) -> LoadedDraft:
    """Load the target and the draft of a recipe into memory, for a measurement.

    Args:
        recipe: the recipe.
        suite: the suite that will be measured, whose prompts are checked before weights are loaded;
            None for no check.
        made_for: the target that the draft was made for, if it is not the recipe's target: e.g. the
            base model of the adapted target that the recipe names.
    """
    draft = find_draft(recipe)

    # Check the draft and the suite before weights are loaded. Without a draft folder (a method
    # without weights), only the suite is checked.
    if suite is not None:
        files = made_for or TargetFiles.from_config(recipe.target)
        folder = locate_trained(recipe.method, draft, key="eval.draft")
        drafts = [(recipe.method, folder, recipe.list_proposer_options())] if folder else []
        check_measurement(files, drafts, suite, recipe.eval, key="eval.draft", recipe=recipe)

    # Load the target, with the chat template that the draft was trained with, unless the recipe
    # names another one. A small target gets fewer CPU threads, or decoding would be slower.
    target = FrozenTarget.load(**vars(recipe.target))
    use_recorded_template([locate(draft)] if draft else [], target.tokenizer, "eval.draft")
    use_template(target.tokenizer, recipe)
    fit_threads(target)

    # Load the draft.
    options: dict[str, Any] = dict(recipe.list_proposer_options())
    options["lookup_first"] = recipe.eval.lookup_first
    options["compile"] = recipe.eval.compile
    return LoadedDraft(
        target, load_proposer(recipe.method, draft, target, made_for=made_for, **options), draft
    )


class AdaptedRecipe(NamedTuple):
    """A recipe whose target has one adapter, made from a recipe with several adapters.

    Attributes:
        recipe: the recipe, whose target has this one adapter.
        suite: the suite. The adapter's name is the category of every prompt, and the beginning of
            its id.
        made_for: the target that the draft was made for: the base, or one of the adapted targets.
    """

    recipe: Recipe
    suite: Suite
    made_for: TargetFiles


def split_adapters(recipe: Recipe, adapters: Sequence[str], suite: Suite) -> list[AdaptedRecipe]:
    """Split a recipe whose target has several adapters into one recipe for each adapter.

    Args:
        recipe: the recipe.
        adapters: the folders or Hub ids of the adapters.
        suite: the suite that is measured with each adapter.

    Raises:
        UserError: for an adapter that occurs twice.
    """
    # Find the target that the draft was made for: the base, or one of the adapted targets.
    base = recipe.target
    names = _name_adapters(adapters)
    targets = [TargetFiles(base.model, base.revision, adapter) for adapter in (None, *adapters)]
    made_for = _find_draft_target(find_draft(recipe), targets)

    # Make a recipe and a suite for each adapter. In the suite of an adapter, each row has the
    # adapter's name in its id and as its category. The copies of a row in all these suites get the
    # same cluster. The bootstrap resamples a cluster as a whole, because the results of copies are
    # not independent.
    adapted_recipes = []
    for name, adapter in zip(names, adapters, strict=True):
        adapted_target = base.model_copy(update={"adapter": adapter})
        adapted = recipe.model_copy(update={"target": adapted_target})
        rows = []
        for row in suite.rows:
            rows.append(
                replace(row, id=f"{name}/{row.id}", category=name, cluster=row.cluster or row.id)
            )
        adapted_recipes.append(AdaptedRecipe(adapted, replace(suite, rows=tuple(rows)), made_for))
    return adapted_recipes


def _name_adapters(adapters: Sequence[str]) -> list[str]:
    """Return a name for each adapter: the last part of its path, or its whole path.

    The whole paths are used if two adapters have the same last part, or if one is named `all`.

    Raises:
        UserError: for an adapter that occurs twice.
    """
    for adapter in adapters:
        if adapters.count(adapter) > 1:
            raise UserError("target.adapter", got=f"{adapter} twice", expected="different adapters")
    names = [Path(adapter).name for adapter in adapters]

    # A name becomes a category, and the whole suite already has the name ALL_PROMPTS (`all`).
    if ALL_PROMPTS in names or len(set(names)) < len(names):
        return list(adapters)
    return names


def _find_draft_target(draft: str | None, targets: Sequence[TargetFiles]) -> TargetFiles:
    """Find out for which of several targets a draft was made.

    The folder of a draft records the weights of its target.

    Args:
        draft: the folder or Hub id of the draft; None for a method without weights.
        targets: the targets to choose from, the base first.

    Returns:
        The target whose weights the draft's folder records. If no target has these weights, or none
        are recorded, the first target.
    """
    recorded = read_target_record(locate(draft), "eval.draft") if draft else None
    for files in targets:
        if recorded and recorded.is_same(files.identity):
            return files
    return targets[0]


def measure_checkpoints(
    recipe: TrainedRecipe, target: FrozenTarget
) -> Callable[[Path], float] | None:
    """Return a function that measures a checkpoint of a draft, so that training keeps the best one.

    The function decodes the prompts that the recipe's section `selection` names. It decodes them
    greedily, with all other settings from the section `eval`.

    Returns:
        A function (draft folder) -> acceptance length; None for a recipe without `selection`.

    Raises:
        UserError: for a suite that cannot be decoded with the target.
    """
    if recipe.selection is None:
        return None

    # Tokenize the prompts once, for all checkpoints.
    max_new_tokens = recipe.selection.max_new_tokens
    suite = load_suite(recipe.selection.suite, recipe.target.model)
    prompts = tokenize(
        suite,
        target.tokenizer,
        num_prompts=recipe.selection.num_prompts,
        max_new_tokens=max_new_tokens,
        max_length=target.max_length,
        vocab_size=target.vocab_size,
    )

    # Use the settings of an evaluation, but decode greedily, and only as many tokens as `selection`
    # says.
    settings = Settings.from_section(recipe.eval)
    settings = replace(settings, max_new_tokens=max_new_tokens, sampling=GREEDY)
    return partial(
        _decode_acceptance_length, recipe, target, suite.name, MeasurementPlan(settings, prompts)
    )


def _decode_acceptance_length(
    recipe: TrainedRecipe,
    target: FrozenTarget,
    suite_name: str,
    plan: MeasurementPlan,
    folder: Path,
) -> float:
    """Decode prompts with the draft in a folder, and return its acceptance length.

    The acceptance length is the number of tokens emitted in rounds, divided by the number of
    rounds.

    Args:
        recipe: the recipe that trains the draft.
        target: the target that verifies.
        suite_name: the name of the suite, which an error names.
        plan: the prompts, and the settings with which they are decoded.
        folder: the folder of the draft.

    Raises:
        UserError: when every completion ends with its first token, so that there are no rounds.
    """
    proposer = load_proposer(
        recipe.method, str(folder), target, logs=False, **recipe.list_proposer_options()
    )
    decoder = Decoder(target, proposer)

    # Count the rounds, and the tokens emitted in them, over all prompts.
    num_rounds = 0
    num_tokens = 0
    # If the target is compiled for training, decode without the compiled code (force_eager): it
    # would have to be compiled again for the shapes of decoding.
    with torch.compiler.set_stance("force_eager"):
        for prompt in plan.prompts:
            generation = decoder.generate(prompt.token_ids, **plan.settings.decoding)
            num_rounds += len(generation.rounds)
            num_tokens += sum(len(entry.emitted) for entry in generation.rounds)
    if num_rounds == 0:
        raise UserError(
            "selection.suite",
            got=f"{suite_name}, whose completions all end after one token",
            expected="prompts with longer completions",
        )
    return num_tokens / num_rounds
