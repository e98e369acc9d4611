#!/bin/bash
# Make training data on 100 nodes that share this folder: each task starts vLLM, makes its shard with it, and ends it.
# Then merge the shards, with the same keys but without data.shard:
#
#     job=$(sbatch --parsable slurm.sh)
#     sbatch --dependency=afterok:$job --wrap "specdistill data merge recipe=mine.yaml 'data.regenerate.server=[http://127.0.0.1:8000]'"
#
# Slurm requeues the tasks of lost nodes; `scontrol requeue JOB_17` repeats one. A repeated task continues after the answers on disk.
# `--array=17` does not repeat shard 17: data.shard=auto counts from the first task of the array, and takes as many shards as it has tasks.
# Without data.regenerate.server the target generates in the task's own process: delete the lines from `vllm serve` to `done`.
#SBATCH --job-name=specdistill-data --array=0-99 --requeue
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=16 --gpus-per-node=8
set -euo pipefail

vllm serve org/model --port 8000 --tensor-parallel-size 8 > "vllm-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID.log" 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl --silent --fail http://127.0.0.1:8000/health; do
    kill -0 $server # fails, and so ends the task, when the server has ended
    sleep 5
done

specdistill data make recipe=mine.yaml 'data.regenerate.server=[http://127.0.0.1:8000]' data.shard=auto
