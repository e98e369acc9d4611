"""vLLM, and speculators, whose folders vLLM serves.

vLLM was read in the sources of 0.32 and 0.33: llama_eagle3.py, llama_eagle.py, models/utils.py,
configs/speculators, gpu_model_runner.py.

- Auxiliary layers count as in this project. They are in a top-level list. The older runner also
  looks for that list in `eagle_config`, where SGLang counts one less. So no file has both lists. A
  file for the default layers has neither.
- `bias: true` is taken for a bias of the attention, too. `fc` of EAGLE-1 has no bias.
- A layer has a sliding window only if `layer_types` says so.
- A tensor with an unknown name is an error; a missing tensor is not.
- Drafts are counted in each answer, if the request asks for it. They are counted before the
  completion is cut at its limit or at a stop token.

speculators, read in the sources of 0.9, writes folders for vLLM that hold embedding and head and
name the target.
"""

import json
import shlex
from collections.abc import Mapping, Sequence

from specdistill.serving.engines.client import (
    PER_POSITION,
    Client,
    CompletionAnswer,
    CompletionRequest,
    Counters,
    ServerIdentity,
)
from specdistill.serving.engines.engine import Engine, FrontLookup, HeadExport, Program, Served
from specdistill.serving.engines.server import (
    Count,
    JsonAnswer,
    Positive,
    ServedModels,
    Server,
    locate_field,
)

DRAFTING = ("metrics", "speculative_decoding")  # the keys under which an answer has its counts
# The environment variable that holds the lookup. All of vLLM's processes inherit it.
LOOKUP_VARIABLE = "SPECDISTILL_LOOKUP_FIRST"
LOOKUP_MARK = "specdistill looks up first:"  # a line that vLLM's log has if it uses the lookup
# Parameters that sample from the model's own distribution, by the names that vLLM and SGLang share;
# top_k -1 keeps all tokens. All of them are sent, because a server takes a missing one from the
# model's generation_config.json. Greedy requests need them, too: a penalty would change the output.
PLAIN_SAMPLING: Mapping[str, float] = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0
}  # fmt: skip


def build_served_config(served: Served) -> dict[str, object]:
    """Return the value of vLLM's option --speculative-config, which describes the draft.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    # Collect the keys that only some drafts need:
    # - the draft's folder (a draft in the target's checkpoint has none), and its revision on the
    #   Hub,
    # - sampled instead of greedy draft tokens (behind a lookup the draft must be greedy, because
    #   looked-up tokens have no probabilities),
    # - a K for each number of sequences at once, in addition to the largest K.
    draft_folder = {} if served.in_target else {"model": str(served.output)}
    sampling = (
        {"draft_sample_method": "probabilistic"}
        if served.samples and not served.lookup_first
        else {}
    )
    draft_revision = (
        {"revision": served.draft_revision} if draft_folder and served.draft_revision else {}
    )
    k_by_load = (
        {"num_speculative_tokens_per_batch_size": list_ranges(served.lengths)}
        if served.lengths
        else {}
    )
    return {
        "method": served.serving.name,
        **served.serving.options(served.config),
        **draft_folder,
        **draft_revision,
        "num_speculative_tokens": served.most_tokens,
        **k_by_load,
        **sampling,
    }


def list_ranges(lengths: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return ranges [first, last, K]: use K for `first` to `last` sequences at once.

    For example, [(1, 5), (8, 3)] gives [[1, 7, 5], [8, 8, 3]]. vLLM uses the last K also above the
    last range.

    Args:
        lengths: pairs (number of sequences at once, K), where K holds from that number on.
    """
    # The first range begins at 1, and each range ends just before the next one begins. The last
    # range ends at the number of sequences in its own pair, which is taken as 1 if it is less.
    firsts = [1, *(load for load, _ in lengths[1:])]
    last_load, _ = lengths[-1]
    lasts = [*(first - 1 for first in firsts[1:]), max(last_load, 1)]
    return [[first, last, k] for first, last, (_, k) in zip(firsts, lasts, lengths, strict=True)]


