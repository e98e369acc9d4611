"""Run by the Python of an environment with SGLang on a machine with a GPU: python run_sglang.py JOBS RESULTS

Files as in run_vllm.py; options are arguments of sglang.Engine. Counts are those of SGLang's response: how many rounds accepted 0, 1, …
tokens of their draft.
"""

import json
import sys
from pathlib import Path
from typing import Any

import sglang

ALWAYS = {"disable_cuda_graph": True, "disable_radix_cache": True, "skip_tokenizer_init": True, "mem_fraction_static": 0.6}


def main(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    results = []
    for job in jobs:
        engine = sglang.Engine(**ALWAYS, **job["options"])
        results.append([complete(engine, prompt, job) for prompt in job["prompts"]])
        engine.shutdown()
    return {"version": sglang.__version__, "jobs": results}


def complete(engine: Any, prompt: list[int], job: dict[str, Any]) -> dict[str, Any]:
    parameters = {"temperature": 0.0, "max_new_tokens": job["max_new_tokens"], "ignore_eos": True}
    output = engine.generate(input_ids=prompt, sampling_params=parameters)
    num_drafted = job["num_speculative_tokens"]
    rounds = output["meta_info"]["spec_correct_drafts_histogram"] if num_drafted else []
    return {
        "token_ids": output["output_ids"],
        "num_drafts": sum(rounds),
        "num_draft_tokens": sum(rounds) * num_drafted,
        "accepted_per_position": [sum(rounds[position + 1 :]) for position in range(num_drafted)],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
