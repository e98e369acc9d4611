#!/bin/bash
# Make training data on a Ray cluster, then train on one of its nodes, with 8 GPUs: `bash ray.sh`, in a folder that all nodes share.
# Each node has specdistill with its extra `ray`. The first job makes 100 shards, one for each GPU at a time, and merges them.
# In a shard the target generates in the task's own process. Where each node runs a server at port 8000, write
# 'data.regenerate.server=[http://127.0.0.1:8000]' and gpus=0.
# If the cluster asks for a token, set RAY_AUTH_TOKEN_PATH. A failed job ends the script. Run it again: what is made already is kept.
set -euo pipefail
address=http://127.0.0.1:8265 # of the head node's dashboard
keys="recipe=mine.yaml data.cache_dir=cache 'data.regenerate.server=[]'"

ray job submit --address $address -- bash -c \
    "cd '$PWD' && specdistill data make $keys on=ray shards=100 gpus=1 && specdistill data merge $keys"
ray job submit --address $address --entrypoint-num-gpus 8 -- bash -c \
    "cd '$PWD' && specdistill train $keys launch=ddp num_processes=8"
