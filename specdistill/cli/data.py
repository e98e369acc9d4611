"""`specdistill data`: make, merge and show the training rows of a recipe; store hidden states."""

from typing import TYPE_CHECKING

from specdistill.cli.launch import LaunchOptions, import_libraries, launch
from specdistill.common.errors import ExitCode, UserError, find_nearest, make_unused_key_error
from specdistill.common.project import ROOT
from specdistill.common.terminal import print_result
from specdistill.data.produce.fleet import FleetOptions, make_on_ray
from specdistill.methods.recipe import Recipe, TrainedRecipe, check_trainable
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_own_keys, load_recipe
from specdistill.recipe.short_keys import TRAIN, select_recipe_keys

if TYPE_CHECKING:  # These import torch.
    from specdistill.data.produce.job import Job
    from specdistill.data.rows.row_set import Manifest

# The schema of a recipe requires this key. Rows do not depend on its value.
OUTPUT_DIR_WITHOUT_RUN = "train.output_dir=runs"


class ShowOptions(Section):
    """The options of `specdistill data show`."""

    documents: int = option(3, "number of documents that `data show` prints as text", ge=1)


def data(arguments: list[str]) -> int:
    """Make, merge or show training rows, or store hidden states (data make|merge|show|features).

    specdistill data show recipe=mine.yaml documents=20
    specdistill data make recipe=mine.yaml data.shard=0/4
    specdistill data make recipe=mine.yaml on=ray shards=100
    specdistill data merge recipe=mine.yaml
    """
    # The first argument is the name of a verb. If it is left out, as in `specdistill data
    # recipe=…`, the verb is `show`.
    has_verb = bool(arguments) and "=" not in arguments[0]
    verb = arguments[0] if has_verb else "show"
    remaining_arguments = arguments[1:] if has_verb else arguments
    if verb not in VERBS:
        raise UserError(
            "specdistill data",
            got=verb,
            expected=f"one of {', '.join(VERBS)}",
            nearest=find_nearest(verb, VERBS),
        )
    return VERBS[verb](remaining_arguments)


def make(arguments: list[str]) -> int:
    """Make the training rows of a recipe, or only one shard of them.

    The work can be split into shards, one for each machine. A shard is written as several files,
    which are called blocks. With on=ray, the nodes of a Ray cluster make all shards.
    """
    # Separate the options of the cluster from the keys of the recipe.
    fleet, keys = load_own_keys(FleetOptions, select_recipe_keys(arguments, TRAIN))
    recipe = _load_data_recipe(keys)
    if fleet.on:
        return _make_on_ray(fleet, recipe, keys)
    check_named_files(recipe)
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.make_data import make_shard, merge_shards

    # If the recipe sets a shard, the blocks of the shard are merged later, together with those of
    # other machines. Otherwise this process has made all blocks, and merges them at once.
    job, index, count = make_shard(recipe)
    if recipe.data.shard is not None:
        print(
            f"Made shard {index} of {count} (counted from 0) in {job.blocks}."
            " When all shards are made, run: specdistill data merge"
        )
        print_result({"blocks": job.blocks, "shard": index, "of": count})
        return ExitCode.DONE
    return _print_manifest(job, merge_shards(job))


def merge(arguments: list[str]) -> int:
    """Merge the blocks that all shards have written into the training rows of a recipe."""
    recipe = _load_data_recipe(select_recipe_keys(arguments, TRAIN))
    check_named_files(recipe)
    if recipe.data.shard is not None:
        raise make_unused_key_error(
            "data.shard", recipe.data.shard, "`specdistill data merge` merges all shards"
        )
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.make_data import merge_shards, prepare_job

    job = prepare_job(recipe, generates=False)
    return _print_manifest(job, merge_shards(job))


def show(arguments: list[str]) -> int:
    """Print the counts of a row set and some of its documents; make it first if it is missing."""
    # Separate the keys of this verb from the keys of the recipe, and check both.
    options, keys = load_own_keys(ShowOptions, select_recipe_keys(arguments, TRAIN))
    recipe = _load_data_recipe(keys)
    check_named_files(recipe)
    import_libraries()
    # These modules import torch, so they are imported only here.
    from specdistill.data.rows.show import decode_documents, measure_lengths, print_data
    from specdistill.training.length import print_length
    from specdistill.workflows.make_data import open_or_make_rows

    # Print the counts, and some documents as text.
    job, rows, manifest = open_or_make_rows(recipe)
    document_lengths = measure_lengths(rows)
    documents = decode_documents(rows, document_lengths, options.documents, job.target.tokenizer)
    print_data(manifest, document_lengths, documents)

    # Print how many optimizer steps a training on these rows takes.
    print_length(recipe.train, recipe.data.max_length, job.run_size(), num_processes=1)
    print_result({"folder": job.folder, **manifest.model_dump(mode="json"), "documents": documents})
    return ExitCode.DONE


