"""SGLang, read in the sources of 0.5.23: llama_eagle3.py, llama_eagle.py, llama.py, spec_aux_hidden_state.py, eagle_worker_v2.py.

- Auxiliary layers count one less than here, in `eagle_config`.
- `fc` of EAGLE-1 always has a bias. A true `bias` in config.json is taken for one of the attention, too, so no file has it.
- Tensors that are unknown or missing are no error.
- `speculative_adaptive`, read in adaptive_spec_params.py: K by the number of sequences at once, and within that by the average of what was
  accepted, over the K that its slot has. `speculative_num_steps` must be one of them.
- Drafts are counted in each answer's `meta_info`, under names that changed between versions.
- Its page counts verifications, tokens and requests of what has ended, and no accepted tokens. Each verification of a request adds what it
  accepts and one token, and the prompt another.
"""

import json
import shlex
from typing import Any

from pydantic import AliasChoices, AliasPath, Field

from specdistill.engines.client import (
    Client,
    CompletionAnswer,
    CompletionRequest,
    Counters,
    ServerIdentity,
)
from specdistill.engines.engine import Engine, Program, Served
from specdistill.engines.server import Count, JsonAnswer, Positive, ServedModels, Server, at
from specdistill.engines.vllm import sampling_parameters

ADAPTIVE = ("EAGLE", "EAGLE3")  # algorithms that it changes the draft length of
BLOCKS = (
    "DFLASH",
    "DSPARK",
)  # algorithms whose draft says in its config how long its blocks are, all of which are drafted
LENGTHS_FILE = "draft_lengths.json"


def server_options(served: Served) -> dict[str, Any]:
    """By their names in `Engine`; those of the command line have dashes."""
    drafts, changes = (
        served.method is not None,
        served.serving.name in ADAPTIVE and bool(served.lengths),
    )
    k, folder = (
        served.most_tokens if changes else served.num_tokens,
        drafts and not served.in_target,
    )
    options = {
        "model_path": served.model,
        "revision": served.pinned,
        "tp_size": served.num_gpus if served.num_gpus > 1 else None,
        "chat_template": served.chat_template,
    }
    chain = {
        "speculative_num_steps": k,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": k + 1,
    }
    drafting = {
        "speculative_algorithm": served.serving.name,
        **({} if served.serving.name in BLOCKS else chain),
        "speculative_draft_model_path": str(served.output) if folder else None,
        "speculative_draft_model_revision": served.draft_revision if folder else None,
        "speculative_adaptive": changes or None,
        "speculative_adaptive_config": LENGTHS_FILE if changes else None,
        **served.serving.options(served.config),
    }
    return {
        name: value
        for name, value in {**options, **(drafting if drafts else {})}.items()
        if value is not None
    }


def arguments(served: Served) -> list[str]:
    named = {f"--{name.replace('_', '-')}": value for name, value in server_options(served).items()}
    return [
        word
        for name, value in named.items()
        for word in ([name] if value is True else [name, str(value)])
    ]


def serve_command(served: Served) -> str:
    """Above the command, where K changes, its file."""
    command, slots = PROGRAM.shell(served), slots_of(served)
    return f"echo {shlex.quote(slots)} > {LENGTHS_FILE}\n{command}" if slots else command


def slots_of(served: Served) -> str:
    """The file of K, JSON: a slot for each number of sequences at once, from that on, with one K. Empty where K does not change."""
    slots = {str(size): {"candidate_steps": [k]} for size, k in served.lengths}
    return json.dumps(slots) if "speculative_adaptive" in server_options(served) else ""


def snippet(served: Served) -> str:
    options, slots = (
        ", ".join(f"{name}={value!r}" for name, value in server_options(served).items()),
        slots_of(served),
    )
    written = (
        f"from pathlib import Path\n\nPath({LENGTHS_FILE!r}).write_text({slots!r})\n\n"
        if slots
        else ""
    )
    return f"""{written}import sglang

if __name__ == "__main__":
    llm = sglang.Engine({options})
    output = llm.generate("def main():", {{"temperature": 0, "max_new_tokens": 64}})
    print(output["text"], output["meta_info"])"""


PROGRAM = Program(
    "python -m sglang.launch_server",
    arguments,
    measured=("--enable-metrics", "--disable-radix-cache"),
)
FLAGS = {
    "several GPUs": "`--tp-size 2`",
    "share of the GPU's memory": "`--mem-fraction-static 0.8`",
    "requests at once, tokens of a sequence": "`--max-running-requests 256`, `--context-length {length}`",
    "chunked prefill": "`--chunked-prefill-size 8192` tokens a step; -1: off",
    "eager, without CUDA graphs": "`--disable-cuda-graph`",
    "weights' dtype": "`--dtype {dtype}`",
}


class ServerInfo(JsonAnswer):
    version: str
    model_path: str | None = None
    speculative_algorithm: str | None = None
    speculative_num_steps: Count | None = None


def counted(*names: str) -> Any:
    """Under one of the names that versions of SGLang have for it."""
    return Field(
        None, validation_alias=AliasChoices(*(AliasPath("meta_info", name) for name in names))
    )


class Generated(CompletionAnswer):
    text: str
    num_tokens: Positive = at("meta_info", "completion_tokens")
    token_ids: list[Count] | None = at("output_ids", default=None)
    num_drafts: Count | None = at("meta_info", "spec_verify_ct", default=0)
    num_draft_tokens: Count | None = counted("spec_num_proposed_drafts", "spec_draft_token_num")
    num_accepted_tokens: Count | None = counted("spec_num_correct_drafts", "spec_accept_token_num")
    histogram: list[Count] | None = counted(
        "spec_correct_drafts_histogram", "spec_accept_histogram"
    )


def describe_server(server: Server, counters: Counters) -> ServerIdentity:
    info, served = (
        server.json("/server_info", ServerInfo),
        server.json("/v1/models", ServedModels).data[0],
    )
    return ServerIdentity(
        version=info.version,
        models=tuple(filter(None, (served.id, info.model_path))),
        max_length=served.max_model_len,
        num_speculative_tokens=info.speculative_num_steps
        if info.speculative_algorithm is not None
        else None,
    )


def request_body(request: CompletionRequest) -> dict[str, Any]:
    """Model and seed play no part: a server has one model, and SGLang seeds its sampling when it starts."""
    parameters = {"max_new_tokens": request.max_new_tokens, **sampling_parameters(request)}
    return {"input_ids": list(request.prompt_ids), "sampling_params": parameters}


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    versions="0.5.23",
    serve_command=serve_command,
    counters="Its log says `accept len`, `/server_info` says `avg_spec_accept_length`.",
    flags=FLAGS,
    snippet=snippet,
    program=PROGRAM,
    loader_version="0.5.23",
    client=Client(
        prefix="sglang",
        hint="start SGLang with --enable-metrics",
        describe=describe_server,
        path="/generate",
        body=request_body,
        parse=lambda response, k: response.json(Generated),
        counts_hint="use a version of SGLang that counts what it accepts",
        drafting=(
            "spec_verify_calls_total",
            "generation_tokens_total",
            "num_requests_total",
            "spec_num_draft_tokens",
        ),
        drafted_by=lambda drafts, tokens, requests, verified: (
            drafts,
            drafts * (verified - 1),
            tokens - requests - drafts,
        ),
    ),
)
