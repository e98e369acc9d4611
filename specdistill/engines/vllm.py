"""vLLM, read in the sources of 0.32 and 0.33: llama_eagle3.py, llama_eagle.py, models/utils.py, configs/speculators, gpu_model_runner.py.

- Auxiliary layers count as here, in a top-level list that the older runner also looks for in `eagle_config`, where SGLang counts one
  less; so no file has both lists, and neither where the layers are the default ones.
- A true `bias` is taken for one of the attention, too; `fc` of EAGLE-1 has none.
- A layer has a window by `layer_types` alone.
- Names of tensors that are not known are an error; a tensor that is missing is not.
- Drafts are counted in each answer, where it is asked for, before the completion is cut at its limit or at a stop token.

speculators, read in the sources of 0.9, writes folders for vLLM that hold embedding and head and name the target.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.engines.client import (
    PER_POSITION,
    Client,
    CompletionAnswer,
    CompletionRequest,
    Counters,
    ServerIdentity,
)
from specdistill.engines.engine import Engine, FrontLookup, HeadExport, Program, Served
from specdistill.engines.server import Count, JsonAnswer, Positive, ServedModels, Server, at

DRAFTING = ("metrics", "speculative_decoding")  # where an answer counts
LOOKUP_VARIABLE = "SPECDISTILL_LOOKUP_FIRST"  # of the environment, which vLLM's processes inherit
LOOKUP_MARK = "specdistill looks up first:"  # in the log of one that does
# Sampling from the model's own distribution, in the words that vLLM and SGLang share; -1 keeps all tokens. What a request leaves out a
# server takes from the model's generation_config.json, greedy requests included, which a penalty changes too.
PLAIN_SAMPLING: Mapping[str, float] = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0
}  # fmt: skip


def served_config(served: Served) -> dict[str, Any]:
    """The speculative config."""
    folder = {} if served.in_target else {"model": str(served.output)}
    sampled = (
        {"draft_sample_method": "probabilistic"}
        if served.samples and not served.lookup_first
        else {}
    )
    of_method = {"method": served.serving.name, **served.serving.options(served.config)}
    pinned = {"revision": served.draft_revision} if folder and served.draft_revision else {}
    table = (
        {"num_speculative_tokens_per_batch_size": ranges(served.lengths)} if served.lengths else {}
    )
    return {
        **of_method,
        **folder,
        **pinned,
        "num_speculative_tokens": served.most_tokens,
        **table,
        **sampled,
    }


def ranges(lengths: Sequence[tuple[int, int]]) -> list[list[int]]:
    """[first, last, K] of the sequences at once; the first range begins at 1, and above the last one its K stays."""
    firsts = [1, *(size for size, _ in lengths[1:])]
    lasts = [*(size - 1 for size in firsts[1:]), max(lengths[-1][0], 1)]
    return [[first, last, k] for first, last, (_, k) in zip(firsts, lasts, lengths, strict=True)]


def arguments(served: Served) -> list[str]:
    pinned = ["--revision", served.pinned] if served.pinned else []
    shared = ["--tensor-parallel-size", str(served.num_gpus)] if served.num_gpus > 1 else []
    drafting = (
        ["--speculative-config", json.dumps(served_config(served))]
        if served.method is not None
        else []
    )
    looked_up = ["--no-async-scheduling"] if drafting and served.lookup_first else []
    template = ["--chat-template", served.chat_template] if served.chat_template else []
    return [served.model, *pinned, *shared, *drafting, *looked_up, *template]


def variables(served: Served) -> dict[str, str]:
    if served.method is None or served.lookup_first is None:
        return {}
    lookup = {
        **served.lookup_first.described,
        "draft_tokens": min(served.lookup_first.levels, served.num_tokens),
    }
    return {LOOKUP_VARIABLE: json.dumps(lookup), "VLLM_USE_V2_MODEL_RUNNER": "0"}


PROGRAM = Program(
    "vllm serve",
    arguments,
    variables=variables,
    measured=("--no-enable-prefix-caching",),
    measured_draft=("--per-request-spec-decode-metrics", "summary"),
)
FLAGS = {
    "several GPUs": '`--tensor-parallel-size 2`; a draft on fewer of them: `"draft_tensor_parallel_size": 1` in the speculative config',
    "share of the GPU's memory": "`--gpu-memory-utilization 0.9`",
    "requests at once, tokens of a sequence": "`--max-num-seqs 256`, `--max-model-len {length}`",
    "chunked prefill": "`--max-num-batched-tokens 8192` tokens a step; `--no-enable-chunked-prefill`",
    "eager, without CUDA graphs": "`--enforce-eager`",
    "weights' dtype": "`--dtype {dtype}`",
}


def snippet(served: Served) -> str:
    named = variables(served)
    given = {
        "revision": served.pinned,
        "tensor_parallel_size": served.num_gpus if served.num_gpus > 1 else None,
        "async_scheduling": False if named else None,
    }
    options = "".join(f"{name}={value!r}, " for name, value in given.items() if value is not None)
    surroundings = f"import os\n\nos.environ |= {named!r}\n\n" if named else ""
    return f"""{surroundings}from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM({served.model!r}, {options}speculative_config={served_config(served)!r}, disable_log_stats=False)
    (output,) = llm.generate("def main():", SamplingParams(temperature=0, max_tokens=64))
    print(output.outputs[0].text)
    counted = {{metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}}
    drafts, accepted = (counted[f"vllm:spec_decode_num_{{name}}"].value for name in ("drafts", "accepted_tokens"))
    print("acceptance length", 1 + accepted / drafts)"""


class Version(JsonAnswer):
    version: str


class Completed(CompletionAnswer):
    text: str = at("choices", 0, "text")
    num_tokens: Positive = at("usage", "completion_tokens")
    token_ids: list[Count] | None = at("choices", 0, "token_ids", default=None)
    num_drafts: Count | None = at(*DRAFTING, "num_spec_steps", default=None)
    num_draft_tokens: Count | None = at(*DRAFTING, "num_draft_tokens", default=None)
    num_accepted_tokens: Count | None = at(*DRAFTING, "num_accepted_draft_tokens", default=None)
    histogram: list[Count] | None = at(*DRAFTING, "acceptance_histogram", default=None)


def describe_server(server: Server, counters: Counters) -> ServerIdentity:
    served = server.json("/v1/models", ServedModels).data[0]
    return ServerIdentity(
        version=server.json("/version", Version).version,
        models=tuple(filter(None, (served.id, served.root))),
        max_length=served.max_model_len,
        num_speculative_tokens=sum(PER_POSITION in name for name in counters) or None,
    )


def request_body(request: CompletionRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_new_tokens,
        **sampling_parameters(request),
        "seed": request.seed,
        "return_token_ids": True,
    }


def sampling_parameters(request: CompletionRequest) -> dict[str, Any]:
    """In the words of vLLM, which SGLang shares."""
    chosen = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
    }
    return {**PLAIN_SAMPLING, **chosen, "skip_special_tokens": False}


VLLM = Engine(
    name="vllm",
    title="vLLM",
    versions="0.32 and 0.33",
    serve_command=PROGRAM.shell,
    counters=(
        "At `/metrics`, acceptance length is 1 + `vllm:spec_decode_num_accepted_tokens_total` / "
        "`vllm:spec_decode_num_drafts_total`."
    ),
    flags=FLAGS,
    snippet=snippet,
    program=PROGRAM,
    loader_version="0.33",
    # OpenAI's completions, with a prompt of token ids.
    client=Client(
        prefix="vllm",
        latency="e2e_request_latency_seconds",
        hint="start vLLM without --disable-log-stats",
        describe=describe_server,
        path="/v1/completions",
        body=request_body,
        parse=lambda response, k: response.json(Completed),
        counts_hint=f"start vLLM with {' '.join(PROGRAM.measured_draft)}",
    ),
    counts_past_end=True,
    lookup=FrontLookup(
        note=f"vLLM does so by a plugin: install specdistill where vLLM is (`pip install 'specdistill[vllm]'`), or it ignores "
        f"`{LOOKUP_VARIABLE}`. When it looks up, its log says `{LOOKUP_MARK}`. Draft tokens are greedy.",
        limit=lambda lookup, k: None if lookup.method == "ngram" else ("method", "ngram"),
        mark=LOOKUP_MARK,
    ),
)


def speculators_config(
    export: HeadExport, kind: str, architecture: str, layers: Mapping[str, Any]
) -> dict[str, Any]:
    """What the config.json of any draft of speculators says, from which vLLM takes the target and how many tokens to draft.

    kind: `speculators_model_type`. layers: the config of the draft's layers.
    """
    target, num = export.target, export.num_speculative_tokens
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target.name,
                "architectures": target.config.get("architectures") or [],
            },
        },
        "transformer_layer_config": dict(layers),
        "draft_vocab_size": export.head.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": export.llama["torch_dtype"],
    }


SPECULATORS = Engine(
    name="speculators",
    title="speculators, served by vLLM",
    versions=f"speculators 0.9; vLLM {VLLM.versions}",
    serve_command=lambda served: (
        f"vllm serve {shlex.quote(str(served.output))}   # names its target, and {served.num_tokens} draft tokens"
    ),
    counters=VLLM.counters,
)