def features(arguments: list[str]) -> int:
    """Store the hidden states of the target that training with a recipe reads."""
    # Compute the hidden states in this process, or with launch=… in processes that accelerate
    # starts. A recipe requires an output folder (OUTPUT_DIR_WITHOUT_RUN), which is not used here.
    launch_options, recipe_arguments = load_own_keys(LaunchOptions, arguments)
    import_libraries()
    if launch_options.launch is not None:
        return launch(
            ROOT / "train" / "features.py",
            [*recipe_arguments, OUTPUT_DIR_WITHOUT_RUN],
            launch_options,
        )
    recipe = check_trainable(
        load_recipe(Recipe, [*select_recipe_keys(recipe_arguments, TRAIN), OUTPUT_DIR_WITHOUT_RUN])
    )
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.features import store_features

    print_result(store_features(recipe)._asdict())
    return ExitCode.DONE


def _load_data_recipe(keys: list[str]) -> TrainedRecipe:
    """Load the recipe of training rows, and refuse a method that needs no training.

    Args:
        keys: the `key=value` arguments of the recipe.

    Raises:
        UserError: if the method of the recipe needs no training, and so no rows.
    """
    # A recipe requires an output folder, which the rows do not depend on.
    recipe = load_recipe(Recipe, [*keys, OUTPUT_DIR_WITHOUT_RUN])
    if not isinstance(recipe, TrainedRecipe):
        raise UserError(
            "method",
            got=f"{recipe.method}, which needs no training",
            expected="a method that trains a draft",
        )
    return recipe


def check_named_files(recipe: TrainedRecipe) -> None:
    """Check the data sources, the suite and the gate that a recipe names, without importing torch.

    Importing torch takes seconds. With this check first, a mistake in these files is reported at
    once. `check_training` checks them again later, together with everything else.
    """
    # These modules import scipy and pyarrow, so they are imported only here.
    from specdistill.evaluation.gate.rules import load_gate
    from specdistill.evaluation.suites.suite import check_suite
    from specdistill.recipe.data_sources import check_files

    # With `data.rows` the rows exist already, and the sources are not read.
    if recipe.data.rows is None:
        check_files(recipe.data.source, recipe.data.split, recipe.data.columns)
    check_suite(recipe.eval.suite)
    load_gate(recipe.gate)


def _make_on_ray(options: FleetOptions, recipe: TrainedRecipe, keys: list[str]) -> ExitCode:
    """Make all shards of a row set as tasks of a Ray cluster.

    This machine reads the sources before the nodes do, so it must see the same files.

    Args:
        options: the number of shards, and the resources of each.
        recipe: the recipe of the rows.
        keys: the `key=value` arguments of the recipe, which each task gets.
    """
    options.check(recipe.data)
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.make_data import prepare_job

    # Check the job on this machine, which does not generate text itself.
    job = prepare_job(recipe, generates=False)
    job.check()
    # Reading this property loads and filters the sources, and caches them on the disk, where the
    # nodes find them.
    _ = job.sources

    # Each task calls the function `data` of this module with `make` and the number of its shard.
    make_on_ray(data, keys, options)
    print(
        f"Made {options.shards} shards in {job.blocks}. To merge them, run: specdistill data merge"
    )
    print_result({"blocks": job.blocks, "shards": options.shards})
    return ExitCode.DONE


def _print_manifest(job: "Job", manifest: "Manifest") -> ExitCode:
    """Print the folder of a row set, and how many tokens and documents it holds."""
    counts = [
        f"{name}: {split.tokens:,} tokens in {split.documents:,} documents"
        for name, split in manifest.splits.items()
    ]
    print(f"The rows are in {job.folder} ({'; '.join(counts)}).")
    print_result({"folder": job.folder, **manifest.model_dump(mode="json")})
    return ExitCode.DONE


# The word after `specdistill data` -> the function that runs it.
VERBS = {"make": make, "merge": merge, "show": show, "features": features}
