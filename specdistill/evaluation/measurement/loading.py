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

DraftFolder = tuple[str, Path, Mapping[str, Any]]  # method, folder, decoding options of this draft


class LoadedDraft(NamedTuple):
    """A target and its draft.

    Attributes:
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
    """Check drafts and a suite against a target.

    Args:
        target: the target that the drafts were made for.
        drafts: the drafts.
        suite: the suite that is measured.
        options: an object with `num_prompts` and `max_new_tokens`, such as a recipe's `eval:`.
        key: the key that named the drafts; errors start with it.
        recipe: the recipe, if options are its `eval:` section; its chat template is then used. None
            for other commands.

    Raises:
        UserError: for a draft of another target, or prompts that the target cannot be given.
        ResourceError: when the Hub fails.
    """
    tokenizer, _, max_length = read_tokenizer(target)
    for method, folder, draft_settings in drafts:
        check_draft(method, folder, target, key, logs=False, **draft_settings)
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

    They cannot in an engine, with a target that is sharded itself or has several adapters, or with
    a draft that looks up earlier outputs: each process would know only its own outputs.

    Raises:
        UserError: for the first key that does not allow it.
    """
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
    for key, value in refused.items():
        raise UserError(
            key,
            got=f"{value} in several processes",
            expected="another value, or a command without launch=",
        )


def find_draft(recipe: Recipe) -> str | None:
    """Return the folder or Hub id of a recipe's draft; None for a method without weights."""
    if not METHODS[recipe.method].is_trained:
        return None
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
        made_for: the target that the draft was made for, if it is another.
    """
    draft = find_draft(recipe)

    # Check the draft and the suite before weights are loaded.
    if suite is not None:
        files = made_for or TargetFiles.from_config(recipe.target)
        folder = locate_trained(recipe.method, draft, key="eval.draft")
        drafts = [(recipe.method, folder, recipe.list_proposer_options())] if folder else []
        check_measurement(files, drafts, suite, recipe.eval, key="eval.draft", recipe=recipe)

    # Load the target
    target = FrozenTarget.load(**vars(recipe.target))
    use_recorded_template([locate(draft)] if draft else [], target.tokenizer, "eval.draft")
    use_template(target.tokenizer, recipe)
    fit_threads(target)

    # Load the draft
    options: dict[str, Any] = dict(recipe.list_proposer_options())
    options["lookup_first"] = recipe.eval.lookup_first
    options["compile"] = recipe.eval.compile
    return LoadedDraft(
        target, load_proposer(recipe.method, draft, target, made_for=made_for, **options), draft
    )


class AdaptedRecipe(NamedTuple):
    """A recipe with one of its target's adapters.

    Attributes:
        recipe: the recipe, whose target has this one adapter.
        suite: the suite, with the adapter's name as the category of every prompt and in front of
            its id.
        made_for: the target that the draft was made for.
    """

    recipe: Recipe
    suite: Suite
    made_for: TargetFiles


def split_adapters(recipe: Recipe, adapters: Sequence[str], suite: Suite) -> list[AdaptedRecipe]:
    """Return the recipe with each of a target's adapters.

    The draft was made for the base, or for one of the adapters.

    Raises:
        UserError: for an adapter that is there twice.
    """
    base = recipe.target
    names = _name_adapters(adapters)
    targets = [TargetFiles(base.model, base.revision, adapter) for adapter in (None, *adapters)]
    made_for = _find_draft_target(find_draft(recipe), targets)
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
    """Return the last part of each adapter's path, or all of the path where these repeat."""
    for adapter in adapters:
        if adapters.count(adapter) > 1:
            raise UserError("target.adapter", got=f"{adapter} twice", expected="different adapters")
    names = [Path(adapter).name for adapter in adapters]
    # ALL is the name of the row over the whole suite.
    if ALL_PROMPTS in names or len(set(names)) < len(names):
        return list(adapters)
    return names


def _find_draft_target(draft: str | None, targets: Sequence[TargetFiles]) -> TargetFiles:
    """Return which of the targets a draft was made for; the first of them if it does not say."""
    recorded = read_target_record(locate(draft), "eval.draft") if draft else None
    for files in targets:
        if recorded and recorded.is_same(files.identity):
            return files
    return targets[0]


def measure_checkpoints(
    recipe: TrainedRecipe, target: FrozenTarget
) -> Callable[[Path], float] | None:
    """Return a function that measures a checkpoint: (draft folder) -> acceptance length.

    The function decodes the prompts of `selection:` greedily, and otherwise as `eval:` says.

    Returns:
        The function; None for a recipe without `selection:`.

    Raises:
        UserError: for a suite that cannot be decoded with the target.
    """
    if recipe.selection is None:
        return None
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
    """Return the acceptance length of the draft in a folder.

    Raises:
        UserError: when no completion has a round.
    """
    proposer = load_proposer(
        recipe.method, str(folder), target, logs=False, **recipe.list_proposer_options()
    )
    decoder = Decoder(target, proposer)
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
            got=f"{suite_name}, whose completions end at once",
            expected="longer completions",
        )
    return num_tokens / num_rounds
