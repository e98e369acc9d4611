"""A suite sent to an engine's servers: every K at every load, which is the number of requests that are in flight all the time.

Requests to servers that run already are interleaved, once these are known to be what a measurement needs: the right model, the right draft,
one version.
Those that are started here run one after the other, the one without a draft first: a device holds one at a time.
"""

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdistill.engines import ENGINES, engines_with
from specdistill.engines.client import Client, Completion, CompletionRequest, ServerIdentity
from specdistill.engines.engine import Served, Serving
from specdistill.engines.server import Server, asking
from specdistill.engines.start import started
from specdistill.errors import ReportedError, ResourceError, UserError
from specdistill.measurement.configurations import Settings
from specdistill.methods import METHODS
from specdistill.progress import progress
from specdistill.recipe.sections import EvalConfig, TargetConfig
from specdistill.suites.suite import Prompt, Suite, evenly, num_measured, tokenize

# (K, 0 without a draft; load) -> the repetitions of each prompt. One that a server no longer answered is missing.
ServerAnswers = dict[tuple[int, int], list[list[Completion]]]


@dataclass(frozen=True)
class ConnectedServer:
    """A server that serves the right model."""

    engine: str
    client: Client
    server: Server
    identity: ServerIdentity
    wanted_k: int = 0

    @property
    def k(self) -> int:
        """Draft tokens per round, where the server does not say as many as it should; 0 without a draft."""
        return self.wanted_k if self.identity.hides_k else self.identity.num_speculative_tokens or 0

    def complete(self, prompt: Prompt, settings: Settings, seed: int) -> Completion:
        model, sampling = self.identity.models[0], vars(settings.sampling)
        request = CompletionRequest(
            model, prompt.token_ids, settings.max_new_tokens, **sampling, seed=seed
        )
        return self.client.complete(self.server, request, self.k)


def connect(
    engine: str, address: str, key: str, target: Sequence[str], timeout: float, k: int
) -> ConnectedServer:
    """A running server. target: the names that its model may have, a folder or Hub id last. key: of the recipe, that led to it.
    k: draft tokens that it should draft per round.

    Raises UserError when it serves another model, ResourceError when it does not answer.
    """
    server, client = Server(address, key=key, timeout=timeout), ENGINES[engine].client
    assert client is not None, engine
    identity = client.identify(server)
    folders = [os.path.realpath(name) for name in target if os.path.isdir(name)]
    if not any(name in target or os.path.realpath(name) in folders for name in identity.models):
        got = f"{address}, which serves {identity.models[0]}"
        raise UserError(
            key, got=got, expected=f"a server of {target[-1]} (or {client.name_option} {target[0]})"
        )
    return ConnectedServer(engine, client, server, identity, k)


def connect_pair(
    config: EvalConfig, target: Sequence[str]
) -> tuple[ConnectedServer, ConnectedServer | None]:
    """A recipe's server with a draft and the one without, as `connect`.

    Raises UserError also when they draft another number of tokens, draft where they should not, or have different versions.
    """
    assert config.server is not None
    engine, address, k = config.engine, config.server, config.num_speculative_tokens
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
    baseline = connect(
        engine, config.baseline_server, "eval.baseline_server", target, config.server_timeout, k
    )
    if baseline.k:
        got = f"{config.baseline_server}, which drafts"
        raise UserError(
            "eval.baseline_server", got=got, expected="a server started without a draft"
        )
    if baseline.identity.version != speculative.identity.version:
        got = f"{engine} {baseline.identity.version}"
        raise UserError(
            "eval.baseline_server",
            got=got,
            expected=f"{speculative.identity.version}, as eval.server runs",
        )
    return speculative, baseline


@dataclass(frozen=True)
class ServerTask:
    """What is asked of servers: every K at every load. settings: of the main configuration, whose batch size is its load."""

    suite: Suite
    prompts: Sequence[Prompt]
    tokenizer: Any
    settings: Settings
    ks: Sequence[int]
    loads: Sequence[int]

    @classmethod
    def of(cls, config: EvalConfig, suite: Suite, tokenizer: Any, max_length: int) -> "ServerTask":
        """A recipe's own K and load first. max_length: of prompt and completion. Raises UserError for more load than prompts."""
        room = {"max_new_tokens": config.max_new_tokens, "max_length": max_length}
        prompts = tokenize(
            suite, tokenizer, num_prompts=num_measured(suite, config.num_prompts), **room
        )
        ks = dict.fromkeys([config.num_speculative_tokens, *config.sweep.num_speculative_tokens])
        loads = dict.fromkeys([config.concurrency, *config.sweep.concurrency])
        if max(loads) > len(prompts):
            got = f"{max(loads)} for {len(prompts)} prompts"
            raise UserError(
                "eval.concurrency", got=got, expected="at most as many as there are prompts"
            )
        return cls(
            suite,
            prompts,
            tokenizer,
            replace(Settings.of(config), batch_size=config.concurrency),
            [*ks],
            [*loads],
        )

    @property
    def configurations(self) -> list[Settings]:
        """The main one first."""
        grid = [
            replace(self.settings, num_speculative_tokens=k, batch_size=load)
            for load in self.loads
            for k in self.ks
        ]
        return [self.settings, *(settings for settings in grid if settings != self.settings)]


