"""Send the prompts of a suite to an engine's servers, for every K at every load.

The load is the number of requests that are in flight at any time. There are two ways to measure:

- Servers that run already (`eval.server`) are checked first: they must serve the right model, with
  the right number of draft tokens, and have the same version. Then requests to the server with the
  draft and to the one without are interleaved.
- Servers that are started here run one after the other, because a device holds one at a time. The
  server without a draft runs first.
"""

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdistill.common.errors import ReportedError, ResourceError, UserError
from specdistill.common.progress import show_progress
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.suites.suite import (
    Prompt,
    Suite,
    count_measured,
    select_evenly,
    tokenize,
)
from specdistill.methods import METHODS
from specdistill.recipe.sections import EvalConfig, TargetConfig
from specdistill.serving.engines import ENGINES, list_engines_with
from specdistill.serving.engines.client import (
    Client,
    CompletionRequest,
    EngineCompletion,
    ServerIdentity,
)
from specdistill.serving.engines.engine import Served, Serving
from specdistill.serving.engines.server import Server, start_request_threads
from specdistill.serving.engines.start import start_server

# (K, load) -> the completions of each prompt, one for each repetition. K is 0 for a server without
# a draft. If a server failed, the completions that it did not return are missing.
ServerAnswers = dict[tuple[int, int], list[list[EngineCompletion]]]


@dataclass(frozen=True)
class ConnectedServer:
    """A running server that was checked to serve the right model.

    Attributes:
        engine: the name of the engine.
        client: the client for servers of this engine.
        server: the address of the server, and how to send requests to it.
        identity: what the server says about itself: its models, version and draft tokens.
        wanted_k: the K that it was started with, for servers that draft but do not report K.
    """

    engine: str
    client: Client
    server: Server
    identity: ServerIdentity
    wanted_k: int = 0

    @property
    def k(self) -> int:
        """The number of draft tokens per round, as the server reports it; 0 without a draft.

        For a server that drafts but does not report the number, it is `wanted_k`: the number with
        which the server was started.
        """
        if self.identity.hides_k:
            return self.wanted_k
        return self.identity.num_speculative_tokens or 0

    def complete(self, prompt: Prompt, settings: Settings, seed: int) -> EngineCompletion:
        """Request the completion of a prompt from the server, and wait for it."""
        # models[0] is the name under which the server serves the model. The client needs K to check
        # the counts of draft tokens in the answer.
        request = CompletionRequest(
            self.identity.models[0],
            prompt.token_ids,
            settings.max_new_tokens,
            **vars(settings.sampling),
            seed=seed,
        )
        return self.client.complete(self.server, request, self.k)


def connect(
    engine: str, address: str, key: str, model_names: Sequence[str], timeout: float, k: int
) -> ConnectedServer:
    """Connect to a running server, and check that it serves the right model.

    Args:
        engine: the name of the engine.
        address: the address of the server.
        key: the recipe key with which error messages begin.
        model_names: the names that the model may have; the last one is a folder or Hub id.
        timeout: the longest wait for an answer, in seconds.
        k: the number of tokens that the server should draft per round. It is taken as the server's
            number if the server does not report one.

    Raises:
        UserError: when the server serves another model.
        ResourceError: when the server does not answer.
    """
    # Ask the server what it serves.
    server = Server(address, key=key, timeout=timeout)
    client = ENGINES[engine].client
    assert client is not None, engine
    identity = client.identify(server)

    # Check that one of the server's models is the target. A model may be named by a folder, and two
    # different paths may lead to the same folder through links, so resolved paths are compared.
    folders = [os.path.realpath(name) for name in model_names if os.path.isdir(name)]
    if not any(
        name in model_names or os.path.realpath(name) in folders for name in identity.models
    ):
        raise UserError(
            key,
            got=f"{address}, which serves {identity.models[0]}",
            expected=f"a server of {model_names[-1]}; if the server has this model under another"
            f" name, restart it with {client.name_option} {model_names[0]}",
        )
    return ConnectedServer(engine, client, server, identity, k)


