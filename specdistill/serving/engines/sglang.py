"""SGLang.

These facts were read in the sources of 0.5.23: llama_eagle3.py, llama_eagle.py, llama.py,
spec_aux_hidden_state.py, eagle_worker_v2.py.

- Auxiliary layers count one less than in this project. They are in `eagle_config`.
- `fc` of EAGLE-1 always has a bias. `bias: true` in config.json is taken for a bias of the
  attention, too, so no file has it.
- Unknown and missing tensors are no error.
- `speculative_adaptive`, read in adaptive_spec_params.py, chooses K by the number of sequences at
  once. The slot for this number lists values of K. Among these it chooses by the average number of
  accepted tokens. `speculative_num_steps` must be one of the values.
- Drafts are counted in each answer's `meta_info`, under names that changed between versions.
- The page of counters counts verifications, tokens and requests that have ended, and no accepted
  tokens. Each verification of a request adds the tokens that it accepts and one more, and the
  prompt adds another one.
"""

import json
import shlex
from typing import Any

from pydantic import AliasChoices, AliasPath, Field

from specdistill.serving.engines.client import (
    Client,
    CompletionAnswer,
    CompletionRequest,
    Counters,
    ServerIdentity,
)
from specdistill.serving.engines.engine import Engine, Program, Served
from specdistill.serving.engines.server import (
    Count,
    JsonAnswer,
    Positive,
    ServedModels,
    Server,
    locate_field,
)
from specdistill.serving.engines.vllm import build_sampling_parameters

ADAPTIVE = ("EAGLE", "EAGLE3")  # algorithms with which SGLang can change K
# Algorithms that draft whole blocks. The draft's config.json says how long a block is.
BLOCKS = ("DFLASH", "DSPARK")
# The file from which the server reads which K to use at which load (sequences at once).
LENGTHS_FILE = "draft_lengths.json"


def build_sglang_options(served: Served) -> dict[str, object]:
    """Return the options of an SGLang server, named as the arguments of `sglang.Engine`.

    On the command line the same names have dashes, e.g. --model-path.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    # If K changes with the number of sequences at once (the load), the server starts with the
    # largest K. A draft in the target's checkpoint has no folder of its own.
    has_draft = served.method is not None
    changes_k = served.serving.name in ADAPTIVE and bool(served.lengths)
    k = served.most_tokens if changes_k else served.num_tokens
    has_folder = has_draft and not served.in_target

    # The options of the target.
    target_options = {
        "model_path": served.model,
        "revision": served.pinned,
        "tp_size": served.num_gpus if served.num_gpus > 1 else None,
        "chat_template": served.chat_template,
    }

    # The options of the draft. A chain of K tokens is a tree of K steps with one token each (top-k
    # 1). SGLang's number of draft tokens includes the last token of the sequence, hence K + 1.
    # Block drafters take the length of a block from their config.json instead.
    chain = {
        "speculative_num_steps": k,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": k + 1,
    }
    draft_options = {
        "speculative_algorithm": served.serving.name,
        **({} if served.serving.name in BLOCKS else chain),
        "speculative_draft_model_path": str(served.output) if has_folder else None,
        "speculative_draft_model_revision": served.draft_revision if has_folder else None,
        "speculative_adaptive": changes_k or None,
        "speculative_adaptive_config": LENGTHS_FILE if changes_k else None,
        **served.serving.options(served.config),
    }

    # Leave out the options that are not set.
    return {
        name: value
        for name, value in {**target_options, **(draft_options if has_draft else {})}.items()
        if value is not None
    }


def serve_arguments(served: Served) -> list[str]:
    """Return the options of `build_sglang_options` as words of a command line.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    # An option whose value is True is a switch, a word without a value.
    named_arguments = {
        f"--{name.replace('_', '-')}": value for name, value in build_sglang_options(served).items()
    }
    words = []
    for name, value in named_arguments.items():
        words += [name] if value is True else [name, str(value)]
    return words


def serve_command(served: Served) -> str:
    """Return the shell lines that start an SGLang server.

    If K changes with the number of sequences at once (the load), the first line writes LENGTHS_FILE
    into the current folder. From this file SGLang reads which K to use at which load.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    command = PROGRAM.format_command(served)
    k_by_load = format_slots(served)  # JSON; empty if K does not change
    return f"echo {shlex.quote(k_by_load)} > {LENGTHS_FILE}\n{command}" if k_by_load else command


def format_slots(served: Served) -> str:
    """Return the JSON that tells SGLang which K to use at which load; empty if K does not change.

    The load is the number of sequences at once. `served.lengths` has pairs (load, K), where each K
    holds from its load on. In SGLang, the entry for a load is called a slot.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    slots = {str(load): {"candidate_steps": [k]} for load, k in served.lengths}
    changes_k = "speculative_adaptive" in build_sglang_options(served)
    return json.dumps(slots) if changes_k else ""


