"""The shards of a row set on a cluster: nodes that are slow or lost, Ray's tasks, and what Slurm and Kubernetes are given."""

import os
import random
import signal
import subprocess
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import psutil
import pytest
import yaml
from datasets import Dataset

from specdistill.errors import ResourceError
from specdistill.files.folders import alone
from specdistill.produce import blocks as blocks_module
from specdistill.produce import fleet, merge
from specdistill.produce.blocks import AnswerFile
from specdistill.produce.job import Job
from specdistill.produce.make import make_blocks, shard_of
from specdistill.recipe.sections import RegenerateConfig
from tests.processes import fork
from tests.produce.openai_server import Behaviour, running
from tests.produce.row_sets import config_for, contents, numbered, replace, row_target
from tests.refusals import refused, refused_key
from tests.scripts import specdistill

PRINTED = [
    "data",
    "make",
    "recipe=small/eagle3",
    "target.model=org/model",
    "data.regenerate.num_tokens=50_000_000",
]
OWN_SERVER = "data.regenerate.server=[http://127.0.0.1:8123]"
AT_ONCE = 4  # nodes that run


def node(job: Job, shard: int, shards: int, kill: tuple[int, bool] | None) -> None:
    """A process that makes a shard. kill: the number of the answer at which it kills itself, and whether a part of that is on disk."""
    add, kept, lock = AnswerFile.add, count(), Lock()

    def dying(self: AnswerFile, answers: Any) -> None:
        with lock:
            number = next(kept)
            if kill is not None and number == kill[0]:
                if kill[1]:
                    add(self, answers)
                    self._file.truncate(self._file.tell() - 9)
                os.kill(os.getpid(), signal.SIGKILL)
            add(self, answers)

    AnswerFile.add = dying  # type: ignore[method-assign]
    make_blocks(job, shard, shards)


@pytest.mark.parametrize(
    "shards", [6, pytest.param(100, marks=pytest.mark.long)]
)  # long: a process for each, and each kill
def test_slow_and_killed_nodes_make_the_same_bytes(
    shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node has one of three servers: one is slow, one fails now and then. Of a third of the shards the first process is killed, and
    of some the second one, too: at a random answer of those that are still missing, so that no kill comes too late.
    """
    monkeypatch.setattr(blocks_module, "TOKENS", 60)
    chance = random.Random(0)
    with ExitStack() as stack:
        faults = [
            Behaviour(),
            Behaviour(seconds=0.02),
            Behaviour(fault=lambda number, body: 503 if number % 7 == 3 else None),
        ]
        servers = [stack.enter_context(running(behaviour)).address for behaviour in faults]
        regenerate = RegenerateConfig(
            num_tokens=60 * shards, prompt_tokens=4, batch_size=2, server=servers[:1]
        )
        config = config_for(tmp_path, numbered(5 * shards), max_length=64, regenerate=regenerate)
        whole, cut = (
            Job(replace(config, rows=str(tmp_path / name / "set")), row_target())
            for name in ("whole", "cut")
        )
        make_blocks(whole)
        missing = [
            len(Dataset.from_file(str(path))) for path in sorted(whole.blocks.glob("*.arrow"))
        ]  # answers of each shard
        assert len(missing) == shards
        kills = {
            shard: 1 + (number % 4 == 0)
            for number, shard in enumerate(chance.sample(range(shards), shards // 3))
        }
        expected, waiting, nodes, codes = sum(kills.values()), list(range(shards)), [], []
        while waiting or nodes:
            while waiting and len(nodes) < AT_ONCE:
                shard = waiting.pop(0)
                kill: tuple[int, bool] | None = None
                own = replace(
                    cut.config, regenerate=replace(regenerate, server=[chance.choice(servers)])
                )
                if kills.get(shard):
                    kill = chance.randrange(missing[shard]), chance.random() < 0.5
                    kills[shard], missing[shard] = kills[shard] - 1, missing[shard] - kill[0]
                nodes.append((shard, fork(node, Job(own, cut.target), shard, shards, kill)))
            shard, process = nodes.pop(0)
            process.join()
            codes.append(process.exitcode)
            waiting += [shard] * (process.exitcode != 0)
    assert codes.count(-signal.SIGKILL) == expected > shards // 3 and codes.count(0) == shards
    for job in (whole, cut):
        merge.merge(job)
    assert contents(cut.folder) == contents(whole.folder)


STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
case "$0" in
    *vllm) echo $$ > "$LOG.server"; exec sleep 30 ;;
    *curl) [ -s "$LOG.server" ] && [ "$(grep -c ^curl "$LOG")" -gt 1 ] ;;
    *specdistill) kill -0 "$(cat "$LOG.server")" ;;
esac
"""


def test_a_slurm_task_starts_its_server_first_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*PRINTED, OWN_SERVER, "target.revision=v1"]
    script = specdistill(*given, "on=slurm", "shards=100", "gpus=8", "cpus=16").stdout
    subprocess.run(["bash", "-n"], input=script, check=True, text=True)
    assert "--array=0-99 " in script and "--cpus-per-task=16 --gpus-per-node=8\n" in script
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "curl", "specdistill"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_ARRAY_TASK_ID": "17", "SLURM_ARRAY_JOB_ID": "4", "LOG": str(tmp_path / "log")}
    surroundings = {
        **os.environ,
        **slurm,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    script = script.replace("sleep 5", "sleep 0.05")
    subprocess.run(
        ["bash", "-s"], input=script, env=surroundings, check=True, text=True, timeout=60
    )
    said = (tmp_path / "log").read_text().splitlines()
    asked = "curl --silent --fail http://127.0.0.1:8123/health"
    made = " ".join(["specdistill", *given, "data.shard=17/100"])
    assert {*said} == {
        "vllm serve org/model --port 8123 --revision v1 --tensor-parallel-size 8",
        asked,
        made,
    }
    assert said.count(asked) >= 2 and said[-1] == made
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "log.server").read_text())).wait(10)


