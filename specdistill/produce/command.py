"""`specdistill data`: make a recipe's row set, or a shard of what it is generated from; merge shards; show it."""

from typing import TYPE_CHECKING

from specdistill.command import keys_of
from specdistill.errors import ExitCode, UserError, nearest
from specdistill.launch import LaunchOptions, run_script
from specdistill.methods.recipe import Recipe, TrainedRecipe
from specdistill.produce.fleet import FleetOptions, array_job, make_on_ray
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_own_keys, load_recipe
from specdistill.suites.conversations import use_template
from specdistill.terminal import result

if TYPE_CHECKING:  # it imports torch
    from specdistill.produce.job import Job

VERBS = ("make", "merge", "show", "features")


class ShowOptions(Section):
    documents: int = option(3, "documents to show as text", ge=1)


def data(arguments: list[str]) -> int:
    """make, merge or show training data, or store hidden states (data make, merge, show, features)

    specdistill data show recipe=mine.yaml documents=20
    specdistill data make recipe=mine.yaml data.shard=0/4
    specdistill data make recipe=mine.yaml on=ray shards=100
    specdistill data merge recipe=mine.yaml"""
    verb, *others = arguments if arguments and "=" not in arguments[0] else ["show", *arguments]
    if verb == "features":
        options, others = load_own_keys(LaunchOptions, others)
        return run_script(
            "train/features.py", [*others, "train.output_dir=runs"], options
        )  # features have no run
    if verb not in VERBS:
        raise UserError(
            "specdistill data",
            got=verb,
            expected=f"one of {', '.join(VERBS)}",
            nearest=nearest(verb, VERBS),
        )
    keys, show_options, fleet = keys_of(others), ShowOptions(), FleetOptions()
    if verb == "show":
        show_options, keys = load_own_keys(ShowOptions, keys)
    if verb == "make":
        fleet, keys = load_own_keys(FleetOptions, keys)
    recipe = load_recipe(
        Recipe, [*keys, "train.output_dir=runs"]
    )  # a recipe needs it, the rows do not
    if not isinstance(recipe, TrainedRecipe):
        raise UserError(
            "method",
            got=f"{recipe.method}, which needs no training",
            expected="a method that is trained",
        )
    if verb == "show":
        return _show(recipe, show_options)
    return _make_on(fleet, recipe, keys) if fleet.on else _make(recipe, merges_only=verb == "merge")


def _job(recipe: TrainedRecipe, *, generates: bool) -> "Job":
    """The work, with the target's weights loaded where it generates in this process."""
    from specdistill.produce.job import Job  # here, and not above, because these import torch
    from specdistill.rows.row_set import RowTarget
    from specdistill.targets.files import TargetFiles
    from specdistill.targets.frozen import FrozenTarget
    from specdistill.targets.loading import read_tokenizer

    target, regenerate = recipe.target, recipe.data.regenerate
    if generates and regenerate.num_tokens > 0 and not regenerate.server:
        made = RowTarget.of(FrozenTarget.load(**vars(target)))
    else:
        files = TargetFiles(target.model, target.revision, target.adapter, target.trust_remote_code)
        tokenizer, end_ids, _ = read_tokenizer(files)
        made = RowTarget(target.model, files.identity.weights, tokenizer, end_ids)
    use_template(made.tokenizer, recipe)
    return Job(recipe.data, made, recipe.measured_on, recipe.states_folder)


def _make_on(options: FleetOptions, recipe: TrainedRecipe, keys: list[str]) -> ExitCode:
    """The shards by Ray, or what another cluster is given to make them."""
    options.check(recipe.data)
    if options.on != "ray":
        text = array_job(keys, options, recipe.target, recipe.data)
        print(text, end="")
        result({options.on: text})
        return ExitCode.DONE
    job = _job(recipe, generates=False)
    job.check()
    _ = job.sources  # the nodes find them prepared
    make_on_ray(data, keys, options)
    print(f"{job.blocks}: {options.shards} shards are made; next: specdistill data merge")
    result({"blocks": job.blocks, "shards": options.shards})
    return ExitCode.DONE


def _make(recipe: TrainedRecipe, *, merges_only: bool) -> ExitCode:
    from specdistill.produce.make import make_blocks, shard_of
    from specdistill.produce.merge import merge
    from specdistill.rows.row_set import read_rows

    if merges_only and recipe.data.shard is not None:
        raise UserError(
            "data.shard",
            got=recipe.data.shard,
            expected="null: `specdistill data merge` takes all shards",
        )
    index, count = shard_of(recipe.data.shard)
    job = _job(recipe, generates=not merges_only)
    job.check()
    if not merges_only:
        make_blocks(job, index, count)
    if recipe.data.shard is not None and not merges_only:
        print(
            f"{job.blocks}: shard {index} of {count} is made; when all are: specdistill data merge"
        )
        result({"blocks": job.blocks, "shard": index, "of": count})
        return ExitCode.DONE
    merge(job)
    *_, manifest = read_rows(job.folder)
    counts = " and ".join(
        f"{it.tokens:,} tokens in {it.documents:,} documents" for it in manifest.splits.values()
    )
    print(f"{job.folder}: for training and validation {counts}")
    result({"folder": job.folder, **manifest.model_dump(mode="json")})
    return ExitCode.DONE


def _show(recipe: TrainedRecipe, options: ShowOptions) -> ExitCode:
    from specdistill.produce import show
    from specdistill.produce.make import open_rows
    from specdistill.rows.row_set import is_whole, read_rows

    job = _job(recipe, generates=False)
    if not is_whole(job.folder):
        job = _job(recipe, generates=True)
    rows, _ = open_rows(job)
    *_, manifest = read_rows(job.folder)
    of = show.lengths(rows)
    documents = show.shown(rows, of, options.documents, job.target.tokenizer)
    show.print_data(manifest, of, documents)
    result({"folder": job.folder, **manifest.model_dump(mode="json"), "documents": documents})
    return ExitCode.DONE
