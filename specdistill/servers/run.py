"""A suite measured on a running server, and on a second one that does not draft: the report of another engine.

Requests go one at a time, in turn to both servers, and every repetition goes through all prompts again. What a server does inside
is not seen; the report says so instead of guessing. When a server fails after the first answers, these are kept.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from specdistill.engines import ENGINES
from specdistill.engines.client import Server
from specdistill.engines.engine import Client, Completion, Identity, Request
from specdistill.errors import ResourceError, UserError
from specdistill.measurement.configurations import Settings
from specdistill.progress import progress
from specdistill.project import git_revision
from specdistill.report.build import build_report
from specdistill.report.results import headline, result_rows
from specdistill.servers.not_measured import DOCUMENT_REASONS, NO_BASELINE, NO_BASELINE_ROW, ROW_REASONS
from specdistill.statistics.configuration import Configuration
from specdistill.statistics.records import PromptRecord, Timing
from specdistill.suites.suite import Prompt, Suite, evenly


@dataclass(frozen=True)
class Peer:
    """A server that has been found to serve what it should."""

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
    """The server that drafts and the one that does not.

    target: the names it may go by, a folder or a Hub id last. Raises UserError when they serve another model, draft another number
    of tokens, draft where they should not, or are of different versions; ResourceError when they do not answer.
    """
    if address is None:
        raise UserError("eval.server", got="nothing", expected=f"the address of a running {engine} server")
    speculative = _connect(engine, address, "eval.server", target, timeout)
    found = speculative.identity.num_speculative_tokens
    if found is None:
        raise UserError("eval.server", got=f"{address}, which does not draft", expected="a server started with a draft")
    if found != k:
        raise UserError("eval.num_speculative_tokens", got=k, expected=f"{found}, as the server at {address} drafts")
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
    """The report of a server, without a gate's decision, and the records that go beside it.

    target and draft: those sections of the report, as the user names them. Raises ResourceError when not one prompt was answered.
    """
    start = time.perf_counter()
    answers, broke_off = _measure(speculative, baseline, prompts, settings)
    whole = [entry for entry in answers if entry.speculative and (entry.baseline or baseline is None)]
    if broke_off is not None and not whole:
        raise broke_off
    configuration = settings.configuration
    records = [_record(suite.name, configuration, tokenizer, entry) for entry in whole]
    identity, engine = speculative.identity, speculative.engine
    reasons = {**ROW_REASONS, **(NO_BASELINE_ROW if baseline is None else {})}
    rows = result_rows(records, suite, configuration, seed=settings.seed, reasons=reasons)
    lossless, not_compared = _compare(whole, baseline is not None, settings)
    gauges = speculative.client.gauges(speculative.server) if broke_off is None else {}
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
        incomplete=None if broke_off is None else f"{broke_off} ({len(whole)} of {len(prompts)} prompts were measured)",
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
    """Every prompt `repeats` times on both servers; with the error that ended it early, if one did."""
    answers = [Answers(prompt) for prompt in prompts]
    try:
        with progress("measuring", settings.warmup + settings.repeats * len(prompts), "prompts") as advance:
            for index, prompt in enumerate(evenly(prompts, [prompt.category for prompt in prompts], settings.warmup)):
                for peer in (speculative, baseline):
                    if peer is not None:
                        peer.complete(prompt, settings, settings.seed + index)
                advance()
            for repeat in range(settings.repeats):
                for index, entry in enumerate(answers):
                    sides = [(speculative, entry.speculative), (baseline, entry.baseline)]
                    for peer, done in sides if (repeat + index) % 2 else reversed(sides):
                        if peer is not None:
                            done.append(peer.complete(entry.prompt, settings, settings.seed + index))
                    advance()
    except ResourceError as error:
        return answers, error
    return answers, None


def _record(suite: str, configuration: Configuration, tokenizer: Any, entry: Answers) -> PromptRecord:
    """The repetition of middling speed of each side; its tokens, counts and seconds belong together."""
    written, plain = _middling(entry.speculative), _middling(entry.baseline) if entry.baseline else None
    prompt = entry.prompt
    return PromptRecord(
        suite=suite,
        configuration=configuration,
        id=prompt.id,
        category=prompt.category,
        num_prompt_tokens=len(prompt.token_ids),
        prompt=prompt.text,
        text=_text(tokenizer, written),
        first_token=None,
        first_token_text="",
        rounds=(),
        speculative=_timing(written),
        baseline=_timing(plain) if plain else None,
        baseline_text=_text(tokenizer, plain) if plain else None,
        counts=written.counts,
    )


def _middling(completions: Sequence[Completion]) -> Completion:
    ordered = sorted(completions, key=lambda completion: completion.seconds / completion.num_tokens)
    return ordered[(len(ordered) - 1) // 2]


def _timing(completion: Completion) -> Timing:
    return Timing(completion.num_tokens, None, completion.seconds)


def _text(tokenizer: Any, completion: Completion) -> str:
    """As the tokens say, where the server returns them: it leaves the stop token out of its own text."""
    ids = completion.counts.token_ids
    return str(tokenizer.decode(ids, skip_special_tokens=False)) if ids else completion.text


def _compare(whole: Sequence[Answers], has_baseline: bool, settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """The report's `lossless`, and why the rest of it is absent: greedy texts of both servers compared, token for token where they
    return tokens.
    """
    if not has_baseline or not settings.sampling.is_greedy:
        reason = "sampled texts differ by chance" if has_baseline else NO_BASELINE
        return {"prompts_checked": 0}, {"lossless.greedy_identical": reason, "lossless.unexplained_divergences": reason}
    different = [entry for entry in whole if _differs(entry.speculative[0], entry.baseline[0])]
    found: dict[str, Any] = {"greedy_identical": not different, "prompts_checked": len(whole), "divergences": len(different)}
    if not different:
        return {**found, "first_divergence": None, "near_ties": 0, "unexplained_divergences": 0}, {}
    reason = "a server gives no logits that would tell a near-tie from a mistake"
    found["first_divergence"] = _divergence(different[0])
    return found, {"lossless.near_ties": reason, "lossless.unexplained_divergences": reason}


def _differs(ours: Completion, theirs: Completion) -> bool:
    if ours.counts.token_ids and theirs.counts.token_ids:
        return ours.counts.token_ids != theirs.counts.token_ids
    return ours.text != theirs.text


def _divergence(entry: Answers) -> dict[str, Any]:
    ours, theirs = entry.speculative[0].counts.token_ids, entry.baseline[0].counts.token_ids
    place = {"prompt_id": entry.prompt.id}
    if not ours or not theirs:
        return place
    shorter = min(len(ours), len(theirs))
    position = next((index for index in range(shorter) if ours[index] != theirs[index]), shorter)
    tokens = {name: ids[position] if position < len(ids) else None for name, ids in (("ours", ours), ("theirs", theirs))}
    return {**place, "position": position, "speculative_token": tokens["ours"], "baseline_token": tokens["theirs"]}
