"""llama.cpp, as in llama-cpp-python 0.3.36.

- Its converter makes a GGUF file of a draft's folder. For EAGLE-3 it reads vLLM's layout, and does
  not know the norms of EAGLE-3.1.
- `--spec-type` is a list. Lookups draft first, whatever its order. Where they find nothing, the
  draft drafts.
- `ngram-simple` compares exactly n tokens (`size-n`). It drafts up to K of the tokens that follow
  the earlier occurrence (`size-m`), and discards a draft of fewer than n tokens.
- An answer holds the sums over its rounds. If it is streamed with `timings_per_token`, each token
  comes with the sums so far. These grow at the first token of a round, so the rounds can be counted
  one by one. Tokens that end inside a character are sent with those that complete the character.
- The page of counters prints six digits.
- By default, draft tokens are sampled in the backend. With several requests in flight, those of an
  EAGLE-3 head are then almost never accepted: for pico 1.04 tokens per round at four requests
  instead of 1.21. If they are sampled outside of the backend, they are accepted as often as with
  one request.
"""

import math
import shlex
from dataclasses import replace
from itertools import pairwise
from typing import Any

from specdistill.common.errors import ResourceError, UserError
from specdistill.serving.engines.client import (
    PER_POSITION,
    Client,
    CompletionAnswer,
    CompletionRequest,
    Counters,
    ServerIdentity,
)
from specdistill.serving.engines.engine import Engine, FrontLookup, Program, Served
from specdistill.serving.engines.server import (
    Count,
    JsonAnswer,
    Positive,
    Response,
    Server,
    locate_field,
)

# Values of --spec-type: a lookup, an EAGLE-3 head, and a draft model.
NGRAM_SIMPLE = "ngram-simple"
EAGLE3 = "draft-eagle3"
MODEL = "draft-simple"
CONTEXT_STEP = 256  # llama.cpp rounds the context of a slot up to a multiple of so many tokens.
FILES = ("model", "model_draft")  # keys of eval.llama_cpp whose values are in a `Served`
EVENT = b"data: "  # the beginning of each line of a streamed answer (server-sent events)


def build_speculation_options(served: Served, draft: str) -> list[str]:
    """Return the command-line options of llama-server that say how it drafts.

    Args:
        served: the facts that the command is built from: the method, K, the lookup, …
        draft: the GGUF file of the draft. It is not used for a lookup, which has no draft.
    """
    types = []
    options = []
    k = served.num_tokens
    has_draft = served.serving.name != NGRAM_SIMPLE
    lookup = served.lookup_first

    # A lookup, alone or in front of a draft. llama.cpp searches the text for an earlier occurrence
    # of its last n tokens, and drafts the m tokens that followed.
    if not has_draft or lookup:
        n = lookup.max if lookup else served.config["max"]
        types.append(NGRAM_SIMPLE)
        options += ["--spec-ngram-simple-size-n", str(n), "--spec-ngram-simple-size-m", str(k)]

    # A draft. Behind a lookup it drafts `lookup.levels` tokens, which may be fewer than K.
    if has_draft:
        types.append(served.serving.name)
        options += ["--spec-draft-n-max", str(min(lookup.levels, k) if lookup else k)]
        # By default, llama.cpp samples the draft's tokens in the backend. With several requests in
        # flight it then accepts almost no token of an EAGLE-3 head (llama-cpp-python 0.3.36).
        if served.serving.name == EAGLE3:
            options.append("--no-spec-draft-backend-sampling")
    draft_option = ["-md", draft] if has_draft else []
    return [*draft_option, "--spec-type", ",".join(types), *options]


def serve_arguments(served: Served) -> list[str]:
    """Return the command-line arguments of llama-server for a target, with or without a draft.

    Args:
        served: the facts that the command is built from. `target_name` is the GGUF file of the
            target, and `output` that of the draft.
    """
    return [
        "-m",
        served.target_name,
        *(build_speculation_options(served, str(served.output)) if served.method else []),
    ]


