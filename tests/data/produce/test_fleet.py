"""The shards of a row set on a cluster: Ray's tasks, and the examples for Slurm and Kubernetes."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from specdistill.common.errors import ResourceError
from specdistill.common.folders import exclusive_lock
from specdistill.common.project import ROOT
from specdistill.data.produce import fleet
from specdistill.data.produce.job import Job
from specdistill.recipe.sections import ServerRegeneration
from specdistill.workflows.make_data import parse_shard
from tests.data.produce.row_sets import config_for, make_numbered_rows, row_target
from tests.refusals import refused, refused_key
from tests.scripts import specdistill

PRINTED = [
    "data",
    "make",
    "recipe=small/eagle3",
    "target.model=org/model",
    "data.regenerate.num_tokens=50_000_000",
]
CLUSTER = ROOT / "examples" / "cluster"
KEYS = "recipe=mine.yaml data.regenerate.server=[http://127.0.0.1:8000]"


STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
case "$0" in
    *vllm) echo $$ > "$LOG.server"; exec sleep 30 ;;
    *curl) [ -s "$LOG.server" ] && [ "$(grep -c ^curl "$LOG")" -gt 1 ] ;;
    *specdistill) kill -0 "$(cat "$LOG.server")" ;;
esac
"""


def test_a_slurm_task_starts_its_server_first_and_ends_it(tmp_path: Path) -> None:
    script = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n"], input=script, check=True, text=True)
    assert "#SBATCH --job-name=specdistill-data --array=0-99 --requeue\n" in script
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
        ["bash", "-s"],
        input=script,
        env=surroundings,
        cwd=tmp_path,
        check=True,
        text=True,
        timeout=60,
    )
    commands = (tmp_path / "log").read_text().splitlines()
    health_check = "curl --silent --fail http://127.0.0.1:8000/health"
    make_command = f"specdistill data make {KEYS} data.shard=auto"
    assert {*commands} == {
        "vllm serve org/model --port 8000 --tensor-parallel-size 8",
        health_check,
        make_command,
    }
    assert commands.count(health_check) >= 2 and commands[-1] == make_command
    assert f"specdistill data merge {KEYS}" in script.replace("'", "")
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "log.server").read_text())).wait(10)


def test_a_job_set_makes_every_shard_and_then_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    make, merges = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8"))[
        "spec"
    ]["replicatedJobs"]
    job = make["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    (server,) = pod["initContainers"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 100
    assert container["command"][:-1] == ["specdistill", "data", "make", *KEYS.split()]
    assert server["command"] == [
        "vllm",
        "serve",
        "org/model",
        "--port",
        "8000",
        "--tensor-parallel-size",
        "8",
    ]
    assert server["restartPolicy"] == "Always" and server["startupProbe"]["httpGet"]["port"] == 8000
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 8}
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert parse_shard(container["command"][-1].removeprefix("data.shard=")) == (3, 100)
    assert merges["dependsOn"] == [{"name": "make", "status": "Complete"}]
    merging = merges["template"]["spec"]["template"]["spec"]
    assert merging["containers"][0]["command"] == ["specdistill", "data", "merge", *KEYS.split()]
    for pod_spec in (pod, merging):
        volumes = {volume["name"] for volume in pod_spec["volumes"]}
        parts = [*pod_spec["containers"], *pod_spec.get("initContainers", [])]
        assert all(mount["name"] in volumes for part in parts for mount in part["volumeMounts"])


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["on=ray", "data.regenerate=null"], "shards"),
        (["shards=4"], "shards"),
        (["on=ray", "shards=4", "image=x"], "image"),
        (["on=ray", "shards=383"], "shards"),  # 382 blocks
        (["on=ray", "shards=2", "data.shard=0/2"], "data.shard"),
        (["on=slurm", "shards=2"], "on"),
        (["on=kubernetes", "shards=2"], "on"),
    ],
)
def test_a_job_that_no_cluster_can_make_is_refused(keys: list[str], key: str) -> None:
    process = specdistill(*PRINTED, *keys)
    assert process.returncode == 2 and refused_key(process.stderr) == key and not process.stdout, (
        process.stderr
    )


def test_a_shard_that_a_lost_node_still_writes_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray repeats a task that raises ResourceError, and no task that a repetition cannot mend."""
    monkeypatch.setattr(fleet, "LOCK_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    config = config_for(
        tmp_path,
        make_numbered_rows(20),
        regenerate=ServerRegeneration(num_tokens=60, server=["http://127.0.0.1:1"]),
    )
    job = Job(config, row_target())

    def make(arguments: list[str]) -> int:
        with exclusive_lock(job.blocks / "block-00000.lock", arguments[0], job.blocks):
            return 0

    fleet._make_shard(make, str(tmp_path), ["data.shard"])
    with exclusive_lock(job.blocks / "block-00000.lock", "data.shard", job.blocks):
        with pytest.raises(ResourceError, match="is writing"):
            fleet._make_shard(make, str(tmp_path), ["data.shard"])
        with refused("data.rows"):
            fleet._make_shard(make, str(tmp_path), ["data.rows"])
