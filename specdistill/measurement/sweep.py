"""A sweep: the main setting, and around it every other value of one setting at a time.

One axis at a time, not the grid: a reader asks what K, the temperature, the batch or the context change about the setting they serve,
and a grid of the same values costs their product.

Each configuration is measured by itself, against a baseline of its own. A finished configuration is on disk at once, under a fingerprint of everything that
it depends on, so that a sweep that was killed goes on where it was; another draft, target, suite, setting or machine has another
fingerprint and is measured anew.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdistill.decoding.batch_decoder import BatchDecoder
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.errors import ResourceError, UserError
from specdistill.measurement.environment import begin, measurement
from specdistill.measurement.losslessness import compare_greedy
from specdistill.measurement.measure import Runs, Settings, greedy_pairs, measure, progress, records
from specdistill.statistics.interim import interim_sizes, reached_precision, spread_out
from specdistill.statistics.records import PromptRecord, read_record
from specdistill.suites.suite import Prompt, Suite
from specdistill.targets.frozen import FrozenTarget

FINGERPRINT_DIGITS = 32


@dataclass(frozen=True)
class Plan:
    """A configuration to be measured: its settings, and the prompts as that configuration cuts them.

    target_precision: stop once the acceptance length and the speedup are known to this share of them, either way; None measures every prompt.
    Raises UserError when there are fewer prompts than a batch holds.
    """

    settings: Settings
    prompts: Sequence[Prompt]
    target_precision: float | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) < self.settings.batch_size:
            got = f"{self.settings.batch_size} for {len(self.prompts)} prompts"
            raise UserError("eval.batch_size", got=got, expected="at most as many as there are prompts")


@dataclass(frozen=True)
class MeasuredConfiguration:
    """A measured configuration.

    lossless: the greedy part of the report's `lossless`; None where sampled texts were not decoded greedily as well.
    took: its seconds and peak_memory_bytes.
    """

    records: list[PromptRecord]
    lossless: dict[str, Any] | None
    took: dict[str, Any]


def plan_configurations(
    main: Plan,
    *,
    num_speculative_tokens: Sequence[int] = (),
    temperatures: Sequence[float] = (),
    batch_sizes: Sequence[int] = (),
    trees: Sequence[StaticTree | DynamicTree] = (),
    contexts: Mapping[int, Sequence[Prompt]] | None = None,
) -> list[Plan]:
    """The main configuration, then those of each axis in the order of its values; a value that is the main configuration's own is not measured twice.

    Other K are chains, also where the main configuration drafts trees. contexts: tokens that prompts were cut to -> those prompts.
    """
    settings = main.settings
    others = [
        *((replace(settings, num_speculative_tokens=k, tree=None), main.prompts) for k in num_speculative_tokens),
        *((replace(settings, sampling=replace(settings.sampling, temperature=t)), main.prompts) for t in temperatures),
        *((replace(settings, batch_size=size), main.prompts) for size in batch_sizes),
        *((replace(settings, num_speculative_tokens=tree.depth, tree=tree), main.prompts) for tree in trees),
        *((replace(settings, context_bucket=str(bucket)), cut) for bucket, cut in (contexts or {}).items()),
    ]
    plans = [main]
    for other, prompts in others:
        if other.configuration not in [plan.settings.configuration for plan in plans]:
            plans.append(Plan(other, prompts, main.target_precision))
    return plans


def measure_configurations(
    target: FrozenTarget,
    proposer: Proposer,
    suite: Suite,
    plans: Sequence[Plan],
    *,
    identity: Mapping[str, Any],
    folder: Path,
) -> list[MeasuredConfiguration]:
    """Every configuration in turn, those that `folder` holds from an earlier run left as they are.

    identity: what a measurement depends on beside settings and prompts, as JSON. Raises UserError when some configuration's batches cannot be,
    ResourceError when the disk fails.
    """
    if any(plan.settings.batch_size > 1 for plan in plans):
        BatchDecoder(target, proposer)  # what cannot be batched is refused before anything is measured
    results = []
    with progress("configurations", len(plans)) as advance:
        for number, plan in enumerate(plans):
            path = folder / f"{fingerprint(plan, identity)}.json"
            if not path.exists():
                begun = begin(target.device)
                runs = _measure(target, proposer, suite, plan)
                _keep(finish(target, proposer, suite, plan, runs, begun, check_sampled=number == 0), path)
            results.append(_kept(path))
            advance()
    return results


def _measure(target: FrozenTarget, proposer: Proposer, suite: Suite, plan: Plan) -> list[Runs]:
    """The runs of all prompts, or of as many as it takes until they are sharp enough: batches as they were, single ones in the suite's
    order.
    """
    if plan.target_precision is None:
        return measure(target, proposer, plan.prompts, plan.settings)
    seed, size = plan.settings.seed, plan.settings.batch_size
    order = spread_out([prompt.category for prompt in plan.prompts], seed)
    runs: list[Runs] = []
    for least in interim_sizes(len(order)):
        upto = math.ceil(least / size) * size  # whole batches
        fresh = [plan.prompts[index] for index in order[len(runs) : upto]]
        warmup = 0 if runs else plan.settings.warmup
        # The seed goes on, so that no two prompts of the run are sampled with one.
        runs += measure(target, proposer, fresh, replace(plan.settings, seed=seed + len(runs), warmup=warmup))
        if reached_precision(
            records(suite.name, plan.settings.configuration, target, proposer, runs), plan.target_precision, seed
        ):
            break
    return runs if size > 1 else [run for _, run in sorted(zip(order, runs, strict=False), key=lambda pair: pair[0])]


def finish(
    target: FrozenTarget,
    proposer: Proposer,
    suite: Suite,
    plan: Plan,
    runs: Sequence[Runs],
    begun: float,
    *,
    check_sampled: bool = True,
) -> MeasuredConfiguration:
    """A configuration from its runs, which began at `begun`; `check_sampled` decodes sampled texts greedily as well, to compare them."""
    checked = check_sampled or plan.settings.sampling.is_greedy
    lossless = compare_greedy(target, greedy_pairs(target, proposer, runs, plan.settings)) if checked else None
    found = records(suite.name, plan.settings.configuration, target, proposer, runs)
    return MeasuredConfiguration(found, lossless, measurement(target.device, begun))


def fingerprint(plan: Plan, identity: Mapping[str, Any]) -> str:
    """A hash of all that the plan's records depend on."""
    prompts = [(prompt.id, prompt.category, prompt.token_ids) for prompt in plan.prompts]
    said = json.dumps([identity, asdict(plan.settings), plan.target_precision, prompts], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def folder_fingerprint(folder: Path) -> str:
    """A hash of the names and contents of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:FINGERPRINT_DIGITS]


def _keep(configuration: MeasuredConfiguration, path: Path) -> None:
    """Whole or not at all: a file that stands under its name is finished."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(configuration)), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise ResourceError(f"could not write {path} ({error.strerror})", next_step="free the disk and start again") from error


def _kept(path: Path) -> MeasuredConfiguration:
    found = json.loads(path.read_text(encoding="utf-8"))
    return MeasuredConfiguration([read_record(row) for row in found["records"]], found["lossless"], found["took"])