def build_server_settings(target: object, config: Any, longest: int) -> list[str]:
    """Return the command-line options of llama-server that follow from a recipe.

    Each request in flight gets a slot with room for the longest sequence. The keys of
    `eval.llama_cpp` are further options, and may replace the number of slots and their size.

    Args:
        target: the recipe's section `target`. It is not used: a GGUF file has a dtype of its own.
        config: the recipe's section `eval`.
        longest: the number of tokens of the longest sequence.

    Raises:
        UserError: if `eval.llama_cpp.ctx_size` is too small for the slots.
    """
    # Find the options that the recipe sets, and the number of slots, which is the largest number of
    # requests at once. The keys in `FILES` name GGUF files, which `serve_arguments` passes on.
    recipe_options = {
        name: value
        for name, value in vars(config.llama_cpp).items()
        if value is not None and name not in FILES
    }
    max_concurrency = max([config.concurrency, *config.sweep.concurrency])
    num_slots = recipe_options.get("parallel", max_concurrency)

    # llama.cpp divides the context among the slots, and leaves two tokens of each slot free. It
    # rounds the size of a slot up to a multiple of CONTEXT_STEP.
    slot_size = math.ceil((longest + 2) / CONTEXT_STEP) * CONTEXT_STEP
    context_size = num_slots * slot_size
    if recipe_options.get("ctx_size", context_size) < context_size:
        raise UserError(
            "eval.llama_cpp.ctx_size",
            got=recipe_options["ctx_size"],
            expected=(
                f"at least {context_size} tokens, {num_slots} slots of {slot_size} tokens each, or"
                " completions end early"
            ),
        )

    # Write the options as words of a command line.
    options = {"parallel": num_slots, "ctx_size": context_size, **recipe_options}
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def serve_command(served: Served) -> str:
    """Return the shell lines that convert target and draft to GGUF files and start the server.

    A target that is a GGUF file already is not converted, and a lookup has no draft to convert.

    Args:
        served: the facts that the commands are built from.
    """
    # The converter takes a folder, not a name on the Hub. So a target with a revision, which is on
    # the Hub, is downloaded first. `hf download` prints its folder.
    target = shlex.quote(served.target_name)
    output = shlex.quote(str(served.output))
    if served.revision and served.gguf is None:
        target = f'"$(hf download {target} --revision {served.revision})"'

    # Convert the draft. Before it, convert the target.
    commands = [convert(served, output, target)] if served.serving.layout else []
    if served.gguf is None:
        commands.insert(
            0, f"python convert_hf_to_gguf.py {target} --outtype f16 --outfile target.gguf"
        )

    # Start the server, with the chat template that the draft was trained with.
    file = shlex.quote(served.gguf or "target.gguf")
    options = build_speculation_options(served, "draft.gguf")
    if served.chat_template:
        options += ["--jinja", "--chat-template-file", served.chat_template]
    commands.append(f"llama-server -m {file} {shlex.join(options)}")
    return "\n".join(commands)


def convert(served: Served, draft: str, target: str) -> str:
    """Return the shell command that converts an exported draft to a GGUF file.

    Args:
        served: the facts that the command is built from.
        draft: the draft's folder, quoted for a shell.
        target: the target's folder, quoted for a shell.
    """
    # A draft model has a tokenizer of its own. A head has none: the converter reads the target's.
    target_option = "" if served.serving.name == MODEL else f" --target-model-dir {target}"
    return f"python convert_hf_to_gguf.py {draft}{target_option} --outtype f16 --outfile draft.gguf"


class Props(JsonAnswer):
    """The answer of /props, with the properties of the server."""

    version: str = locate_field("build_info")
    path: str = locate_field("model_path")
    alias: str = locate_field("model_alias")
    max_length: Positive = locate_field("default_generation_settings", "n_ctx")


class Slots(JsonAnswer):
    """The answer of /slots, a list, which is put under the key `slots` to be parsed."""

    drafts: bool = locate_field("slots", 0, "speculative")


class Event(JsonAnswer):
    """A part of a streamed answer, with the counts from the beginning of the answer."""

    content: str
    tokens: list[Count]
    stop: bool
    num_tokens: Count = locate_field("timings", "predicted_n")
    num_draft_tokens: Count = locate_field("timings", "draft_n", default=0)
    num_accepted_tokens: Count = locate_field("timings", "draft_n_accepted", default=0)


