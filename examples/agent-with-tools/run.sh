#!/bin/bash
# Make training data, train, measure and export a draft for an agent that runs on Qwen3-8B, on eight GPUs of 80 GB: `bash run.sh`.
# After a failure run the script again: a killed step continues where it stopped, and a draft that is trained or exported is kept.
set -euo pipefail
target=Qwen/Qwen3-8B

# The server generates the answers for training. It holds the GPUs, so it ends before the training.
vllm serve $target --revision b968826d9c46dd6066d109eabc6255188de91218 --data-parallel-size 8 > vllm.log 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl --silent --fail http://127.0.0.1:8000/health; do
    kill -0 $server # fails, and so ends the script, when the server has ended
    sleep 5
done
specdistill data make recipe=recipe.yaml
trap - EXIT
kill $server
wait $server || true

specdistill data show recipe=recipe.yaml
[ -d runs/agent-with-tools/draft ] || specdistill train recipe=recipe.yaml launch=ddp num_processes=8

# The exit code of this script is the gate's: 0 passed, 1 failed, 4 more prompts are needed.
verdict=0
specdistill eval recipe=runs/agent-with-tools/run/recipe.yaml || verdict=$?
[ -d runs/agent-with-tools/vllm ] || specdistill export draft=runs/agent-with-tools/draft engine=vllm target=$target output_dir=runs/agent-with-tools/vllm
exit $verdict
