#!/bin/bash
# Make training data, train, measure and export an EAGLE-3 head for Llama-3.1-8B-Instruct on eight GPUs of 80 GB: `bash run.sh`.
# After a failure run the script again: a killed step continues where it stopped, and a draft that is trained or exported is kept.
set -euo pipefail
target=meta-llama/Llama-3.1-8B-Instruct

# The server generates the answers for training. It holds the GPUs, so it ends before the training.
vllm serve $target --revision 0e9e39f249a16976918f6564b8830bc894c89659 --data-parallel-size 8 > vllm.log 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl --silent --fail http://127.0.0.1:8000/health; do
    kill -0 $server # fails, and so ends the script, when the server has ended
    sleep 5
done
specdistill data make recipe=llama-3.1-8b/eagle3
trap - EXIT
kill $server
wait $server || true

[ -d runs/llama-3.1-8b-eagle3/draft ] || specdistill train recipe=llama-3.1-8b/eagle3 launch=ddp num_processes=8

# The exit code of this script is the gate's: 0 passed, 1 failed, 4 more prompts are needed.
verdict=0
specdistill eval recipe=runs/llama-3.1-8b-eagle3/run/recipe.yaml || verdict=$?
[ -d runs/llama-3.1-8b-eagle3/vllm ] || specdistill export draft=runs/llama-3.1-8b-eagle3/draft engine=vllm target=$target output_dir=runs/llama-3.1-8b-eagle3/vllm
exit $verdict