def test_a_job_set_makes_every_shard_and_then_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in ([OWN_SERVER], []):
        make, merges = yaml.safe_load(
            specdistill(*PRINTED, *own, "on=kubernetes", "shards=5", "gpus=2").stdout
        )["spec"]["replicatedJobs"]
        job, pod = make["template"]["spec"], make["template"]["spec"]["template"]["spec"]
        (container,), servers = pod["containers"], pod.get("initContainers", [])
        assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 5
        assert container["command"][:-1] == ["specdistill", *PRINTED, *own]
        holder = servers[0] if own else container  # of the GPUs
        assert len(servers) == len(own) and holder["resources"]["limits"] == {"nvidia.com/gpu": 2}
        if own:
            assert holder["command"] == [
                "vllm",
                "serve",
                "org/model",
                "--port",
                "8123",
                "--tensor-parallel-size",
                "2",
            ]
            assert (
                holder["restartPolicy"] == "Always"
                and holder["startupProbe"]["httpGet"]["port"] == 8123
            )
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
        assert shard_of(container["command"][-1].removeprefix("data.shard=")) == (3, 5)
        assert merges["dependsOn"] == [{"name": "make", "status": "Complete"}]
        assert merges["template"]["spec"]["template"]["spec"]["containers"][0]["command"][:3] == [
            "specdistill",
            "data",
            "merge",
        ]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert all(
            mount["name"] in volumes
            for part in (container, *servers)
            for mount in part["volumeMounts"]
        )


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["on=slurm", "data.regenerate=null"], "shards"),
        (["shards=4"], "shards"),
        (["on=slurm", "shards=4", "image=x"], "image"),
        (["on=slurm", "shards=383"], "shards"),  # 382 blocks
        (["on=slurm", "shards=2", "data.shard=0/2"], "data.shard"),
        (["on=sge", "shards=2"], "on"),
    ],
)
def test_what_no_cluster_could_make_is_refused(keys: list[str], key: str) -> None:
    done = specdistill(*PRINTED, *keys)
    assert done.returncode == 2 and refused_key(done.stderr) == key and not done.stdout, done.stderr


def test_a_shard_that_a_lost_node_still_writes_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ResourceError, for which Ray repeats a task; not what a repetition cannot mend."""
    monkeypatch.setattr(fleet, "LOCK_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    config = config_for(
        tmp_path,
        numbered(20),
        regenerate=RegenerateConfig(num_tokens=60, server=["http://127.0.0.1:1"]),
    )
    job = Job(config, row_target())

    def make(arguments: list[str]) -> int:
        with alone(job.blocks / "block-00000.lock", arguments[0], job.blocks):
            return 0

    fleet._make_shard(make, str(tmp_path), ["data.shard"])
    with alone(job.blocks / "block-00000.lock", "data.shard", job.blocks):
        with pytest.raises(ResourceError, match="is writing"):
            fleet._make_shard(make, str(tmp_path), ["data.shard"])
        with refused("data.rows"):
            fleet._make_shard(make, str(tmp_path), ["data.rows"])
