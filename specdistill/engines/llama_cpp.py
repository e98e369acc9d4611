"""llama.cpp, as in llama-cpp-python 0.3.36.

Its converter makes a GGUF file of a draft's folder. Of EAGLE-3 it reads vLLM's, and does not know the norms of EAGLE-3.1.

`--spec-type` is a list. Lookups draft first, whatever its order; where they find nothing, the draft does. `ngram-simple` compares exactly
size-n tokens, and drafts only where at least as many follow.

An answer holds the sums over its rounds. Streamed, with `timings_per_token`, each token comes with the sums so far, which grow at the first
token of a round: so the rounds are counted one by one. Tokens that end inside a character are sent with those that complete it. The
page of counters prints six digits.

With several requests in flight an EAGLE-3 head whose draft tokens are sampled in the backend, as by default, is almost never accepted
(of pico 1.04 tokens per round at four requests in place of 1.21); sampled outside of it, as often as alone.
"""

import shlex
from dataclasses import replace
from itertools import pairwise
from typing import Any

from specdistill.engines.client import (
    PER_POSITION,
    Client,
    CompletionAnswer,
    CompletionRequest,
    Counters,
    ServerIdentity,
)
from specdistill.engines.engine import Engine, FrontLookup, Program, Served
from specdistill.engines.server import Count, JsonAnswer, Positive, Response, Server, at
from specdistill.errors import ResourceError, UserError

NGRAM_SIMPLE, EAGLE3, MODEL = "ngram-simple", "draft-eagle3", "draft-simple"
CONTEXT_STEP = 256  # it rounds the context of a slot up to a multiple of these tokens
FILES = ("model", "model_draft")  # keys of eval.llama_cpp that `Served` has
EVENT = b"data: "


def speculation(served: Served, draft: str) -> list[str]:
    """The options that say how it drafts, K tokens per round. draft: the file, or what stands for it in a shell."""
    types, options, k = [], [], served.num_tokens
    has_draft, lookup = served.serving.name != NGRAM_SIMPLE, served.lookup_first
    if not has_draft or lookup:
        compared = lookup.max if lookup else served.config["max"]
        types += [NGRAM_SIMPLE]
        options += [
            "--spec-ngram-simple-size-n",
            str(compared),
            "--spec-ngram-simple-size-m",
            str(k),
        ]
    if has_draft:
        types += [served.serving.name]
        options += ["--spec-draft-n-max", str(min(lookup.levels, k) if lookup else k)]
        options += ["--no-spec-draft-backend-sampling"] if served.serving.name == EAGLE3 else []
    return [*(["-md", draft] if has_draft else []), "--spec-type", ",".join(types), *options]


def arguments(served: Served) -> list[str]:
    """target and output: GGUF files."""
    return [
        "-m",
        served.target_name,
        *(speculation(served, str(served.output)) if served.method else []),
    ]


def settings(target: Any, config: Any, longest: int) -> list[str]:
    """A slot for each request in flight, with room for a sequence, and what eval.llama_cpp says. A GGUF file has a dtype of its own."""
    given = {
        name: value
        for name, value in vars(config.llama_cpp).items()
        if value is not None and name not in FILES
    }
    parallel = given.get("parallel", max([config.concurrency, *config.sweep.concurrency]))
    room = (
        -(-(longest + 2) // CONTEXT_STEP) * CONTEXT_STEP
    )  # it leaves two tokens of a context free
    if given.get("ctx_size", parallel * room) < parallel * room:
        expected = (
            f"at least {parallel * room}: {parallel} slots of {room}, or completions end early"
        )
        raise UserError("eval.llama_cpp.ctx_size", got=given["ctx_size"], expected=expected)
    options = {"parallel": parallel, "ctx_size": parallel * room, **given}
    return [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def serve_command(served: Served) -> str:
    target, output = shlex.quote(served.target_name), shlex.quote(str(served.output))
    if served.revision:  # the converter takes a folder
        target = f'"$(hf download {target} --revision {served.revision})"'
    commands = [
        f"python convert_hf_to_gguf.py {target} --outtype f16 --outfile target.gguf",
        convert(served, output, target),
    ]
    template = (
        ["--jinja", "--chat-template-file", served.chat_template] if served.chat_template else []
    )
    return "\n".join(
        [
            *commands,
            f"llama-server -m target.gguf {shlex.join([*speculation(served, 'draft.gguf'), *template])}",
        ]
    )


def convert(served: Served, draft: str, target: str) -> str:
    """The command that makes a GGUF file of an exported draft, for a shell: a head takes its vocabulary from the target."""
    of_target = "" if served.serving.name == MODEL else f" --target-model-dir {target}"
    return f"python convert_hf_to_gguf.py {draft}{of_target} --outtype f16 --outfile draft.gguf"


class Props(JsonAnswer):
    version: str = at("build_info")
    path: str = at("model_path")
    alias: str = at("model_alias")
    max_length: Positive = at("default_generation_settings", "n_ctx")


class Slots(JsonAnswer):
    drafts: bool = at("slots", 0, "speculative")


class Event(JsonAnswer):
    """A part of an answer, with the sums so far."""

    content: str
    tokens: list[Count]
    stop: bool
    num_tokens: Count = at("timings", "predicted_n")
    num_draft_tokens: Count = at("timings", "draft_n", default=0)
    num_accepted_tokens: Count = at("timings", "draft_n_accepted", default=0)


BEFORE = Event.model_construct(num_tokens=0, num_draft_tokens=0, num_accepted_tokens=0)


def describe_server(server: Server, counters: Counters) -> ServerIdentity:
    """It says how far it drafts once it has drafted."""
    # It may close a connection that was kept alive just when the next request is sent.
    server.session.headers["Connection"] = "close"
    props, response = (
        server.json("/props", Props),
        server.ask("/slots", hint="start llama-server without --no-slots"),
    )
    slots = response._replace(content=b'{"slots": %b}' % response.content).json(Slots)
    positions = sum(PER_POSITION in name for name in counters)
    return ServerIdentity(
        version=props.version,
        models=(props.alias, props.path),
        max_length=props.max_length,
        num_speculative_tokens=positions or None,
        hides_k=slots.drafts and not positions,
    )


def request_body(request: CompletionRequest) -> dict[str, Any]:
    """The samplers in vLLM's order; others that llama.cpp has are left out."""
    sampling = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "seed")}
    return {
        "prompt": list(request.prompt_ids),
        "n_predict": request.max_new_tokens,
        "samplers": ["temperature", "top_k", "top_p"],
        **sampling,
        "cache_prompt": False,
        **dict.fromkeys(("stream", "timings_per_token", "return_tokens"), True),
    }


