"""Make the shards of a row set on the nodes of a cluster: `data make … on=ray shards=N`.

Each shard has an engine or a server of its own. Shards are tasks of Ray Core, which repeats tasks
whose worker or node is lost. All nodes must see the folder in which the command is given. A
repeated shard continues after the answers that are on disk. For Slurm and Kubernetes there are
files to adapt in `examples/cluster`.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from specdistill.common.errors import ResourceError, UserError, make_unused_key_error
from specdistill.common.progress import show_progress
from specdistill.recipe.fields import Condition, Section, option
from specdistill.recipe.sections import DataConfig

# How often Ray repeats a shard. With LOCK_SECONDS before each new try, a shard that is locked is
# tried for four minutes.
MAX_SHARD_RETRIES = 8
# How long a repeated shard waits for the lock of a lost node. A network file system keeps such
# locks for a minute or two.
LOCK_SECONDS = 30.0
CLUSTER_IS_USED = Condition("with on=ray", lambda options: options.on is not None)


class FleetOptions(Section):
    """The options of `specdistill data make` that divide its work among the nodes of a cluster."""

    on: Literal["ray"] | None = option(
        None,
        "where `data make` runs. ray: on the Ray cluster that RAY_ADDRESS names, or else on a"
        " cluster started on this machine; null: in this process",
    )
    shards: int = option(
        1,
        "number of shards to divide the work into; use at least one per node",
        ge=1,
        condition=CLUSTER_IS_USED,
    )
    gpus: int = option(
        1, "number of GPUs that each shard needs on its node", ge=0, condition=CLUSTER_IS_USED
    )
    cpus: int = option(
        1, "number of CPU cores that each shard needs on its node", ge=1, condition=CLUSTER_IS_USED
    )

    def check(self, config: DataConfig) -> None:
        """Raise UserError if the work of a recipe cannot be divided into `shards` shards.

        Args:
            config: the `data:` section of the recipe.
        """
        # The import is not at the top of the module, because it imports transformers, which is
        # slow.
        from specdistill.data.produce.blocks import plan_blocks

        # The command makes all shards, so the recipe must not ask for a single one.
        if config.shard is not None:
            raise make_unused_key_error(
                "data.shard", config.shard, f"on={self.on} makes all shards"
            )

        # The tokens to generate are divided into blocks, and each shard needs at least one block.
        num_tokens = config.regenerate.num_tokens
        num_blocks = len(plan_blocks(num_tokens)) if num_tokens else 0
        if self.shards > num_blocks:
            raise UserError(
                "shards",
                got=self.shards,
                expected=f"at most {num_blocks}, the number of blocks into which the"
                f" {num_tokens:,} tokens of data.regenerate are divided",
            )


def make_on_ray(
    make: Callable[[list[str]], int], keys: Sequence[str], options: FleetOptions
) -> None:
    """Run `specdistill data make` for every shard as a task on a Ray cluster, and wait for all.

    The cluster is the one that the environment variable RAY_ADDRESS names. If the variable is not
    set, a cluster is started on this machine. An error in a shard is raised here, too.

    Args:
        make: the function that runs `specdistill data`. For each shard it is called with the
            arguments ["make", *keys, "data.shard=…"].
        keys: the `key=value` arguments of the user's command.
        options: the number of shards, and the GPUs and CPU cores that each needs.

    Raises:
        UserError: if Ray is not installed, or if no node has enough GPUs and CPU cores.
        ResourceError: if no cluster answers, or if the worker of a shard died too often.
    """
    if find_spec("ray") is None:
        raise UserError(
            "on",
            got="ray without its package",
            expected="an installed package",
            text="on=ray: Ray is not installed. Run: pip install 'specdistill[ray]'",
        )
    import ray  # slow to import

    # Join the cluster that RAY_ADDRESS names, or start one on this machine.
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ResourceError(
            f"no Ray cluster answers ({error})",
            next_step="start it (`ray start --head`), or unset RAY_ADDRESS for one on this machine",
        ) from error
    try:
        # If no node has the GPUs and CPUs of a shard, Ray would wait forever for such a node.
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        _check_nodes(nodes, options)

        # Every shard is a task of its own. Ray repeats it if its worker dies, or if it raises
        # ResourceError.
        shard = ray.remote(_make_shard).options(
            max_retries=MAX_SHARD_RETRIES,
            retry_exceptions=[ResourceError],
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            scheduling_strategy="SPREAD",
        )
        tasks = [
            shard.remote(make, os.getcwd(), ["make", *keys, f"data.shard={index}/{options.shards}"])
            for index in range(options.shards)
        ]
        _wait_for_shards(tasks)
    finally:
        ray.shutdown()


def _check_nodes(nodes: Sequence[Mapping[str, float]], options: FleetOptions) -> None:
    """Raise UserError if no node of the cluster has the CPU cores and GPUs that a shard needs.

    Args:
        nodes: for each node, Ray's mapping from a resource ("CPU", "GPU") to its amount.
        options: the GPUs and CPU cores that each shard needs.
    """
    if not any(
        resources.get("CPU", 0) >= options.cpus and resources.get("GPU", 0) >= options.gpus
        for resources in nodes
    ):
        most_gpus = max(int(resources.get("GPU", 0)) for resources in nodes)
        raise UserError(
            "gpus",
            got=f"{options.gpus} with cpus={options.cpus}",
            expected="no more GPUs and CPU cores than one node of the Ray cluster has (at most"
            f" {most_gpus} GPUs on a node)",
        )


def _wait_for_shards(tasks: Sequence[Any]) -> None:
    """Wait until Ray has finished all tasks; raise the error of the first task that fails.

    Args:
        tasks: Ray's references to the tasks, each of which makes a shard.
    """
    import ray  # slow to import

    waiting = list(tasks)
    with show_progress("Making shards", len(waiting), "shards") as advance:
        while waiting:
            (finished,), waiting = ray.wait(waiting)
            try:
                ray.get(finished)
            except ray.exceptions.RayTaskError as error:
                # The task raised an error, which Ray wrapped. Raise the original error.
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise ResourceError(
                    f"a shard's worker died {MAX_SHARD_RETRIES + 1} times ({error})",
                    next_step="run the same command again to make the shards that are missing",
                ) from error
            advance()


def _make_shard(make: Callable[[list[str]], int], folder: str, arguments: list[str]) -> None:
    """Make one shard; this function runs as a task in a Ray worker.

    Args:
        make: the function that runs `specdistill data`.
        folder: the folder in which the user gave the command. Paths are relative to it.
        arguments: the arguments of `specdistill data`.

    Raises:
        ResourceError: if another process holds the lock of the shard. Ray then repeats the task.
    """
    os.chdir(folder)
    try:
        make(arguments)
    except UserError as error:
        # An error with the key `data.shard` means that another process holds the lock of a block.
        # That may be the lost process of an earlier try, whose lock disappears after a while.
        # ResourceError makes Ray try again.
        if error.key != "data.shard":
            raise
        time.sleep(LOCK_SECONDS)
        raise ResourceError(
            str(error), next_step="end the other process that makes this shard"
        ) from error
