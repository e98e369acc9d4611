"""Simulated measurements: records with known acceptance and step costs, and their reports.

No model is involved.
"""

import copy
import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdistill.evaluation.comparison.compare import Measured
from specdistill.evaluation.report.build import (
    build_context_rows,
    build_report,
    build_result_rows,
    build_theory,
    select_headline,
)
from specdistill.evaluation.statistics.records import (
    Configuration,
    HFGenerate,
    PromptRecord,
    RoundRecord,
    Timing,
)
from specdistill.evaluation.statistics.theory import RoundCost
from specdistill.evaluation.suites import suite as suites
from specdistill.evaluation.suites.suite import Suite
from specdistill.serving.engines.client import ServerCounts

CATEGORIES = ("function", "docstring", "chat", "long_context")
WORDS = re.findall(r"\s*\w+|\s*[^\w\s]+", inspect.getsource(suites))
IDS = {word: number for number, word in enumerate(WORDS)}
PLAIN_STEP, VERIFY_STEP, DRAFT_STEP, PREFILL = 2.5e-3, 3.2e-3, 0.3e-3, 8e-3  # seconds
SUITE = Suite("simulated", "1", "CC0-1.0", "made up", "0" * 64, ())


def simulate(
    num_prompts: int = 48,
    *,
    conditional: Sequence[float] = (0.75, 0.72, 0.68, 0.65),
    num_rounds: int = 40,
    draft_step: float = DRAFT_STEP,
    verify_step: float = VERIFY_STEP,
    noise: float = 0.01,
    seed: int = 0,
    timing_seed: int = 1,
) -> list[PromptRecord]:
    """Return prompts whose drafts of len(conditional) tokens are accepted with these rates.

    `noise`: relative spread of a prompt's times. The same `seed` gives the same prompts with the
    same texts; a prompt's own difficulty shifts all its rates.
    """
    steps, seeds = (draft_step, verify_step), (seed, timing_seed)
    return [
        _record(number, conditional, num_rounds, steps, noise, seeds)
        for number in range(num_prompts)
    ]


def _record(
    number: int,
    conditional: Sequence[float],
    num_rounds: int,
    steps: tuple[float, float],
    noise: float,
    seeds: tuple[int, int],
) -> PromptRecord:
    text, clock = (np.random.default_rng([seed, number]) for seed in seeds)
    draft_step, verify_step = steps
    category = CATEGORIES[number % len(CATEGORIES)]
    difficulty = text.normal(0, 0.05)
    start = int(text.integers(len(WORDS)))
    words = iter(WORDS[start:] + WORDS)
    rounds = []
    for _ in range(num_rounds):
        accepted = 0
        draws = text.uniform(size=len(conditional))
        while accepted < len(conditional) and draws[accepted] < conditional[accepted] + difficulty:
            accepted += 1
        emitted_text = tuple(next(words) for _ in range(accepted + 1))
        wrong = tuple(
            WORDS[number] for number in text.integers(len(WORDS), size=len(conditional) - accepted)
        )
        emitted = tuple(IDS[word] for word in emitted_text)
        drafted_text = (*emitted_text[:accepted], *wrong)
        drafted = tuple(IDS[word] for word in drafted_text)
        rounds.append(RoundRecord(drafted, drafted_text, emitted[:accepted], emitted, emitted_text))
    num_tokens = 1 + sum(len(entry.emitted) for entry in rounds)
    return PromptRecord(
        suite=SUITE.name,
        configuration=Configuration(len(conditional)),
        id=f"{category}-{number // len(CATEGORIES):02}",
        category=category,
        num_prompt_tokens=310 if category == "long_context" else 60,
        prompt="def simulated(number):\n    ",
        text="".join(["return", *(piece for entry in rounds for piece in entry.emitted_text)]),
        first_token=0,
        first_token_text="return",
        rounds=tuple(rounds),
        speculative=_timing(
            num_tokens,
            num_rounds,
            len(conditional) * draft_step,
            verify_step,
            clock.normal(1, noise),
        ),
        baseline=_timing(num_tokens, num_tokens - 1, 0.0, PLAIN_STEP, clock.normal(1, noise)),
        hf_generate=HFGenerate(num_tokens, num_tokens * PLAIN_STEP * 1.1) if number < 12 else None,
        num_in_draft_vocabulary=num_tokens,
    )


def _timing(num_tokens: int, num_rounds: int, draft: float, verify: float, noise: float) -> Timing:
    seconds = (PREFILL + num_rounds * (draft + verify) * 1.02) * noise
    return Timing(
        num_tokens,
        num_rounds,
        seconds,
        PREFILL,
        num_rounds * draft * noise,
        num_rounds * verify * noise,
    )


def round_costs(k: int) -> list[RoundCost]:
    """Return costs of rounds that get cheaper by a tenth of a plain step with each token less."""
    return [
        RoundCost(n, 1000 * (VERIFY_STEP - (k - n) * PLAIN_STEP / 10), 1000 * n * DRAFT_STEP)
        for n in range(1, k + 1)
    ]