# The counts before the first part of an answer.
FIRST_EVENT = Event.model_construct(num_tokens=0, num_draft_tokens=0, num_accepted_tokens=0)


def describe_server(server: Server, counters: Counters) -> ServerIdentity:
    """Ask a llama.cpp server for its version, its model, its context length and K.

    Args:
        server: the server.
        counters: a reading of the server's /metrics. Once the server has drafted, it has a counter
            of accepted tokens for each of the K positions, so K is the number of these counters.
    """
    # Use a new connection for each request, because llama.cpp may close an idle connection at the
    # moment when the next request is sent.
    server.session.headers["Connection"] = "close"

    # /slots says whether the server drafts, but not how many tokens. A server that drafts, but has
    # no counters of positions yet, hides its K. The answer of /slots is a list, which is wrapped
    # into an object so that it can be parsed.
    props = server.json("/props", Props)
    response = server.ask("/slots", hint="start llama-server without --no-slots")
    slots = response._replace(content=b'{"slots": %b}' % response.content).json(Slots)
    num_positions = sum(PER_POSITION in name for name in counters)
    return ServerIdentity(
        version=props.version,
        models=(props.alias, props.path),
        max_length=props.max_length,
        num_speculative_tokens=num_positions or None,
        hides_k=slots.drafts and not num_positions,
    )


def request_body(request: CompletionRequest) -> dict[str, object]:
    """Return the JSON of a completion request to llama-server.

    The request names only three samplers, in vLLM's order, so that llama.cpp samples from the same
    distribution as vLLM.

    Args:
        request: the prompt, and how to sample.
    """
    # The answer is streamed, because only the parts of a streamed answer show the rounds. The
    # prompt cache is off, so that each repetition of a prompt takes the same time.
    return {
        "prompt": list(request.prompt_ids),
        "n_predict": request.max_new_tokens,
        "samplers": ["temperature", "top_k", "top_p"],
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "cache_prompt": False,
        **dict.fromkeys(("stream", "timings_per_token", "return_tokens"), True),
    }


def parse_events(response: Response, k: int) -> CompletionAnswer:
    """Parse a streamed answer of llama-server, and find out what each round accepted.

    Each part of the answer has the numbers of draft tokens and of accepted tokens so far. Usually
    one round ends between two parts, and the growth of both numbers belongs to this round. If the
    number of draft tokens grows by more than K, several rounds have ended. How they share the
    accepted tokens is unknown. They are assigned to the last of these rounds first, up to K for
    each round: with K = 4, if the numbers grow by 8 draft tokens and 5 accepted ones, the last
    round gets 4 and the round before gets 1. Accepted tokens after the end of the completion are
    not counted.

    Args:
        response: the answer, a stream of server-sent events.
        k: K, draft tokens per round.

    Returns:
        The completion. Its token_ids are None if the server did not send all of them, and its
        histogram (how many rounds accepted 0, 1, … K tokens) is None if the numbers contradict each
        other.

    Raises:
        ResourceError: for an answer that breaks off.
    """
    # Parse the parts (events) of the answer. The last one must say that the completion has ended.
    parts = [
        line.removeprefix(EVENT) for line in response.content.splitlines() if line.startswith(EVENT)
    ]
    events = [response._replace(content=part).json(Event) for part in parts]
    if not events or not events[-1].stop:
        raise ResourceError(
            f"{response.url} ended its answer early", next_step="look at the server's log"
        )

    # Find the rounds: there is a new round where the number of draft tokens grows.
    accepted_per_round: list[int] = []
    num_tokens_before_last_round = 0
    is_possible = True
    last = events[-1]
    for before, now in pairwise([FIRST_EVENT, *events]):
        num_drafted = now.num_draft_tokens - before.num_draft_tokens
        if not num_drafted:
            continue

        # Assume the fewest rounds that draft so many tokens. The last of them gets up to K of the
        # accepted tokens, then the one before it, and so on.
        num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
        num_rounds = math.ceil(num_drafted / max(k, 1))
        for num_later_rounds in reversed(range(num_rounds)):
            num_remaining = max(0, num_accepted - k * num_later_rounds)
            accepted_per_round.append(min(k, num_remaining))

        # The last of these rounds begins after the tokens of earlier events and of the rounds
        # before it, each of which emits its accepted tokens and one more. This event must hold at
        # least one token of the last round.
        num_accepted_earlier = max(0, num_accepted - k)
        num_tokens_before_last_round = before.num_tokens + num_accepted_earlier + num_rounds - 1
        is_possible &= 0 <= num_accepted <= num_drafted
        is_possible &= num_tokens_before_last_round < now.num_tokens

    # The last round may have accepted tokens past the completion's end. Do not count those.
    if accepted_per_round:
        num_tokens_of_last_round = max(0, last.num_tokens - num_tokens_before_last_round)
        accepted_per_round[-1] = min(accepted_per_round[-1], num_tokens_of_last_round)

    # Join the parts, and count the rounds by the number of accepted tokens.
    ids = []
    for event in events:
        ids.extend(event.tokens)
    histogram = [accepted_per_round.count(count) for count in range(k + 1)]
    return CompletionAnswer(
        text="".join(event.content for event in events),
        num_tokens=last.num_tokens,
        token_ids=ids if len(ids) == last.num_tokens else None,
        num_drafts=len(accepted_per_round),
        num_draft_tokens=last.num_draft_tokens,
        num_accepted_tokens=sum(accepted_per_round),
        histogram=histogram if is_possible else None,
    )