def connect_pair(
    config: EvalConfig, model_names: Sequence[str]
) -> tuple[ConnectedServer, ConnectedServer | None]:
    """Connect to the two servers that a recipe names: with a draft, and without one (baseline).

    The baseline server is optional.

    Args:
        config: the recipe's section `eval`.
        model_names: the names that the model may have (see `connect`).

    Raises:
        UserError: when a server serves another model, when the server with the draft drafts
            another number of tokens, when the baseline server drafts, or when their versions
            differ.
        ResourceError: when a server does not answer.

    Returns:
        The server with the draft, and the baseline server or None.
    """
    assert config.server is not None
    engine = config.engine
    address = config.server
    k = config.num_speculative_tokens

    # Connect to the server with the draft, and check that it drafts K tokens per round.
    speculative = connect(
        engine, address, "eval.server", model_names, timeout=config.server_timeout, k=k
    )
    if not speculative.k:
        raise UserError(
            "eval.server",
            got=f"{address}, which does not draft",
            expected="a server started with a draft",
        )
    if speculative.k != k:
        raise UserError(
            "eval.num_speculative_tokens",
            got=k,
            expected=f"{speculative.k}, the number of tokens that the server at {address} drafts",
        )
    if config.baseline_server is None:
        return speculative, None

    # Connect to the baseline server. Check that it does not draft, and that it has the same version
    # of the engine as the server with the draft.
    baseline = connect(
        engine,
        config.baseline_server,
        "eval.baseline_server",
        model_names,
        timeout=config.server_timeout,
        k=k,
    )
    if baseline.k:
        raise UserError(
            "eval.baseline_server",
            got=f"{config.baseline_server}, which drafts",
            expected="a server started without a draft",
        )
    if baseline.identity.version != speculative.identity.version:
        raise UserError(
            "eval.baseline_server",
            got=f"{engine} {baseline.identity.version}",
            expected=f"{speculative.identity.version}, the version of eval.server",
        )
    return speculative, baseline


