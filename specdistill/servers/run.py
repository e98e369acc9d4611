"""A suite measured on a running server, and on a second one without a draft: the report of another engine.

Requests are sent one at a time, alternating between the servers, and every repetition goes through all prompts again. The report says
what a server does not show. When a server fails after the first answers, these are kept.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from specdistill.engines import ENGINES
from specdistill.engines.server import Client, Completion, Identity, Request, Server
from specdistill.errors import ResourceError, UserError
from specdistill.measurement.configurations import Settings
from specdistill.measurement.losslessness import first_difference
from specdistill.progress import progress
from specdistill.project import git_revision
from specdistill.report.build import build_report
from specdistill.report.results import headline, result_rows
from specdistill.servers.not_measured import DOCUMENT_REASONS, NO_BASELINE, NO_BASELINE_ROW, ROW_REASONS
from specdistill.statistics.records import Configuration, PromptRecord, Timing
from specdistill.suites.suite import Prompt, Suite, evenly


@dataclass(frozen=True)
class Peer:
    """A server that serves the right model."""

    engine: str
    client: Client
    server: Server
    identity: Identity

    def complete(self, prompt: Prompt, settings: Settings, seed: int) -> Completion:
        model, sampling = self.identity.models[0], vars(settings.sampling)
        request = Request(model, prompt.token_ids, settings.max_new_tokens, **sampling, seed=seed)
        return self.client.complete(self.server, request)


@dataclass
class Answers:
    """All repetitions of one prompt."""

    prompt: Prompt
    speculative: list[Completion] = field(default_factory=list)
    baseline: list[Completion] = field(default_factory=list)


def connect(
    engine: str, address: str | None, baseline_address: str | None, *, target: Sequence[str], k: int, timeout: float
) -> tuple[Peer, Peer | None]:
    """The server with a draft and the one without.

    target: its possible names, a folder or Hub id last. Raises UserError when they serve another model, draft another number of tokens,
    draft where they should not, or have different versions; ResourceError when they do not answer.
    """
    if address is None:
        raise UserError("eval.server", got="nothing", expected=f"the address of a running {engine} server")
    speculative = _connect(engine, address, "eval.server", target, timeout)
    served_k = speculative.identity.num_speculative_tokens
    if served_k is None:
        raise UserError("eval.server", got=f"{address}, which does not draft", expected="a server started with a draft")
    if served_k != k:
        raise UserError("eval.num_speculative_tokens", got=k, expected=f"{served_k}, as the server at {address} drafts")
    if baseline_address is None:
        return speculative, None
    baseline = _connect(engine, baseline_address, "eval.baseline_server", target, timeout)
    if baseline.identity.num_speculative_tokens is not None:
        got = f"{baseline_address}, which drafts"
        raise UserError("eval.baseline_server", got=got, expected="a server started without a draft")
    if baseline.identity.version != speculative.identity.version:
        got = f"{engine} {baseline.identity.version}"
        raise UserError("eval.baseline_server", got=got, expected=f"{speculative.identity.version}, as eval.server runs")
    return speculative, baseline


def evaluate_server(
    speculative: Peer,
    baseline: Peer | None,
    suite: Suite,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    tokenizer: Any,
    target: Mapping[str, Any],
    draft: Mapping[str, Any],
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report of a server, before a gate has judged it, and its records.

    target, draft: those sections of the report, as the user names them. Raises ResourceError when no prompt was answered.
    """
    start = time.perf_counter()
    answers, failure = _measure(speculative, baseline, prompts, settings)
    complete = [entry for entry in answers if entry.speculative and (entry.baseline or baseline is None)]
    if failure is not None and not complete:
        raise failure
    configuration = settings.configuration
    records = [_record(suite.name, configuration, tokenizer, entry) for entry in complete]
    identity, engine = speculative.identity, speculative.engine
    reasons = {**ROW_REASONS, **(NO_BASELINE_ROW if baseline is None else {})}
    rows = result_rows(records, suite, configuration, seed=settings.seed, reasons=reasons)
    lossless, not_compared = _compare(complete, baseline is not None, settings)
    gauges = speculative.client.gauges(speculative.server) if failure is None else {}
    report = build_report(
        target=target,
        draft=draft,
        hardware={"device": "server", "name": speculative.server.address},
        software={
            "python": platform.python_version(),
            "transformers": metadata.version("transformers"),
            engine: identity.version,
        },
        settings={
            "num_speculative_tokens": configuration.num_speculative_tokens,
            **vars(settings.sampling),
            "max_new_tokens": settings.max_new_tokens,
            "tree": None,
            "batch_size": 1,
            "seed": settings.seed,
            "warmup": settings.warmup,
            "repeats": settings.repeats,
        },
        suite=suite,
        results=rows,
        context=[],
        headline=headline(rows, records),
        theory=None,
        lossless=lossless,
        not_measured={**DOCUMENT_REASONS, **not_compared},
        git_revision=git_revision(),
        engine={
            "name": engine,
            "version": identity.version,
            "server": speculative.server.address,
            "baseline_server": baseline.server.address if baseline else None,
            **({"gauges": gauges} if gauges else {}),
        },
        incomplete=None if failure is None else f"{failure} ({len(complete)} of {len(prompts)} prompts were measured)",
    )
    return {**report, "measurement": {"seconds": time.perf_counter() - start}}, records