def simulated_report(
    records: Sequence[PromptRecord], *, k: int = 4, temperature: float = 0.0, **changes: Any
) -> dict[str, Any]:
    """Return the report of simulated records, not yet judged.

    `changes` replace arguments of `build_report`.
    """
    rows = build_result_rows(records, SUITE, Configuration(k, temperature), seed=0)
    lossless = {
        "greedy_identical": True,
        "prompts_checked": len(records),
        "first_divergence": None,
        "divergences": 0,
        "near_ties": 0,
        "unexplained_divergences": 0,
        "sampling_test": {
            "statistic": 7.1,
            "p_value": 0.42,
            "negative_control_p_value": 3e-9,
            "num_cells": 8,
            "num_draws": 400,
            "prompt_id": "function-00",
            "num_prompt_tokens": 12,
        },
    }
    parts: dict[str, Any] = {
        "target": {"model": "pico", "revision": None, "dtype": "float32", "parameters": 3_700_000},
        "draft": {
            "model": "runs/demo/draft",
            "revision": None,
            "method": "eagle3",
            "parameters": 410_000,
            "bytes": 1_640_000,
        },
        "hardware": {
            "device": "cpu",
            "name": "AMD EPYC 9B45",
            "count": 1,
            "memory_bytes": 24 * 2**30,
            "cpu": "AMD EPYC 9B45",
            "cpu_cores": 2,
            "cpu_threads": 2,
        },
        "software": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        "settings": {
            "num_speculative_tokens": k,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_new_tokens": 128,
            "tree": None,
            "draft_sampling": "greedy",
            "batch_size": 1,
            "seed": 0,
            "warmup": 2,
            "repeats": 3,
        },
        "suite": SUITE,
        "results": rows,
        "context": build_context_rows(records),
        "headline": select_headline(rows, records),
        "theory": build_theory(rows[0], round_costs(k), lambda k: k),
        "lossless": lossless,
        "not_measured": {},
        "git_revision": "0123456789abcdef",
    }
    return build_report(**{**parts, **changes})


def simulated_sweep(report: dict[str, Any], num_prompts: int = 24) -> dict[str, Any]:
    """Return the report with the rows of a sweep around its own configuration.

    The sweep is over K, temperature, batch and prompt length.
    """
    rates = (0.75, 0.72, 0.68, 0.65, 0.6, 0.55, 0.5, 0.5)
    configurations = {
        **{
            Configuration(k): (rates[:k], VERIFY_STEP + (k - 4) * PLAIN_STEP / 10)
            for k in (1, 2, 6, 8)
        },
        **{
            Configuration(4, t): (tuple(rate - t / 10 for rate in rates[:4]), VERIFY_STEP)
            for t in (0.8, 1.0)
        },
        **{
            Configuration(4, batch_size=size): (rates[:4], VERIFY_STEP * (1 + size / 10))
            for size in (2, 4, 8)
        },
        **{
            Configuration(4, context_bucket=str(size)): (rates[:4], VERIFY_STEP)
            for size in (64, 128)
        },
    }
    rows = [
        row
        for configuration, (conditional, verify_step) in configurations.items()
        for row in build_result_rows(
            simulate(num_prompts, conditional=conditional, verify_step=verify_step),
            SUITE,
            configuration,
            seed=0,
        )
    ]
    return {**report, "results": [*report["results"], *rows]}


def simulated_candidate(
    name: str,
    *,
    parameters: int = 410_000,
    training: dict[str, Any] | None = None,
    unexplained: int = 0,
    **simulation: Any,
) -> Measured:
    """Return a draft of a comparison.

    `unexplained`: greedy completions that differ from plain decoding. `simulation`: arguments of
    `simulate`.
    """
    records = simulate(**simulation)
    report = simulated_report(records, k=len(records[0].rounds[0].drafted))
    report["draft"] |= {"model": f"runs/{name}", "parameters": parameters, "bytes": 4 * parameters}
    report["lossless"] |= {
        "greedy_identical": not unexplained,
        "unexplained_divergences": unexplained,
        "divergences": unexplained,
    }
    return Measured(name, training, report, records)


def edited(document: Any, path: Sequence[str | int], value: Any) -> Any:
    """Return a copy of a document with another value at a path."""
    copied = place = copy.deepcopy(document)
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return copied


def with_text(record: PromptRecord, text: str) -> PromptRecord:
    """Return the first rounds of a record, with this text in place of every text in it."""
    rounds = tuple(
        replace(
            entry,
            emitted_text=(text,) * len(entry.emitted),
            drafted_text=(text,) * len(entry.drafted),
        )
        for entry in record.rounds[:3]
    )
    names = {"id": text + record.id, "prompt": text, "text": text, "first_token_text": text}
    return replace(record, rounds=rounds, **names)


def in_batches(records: Sequence[PromptRecord], size: int) -> list[PromptRecord]:
    """Return the same prompts decoded together.

    Each has an equal share of its batch's times.
    """
    found = []
    for number, record in enumerate(records):
        batch = records[number // size * size :][:size]
        timings = {
            side: replace(
                getattr(record, side),
                seconds=sum(getattr(one, side).seconds for one in batch) / len(batch),
            )
            for side in ("speculative", "baseline")
        }
        found.append(replace(record, batch=number // size, **timings))
    return found


def as_from_server(record: PromptRecord, *, with_baseline: bool = True) -> PromptRecord:
    """Return the same text, with what a server tells of it in place of its rounds."""
    longest = max(len(entry.drafted) for entry in record.rounds)
    accepted = [len(entry.accepted) for entry in record.rounds]
    counts = ServerCounts(
        token_ids=record.token_ids,
        num_drafts=len(record.rounds),
        num_draft_tokens=sum(len(entry.drafted) for entry in record.rounds),
        num_accepted_tokens=sum(accepted),
        accepted_per_position=tuple(
            sum(count > position for count in accepted) for position in range(longest)
        ),
    )
    speculative = Timing(
        record.speculative.num_tokens, len(record.rounds), record.speculative.seconds
    )
    baseline = (
        Timing(record.baseline.num_tokens, None, record.baseline.seconds) if with_baseline else None
    )
    return replace(
        record,
        rounds=(),
        first_token=None,
        first_token_text="",
        speculative=speculative,
        baseline=baseline,
        hf_generate=None,
        num_in_draft_vocabulary=None,
        counts=counts,
    )
