"""`specdistill data make … on=CLUSTER shards=N`: the shards of a row set on the nodes of a cluster, each with an engine or a server.

ray          tasks of Ray Core, which repeats those whose worker or node is lost
slurm        the script of an array job, as text
kubernetes   the manifest of a JobSet, as text: an indexed job, and one that merges when it is complete

All nodes see the folder that the command is given in. A repeated shard continues after the answers that are on disk.
"""

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from jinja2 import Environment, StrictUndefined

from specdistill.engines.completions import LOOPBACK
from specdistill.errors import ResourceError, UserError
from specdistill.progress import progress
from specdistill.recipe.fields import ReadWhen, Section, option
from specdistill.recipe.sections import DataConfig, TargetConfig

REPEATS = 8  # of a shard
TEMPLATES: dict[str | None, str] = {"slurm": "slurm.sh.j2", "kubernetes": "kubernetes.yaml.j2"}
LOCK_SECONDS = 30.0  # a network's file system keeps the locks of a lost node for a minute or two
ON_CLUSTER = ReadWhen("with on=…", lambda it: it.on is not None)
ON_KUBERNETES = ReadWhen("with on=kubernetes", lambda it: it.on == "kubernetes")


class FleetOptions(Section):
    on: Literal["ray", "slurm", "kubernetes"] | None = option(
        None,
        "cluster whose nodes `data make` divides shards among: ray: they are made; slurm, kubernetes: the array job's script or the "
        "JobSet's manifest is printed; null: this process",
    )
    shards: int = option(1, "number of shards, at least one per node", ge=1, read_when=ON_CLUSTER)
    gpus: int = option(1, "GPUs of a node per shard", ge=0, read_when=ON_CLUSTER)
    cpus: int = option(1, "CPU cores of a node per shard", ge=1, read_when=ON_CLUSTER)
    image: str = option(
        "specdistill:cuda", "container image with specdistill", read_when=ON_KUBERNETES
    )

    def check(self, config: DataConfig) -> None:
        """Raises UserError for data that these shards cannot divide."""
        from specdistill.produce.blocks import (
            blocks,
        )  # here, and not above, because it imports transformers

        if config.shard is not None:
            raise UserError(
                "data.shard",
                got=config.shard,
                expected=f"null with on={self.on}, which makes all shards",
            )
        num_tokens = config.regenerate.num_tokens
        if self.shards > (most := len(blocks(num_tokens)) if num_tokens else 0):
            raise UserError(
                "shards",
                got=self.shards,
                expected=f"at most {most}, the blocks of {num_tokens:,} tokens",
            )


def make_on_ray(
    make: Callable[[list[str]], int], keys: Sequence[str], options: FleetOptions
) -> None:
    """Have `make(["make", *keys, "data.shard=…"])` run for each shard by the cluster of RAY_ADDRESS, or that of this machine.

    Raises what a shard raised, ResourceError without a cluster and for a shard whose worker died too often, UserError where no node fits.
    """
    if find_spec("ray") is None:
        missing = "on=ray: Ray is not installed. Run: pip install 'specdistill[ray]'"
        raise UserError(
            "on", got="ray without its package", expected="an installed package", text=missing
        )
    import ray  # slow to import

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        next_step = "start it (`ray start --head`), or unset RAY_ADDRESS for one on this machine"
        raise ResourceError(f"no Ray cluster answers ({error})", next_step=next_step) from error
    try:
        free = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(
            it.get("CPU", 0) >= options.cpus and it.get("GPU", 0) >= options.gpus for it in free
        ):
            got, most = (
                f"{options.gpus} with cpus={options.cpus}",
                max(int(it.get("GPU", 0)) for it in free),
            )
            raise UserError(
                "gpus", got=got, expected=f"what a node of the Ray cluster has: at most {most} GPUs"
            )
        placed = {
            "num_cpus": options.cpus,
            "num_gpus": options.gpus,
            "scheduling_strategy": "SPREAD",
        }
        shard = ray.remote(_make_shard).options(
            max_retries=REPEATS, retry_exceptions=[ResourceError], **placed
        )
        arguments = [
            ["make", *keys, f"data.shard={index}/{options.shards}"]
            for index in range(options.shards)
        ]
        waiting = [shard.remote(make, os.getcwd(), words) for words in arguments]
        with progress("Making shards", len(waiting), "shards") as advance:
            while waiting:
                (done,), waiting = ray.wait(waiting)
                try:
                    ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError as error:
                    next_step = "the same command makes what is missing"
                    raise ResourceError(
                        f"a shard's worker died {REPEATS + 1} times ({error})", next_step=next_step
                    ) from error
                advance()
    finally:
        ray.shutdown()


def _make_shard(make: Callable[[list[str]], int], folder: str, arguments: list[str]) -> None:
    """In a worker. Raises ResourceError, for Ray to repeat it, while a lost node's process or its lock is still there."""
    os.chdir(folder)
    try:
        make(arguments)
    except UserError as error:
        if error.key != "data.shard":
            raise
        time.sleep(LOCK_SECONDS)
        raise ResourceError(str(error), next_step="end the other process") from error


def array_job(
    keys: Sequence[str], options: FleetOptions, target: TargetConfig, config: DataConfig
) -> str:
    """The script for `sbatch`, which repeats shards 3 and 17 with `--array=3,17` on its command line, or the manifest for `kubectl apply`.

    A server of a node's own starts before the shard, and ends after it.
    """
    quoted, shard = (
        (shlex.join, [])
        if options.on == "slurm"
        else (json.dumps, [f"data.shard=auto/{options.shards}"])
    )
    command, port = _server(target, config, options) or ([], 0)
    templates = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return templates.from_string(
        Path(__file__).with_name(TEMPLATES[options.on]).read_text(encoding="utf-8")
    ).render(
        options=options,
        repeats=REPEATS,
        folder=shlex.quote(os.getcwd()),
        server=command and quoted(command),
        port=port,
        make=quoted(["specdistill", "data", "make", *keys, *shard]),
        merge=quoted(["specdistill", "data", "merge", *keys]),
    )


def _server(
    target: TargetConfig, config: DataConfig, options: FleetOptions
) -> tuple[list[str], int] | None:
    """The command and port of the server that each node starts; None where the recipe names none of its own, or an adapted target."""
    address = urlsplit(config.regenerate.server[0]) if len(config.regenerate.server) == 1 else None
    if address is None or address.hostname not in LOOPBACK or target.adapter:
        return None
    words = {
        "--revision": target.revision,
        "--tensor-parallel-size": options.gpus if options.gpus > 1 else None,
    }
    given = [
        word for name, value in words.items() if value is not None for word in (name, str(value))
    ]
    port = address.port or 80
    trust = ["--trust-remote-code"] * target.trust_remote_code
    return ["vllm", "serve", target.model, "--port", str(port), *given, *trust], port