def limit(lookup: Any, k: int | None) -> tuple[str, str] | None:
    """Return the first setting of a lookup that llama.cpp does not support.

    A lookup searches the text for an earlier occurrence of its last n tokens, min <= n <= max, and
    drafts up to K of the tokens that followed. llama.cpp has one n, and discards a draft of fewer
    than n tokens. So it never drafts if n > K.

    Args:
        lookup: a `LookupFirstConfig`, the settings of the lookup.
        k: K, draft tokens per round; None if it is not known.

    Returns:
        The key of the setting and what is expected instead; None if llama.cpp supports all of them.
    """
    if lookup.method != "ngram":
        return "method", "ngram"
    if lookup.min != lookup.max:
        return (
            "min",
            f"{lookup.max}, the value of eval.lookup_first.max: llama.cpp compares exactly this"
            " many tokens",
        )
    if k is not None and lookup.max > k:
        return (
            "max",
            f"at most K = {k}: llama.cpp discards a draft of fewer tokens than it compares",
        )
    return None


LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    versions="as in llama-cpp-python 0.3.36",
    counters=(
        "`llama-server` logs drafted and accepted tokens; with `--metrics`, `/metrics` has them by"
        " position."
    ),
    flags={
        "several GPUs": "`--split-mode layer --tensor-split 1,1`",
        "layers on the GPU": "`--gpu-layers 99`; of the draft: `--spec-draft-ngl 99`",
        "device of the draft": "`--spec-draft-device CUDA1`",
        "threads": "`--threads 8`; of the draft: `--spec-draft-threads 8`",
        "requests at once, tokens of all together": "`--parallel 4`, `--ctx-size {total}`",
        "type of keys and values": (
            "`--cache-type-k q8_0 --cache-type-v q8_0`; of the draft: `--spec-draft-type-k q8_0"
            " --spec-draft-type-v q8_0`"
        ),
    },
    program=Program(
        "llama-server", serve_arguments, measured=("--metrics",), settings=build_server_settings
    ),
    client=Client(
        prefix="llamacpp",
        hint="start llama-server with --metrics",
        describe=describe_server,
        path="/completion",
        body=request_body,
        parse=parse_events,
        counts_hint="use the K that the server drafts with",
        name_option="--alias",
        generated="tokens_predicted_total",
        rounding=1e-5,  # the page prints six digits
    ),
    lookup=FrontLookup(
        note=(
            f"llama.cpp looks up with its own rule `{NGRAM_SIMPLE}`: it compares a fixed number of"
            " tokens, and discards a draft of fewer tokens."
        ),
        limit=limit,
    ),
    layouts="gguf",
)
# The export of GGUF files goes by the name `gguf`; measuring a server goes by `llama.cpp`.
GGUF = replace(
    LLAMA_CPP, name="gguf", serve_command=serve_command, program=None, client=None, layouts=""
)
