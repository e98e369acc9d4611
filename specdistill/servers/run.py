"""A suite measured on a running server, and on a second one without a draft: the report of another engine.

Requests are sent one at a time, alternating between the servers, and every repetition goes through all prompts again. The report says
what a server does not show. When a server fails after the first answers, these are kept.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specdistill.engines import ENGINES
from specdistill.engines.server import Client, Completion, Identity, Request, Server
from specdistill.errors import ResourceError, UserError
from specdistill.measurement.configurations import Settings
from specdistill.measurement.losslessness import first_difference
from specdistill.progress import progress
from specdistill.project import git_revision
from specdistill.report.build import build_report, headline, result_rows
from specdistill.statistics.records import Configuration, PromptRecord, Timing
from specdistill.suites.suite import Prompt, Suite, evenly

SETTINGS = ("max_new_tokens", "tree", "batch_size", "seed", "warmup", "repeats")  # shown in the report, in this order

# Why numbers are missing from the report of a server
HIDDEN = "a server does not time its steps one by one"
SUMS = "a server counts over whole outputs, not round by round"
UNSAID = "a server does not say"
NO_LOGITS = "a server returns no logits that would tell a near-tie from a mistake"
NO_BASELINE = "no eval.baseline_server was given"
NO_HF = "transformers' generate() is not timed beside a server"
ROW_REASONS = {
    **dict.fromkeys(("draft_ms", "verify_ms", "baseline_step_ms", "predicted_speedup", "prediction_gap"), HIDDEN),
    **dict.fromkeys(("num_rounds", "tokens_per_round", "context_ratio"), SUMS),
    **dict.fromkeys(("hf_generate_tokens_per_second", "hf_generate_num_prompts"), NO_HF),
    **dict.fromkeys(("baseline_over_hf_generate", "speedup_over_hf_generate"), NO_HF),
    "decode_speedup": "a server answers with the whole output: its prefill is not timed apart",
    "num_looping": "the server does not return its tokens",
    "vocabulary_coverage": "a server does not tell its draft's vocabulary",
}
NO_BASELINE_ROW = dict.fromkeys(("baseline_tokens_per_second", "speedup", "overhead_factor"), NO_BASELINE)
DOCUMENT_REASONS = {
    "theory": HIDDEN,
    "context": SUMS,
    "lossless.sampling_test": "a server cannot be given the rule that the test must reject",
    "hardware": "a server does not say what it runs on",
    **dict.fromkeys(("target.parameters", "target.dtype", "draft.parameters", "draft.bytes"), UNSAID),
    **dict.fromkeys(("measurement.peak_memory_bytes", "settings.draft_sampling"), UNSAID),
}


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


Answers = tuple[Prompt, list[list[Completion]]]  # all repetitions of one prompt, by each peer


def connect(
    engine: str, address: str | None, baseline_address: str | None, *, target: Sequence[str], k: int, timeout: float
) -> list[Peer]:
    """The server with a draft and, if it has an address, the one without.

    target: its possible names, a folder or Hub id last. Raises UserError when they serve another model, draft another number of tokens,
    draft where they should not, or have different versions; ResourceError when they do not answer.
    """
    if address is None:
        raise UserError("eval.server", got="nothing", expected=f"the address of a running {engine} server")
    speculative = _connect(engine, address, "eval.server", target, timeout)
    served_k, served_version = speculative.identity.num_speculative_tokens, speculative.identity.version
    if served_k is None:
        raise UserError("eval.server", got=f"{address}, which does not draft", expected="a server started with a draft")
    if served_k != k:
        raise UserError("eval.num_speculative_tokens", got=k, expected=f"{served_k}, as the server at {address} drafts")
    if baseline_address is None:
        return [speculative]
    key = "eval.baseline_server"
    baseline = _connect(engine, baseline_address, key, target, timeout)
    if baseline.identity.num_speculative_tokens is not None:
        raise UserError(key, got=f"{baseline_address}, which drafts", expected="a server started without a draft")
    if baseline.identity.version != served_version:
        raise UserError(key, got=f"{engine} {baseline.identity.version}", expected=f"{served_version}, as eval.server runs")
    return [speculative, baseline]


def evaluate_server(
    peers: Sequence[Peer],
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
    answers, failure = _measure(peers, prompts, settings)
    complete = [entry for entry in answers if all(entry[1])]
    if failure is not None and not complete:
        raise failure
    (peer, *others), configuration = peers, settings.configuration
    records = [_record(suite.name, configuration, tokenizer, *entry) for entry in complete]
    reasons = {**ROW_REASONS, **({} if others else NO_BASELINE_ROW)}
    rows = result_rows(records, suite, configuration, seed=settings.seed, reasons=reasons)
    lossless, not_compared = _compare(complete, bool(others), settings)
    gauges = peer.client.gauges(peer.server) if failure is None else {}
    report = build_report(
        target=target,
        draft=draft,
        hardware={"device": "server", "name": peer.server.address},
        software={
            "python": platform.python_version(),
            "transformers": version("transformers"),
            peer.engine: peer.identity.version,
        },
        settings={
            "num_speculative_tokens": settings.num_speculative_tokens,
            **vars(settings.sampling),
            **{name: getattr(settings, name) for name in SETTINGS},
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
            "name": peer.engine,
            "version": peer.identity.version,
            "server": peer.server.address,
            "baseline_server": others[0].server.address if others else None,
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
    peers: Sequence[Peer], prompts: Sequence[Prompt], settings: Settings
) -> tuple[list[Answers], ResourceError | None]:
    """Every prompt `repeats` times on each server, and the error that ended it early, if one did."""
    answers: list[Answers] = [(prompt, [[] for _ in peers]) for prompt in prompts]
    try:
        with progress("Measuring", settings.warmup + settings.repeats * len(prompts), "prompts") as advance:
            for index, prompt in enumerate(evenly(prompts, [prompt.category for prompt in prompts], settings.warmup)):
                for peer in peers:
                    peer.complete(prompt, settings, settings.seed + index)
                advance()
            for repeat in range(settings.repeats):
                for index, (prompt, completions) in enumerate(answers):
                    sides = list(zip(peers, completions, strict=True))
                    for peer, own in sides if (repeat + index) % 2 else reversed(sides):
                        own.append(peer.complete(prompt, settings, settings.seed + index))
                    advance()
    except ResourceError as error:
        return answers, error
    return answers, None


def _record(
    suite: str, configuration: Configuration, tokenizer: Any, prompt: Prompt, completions: list[list[Completion]]
) -> PromptRecord:
    """The repetition of median speed of each side; its tokens, counts and seconds belong together."""
    medians = [_median(own) for own in completions]
    timings = [Timing(chosen.num_tokens, None, chosen.seconds) for chosen in medians]
    texts = [_text(tokenizer, chosen) for chosen in medians]
    return PromptRecord(
        suite=suite,
        configuration=configuration,
        id=prompt.id,
        category=prompt.category,
        num_prompt_tokens=len(prompt.token_ids),
        prompt=prompt.text,
        text=texts[0],
        first_token=None,
        first_token_text="",
        rounds=(),
        speculative=timings[0],
        baseline=timings[1] if len(timings) > 1 else None,
        baseline_text=texts[1] if len(texts) > 1 else None,
        counts=medians[0].counts,
    )


def _median(completions: Sequence[Completion]) -> Completion:
    ordered = sorted(completions, key=lambda completion: completion.seconds / completion.num_tokens)
    return ordered[(len(ordered) - 1) // 2]


def _text(tokenizer: Any, completion: Completion) -> str:
    """Decoded from its tokens where the server returns them: its own text lacks the stop token."""
    ids = completion.counts.token_ids
    return str(tokenizer.decode(ids, skip_special_tokens=False)) if ids else completion.text


def _compare(answers: Sequence[Answers], has_baseline: bool, settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """The report's `lossless`, and reasons for what it lacks. Greedy outputs of both servers are compared by tokens, or else by text."""
    if not has_baseline or not settings.sampling.is_greedy:
        reason = "sampled outputs differ by chance" if has_baseline else NO_BASELINE
        return {"prompts_checked": 0}, dict.fromkeys(("lossless.greedy_identical", "lossless.unexplained_divergences"), reason)
    divergences = [found for entry in answers if (found := _divergence(*entry))]
    lossless = {
        "greedy_identical": not divergences,
        "prompts_checked": len(answers),
        "divergences": len(divergences),
        "first_divergence": divergences[0] if divergences else None,
    }
    if not divergences:
        return {**lossless, "near_ties": 0, "unexplained_divergences": 0}, {}
    return lossless, dict.fromkeys(("lossless.near_ties", "lossless.unexplained_divergences"), NO_LOGITS)


def _divergence(prompt: Prompt, completions: list[list[Completion]]) -> dict[str, Any] | None:
    """The prompt whose outputs differ, and where, if both servers return their tokens."""
    with_draft, plain = (own[0] for own in completions)
    ours, theirs = with_draft.counts.token_ids, plain.counts.token_ids
    if not ours or not theirs:
        return {"prompt_id": prompt.id} if with_draft.text != plain.text else None
    if ours == theirs:
        return None
    position, our_token, their_token = first_difference(ours, theirs)
    return {"prompt_id": prompt.id, "position": position, "speculative_token": our_token, "baseline_token": their_token}