def format_snippet(served: Served) -> str:
    """Return Python code that loads target and draft in SGLang and generates from a prompt.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    # If K changes with the number of sequences at once (the load), the code first writes
    # LENGTHS_FILE, from which SGLang reads which K to use at which load.
    options = ", ".join(f"{name}={value!r}" for name, value in build_sglang_options(served).items())
    k_by_load = format_slots(served)  # JSON; empty if K does not change
    setup = (
        f"from pathlib import Path\n\nPath({LENGTHS_FILE!r}).write_text({k_by_load!r})\n\n"
        if k_by_load
        else ""
    )
    return f"""{setup}import sglang

if __name__ == "__main__":
    llm = sglang.Engine({options})
    output = llm.generate("def main():", {{"temperature": 0, "max_new_tokens": 64}})
    print(output["text"], output["meta_info"])"""


PROGRAM = Program(
    "python -m sglang.launch_server",
    serve_arguments,
    measured=("--enable-metrics", "--disable-radix-cache"),
)
FLAGS = {
    "several GPUs": "`--tp-size 2`",
    "share of the GPU's memory": "`--mem-fraction-static 0.8`",
    "requests at once, tokens of a sequence": (
        "`--max-running-requests 256`, `--context-length {length}`"
    ),
    "chunked prefill": "`--chunked-prefill-size 8192` tokens a step; -1: off",
    "eager, without CUDA graphs": "`--disable-cuda-graph`",
    "weights' dtype": "`--dtype {dtype}`",
}


class ServerInfo(JsonAnswer):
    """The answer of /server_info, with the server's own settings."""

    version: str
    model_path: str | None = None
    speculative_algorithm: str | None = None
    speculative_num_steps: Count | None = None


def describe_counter(*names: str) -> Any:
    """Return a pydantic field that is read from `meta_info` in an answer of SGLang.

    Args:
        names: the names of the field in different versions of SGLang, the preferred one first.
    """
    return Field(
        None, validation_alias=AliasChoices(*(AliasPath("meta_info", name) for name in names))
    )


class Generated(CompletionAnswer):
    """A completion of SGLang."""

    # The counts are in `meta_info`. If an answer has no number of drafts, nothing was drafted.
    text: str
    num_tokens: Positive = locate_field("meta_info", "completion_tokens")
    token_ids: list[Count] | None = locate_field("output_ids", default=None)
    num_drafts: Count | None = locate_field("meta_info", "spec_verify_ct", default=0)
    num_draft_tokens: Count | None = describe_counter(
        "spec_num_proposed_drafts", "spec_draft_token_num"
    )
    num_accepted_tokens: Count | None = describe_counter(
        "spec_num_correct_drafts", "spec_accept_token_num"
    )
    histogram: list[Count] | None = describe_counter(
        "spec_correct_drafts_histogram", "spec_accept_histogram"
    )


def describe_server(server: Server, counters: Counters) -> ServerIdentity:
    """Ask an SGLang server for its version, its model, its context length and K.

    Args:
        server: the server.
        counters: a reading of the server's counters. It is not used here, but other engines need it
            to find K.
    """
    info = server.json("/server_info", ServerInfo)
    served = server.json("/v1/models", ServedModels).data[0]
    return ServerIdentity(
        version=info.version,
        models=tuple(filter(None, (served.id, info.model_path))),
        max_length=served.max_model_len,
        num_speculative_tokens=(
            info.speculative_num_steps if info.speculative_algorithm is not None else None
        ),
    )


def request_body(request: CompletionRequest) -> dict[str, object]:
    """Return the JSON of a completion request to SGLang.

    `request.model` and `request.seed` are not sent: a server has one model, and SGLang sets its
    seed when it starts.

    Args:
        request: the prompt, and how to sample.
    """
    return {
        "input_ids": list(request.prompt_ids),
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            **build_sampling_parameters(request),
        },
    }


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    versions="0.5.23",
    serve_command=serve_command,
    counters="Its log says `accept len`, `/server_info` says `avg_spec_accept_length`.",
    flags=FLAGS,
    snippet=format_snippet,
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
        # Each verification reads K draft tokens and one more (`verified` is K + 1), and generates
        # the accepted tokens and one more. The prefill of each request generates another token.
        drafted_by=lambda drafts, tokens, requests, verified: (
            drafts,
            drafts * (verified - 1),
            tokens - requests - drafts,
        ),
    ),
)