@dataclass(frozen=True)
class ServerTask:
    """The requests to servers: the prompts of a suite, for every K at every load.

    Attributes:
        suite: the suite.
        prompts: the prompts that are measured.
        tokenizer: the target's tokenizer.
        settings: the settings of the main configuration. Their batch size is its load.
        ks: the values of K, the main one first.
        loads: the loads, the main one first.
    """

    suite: Suite
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    settings: Settings
    ks: Sequence[int]
    loads: Sequence[int]

    @classmethod
    def from_config(
        cls, config: EvalConfig, suite: Suite, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> "ServerTask":
        """Plan the requests that a recipe asks for: its prompts, values of K and loads.

        A load is the number of requests that are in flight at the same time.

        Args:
            config: the recipe's section `eval`.
            suite: the suite of prompts.
            tokenizer: the target's tokenizer.
            max_length: the most tokens of a prompt and its completion together.

        Raises:
            UserError: for a load that is higher than the number of prompts.
        """
        prompts = tokenize(
            suite,
            tokenizer,
            num_prompts=count_measured(suite, config.num_prompts),
            max_new_tokens=config.max_new_tokens,
            max_length=max_length,
        )

        # List K and load of the main configuration, then the values to sweep. The keys of a dict
        # keep their order and drop duplicates.
        ks = dict.fromkeys([config.num_speculative_tokens, *config.sweep.num_speculative_tokens])
        loads = dict.fromkeys([config.concurrency, *config.sweep.concurrency])
        if max(loads) > len(prompts):
            raise UserError(
                "eval.concurrency",
                got=f"{max(loads)} for {len(prompts)} prompts",
                expected=f"at most {len(prompts)}, the number of prompts",
            )
        return cls(
            suite,
            prompts,
            tokenizer,
            replace(Settings.from_section(config), batch_size=config.concurrency),
            [*ks],
            [*loads],
        )

    @property
    def configurations(self) -> list[Settings]:
        """The settings of every configuration, the main one first: each K at each load.

        The batch size of a configuration is its load, the number of requests in flight.
        """
        grid = []
        for load in self.loads:
            for k in self.ks:
                grid.append(replace(self.settings, num_speculative_tokens=k, batch_size=load))
        return [self.settings, *(settings for settings in grid if settings != self.settings)]


def find_startable_serving(engine: str, method: str) -> Serving:
    """Return how an engine serves drafts of a method, if specdistill can start this engine.

    Args:
        engine: the name of the engine, as `eval.engine` names it.
        method: the method of the draft.

    Raises:
        UserError: for an engine that specdistill cannot start, and for a method that the engine
            does not serve.
    """
    if ENGINES[engine].program is None:
        raise UserError(
            "eval.server", got="nothing", expected=f"the address of a running {engine} server"
        )

    # Find all engines that can be started and serve the method, because the error names them. An
    # engine may load drafts in the format (layout) of another engine.
    serving = METHODS[method].serving()
    startable = {}
    for name in list_engines_with("program"):
        layout = ENGINES[name].layouts or name
        if layout in serving:
            startable[name] = serving[layout]
    if engine not in startable:
        raise UserError(
            "method",
            got=f"{method} with eval.engine={engine}",
            expected=f"a method that {engine} serves, or eval.engine={' or '.join(startable)}",
        )
    return startable[engine]


@dataclass
class ServerMeasurement:
    """The completions that servers have returned so far.

    Attributes:
        engine: the section `engine` of the report.
        has_baseline: whether a server without a draft is measured as well.
        answers: the completions, by K and load.
        seconds: how long the requests took in total.
        failure: the error that ended the measurement early; None if there was none.
    """

    engine: dict[str, Any]
    has_baseline: bool
    answers: ServerAnswers = field(default_factory=dict)
    seconds: float = 0.0
    failure: ReportedError | None = None

    def ask(self, peers: Sequence[ConnectedServer], task: ServerTask) -> None:
        """Send every prompt to running servers, and collect the completions in `answers`.

        This is done at each load, the number of requests that are in flight at the same time. Each
        repetition sends all prompts to one server, then to the next. Which server comes first
        alternates, so that a slow minute of the machine affects all of them.

        Args:
            peers: one server, or two: without a draft, then with the draft.
            task: the prompts, their settings and the loads.

        Raises:
            ResourceError: when a server fails. The completions that it returned before are kept.
        """
        settings = task.settings
        prompts = task.prompts
        start = time.perf_counter()

        # The report shows the version of the server with the draft, the last of the peers.
        self.engine["version"] = peers[-1].identity.version

        # Choose the prompts of the warm-up, spread over the categories: `warmup` prompts for each
        # request in flight.
        categories = [prompt.category for prompt in prompts]
        warmups = {
            load: select_evenly(prompts, categories, load * settings.warmup) for load in task.loads
        }
        num_untimed = sum(map(len, warmups.values()))
        num_timed = len(task.loads) * settings.repeats * len(prompts)

        # Send the prompts. The time is added up even if a server fails.
        try:
            num_requests = len(peers) * (num_untimed + num_timed)
            with show_progress("Measuring", num_requests, "completions") as advance:
                for load, warmup in warmups.items():
                    # Warm up every server at this load.
                    for peer in peers:
                        for _ in complete_all(peer, warmup, settings, load):
                            advance()

                    # In each repetition, send all prompts to each server. `answers` gets a list for
                    # each prompt, to which every repetition appends a completion.
                    for repeat in range(settings.repeats):
                        # Every other repetition starts with the other server.
                        for peer in reversed(peers) if repeat % 2 else peers:
                            repetitions = self.answers.setdefault(
                                (peer.k, load), [[] for _ in prompts]
                            )
                            answered = complete_all(peer, prompts, settings, load)
                            for completions, completion in zip(repetitions, answered, strict=True):
                                completions.append(completion)
                                advance()
        finally:
            self.seconds += time.perf_counter() - start


def measure_running(
    task: ServerTask, speculative: ConnectedServer, baseline: ConnectedServer | None
) -> ServerMeasurement:
    """Measure servers that run already, which this process did not start.

    Args:
        task: the requests to send.
        speculative: the server with the draft.
        baseline: the server without a draft; None if there is none.

    Returns:
        The completions. If a server fails, these are the completions until then, and `failure` has
        the error.
    """
    # Describe the servers for the report.
    measurement = ServerMeasurement(
        {
            "name": speculative.engine,
            "server": speculative.server.address,
            "baseline_server": baseline.server.address if baseline else None,
        },
        has_baseline=baseline is not None,
    )

    # Send the prompts to both servers, or to the one with the draft alone.
    peers = [baseline, speculative] if baseline else [speculative]
    try:
        measurement.ask(peers, task)
    except ReportedError as error:
        measurement.failure = error
    return measurement


def measure_started(
    task: ServerTask, config: EvalConfig, target: TargetConfig, served: Served, logs: Path
) -> ServerMeasurement:
    """Start an engine's servers one after the other, and measure each.

    The first server has no draft. Then there is one for every K, the number of draft tokens per
    round, beginning with the K of the main configuration. Each server is ended before the next one
    is started, because the device may hold only one.

    Args:
        task: the requests to send.
        config: the recipe's section `eval`.
        target: the recipe's section `target`.
        served: the recipe's draft, as it was exported for the engine.
        logs: the folder for the logs of the servers.

    Returns:
        The completions. If a server fails, these are the completions until then, and `failure` has
        the error.
    """
    # Build the command that starts each server, K -> command, and the environment variables that it
    # needs. K = 0 is the server without the draft.
    longest_prompt = max(len(prompt.token_ids) for prompt in task.prompts)
    longest = longest_prompt + config.max_new_tokens
    key = "eval.engine_command"
    commands = {k: start_command(config, target, served, k, longest) for k in (0, *task.ks)}
    program = ENGINES[config.engine].program
    assert program is not None, config.engine
    variables = {k: program.variables(replace(served, num_tokens=k)) if k else {} for k in commands}

    # Show in the report the commands of the main K, the first of `ks`, and of the server without
    # the draft.
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables[task.ks[0]].items()]
    shown = {
        "command": " ".join([*settings, shlex.join(commands[task.ks[0]])]),
        "baseline_command": shlex.join(commands[0]),
    }
    measurement = ServerMeasurement({"name": config.engine, **shown}, has_baseline=True)

    # List the names under which a server may serve the model: its own name, or the folder from
    # which it was loaded. With multi-token prediction, the draft's folder may hold the target, too.
    names = (target.model, str(served.output), served.target_name)

    # Start the servers one after the other. Check that each has the right model and draft, and send
    # it the prompts.
    try:
        for k in commands:
            log = logs / (f"k{k}.log" if k else "plain.log")
            with start_server(commands[k], log, key=key, variables=variables[k]) as address:
                peer = connect(
                    config.engine, address, key, names, timeout=config.server_timeout, k=k
                )
                _check_drafting(peer, served, k, log)
                measurement.ask([peer], task)
    except ReportedError as error:
        measurement.failure = error
    return measurement


