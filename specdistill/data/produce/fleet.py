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
        "where `data make` makes shards: ray, on the nodes of the cluster of RAY_ADDRESS or else on"
        " this machine; null: in this process",
    )
    shards: int = option(
        1, "number of shards, at least one per node", ge=1, condition=CLUSTER_IS_USED
    )
    gpus: int = option(1, "GPUs of a node per shard", ge=0, condition=CLUSTER_IS_USED)
    cpus: int = option(1, "CPU cores of a node per shard", ge=1, condition=CLUSTER_IS_USED)

    def check(self, config: DataConfig) -> None:
        """Raise UserError for data that cannot be divided into these shards."""
        # The import is here, and not above, because it imports transformers.
        from specdistill.data.produce.blocks import plan_blocks

        # All shards are made, so the recipe must not ask for one of them.
        if config.shard is not None:
            raise make_unused_key_error(
                "data.shard", config.shard, f"on={self.on} makes all shards"
            )

        # A shard has at least one block.
        num_tokens = config.regenerate.num_tokens
        num_blocks = len(plan_blocks(num_tokens)) if num_tokens else 0
        if self.shards > num_blocks:
            raise UserError(
                "shards",
                got=self.shards,
                expected=f"at most {num_blocks}, the blocks of {num_tokens:,} tokens",
            )


def make_on_ray(
    make: Callable[[list[str]], int], keys: Sequence[str], options: FleetOptions
) -> None:
    """Make every shard on the Ray cluster of RAY_ADDRESS, or on one that is started here.

    An error that a shard raises is raised here.

    Args:
        make: called as `make(["make", *keys, "data.shard=…"])` for each shard.
        keys: the `key=value` arguments of the command.
        options: how many shards there are, and what each needs.

    Raises:
        UserError: if Ray is not installed, or if no node fits.
        ResourceError: without a cluster, and for a shard whose worker died too often.
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
        # If no node has the GPUs and CPUs of a shard, Ray would wait for one without end.
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        _check_nodes(nodes, options)

        # Every shard is a task of its own. Ray repeats it if its worker dies.
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
    """Raise UserError if no node of the cluster has the CPUs and GPUs that a shard needs.

    Args:
        nodes: the resources of each node, as Ray names them.
        options: what each shard needs.
    """
    if not any(
        resources.get("CPU", 0) >= options.cpus and resources.get("GPU", 0) >= options.gpus
        for resources in nodes
    ):
        most_gpus = max(int(resources.get("GPU", 0)) for resources in nodes)
        raise UserError(
            "gpus",
            got=f"{options.gpus} with cpus={options.cpus}",
            expected=f"resources that a node of the Ray cluster has: at most {most_gpus} GPUs",
        )


def _wait_for_shards(tasks: Sequence[Any]) -> None:
    """Wait until Ray has finished all tasks, and raise the error of the first one that failed.

    Args:
        tasks: Ray's references to the tasks.
    """
    import ray  # slow to import

    waiting = list(tasks)
    with show_progress("Making shards", len(waiting), "shards") as advance:
        while waiting:
            (finished,), waiting = ray.wait(waiting)
            try:
                ray.get(finished)
            except ray.exceptions.RayTaskError as error:
                # The shard's own error is raised as it is.
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise ResourceError(
                    f"a shard's worker died {MAX_SHARD_RETRIES + 1} times ({error})",
                    next_step="run the same command again to make the shards that are missing",
                ) from error
            advance()


def _make_shard(make: Callable[[list[str]], int], folder: str, arguments: list[str]) -> None:
    """Make a shard in a Ray worker, in the folder of the command.

    Args:
        make: called with the arguments.
        folder: the folder in which the command was given.
        arguments: the arguments of `specdistill data`.

    Raises:
        ResourceError: while the process of a lost node, or its lock, is still there. Ray then
            repeats the shard.
    """
    os.chdir(folder)
    try:
        make(arguments)
    except UserError as error:
        # This key means that another process holds the lock of a block. If that process is lost,
        # its lock disappears after a while, so the shard is worth another try.
        if error.key != "data.shard":
            raise
        time.sleep(LOCK_SECONDS)
        raise ResourceError(str(error), next_step="end the other process") from error
