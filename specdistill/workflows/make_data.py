"""Make training data: check the recipe, generate blocks, merge them into a row set, and open it.

A block is a part of the data that one process generates at a time. A row set is the folder with the
finished rows of a recipe.
"""

import os
import uuid
from pathlib import Path

from datasets import Dataset

from specdistill.common.errors import UserError, make_unused_key_error
from specdistill.common.processes import (
    all_gather_object,
    check_ranks_agree,
    find_rank_and_world_size,
)
from specdistill.data.produce.generate import make_blocks
from specdistill.data.produce.job import Job
from specdistill.data.produce.merge import merge
from specdistill.data.rows.files import NUM_SHOWN_HASH_DIGITS, cache_folder
from specdistill.data.rows.row_set import (
    Manifest,
    RowSetSpec,
    RowTarget,
    check_row_set,
    is_whole,
    read_rows,
)
from specdistill.evaluation.suites.conversations import use_template
from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.sections import LocalRegeneration
from specdistill.targets.frozen import FrozenTarget
from specdistill.workflows.check_training import check_training


def prepare_job(recipe: TrainedRecipe, *, generates: bool) -> Job:
    """Check a recipe and return the job that makes its rows.

    Args:
        recipe: the recipe of a training.
        generates: whether this process will make rows. If so, and if the recipe lets the target
            generate the answers in this process (not on a server), the target's weights are loaded.

    Raises:
        UserError: for a target, settings or sources with which no rows can be made.
    """
    # Check everything that can be checked without loading weights.
    job = check_training(recipe)
    if not generates or not isinstance(recipe.data.regenerate, LocalRegeneration):
        return job

    # Load the target, which generates text in this process.
    target = FrozenTarget.load(**vars(recipe.target))
    use_template(target.tokenizer, recipe)
    return job.load_target(RowTarget.from_target(target))


def make_shard(recipe: TrainedRecipe) -> tuple[Job, int, int]:
    """Make the blocks of one shard of the training rows, or all blocks without a shard.

    Rows are made in blocks, each a file of its own. With `data.shard`, for example `0/4`, this
    machine makes only a part of the blocks. The other blocks are left to other machines.

    Args:
        recipe: the recipe of a training.

    Returns:
        The job, the number of the shard (from 0), and the number of all shards.
    """
    index, count = parse_shard(recipe.data.shard)
    job = prepare_job(recipe, generates=True)
    job.check()
    make_blocks(job, index, count)
    return job, index, count


def merge_shards(job: Job) -> Manifest:
    """Merge the blocks of a job into its row set, and return the manifest of the row set.

    A row set is a folder with finished training rows. Its manifest is a file that describes them,
    for example with the number of tokens.

    Raises:
        UserError: if the blocks of some shards are missing.
    """
    job.check()
    merge(job)
    # `read_rows` also returns the rows, which are not needed here.
    *_, manifest = read_rows(job.folder)
    return manifest


def open_or_make_rows(recipe: TrainedRecipe) -> tuple[Job, Dataset, Manifest]:
    """Open the training rows of a recipe, and make them first if they do not exist yet.

    Returns:
        The job of the rows, the training rows, and the manifest of their row set.
    """
    # Find out where the rows belong. If they do not exist yet, prepare the job again, now with all
    # that is needed to make them.
    job = prepare_job(recipe, generates=False)
    if not is_whole(job.folder):
        job = prepare_job(recipe, generates=True)
    train_rows, _ = open_rows(job)
    *_, manifest = read_rows(job.folder)
    return job, train_rows, manifest