def _check_drafting(peer: ConnectedServer, served: Served, k: int, log: Path) -> None:
    """Check that a server drafts K tokens per round and uses the lookup in front of its draft.

    Args:
        peer: the server.
        served: the draft that it was started with.
        k: the number of tokens that it should draft per round; 0 for none.
        log: the log of the server.

    Raises:
        ResourceError: when the server drafts another number of tokens, or does not use the lookup
            in front of the draft.
    """
    if peer.k != k:
        raise ResourceError(
            f"{peer.engine} drafts {peer.k} tokens per round, not {k}", next_step=f"look at {log}"
        )

    # If there is a lookup in front of the draft, the engine must write a certain mark to its log.
    # vLLM ignores the lookup if specdistill's plugin is not installed next to it.
    front = ENGINES[peer.engine].describe_front(served.lookup_first) if k else None
    if front and front.mark not in log.read_text(encoding="utf-8", errors="replace"):
        raise ResourceError(
            f"{peer.engine} does not use the lookup in front of the draft: {log} does not say"
            f" `{front.mark}`",
            next_step=front.note,
        )


def start_command(
    config: EvalConfig, target: TargetConfig, served: Served, k: int, longest: int
) -> list[str]:
    """Return the command that starts an engine's server, as a list of words.

    Args:
        config: the recipe's section `eval`.
        target: the recipe's section `target`.
        served: the recipe's draft, as it was exported for the engine.
        k: draft tokens per round; 0 serves the target without the draft.
        longest: the most tokens of a sequence, that is of a prompt and its completion.
    """
    program = ENGINES[config.engine].program
    assert program is not None, config.engine

    # Start with the program. Then come the arguments about target and draft. Without a method
    # (method=None) these are the arguments for the target alone.
    words = shlex.split(config.engine_command or program.command)
    served_with_k = replace(served, num_tokens=k) if k else replace(served, method=None)
    words += program.arguments(served_with_k)

    # Add the arguments about the settings of the recipe, and those that only a measurement needs.
    return [
        *words,
        *program.settings(target, config, longest),
        *program.measured,
        *(program.measured_draft if k else ()),
    ]


def complete_all(
    peer: ConnectedServer, prompts: Sequence[Prompt], settings: Settings, load: int
) -> Iterator[EngineCompletion]:
    """Send prompts to a server, and yield the completions in the order of the prompts.

    Args:
        peer: the server.
        prompts: the prompts.
        settings: the settings with which the server completes them.
        load: the number of requests that are in flight at the same time.

    Raises:
        ResourceError: when the server served other clients meanwhile, which would distort times.
    """
    # Read the server's counter of tokens before and after. If the counter grew by more than the
    # tokens of these completions, the server has served somebody else, too.
    before = peer.client.read(peer.server)
    num_tokens = 0
    with start_request_threads(load, peer.server) as pool:
        # Every prompt has its own seed, the same in each repetition.
        seeds = range(settings.seed, settings.seed + len(prompts))
        completions = pool.map(
            lambda prompt, seed: peer.complete(prompt, settings, seed), prompts, seeds
        )
        for completion in completions:
            num_tokens += completion.num_tokens
            yield completion
    peer.client.check_alone(peer.server, before, num_tokens)
