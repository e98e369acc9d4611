"""A few prompts of a report decoded again, with the weights that it is said to be of.

Records can be made up, weights cannot be made to decode them. On the processor that measured, with the same libraries, a draft proposes the
same tokens again, and the target accepts the same of them. Elsewhere sums round differently and near-ties fall otherwise, so that single
completions go other ways; there the acceptance length over all prompts that were decoded again must be the recorded one.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdistill.decoding.proposer import Proposer
from specdistill.engines import ENGINES
from specdistill.measurement.configurations import Settings
from specdistill.measurement.hardware import hardware, software
from specdistill.measurement.losslessness import greedy_check, sampling_test
from specdistill.measurement.measure import Runs, decode, decoder_for, in_batches, prompt_records
from specdistill.report.phrases import number, signed
from specdistill.statistics.intervals import relative_change
from specdistill.statistics.metrics import METRICS, prompt_sums, value
from specdistill.statistics.records import PromptRecord
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget

MOST_APART = 0.05  # relative change of the acceptance length that other rounding may make, over a few prompts
DECIDES_ROUNDING = ("device", "name", "count", "cpu", "cpu_threads")  # of `hardware`; and all of `software` but the platform
TIMES = ("speculative", "baseline", "hf_generate", "batch")  # of a record, which are never the same again


@dataclass(frozen=True)
class SpotCheck:
    """prompts: ids of those decoded again. is_exact: whether they had to be decoded the same, token for token.

    differences: what was not as recorded, in words. lossless: as in a report, of these prompts.
    """

    prompts: Sequence[str]
    is_exact: bool
    differences: Sequence[str]
    lossless: Mapping[str, Any]


def spot_check(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    settings: Settings,
    report: Mapping[str, Any],
    records: Sequence[PromptRecord],
    *,
    num_prompts: int,
) -> SpotCheck:
    """Decode `num_prompts` prompts of a report's main configuration again, in whole batches, and repeat its test of sampling.

    prompts, records: the configuration's, in the same order. First come those whose recorded completions with the draft and without differ,
    then any: who made up records does not know which.
    """
    by_server = records[0].counts is not None
    settings = replace(settings, batch_size=1) if by_server else settings
    batches = in_batches(prompts, settings.batch_size)
    odd = [batch for batch in batches if any(it.text != it.baseline_text for it in records[batch.start : batch.end])]
    others = [batch for batch in batches if batch not in odd]
    chosen = [*odd, *random.sample(others, len(others))][: -(-num_prompts // settings.batch_size)]

    runs: list[Runs] = []
    for batch in chosen:
        ways = [decode(decoder_for(target, settings, draft), batch, settings) for draft in (proposer, None)]
        runs += [Runs(prompt, None, [ours], [plain]) for prompt, ours, plain in zip(batch.prompts, *ways, strict=True)]
    recorded = [record for batch in chosen for record in records[batch.start : batch.end]]
    again = prompt_records(records[0].suite, records[0].configuration, target, proposer, runs)

    is_exact = rounds_alike(report, target, settings) and not by_server
    differences = list(_other_draft(report, proposer))
    differences += _other_rounds(again, recorded) if is_exact else _other_acceptance(again, recorded, report)
    lossless: dict[str, Any] = greedy_check(target, proposer, runs, settings)
    if test := report["lossless"].get("sampling_test"):
        tested = sampling_test(target, proposer, prompts, settings, num_draws=test["num_draws"])
        if isinstance(tested, str):
            differences.append(f"the test of sampling: {tested}")
        else:
            lossless["sampling_test"] = tested
    return SpotCheck([record.id for record in recorded], is_exact, differences, lossless)


def rounds_alike(report: Mapping[str, Any], target: FrozenTarget, settings: Settings) -> bool:
    """Whether decoding here rounds as it did where a report was measured, and draws the same numbers."""
    here, libraries = hardware(target.device), software()
    same_machine = all(report["hardware"].get(name) == here[name] for name in DECIDES_ROUNDING)
    same_libraries = all(report["software"].get(name) == libraries[name] for name in libraries.keys() - {"platform"})
    # Prompts that were added to one by one were sampled with seeds in the order in which they came.
    same_seeds = settings.sampling.is_greedy or not report["settings"].get("interim_analyses")
    return here["device"] == "cpu" and same_machine and same_libraries and same_seeds


def _other_draft(report: Mapping[str, Any], proposer: Proposer) -> Iterator[str]:
    stated = {name: report["draft"].get(name) for name in ("parameters", "bytes")}
    found = {"parameters": proposer.num_parameters, "bytes": proposer.num_bytes}
    for name, now in found.items():
        if stated[name] not in (None, now):  # a server does not say
            yield f"the report's draft has {stated[name]:,} {name}, this one {now:,}"
    if report["settings"].get("drafting") not in (None, _as_json(proposer.settings)):
        yield f"the report's draft was drafting with {report['settings']['drafting']}, this one with {dict(proposer.settings)}"


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _other_rounds(again: Sequence[PromptRecord], recorded: Sequence[PromptRecord]) -> Iterator[str]:
    nothing = dict.fromkeys(TIMES)
    for now, then in zip(again, recorded, strict=True):
        mine, theirs = ({**vars(record), **nothing} for record in (now, then))
        if mine == theirs:
            continue
        rounds = enumerate(zip(now.rounds, then.rounds, strict=False), start=1)
        place = next((f"in round {place}" for place, pair in rounds if pair[0] != pair[1]), "in its completion")
        yield f"{now.id} is decoded otherwise than recorded, {place}"


def _other_acceptance(
    again: Sequence[PromptRecord], recorded: Sequence[PromptRecord], report: Mapping[str, Any]
) -> Iterator[str]:
    metric, sums = METRICS["mean_acceptance_length"], [prompt_sums(records) for records in (again, recorded)]
    now, then = (value(metric, side) for side in sums)
    if now is None or then is None:
        if now != then:
            yield f"acceptance length {number(now)}, recorded {number(then)}"
        return
    change, bounds = relative_change(metric, *sums, seed=report["settings"]["seed"])
    low, high = bounds or (change, change)
    engine = ENGINES.get(report.get("engine", {}).get("name", ""))
    past_the_end = report["settings"]["num_speculative_tokens"] / sums[1]["num_drafts"].mean() if engine else 0.0
    if (low > 0 or high < 0) and abs(change) > MOST_APART + past_the_end:
        yield f"acceptance length {number(now)} over {len(again)} prompts, recorded {number(then)} ({signed(change)})"
