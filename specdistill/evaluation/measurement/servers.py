"""Send the prompts of a suite to an engine's servers, for every K at every load.

The load is the number of requests that are in flight at any time.

Servers that run already are checked first: they must serve the right model, with the right number
of draft tokens, and have the same version. Then requests to them are interleaved. Servers that are
started here run one after the other, because a device holds one at a time. The one without a draft
runs first.
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

# (K, load) -> the repetitions of each prompt. K is 0 without a draft. Completions that a server did
# not return because it failed are missing.
ServerAnswers = dict[tuple[int, int], list[list[EngineCompletion]]]


@dataclass(frozen=True)
class ConnectedServer:
    """A server that serves the right model.

    Attributes:
        engine: the name of the engine.
        client: the client of the engine.
        server: the server.
        identity: what the server says about itself.
        wanted_k: K as it should be, for servers that draft but do not report K.
    """

    engine: str
    client: Client
    server: Server
    identity: ServerIdentity
    wanted_k: int = 0

    @property
    def k(self) -> int:
        """The draft tokens per round; 0 without a draft.

        For a server that does not report them, this is `wanted_k`.
        """
        return self.wanted_k if self.identity.hides_k else self.identity.num_speculative_tokens or 0

    def complete(self, prompt: Prompt, settings: Settings, seed: int) -> EngineCompletion:
        """Request the completion of a prompt."""
        request = CompletionRequest(
            self.identity.models[0],
            prompt.token_ids,
            settings.max_new_tokens,
            **vars(settings.sampling),
            seed=seed,
        )
        return self.client.complete(self.server, request, self.k)


def connect(
    engine: str, address: str, key: str, target: Sequence[str], timeout: float, k: int
) -> ConnectedServer:
    """Connect to a running server, and check that it serves the right model.

    Args:
        engine: the name of the engine.
        address: the address of the server.
        key: the recipe key that errors name.
        target: the names that the model may have; the last one is a folder or Hub id.
        timeout: the longest wait for an answer, in seconds.
        k: the draft tokens that it should draft per round.

    Raises:
        UserError: when it serves another model.
        ResourceError: when it does not answer.
    """
    server = Server(address, key=key, timeout=timeout)
    client = ENGINES[engine].client
    assert client is not None, engine
    identity = client.identify(server)
    folders = [os.path.realpath(name) for name in target if os.path.isdir(name)]
    if not any(name in target or os.path.realpath(name) in folders for name in identity.models):
        raise UserError(
            key,
            got=f"{address}, which serves {identity.models[0]}",
            expected=f"a server of {target[-1]} (or {client.name_option} {target[0]})",
        )
    return ConnectedServer(engine, client, server, identity, k)


def connect_pair(
    config: EvalConfig, target: Sequence[str]
) -> tuple[ConnectedServer, ConnectedServer | None]:
    """Connect to a recipe's server with a draft, and to the one without if there is one.

    Args:
        config: the recipe's `eval:`.
        target: the names that the model may have (see `connect`).

    Raises:
        UserError: when a server serves another model, when the first drafts another number of
            tokens, when the second drafts, or when their versions differ.
        ResourceError: when a server does not answer.
    """
    assert config.server is not None
    engine = config.engine
    address = config.server
    k = config.num_speculative_tokens

    # The server with the draft must draft K tokens.
    speculative = connect(engine, address, "eval.server", target, config.server_timeout, k)
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
            expected=f"{speculative.k}, as the server at {address} drafts",
        )
    if config.baseline_server is None:
        return speculative, None

    # The baseline must be the same engine without a draft.
    baseline = connect(
        engine, config.baseline_server, "eval.baseline_server", target, config.server_timeout, k
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
            expected=f"{speculative.identity.version}, as eval.server runs",
        )
    return speculative, baseline


@dataclass(frozen=True)
class ServerTask:
    """The requests to servers: the prompts of a suite, for every K at every load.

    Attributes:
        suite: the suite.
        prompts: the prompts that are measured.
        tokenizer: the target's tokenizer.
        settings: the settings of the main configuration; their batch size is the load.
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
        """Make the task of a recipe.

        Args:
            config: the recipe's `eval:`.
            suite: the suite.
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
        ks = dict.fromkeys([config.num_speculative_tokens, *config.sweep.num_speculative_tokens])
        loads = dict.fromkeys([config.concurrency, *config.sweep.concurrency])
        if max(loads) > len(prompts):
            raise UserError(
                "eval.concurrency",
                got=f"{max(loads)} for {len(prompts)} prompts",
                expected="at most as many as there are prompts",
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
        """The settings of every configuration, the main one first."""
        grid = []
        for load in self.loads:
            for k in self.ks:
                grid.append(replace(self.settings, num_speculative_tokens=k, batch_size=load))
        return [self.settings, *(settings for settings in grid if settings != self.settings)]


def find_startable_serving(engine: str, method: str) -> Serving:
    """Return how an engine that is started here serves drafts of a method.

    Raises:
        UserError: for an engine that cannot be started here, and for a method that it does not
            serve.
    """
    if ENGINES[engine].program is None:
        raise UserError(
            "eval.server", got="nothing", expected=f"the address of a running {engine} server"
        )
    serving = METHODS[method].serving()
    able = {
        name: serving[key]
        for name in list_engines_with("program")
        if (key := ENGINES[name].layouts or name) in serving
    }
    if engine not in able:
        raise UserError(
            "method",
            got=f"{method} with eval.engine={engine}",
            expected=f"a method that {engine} serves, or eval.engine={' or '.join(able)}",
        )
    return able[engine]


@dataclass
class ServerMeasurement:
    """The completions that servers returned.

    Attributes:
        engine: the section `engine` of the report.
        has_baseline: whether a server without a draft is measured as well.
        answers: the completions.
        seconds: the seconds of the measurement.
        failure: the error that ended the measurement early; None if there was none.
    """

    engine: dict[str, Any]
    has_baseline: bool
    answers: ServerAnswers = field(default_factory=dict)
    seconds: float = 0.0
    failure: ReportedError | None = None

    def ask(self, peers: Sequence[ConnectedServer], task: ServerTask) -> None:
        """Add the completions of every prompt by running servers, at each load.

        Servers are interleaved by repetition, and the one that comes first alternates.

        Args:
            peers: the servers; the one with the draft is the last.
            task: the requests.

        Raises:
            ResourceError: when a server fails. The completions that it returned before are kept.
        """
        settings = task.settings
        prompts = task.prompts
        start = time.perf_counter()

        # Spread the prompts of the warm-up over the categories.
        self.engine["version"] = peers[-1].identity.version
        categories = [prompt.category for prompt in prompts]
        warmups = {
            load: select_evenly(prompts, categories, load * settings.warmup) for load in task.loads
        }
        num_untimed = sum(map(len, warmups.values()))
        num_timed = len(task.loads) * settings.repeats * len(prompts)
        try:
            with show_progress(
                "Measuring", len(peers) * (num_untimed + num_timed), "completions"
            ) as advance:
                for load, warmup in warmups.items():
                    # Warm every server up at this load.
                    for peer in peers:
                        for _ in complete_all(peer, warmup, settings, load):
                            advance()
                    # Measure all prompts once with each server per repetition.
                    for repeat in range(settings.repeats):
                        for peer in reversed(peers) if repeat % 2 else peers:
                            repetitions = self.answers.setdefault(
                                (peer.k, load), [[] for _ in prompts]
                            )
                            answered = complete_all(peer, prompts, settings, load)
                            for completions, completion in zip(repetitions, answered, strict=True):
                                completions.append(completion)
                                advance()

        # The time counts even if a server fails.
        finally:
            self.seconds += time.perf_counter() - start


def measure_running(
    task: ServerTask, speculative: ConnectedServer, baseline: ConnectedServer | None
) -> ServerMeasurement:
    """Measure servers that run already. An error ends the measurement, and is recorded in it."""
    measurement = ServerMeasurement(
        {
            "name": speculative.engine,
            "server": speculative.server.address,
            "baseline_server": baseline.server.address if baseline else None,
        },
        has_baseline=baseline is not None,
    )
    try:
        measurement.ask([*filter(None, (baseline, speculative))], task)
    except ReportedError as error:
        measurement.failure = error
    return measurement


def measure_started(
    task: ServerTask, config: EvalConfig, target: TargetConfig, served: Served, logs: Path
) -> ServerMeasurement:
    """Start an engine's server, measure it and end it, first without the draft, then for every K.

    The main K comes before the others. An error ends the measurement, and is recorded in it.

    Args:
        task: the requests.
        config: the recipe's `eval:`.
        target: the recipe's `target:`.
        served: the recipe's draft, as it was exported.
        logs: the folder for the logs of the servers.
    """
    longest = max(len(prompt.token_ids) for prompt in task.prompts) + config.max_new_tokens
    key = "eval.engine_command"
    commands = {k: start_command(config, target, served, k, longest) for k in (0, *task.ks)}
    program = ENGINES[config.engine].program
    assert program is not None, config.engine
    variables = {k: program.variables(replace(served, num_tokens=k)) if k else {} for k in commands}
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables[task.ks[0]].items()]
    shown = {
        "command": " ".join([*settings, shlex.join(commands[task.ks[0]])]),
        "baseline_command": shlex.join(commands[0]),
    }
    measurement = ServerMeasurement({"name": config.engine, **shown}, has_baseline=True)
    # For multi-token prediction the engine may serve the draft's folder, so that is a valid name of
    # the model as well.
    names = (target.model, str(served.output), served.target_name)
    try:
        for k in commands:
            log = logs / (f"k{k}.log" if k else "plain.log")
            with start_server(commands[k], log, key=key, variables=variables[k]) as address:
                peer = connect(config.engine, address, key, names, config.server_timeout, k)
                if peer.k != k:
                    raise ResourceError(
                        f"{config.engine} drafts {peer.k} tokens per round, not {k}",
                        next_step=f"look at {log}",
                    )
                # The log must show that the engine really uses a lookup in front of the draft.
                front = ENGINES[config.engine].describe_front(served.lookup_first) if k else None
                if front and front.mark not in log.read_text(encoding="utf-8", errors="replace"):
                    raise ResourceError(
                        (
                            f"{config.engine} looks nothing up in front of the draft: {log} does"
                            " not say so"
                        ),
                        next_step=front.note,
                    )
                measurement.ask([peer], task)
    except ReportedError as error:
        measurement.failure = error
    return measurement


def start_command(
    config: EvalConfig, target: TargetConfig, served: Served, k: int, longest: int
) -> list[str]:
    """Return the command that starts an engine's server.

    Args:
        config: the recipe's `eval:`.
        target: the recipe's `target:`.
        served: the recipe's draft, as it was exported.
        k: draft tokens per round; 0 serves the target without the draft.
        longest: the most tokens of a sequence.

    Returns:
        The words of the command.
    """
    program = ENGINES[config.engine].program
    assert program is not None, config.engine
    words = shlex.split(config.engine_command or program.command)
    words += program.arguments(replace(served, num_tokens=k) if k else replace(served, method=None))
    return [
        *words,
        *program.settings(target, config, longest),
        *program.measured,
        *(program.measured_draft if k else ()),
    ]


def complete_all(
    peer: ConnectedServer, prompts: Sequence[Prompt], settings: Settings, load: int
) -> Iterator[EngineCompletion]:
    """Yield the completions of a server in the order of the prompts.

    `load` requests are in flight until the last ones have begun.

    Raises:
        ResourceError: when the server served other clients meanwhile.
    """
    before = peer.client.read(peer.server)
    num_tokens = 0
    with start_request_threads(load, peer.server) as pool:
        seeds = range(settings.seed, settings.seed + len(prompts))
        for completion in pool.map(
            lambda prompt, seed: peer.complete(prompt, settings, seed), prompts, seeds
        ):
            num_tokens += completion.num_tokens
            yield completion
    peer.client.check_alone(peer.server, before, num_tokens)
