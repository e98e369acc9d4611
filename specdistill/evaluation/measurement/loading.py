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
    """Check that drafts and a suite fit a target, without loading weights.

    Args:
        target: the target that the drafts were made for.
        drafts: the drafts.
        suite: the suite that is measured.
        options: an object with `num_prompts` and `max_new_tokens`, such as a recipe's `eval:`.
        key: the key that named the drafts; errors start with it.
        recipe: the recipe, if `options` is its `eval:` section. Its chat template is then used, and
            all its configurations are planned. None for other commands.

    Raises:
        UserError: for a draft of another target, or prompts that the target cannot be given.
        ResourceError: when the Hub fails.
    """
    # Check every draft.
    tokenizer, _, max_length = read_tokenizer(target)
    for method, folder, draft_settings in drafts:
        check_draft(method, folder, target, key, logs=False, **draft_settings)

    # Check every prompt by tokenizing it, with the chat template that the drafts were trained with.
    use_recorded_template([folder for _, folder, _ in drafts], tokenizer, key)
    use_template(tokenizer, recipe)
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
    """Check that several processes can share a measurement.

    They cannot if an engine measures, if the target is sharded over the processes, or if it has
    several adapters. Nor can they with a draft that looks up earlier outputs, because each process
    would know only its own outputs.

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

    # Refuse the first one.
    for key, value in refused.items():
        raise UserError(
            key,
            got=f"{value} in several processes",
            expected="another value, or a command without launch=",
        )


def find_draft(recipe: Recipe) -> str | None:
    """Return the folder or Hub id of a recipe's draft; None for a method without weights.

    The draft is the one that `eval.draft` names, or else the one that this recipe has trained.

    Raises:
        UserError: when the recipe names no draft and has not trained one.
    """
    if not METHODS[recipe.method].is_trained:
        return None

    # A draft that the recipe names comes first. Otherwise it must have been trained.
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
    """Load a recipe's target and its draft.

    Args:
        recipe: the recipe.
        suite: a suite to check before weights are loaded; None for none.
        made_for: the target that the draft was made for, if it is not the recipe's target.
    """
    draft = find_draft(recipe)

    # Check the draft and the suite before weights are loaded.
    if suite is not None:
        files = made_for or TargetFiles.from_config(recipe.target)
        folder = locate_trained(recipe.method, draft, key="eval.draft")
        drafts = [(recipe.method, folder, recipe.list_proposer_options())] if folder else []
        check_measurement(files, drafts, suite, recipe.eval, key="eval.draft", recipe=recipe)

    # Load the target, with the chat template that the draft was trained with.
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
    """Split a recipe with several adapters into one recipe for each adapter.

    Args:
        recipe: the recipe.
        adapters: the adapters of its target.
        suite: the suite.

    Raises:
        UserError: for an adapter that occurs twice.
    """
    # Find the target that the draft was made for: the base, or one of the adapted targets.
    base = recipe.target
    names = _name_adapters(adapters)
    targets = [TargetFiles(base.model, base.revision, adapter) for adapter in (None, *adapters)]
    made_for = _find_draft_target(find_draft(recipe), targets)

    # Make a recipe for each adapter. The same prompt with several adapters is one cluster, because
    # the results with them are not independent.
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
    """Return a short name for each adapter: the last part of its path, if all of these differ.

    Raises:
        UserError: for an adapter that occurs twice.
    """
    for adapter in adapters:
        if adapters.count(adapter) > 1:
            raise UserError("target.adapter", got=f"{adapter} twice", expected="different adapters")
    names = [Path(adapter).name for adapter in adapters]

    # A name becomes a category, and ALL_PROMPTS is already the category of the whole suite.
    if ALL_PROMPTS in names or len(set(names)) < len(names):
        return list(adapters)
    return names


def _find_draft_target(draft: str | None, targets: Sequence[TargetFiles]) -> TargetFiles:
    """Return the target that a draft was made for, by the weights that the draft's folder records.

    Args:
        draft: the folder or Hub id of the draft; None for a method without weights.
        targets: the targets to choose from.

    Returns:
        The target; the first one if nothing is recorded, or none of them matches.
    """
    recorded = read_target_record(locate(draft), "eval.draft") if draft else None
    for files in targets:
        if recorded and recorded.is_same(files.identity):
            return files
    return targets[0]


def measure_checkpoints(
    recipe: TrainedRecipe, target: FrozenTarget
) -> Callable[[Path], float] | None:
    """Return a function that training calls to measure a checkpoint of the draft.

    The function decodes the prompts of the recipe's section `selection` greedily, and otherwise as
    its section `eval` says.

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

    # Decode as in an evaluation, except that it is greedy and may be shorter.
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

    Raises:
        UserError: when every completion ends with its first token, so that there are no rounds.
    """
    proposer = load_proposer(
        recipe.method, str(folder), target, logs=False, **recipe.list_proposer_options()
    )
    decoder = Decoder(target, proposer)

    # The acceptance length is the number of tokens emitted in rounds, divided by the rounds.
    num_rounds = 0
    num_tokens = 0
    # A target that is compiled for training is not compiled again for decoding.
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