def serve_arguments(served: Served) -> list[str]:
    """Return the command-line arguments of `vllm serve`.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    # Collect the options that only some targets or drafts need.
    revision = ["--revision", served.pinned] if served.pinned else []
    gpus = ["--tensor-parallel-size", str(served.num_gpus)] if served.num_gpus > 1 else []
    drafting = (
        ["--speculative-config", json.dumps(build_served_config(served))]
        if served.method is not None
        else []
    )
    # A lookup in front of the draft is a plugin of this project. The plugin must know the last
    # token before it looks up the next ones, so vLLM cannot schedule asynchronously.
    scheduling = ["--no-async-scheduling"] if drafting and served.lookup_first else []
    template = ["--chat-template", served.chat_template] if served.chat_template else []
    return [served.model, *revision, *gpus, *drafting, *scheduling, *template]


def list_variables(served: Served) -> dict[str, str]:
    """Return the environment variables that vLLM needs to look up tokens before it drafts.

    This project's vLLM plugin reads the settings of the lookup from an environment variable, as
    JSON. Without a lookup no variable is needed.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    if served.method is None or served.lookup_first is None:
        return {}

    # `draft_tokens` is the number of tokens that the draft drafts where nothing is looked up, at
    # most K. The plugin works with vLLM's model runner V1 only, so V2 is switched off.
    lookup = {
        **served.lookup_first.described,
        "draft_tokens": min(served.lookup_first.levels, served.num_tokens),
    }
    return {LOOKUP_VARIABLE: json.dumps(lookup), "VLLM_USE_V2_MODEL_RUNNER": "0"}


PROGRAM = Program(
    "vllm serve",
    serve_arguments,
    variables=list_variables,
    measured=("--no-enable-prefix-caching",),
    measured_draft=("--per-request-spec-decode-metrics", "summary"),
)
FLAGS = {
    "several GPUs": (
        '`--tensor-parallel-size 2`; a draft on fewer of them: `"draft_tensor_parallel_size": 1` in'
        " the speculative config"
    ),
    "share of the GPU's memory": "`--gpu-memory-utilization 0.9`",
    "requests at once, tokens of a sequence": "`--max-num-seqs 256`, `--max-model-len {length}`",
    "chunked prefill": (
        "`--max-num-batched-tokens 8192` tokens a step; `--no-enable-chunked-prefill`"
    ),
    "eager, without CUDA graphs": "`--enforce-eager`",
    "weights' dtype": "`--dtype {dtype}`",
}


def format_snippet(served: Served) -> str:
    """Return Python code that loads target and draft in vLLM and prints the acceptance length.

    Args:
        served: the target, the draft and the settings to serve them with.
    """
    # Environment variables are needed only for a lookup in front of the draft. The lookup must know
    # the last token before it looks up the next ones, so vLLM cannot schedule asynchronously then.
    environment = list_variables(served)
    has_lookup = bool(environment)

    # Collect the arguments of `LLM`. Those that are None are left out.
    engine_arguments = {
        "revision": served.pinned,
        "tensor_parallel_size": served.num_gpus if served.num_gpus > 1 else None,
        "async_scheduling": False if has_lookup else None,
    }
    options = "".join(
        f"{name}={value!r}, " for name, value in engine_arguments.items() if value is not None
    )
    setup = f"import os\n\nos.environ |= {environment!r}\n\n" if environment else ""
    return f"""{setup}from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM({served.model!r}, {options}speculative_config={build_served_config(served)!r}, disable_log_stats=False)
    (output,) = llm.generate("def main():", SamplingParams(temperature=0, max_tokens=64))
    print(output.outputs[0].text)
    counted = {{metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}}
    drafts, accepted = (counted[f"vllm:spec_decode_num_{{name}}"].value for name in ("drafts", "accepted_tokens"))
    print("acceptance length", 1 + accepted / drafts)"""  # noqa: E501


class Version(JsonAnswer):
    """The answer of /version."""

    version: str


