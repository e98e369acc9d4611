#!/bin/bash
# Train, measure and export a draft for a small instruct model on a CPU: `bash run.sh TARGET`, a folder or a Hub id.
set -euo pipefail
target=$1

specdistill plan target="$target"
specdistill train recipe=small/eagle3 target.model="$target" data.source=conversations.jsonl eval.suite=prompts.jsonl

# The exit code of this script is the gate's: 0 passed, 1 failed, 4 more prompts are needed.
verdict=0
specdistill eval recipe=runs/small-eagle3/run/recipe.yaml || verdict=$?
specdistill export draft=runs/small-eagle3/draft engine=vllm target="$target" output_dir=runs/small-eagle3/vllm
exit $verdict
