"""Completions of vLLM, run by the Python of an environment with vLLM alone.

    python run_vllm.py JOBS RESULTS

JOBS holds a list of {options, prompts, max_new_tokens, num_speculative_tokens}: arguments of
vllm.LLM, and token ids to complete greedily, past stop tokens. RESULTS gets for each job a list of
{token_ids, num_drafts, num_draft_tokens, accepted_per_position}, one for each prompt: prompts go
through the engine one at a time, so that what its counters gain is the prompt's.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# vLLM runs in one process; on a CPU it has 1 GiB for keys and values.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.distributed import cleanup_dist_env_and_memory

# Nothing is timed, so nothing is compiled; block sizes are multiples of 32 on CPUs.
ALWAYS = {
    "enforce_eager": True,
    "block_size": 32,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}


def main(jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    results = []
    for job in jobs:
        engine = vllm.LLM(**ALWAYS, **job["options"])
        results.append([complete(engine, prompt, job) for prompt in job["prompts"]])
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    return results


def complete(engine: Any, prompt: list[int], job: dict[str, Any]) -> dict[str, Any]:
    """Return one completion and what the counters gained with it."""
    parameters = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True, detokenize=False
    )
    before = read_counters(engine, job["num_speculative_tokens"])
    (output,) = engine.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
    drafts, drafted, *accepted = (
        now - then
        for now, then in zip(
            read_counters(engine, job["num_speculative_tokens"]), before, strict=True
        )
    )
    return {
        "token_ids": list(output.outputs[0].token_ids),
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "accepted_per_position": accepted,
    }


def read_counters(engine: Any, num_speculative_tokens: int) -> list[int]:
    """Return the drafts, their tokens, and the accepted tokens of each position.

    Without a draft vLLM has no such counters, and drafts and tokens are zero.
    """
    metrics = {
        metric.name.removeprefix("vllm:spec_decode_"): metric for metric in engine.get_metrics()
    }
    if not num_speculative_tokens:
        return [0, 0]
    return [
        metrics["num_drafts"].value,
        metrics["num_draft_tokens"].value,
        *metrics["num_accepted_tokens_per_pos"].values[:num_speculative_tokens],
    ]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