def parse(response: Response, k: int) -> CompletionAnswer:
    """A streamed answer. Rounds that no token was sent between are taken to draft K tokens each, and to accept theirs as late as they can;
    of the last one what the completion does not hold is not counted. token_ids: None where some were not sent. histogram: None for counts
    that cannot be.
    """
    parts = [
        line.removeprefix(EVENT) for line in response.content.splitlines() if line.startswith(EVENT)
    ]
    events = [response._replace(content=part).json(Event) for part in parts]
    if not events or not events[-1].stop:
        raise ResourceError(
            f"{response.url} broke off its answer", next_step="look at the server's log"
        )
    accepted, begun, is_possible, last = [], 0, True, events[-1]
    for before, now in pairwise([BEFORE, *events]):
        if drafted := now.num_draft_tokens - before.num_draft_tokens:
            kept, rounds = (
                now.num_accepted_tokens - before.num_accepted_tokens,
                -(-drafted // max(k, 1)),
            )
            accepted += [min(k, max(0, kept - k * later)) for later in reversed(range(rounds))]
            begun = (
                before.num_tokens + max(0, kept - k) + rounds - 1
            )  # the last one began within what is sent now
            is_possible &= 0 <= kept <= drafted and begun < now.num_tokens
    accepted[-1:] = [min(count, max(0, last.num_tokens - begun)) for count in accepted[-1:]]
    ids = [token for event in events for token in event.tokens]
    return CompletionAnswer(
        text="".join(event.content for event in events),
        num_tokens=last.num_tokens,
        token_ids=ids if len(ids) == last.num_tokens else None,
        num_drafts=len(accepted),
        num_draft_tokens=last.num_draft_tokens,
        num_accepted_tokens=sum(accepted),
        histogram=[accepted.count(count) for count in range(k + 1)] if is_possible else None,
    )


def limit(lookup: Any, k: int | None) -> tuple[str, str] | None:
    """It compares as many tokens as it is told, not fewer, and drafts only where as many follow."""
    if lookup.method != "ngram":
        return "method", "ngram"
    if lookup.min != lookup.max:
        return (
            "min",
            f"{lookup.max}, as eval.lookup_first.max: llama.cpp compares exactly that many",
        )
    return (
        ("max", f"at most K, {k}, or it drafts nothing")
        if k is not None and lookup.max > k
        else None
    )


LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    versions="as in llama-cpp-python 0.3.36",
    counters="`llama-server` logs drafted and accepted tokens; with `--metrics`, `/metrics` has them by position.",
    flags={
        "several GPUs": "`--split-mode layer --tensor-split 1,1`",
        "layers on the GPU": "`--gpu-layers 99`; of the draft: `--spec-draft-ngl 99`",
        "device of the draft": "`--spec-draft-device CUDA1`",
        "threads": "`--threads 8`; of the draft: `--spec-draft-threads 8`",
        "requests at once, tokens of all together": "`--parallel 4`, `--ctx-size {total}`",
        "type of keys and values": (
            "`--cache-type-k q8_0 --cache-type-v q8_0`; of the draft: `--spec-draft-type-k q8_0 --spec-draft-type-v q8_0`"
        ),
    },
    program=Program("llama-server", arguments, measured=("--metrics",), settings=settings),
    client=Client(
        prefix="llamacpp",
        hint="start llama-server with --metrics",
        describe=describe_server,
        path="/completion",
        body=request_body,
        parse=parse,
        counts_hint="use the K that the server drafts with",
        name_option="--alias",
        generated="tokens_predicted_total",
        rounding=1e-5,
    ),
    lookup=FrontLookup(
        note=f"llama.cpp looks up by `{NGRAM_SIMPLE}`, a rule of its own: it drafts only where as many tokens follow as agree.",
        limit=limit,
    ),
    layouts="gguf",
)
GGUF = replace(
    LLAMA_CPP, name="gguf", serve_command=serve_command, program=None, client=None, layouts=""
)
