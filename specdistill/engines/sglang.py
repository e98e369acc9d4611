"""SGLang, read in the sources of 0.5.23: llama_eagle3.py, llama_eagle.py, llama.py, spec_aux_hidden_state.py, eagle_worker_v2.py.

- Auxiliary layers count one less than here, in `eagle_config`.
- `fc` of EAGLE-1 always has a bias. A true `bias` in config.json is taken for one of the attention, too, so no file has it.
- Tensors that are unknown or missing are no error.
- Drafts are counted in each answer's `meta_info`, under names that changed between versions.
"""

from typing import Any

from specdistill.engines.engine import Engine, Program, Served
from specdistill.engines.server import (
    Client,
    CompletionRequest,
    Counters,
    Server,
    ServerCounts,
    ServerIdentity,
    reached,
    samples,
)
from specdistill.engines.vllm import sampling_parameters
from specdistill.errors import ResourceError

# Counts of an answer, the newest name first. The histogram's entry j counts the rounds in which j draft tokens were accepted.
ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
GAUGES = {"sglang:spec_accept_length": "mean_acceptance_length", "sglang:spec_accept_rate": "acceptance_rate"}


def arguments(served: Served) -> list[str]:
    options: dict[str, Any] = {"model_path": served.target_name}
    if served.method is not None:
        options |= {
            "speculative_algorithm": served.serving.name,
            "speculative_num_steps": served.num_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": served.num_tokens + 1,
            "model_path" if served.in_target else "speculative_draft_model_path": str(served.output),
            **served.serving.options(served.config),
        }
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


PROGRAM = Program("python -m sglang.launch_server", arguments, measured=("--enable-metrics", "--disable-radix-cache"))
FLAGS = {
    "several GPUs": "`--tp-size 2`",
    "share of the GPU's memory": "`--mem-fraction-static 0.8`",
    "requests at once, tokens of a sequence": "`--max-running-requests 256`, `--context-length 8192`",
    "chunked prefill": "`--chunked-prefill-size 8192` tokens a step; -1: off",
    "eager, without CUDA graphs": "`--disable-cuda-graph`",
    "weights' dtype": "`--dtype bfloat16`",
}


def describe_server(server: Server, counters: Counters) -> ServerIdentity:
    info, served = server.json("/get_server_info"), server.json("/v1/models")["data"][0]
    drafts = info.get("speculative_algorithm") is not None
    return ServerIdentity(
        version=str(info["version"]),
        models=tuple(filter(None, (served["id"], info.get("model_path")))),
        max_length=served.get("max_model_len"),
        num_speculative_tokens=int(info["speculative_num_steps"]) if drafts else None,
    )


def request_body(request: CompletionRequest) -> dict[str, Any]:
    """Model and seed play no part: a server has one model, and SGLang seeds its sampling when it starts."""
    parameters = {"max_new_tokens": request.max_new_tokens, **sampling_parameters(request)}
    return {"input_ids": list(request.prompt_ids), "sampling_params": parameters}


def answer_counts(answer: Any, k: int) -> ServerCounts:
    """Drafts of one answer; zeros where nothing was drafted. Raises ResourceError when a server does not count what it accepts."""
    meta, token_ids = answer["meta_info"], tuple(answer.get("output_ids") or ())
    rounds = meta.get("spec_verify_ct") or 0
    if not rounds:
        return ServerCounts(token_ids, 0, 0, 0, ())
    found = []
    for names in (DRAFTED, ACCEPTED, HISTOGRAM):
        name = next((name for name in names if name in meta), None)
        if name is None:
            lacks = f"SGLang counts the rounds of its answer and has no {' or '.join(names)} with them"
            raise ResourceError(lacks, next_step="use a version of SGLang that does")
        found.append(meta[name])
    drafted, accepted, histogram = found
    return ServerCounts(token_ids, rounds, drafted, accepted, reached(histogram))


def page_gauges(page: str) -> dict[str, float]:
    """Averages over the server's last interval, not over a suite; empty before it drafted any."""
    return {GAUGES[name]: value for name, _, value in samples(page) if name in GAUGES and value > 0}


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    versions="0.5.23",
    serve_command=PROGRAM.shell,
    counters="Its log says `accept len`, `/server_info` says `avg_spec_accept_length`.",
    flags=FLAGS,
    program=PROGRAM,
    loader_version="0.5.23",
    client=Client(
        prefix="sglang",
        hint="start SGLang with --enable-metrics",
        describe=describe_server,
        path="/generate",
        body=request_body,
        text_and_length=lambda answer: (answer["text"], answer["meta_info"]["completion_tokens"]),
        counts=answer_counts,
        gauges=lambda server: page_gauges(server.text("/metrics")),
    ),
)