def _connect(engine: str, address: str, key: str, target: Sequence[str], timeout: float) -> Peer:
    server, client = Server(address, key=key, timeout=timeout), ENGINES[engine].client
    assert client is not None, engine
    identity = client.identify(server)
    if not any(_same_model(name, wanted) for name in identity.models for wanted in target):
        got = f"{address}, which serves {identity.models[0]}"
        raise UserError(key, got=got, expected=f"a server of {target[-1]} (or --served-model-name {target[0]})")
    return Peer(engine, client, server, identity)


def _same_model(name: str, wanted: str) -> bool:
    return name == wanted or (Path(wanted).is_dir() and Path(name).is_dir() and Path(name).samefile(wanted))


def _measure(
    speculative: Peer, baseline: Peer | None, prompts: Sequence[Prompt], settings: Settings
) -> tuple[list[Answers], ResourceError | None]:
    """Every prompt `repeats` times on both servers, and the error that ended it early, if one did."""
    answers = [Answers(prompt) for prompt in prompts]
    try:
        with progress("Measuring", settings.warmup + settings.repeats * len(prompts), "prompts") as advance:
            for index, prompt in enumerate(evenly(prompts, [prompt.category for prompt in prompts], settings.warmup)):
                for peer in (speculative, baseline):
                    if peer is not None:
                        peer.complete(prompt, settings, settings.seed + index)
                advance()
            for repeat in range(settings.repeats):
                for index, entry in enumerate(answers):
                    sides = [(speculative, entry.speculative), (baseline, entry.baseline)]
                    for peer, completions in sides if (repeat + index) % 2 else reversed(sides):
                        if peer is not None:
                            completions.append(peer.complete(entry.prompt, settings, settings.seed + index))
                    advance()
    except ResourceError as error:
        return answers, error
    return answers, None


def _record(suite: str, configuration: Configuration, tokenizer: Any, entry: Answers) -> PromptRecord:
    """The repetition of median speed of each side; its tokens, counts and seconds belong together."""
    drafted, plain = _median(entry.speculative), _median(entry.baseline) if entry.baseline else None
    prompt = entry.prompt
    return PromptRecord(
        suite=suite,
        configuration=configuration,
        id=prompt.id,
        category=prompt.category,
        num_prompt_tokens=len(prompt.token_ids),
        prompt=prompt.text,
        text=_text(tokenizer, drafted),
        first_token=None,
        first_token_text="",
        rounds=(),
        speculative=_timing(drafted),
        baseline=_timing(plain) if plain else None,
        baseline_text=_text(tokenizer, plain) if plain else None,
        counts=drafted.counts,
    )


def _median(completions: Sequence[Completion]) -> Completion:
    ordered = sorted(completions, key=lambda completion: completion.seconds / completion.num_tokens)
    return ordered[(len(ordered) - 1) // 2]


def _timing(completion: Completion) -> Timing:
    return Timing(completion.num_tokens, None, completion.seconds)


def _text(tokenizer: Any, completion: Completion) -> str:
    """Decoded from its tokens where the server returns them: its own text lacks the stop token."""
    ids = completion.counts.token_ids
    return str(tokenizer.decode(ids, skip_special_tokens=False)) if ids else completion.text


def _compare(answers: Sequence[Answers], has_baseline: bool, settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """The report's `lossless`, and reasons for what it lacks. Greedy outputs of both servers are compared by tokens, or else by text."""
    if not has_baseline or not settings.sampling.is_greedy:
        reason = "sampled outputs differ by chance" if has_baseline else NO_BASELINE
        return {"prompts_checked": 0}, {"lossless.greedy_identical": reason, "lossless.unexplained_divergences": reason}
    different = [entry for entry in answers if _differs(entry.speculative[0], entry.baseline[0])]
    lossless: dict[str, Any] = {
        "greedy_identical": not different,
        "prompts_checked": len(answers),
        "divergences": len(different),
    }
    if not different:
        return {**lossless, "first_divergence": None, "near_ties": 0, "unexplained_divergences": 0}, {}
    reason = "a server returns no logits that would tell a near-tie from a mistake"
    lossless["first_divergence"] = _divergence(different[0])
    return lossless, {"lossless.near_ties": reason, "lossless.unexplained_divergences": reason}


def _differs(ours: Completion, theirs: Completion) -> bool:
    if ours.counts.token_ids and theirs.counts.token_ids:
        return ours.counts.token_ids != theirs.counts.token_ids
    return ours.text != theirs.text


def _divergence(entry: Answers) -> dict[str, Any]:
    ours, theirs = entry.speculative[0].counts.token_ids, entry.baseline[0].counts.token_ids
    if not ours or not theirs:
        return {"prompt_id": entry.prompt.id}
    position, our_token, their_token = first_difference(ours, theirs)
    return {
        "prompt_id": entry.prompt.id,
        "position": position,
        "speculative_token": our_token,
        "baseline_token": their_token,
    }