class Completed(CompletionAnswer):
    """A completion of vLLM."""

    # The counts are in the answer only if the server was started with the option for them.
    text: str = locate_field("choices", 0, "text")
    num_tokens: Positive = locate_field("usage", "completion_tokens")
    token_ids: list[Count] | None = locate_field("choices", 0, "token_ids", default=None)
    num_drafts: Count | None = locate_field(*DRAFTING, "num_spec_steps", default=None)
    num_draft_tokens: Count | None = locate_field(*DRAFTING, "num_draft_tokens", default=None)
    num_accepted_tokens: Count | None = locate_field(
        *DRAFTING, "num_accepted_draft_tokens", default=None
    )
    histogram: list[Count] | None = locate_field(*DRAFTING, "acceptance_histogram", default=None)


def describe_server(server: Server, counters: Counters) -> ServerIdentity:
    """Ask a vLLM server for its version, its model, its context length and K.

    Args:
        server: the server.
        counters: a reading of the server's /metrics. It has a counter of accepted tokens for each
            of the K positions, so K is the number of these counters.
    """
    served = server.json("/v1/models", ServedModels).data[0]
    return ServerIdentity(
        version=server.json("/version", Version).version,
        models=tuple(filter(None, (served.id, served.root))),
        max_length=served.max_model_len,
        num_speculative_tokens=sum(PER_POSITION in name for name in counters) or None,
    )


def request_body(request: CompletionRequest) -> dict[str, object]:
    """Return the JSON of a completion request to vLLM, for /v1/completions.

    Args:
        request: the prompt, and how to sample.
    """
    return {
        "model": request.model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_new_tokens,
        **build_sampling_parameters(request),
        "seed": request.seed,
        "return_token_ids": True,
    }


def build_sampling_parameters(request: CompletionRequest) -> dict[str, float]:
    """Return the sampling parameters of a request, by the names that vLLM and SGLang share.

    Args:
        request: the prompt, and how to sample. Its `top_k` is 0 to keep all tokens; the engines
            write -1 for this.
    """
    # PLAIN_SAMPLING switches off everything that a model's generation_config.json could turn on,
    # such as a repetition penalty.
    return {
        **PLAIN_SAMPLING,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "skip_special_tokens": False,
    }


VLLM = Engine(
    name="vllm",
    title="vLLM",
    versions="0.32 and 0.33",
    serve_command=PROGRAM.format_command,
    counters=(
        "At `/metrics`, acceptance length is 1 + `vllm:spec_decode_num_accepted_tokens_total` / "
        "`vllm:spec_decode_num_drafts_total`."
    ),
    flags=FLAGS,
    snippet=format_snippet,
    program=PROGRAM,
    loader_version="0.33",
    # The client uses OpenAI's completions, with a prompt of token ids.
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
        note=(
            "vLLM looks up tokens with a plugin: install specdistill where vLLM is (`pip install"
            f" 'specdistill[vllm]'`), or vLLM ignores `{LOOKUP_VARIABLE}`. If the lookup is in use,"
            f" vLLM's log says `{LOOKUP_MARK}`. Draft tokens are greedy."
        ),
        limit=lambda lookup, k: None if lookup.method == "ngram" else ("method", "ngram"),
        mark=LOOKUP_MARK,
    ),
)


def build_speculators_config(
    export: HeadExport, kind: str, architecture: str, layers: Mapping[str, object]
) -> dict[str, object]:
    """Return the config.json of a draft in the layout of speculators.

    speculators is a project that trains drafts for vLLM. vLLM reads the target and the number of
    draft tokens from this file, so that `vllm serve FOLDER` needs no further options.

    Args:
        export: the head (draft), its target and K.
        kind: the value of `speculators_model_type`, e.g. `eagle3`.
        architecture: the name of the draft's model class.
        layers: the config of the draft's layers.
    """
    # Draft greedily, and accept without tolerance, so that the output is the target's own.
    # `speculators_version` is the version of the project whose layout is written here.
    target = export.target
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": export.num_speculative_tokens,
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
        f"vllm serve {shlex.quote(str(served.output))}   # names its target, and"
        f" {served.num_tokens} draft tokens"
    ),
    counters=VLLM.counters,
)