def open_rows(job: Job) -> tuple[Dataset, Dataset]:
    """Open the rows of a training, and make them first if they do not exist yet.

    If the recipe names a folder in `data.rows`, the rows have to exist in that folder. Otherwise
    the rows belong into a folder of the cache, and are made there if they are missing.

    Every process of a launch has to call this function. The first process reads the sources. Then
    each process makes a share of the blocks, which are parts of the rows. When all blocks are made,
    the first process merges them. If the machines of a launch share no folder, the first process of
    each machine reads and merges for its machine.

    Args:
        job: the job of the rows.

    Returns:
        The training rows and the validation rows, with the columns that
        `specdistill.data.rows.packing` describes.

    Raises:
        UserError: for rows of another target, template or shape, for an incomplete row set, and for
            machines whose rows or weights differ.
    """
    # All processes must have the same target. Comparing the first digits of the hashes suffices,
    # and an error can show them.
    check_ranks_agree({"weights of target.model": job.target.weights[:NUM_SHOWN_HASH_DIGITS]})
    if job.config.shard is not None:
        raise make_unused_key_error(
            "data.shard", job.config.shard, "only `specdistill data make` makes a shard of the rows"
        )
    check_row_set(job.config, job.target)

    # Make the rows, unless every process finds a finished row set. Each `all_gather_object` is a
    # barrier, at which processes wait for each other.
    if job.config.rows is None and not all(all_gather_object(is_whole(job.folder))):
        job.check()
        index, count = _find_shares(cache_folder(job.config.cache_dir))
        if index == 0:
            # Reading this property loads and filters the sources, and caches them on the disk,
            # where the other processes find them.
            _ = job.sources
        all_gather_object(None)
        make_blocks(job, index, count)
        all_gather_object(None)
        if index == 0:
            merge(job)
        all_gather_object(None)

    # Open the rows. All machines must have the same rows, so their hashes are compared.
    train, validation, manifest = read_rows(
        job.folder, RowSetSpec.from_config(job.config, job.target)
    )
    hashes = {shard.name: shard.hash[:NUM_SHOWN_HASH_DIGITS] for shard in manifest.shards}
    check_ranks_agree(
        hashes, otherwise=": make the rows on one machine, and copy the folder (data.rows)"
    )
    return train, validation


def _find_shares(folder: Path) -> tuple[int, int]:
    """Find the processes that share a folder, and return this process's rank and their number.

    On a network file system, all processes of a launch share the folder. Otherwise each machine has
    a folder of its own, which only the processes of this machine share. To find out, rank 0 writes
    a marker file: if every process sees the file, all of them share the folder.

    Args:
        folder: the folder that caches row sets.

    Returns:
        The rank and the number of processes, either in the whole launch or on this machine.
    """
    rank, count = find_rank_and_world_size()
    if count == 1:
        return 0, 1

    # The first process writes the marker. A random name makes it differ from markers that killed
    # processes have left. All processes use the name of rank 0, so it is gathered first.
    random_name = all_gather_object(uuid.uuid4().hex)[0]
    marker = folder / f"launch-{random_name}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()

    # Each `all_gather_object` is a barrier. The first waits until rank 0 has written the marker,
    # the second until every process has looked for it. Only then the marker is removed.
    all_gather_object(None)
    is_common = all(all_gather_object(marker.exists()))
    if rank == 0:
        marker.unlink()

    # Without a common folder, only the processes of this machine share its folder.
    if is_common:
        return rank, count
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def parse_shard(shard_text: str | None) -> tuple[int, int]:
    """Return the number of the shard (from 0) and the number of shards that `data.shard` names.

    Args:
        shard_text: the value of `data.shard`: `i/n`, `auto` or `auto/n`. With `auto`, the number of
            the shard comes from environment variables of a Slurm array job or a Kubernetes indexed
            job. None means a single shard with all the work.

    Raises:
        UserError: for any other value, and for `auto` outside of such a job.
    """
    expected = (
        "i/n with i from 0 to n - 1; in a Slurm array job or a Kubernetes indexed job also auto, or"
        " auto/n for n shards"
    )
    index, _, count = ("0/1" if shard_text is None else shard_text).partition("/")

    # Slurm and Kubernetes number the tasks of such a job. The first number is not always 0 in
    # Slurm, so it is subtracted. Kubernetes sets JOB_COMPLETIONS only if the job's manifest says
    # so.
    if index == "auto":
        env = os.environ
        if "SLURM_ARRAY_TASK_ID" in env:
            first_id = int(env.get("SLURM_ARRAY_TASK_MIN", "0"))
            index = str(int(env["SLURM_ARRAY_TASK_ID"]) - first_id)
            count = count or env.get("SLURM_ARRAY_TASK_COUNT", "")
        else:
            index = env.get("JOB_COMPLETION_INDEX", "")
            count = count or env.get("JOB_COMPLETIONS", "")
        if not index or not count:
            got = (
                "auto without SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT, or"
                " JOB_COMPLETION_INDEX and JOB_COMPLETIONS"
            )
            raise UserError("data.shard", got=got, expected=expected)

    # `index` and `count` are still text, from the key or from the environment.
    if not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise UserError("data.shard", got=shard_text, expected=expected)
    return int(index), int(count)