def startable(engine: str, method: str) -> Serving:
    """How an engine that is started here is given drafts of a method. Raises UserError for an engine that cannot be, and for a method that
    it does not serve.
    """
    if ENGINES[engine].program is None:
        raise UserError(
            "eval.server", got="null", expected=f"the address of a running {engine} server"
        )
    given = METHODS[method].serving()
    able = {
        name: given[key]
        for name in engines_with("program")
        if (key := ENGINES[name].layouts or name) in given
    }
    if engine not in able:
        got = f"{method} with eval.engine={engine}"
        raise UserError(
            "method",
            got=got,
            expected=f"a method that {engine} serves, or eval.engine={' or '.join(able)}",
        )
    return able[engine]


@dataclass
class ServerMeasurement:
    """What servers answered. engine: that section of the report; failure: what ended the measurement early."""

    engine: dict[str, Any]
    has_baseline: bool
    answers: ServerAnswers = field(default_factory=dict)
    seconds: float = 0.0
    failure: ReportedError | None = None

    def ask(self, peers: Sequence[ConnectedServer], task: ServerTask) -> None:
        """Add every prompt's completions by running servers at each load. Servers are interleaved, and which is first alternates.

        Raises ResourceError when a server fails; what it answered before is kept. The first averages of a server that drafts are kept.
        """
        settings, prompts, start = task.settings, task.prompts, time.perf_counter()
        self.engine["version"] = peers[-1].identity.version
        categories = [prompt.category for prompt in prompts]
        warmups = {load: evenly(prompts, categories, load * settings.warmup) for load in task.loads}
        num_untimed, num_timed = (
            sum(map(len, warmups.values())),
            len(task.loads) * settings.repeats * len(prompts),
        )
        try:
            with progress(
                "Measuring", len(peers) * (num_untimed + num_timed), "completions"
            ) as advance:
                for load, warmup in warmups.items():
                    for peer in peers:
                        for _ in complete_all(peer, warmup, settings, load):
                            advance()
                    for repeat in range(settings.repeats):
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
    addresses = {
        "server": speculative.server.address,
        "baseline_server": baseline.server.address if baseline else None,
    }
    measurement = ServerMeasurement(
        {"name": speculative.engine, **addresses}, has_baseline=baseline is not None
    )
    try:
        measurement.ask([*filter(None, (baseline, speculative))], task)
    except ReportedError as error:
        measurement.failure = error
    return measurement


def measure_started(
    task: ServerTask, config: EvalConfig, target: TargetConfig, served: Served, logs: Path
) -> ServerMeasurement:
    """Start the engine without the draft, measure it and end it; then the same with the draft, for every K, the main one first.

    served: the recipe's draft, exported. logs: the folder of what the engine prints.
    """
    longest = max(len(prompt.token_ids) for prompt in task.prompts) + config.max_new_tokens
    key, commands = (
        "eval.engine_command",
        {k: start_command(config, target, served, k, longest) for k in (0, *task.ks)},
    )
    program = ENGINES[config.engine].program
    assert program is not None, config.engine
    variables = {k: program.variables(replace(served, num_tokens=k)) if k else {} for k in commands}
    named = [f"{name}={shlex.quote(value)}" for name, value in variables[task.ks[0]].items()]
    shown = {
        "command": " ".join([*named, shlex.join(commands[task.ks[0]])]),
        "baseline_command": shlex.join(commands[0]),
    }
    measurement = ServerMeasurement({"name": config.engine, **shown}, has_baseline=True)
    # Multi-token prediction is served in the draft's own folder.
    names = (target.model, str(served.output), served.target_name)
    try:
        for k in commands:
            log = logs / (f"k{k}.log" if k else "plain.log")
            with started(commands[k], log, key=key, variables=variables[k]) as address:
                peer = connect(config.engine, address, key, names, config.server_timeout, k)
                if peer.k != k:
                    drafts = f"{config.engine} drafts {peer.k} tokens per round, not {k}"
                    raise ResourceError(drafts, next_step=f"look at {log}")
                front = ENGINES[config.engine].front(served.lookup_first) if k else None
                if front and front.mark not in log.read_text(encoding="utf-8", errors="replace"):
                    ignored = f"{config.engine} looks nothing up in front of the draft: {log} does not say so"
                    raise ResourceError(ignored, next_step=front.note)
                measurement.ask([peer], task)
    except ReportedError as error:
        measurement.failure = error
    return measurement


def start_command(
    config: EvalConfig, target: TargetConfig, served: Served, k: int, longest: int
) -> list[str]:
    """What starts the engine that serves with K draft tokens per round, 0: without the draft. longest: tokens of a sequence."""
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
) -> Iterator[Completion]:
    """The completions in the order of the prompts, `load` requests in flight until the last have begun.

    Raises ResourceError when the server served others meanwhile.
    """
    before, num_tokens = peer.client.read(peer.server), 0
    with asking(load, peer.server) as pool:
        seeds = range(settings.seed, settings.seed + len(prompts))
        for completion in pool.map(
            lambda prompt, seed: peer.complete(prompt, settings, seed), prompts, seeds
        ):
            num_tokens += completion.num_tokens
            yield completion
    peer.client.check_alone(peer.server, before, num_tokens)
