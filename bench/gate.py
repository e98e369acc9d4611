"""How often a regression rule passes, fails and cannot decide, against the true change of a draft and the number of prompts.

    python bench/gate.py        # writes docs/images/gate.svg and the tables of docs/gate.md from what bench/gate.json holds

bench/gate.json holds measurements; to replace them:

    specdistill compare target=… drafts=[…,…] suite=… output_dir=runs/compared
    python bench/gate.py comparisons=[runs/compared] before=NAME after=[NAME,…] again=[runs/report-1,runs/report-2]

`before` and each of `after` are two drafts on the same prompts; `again` is one draft, measured twice. A simulated release draws prompts
with replacement, keeps the measurements of both drafts, and changes the later one so that its true change over all measured prompts is
the one on the axis. The rule is that of eval/gates/release.yaml, decided by the gate's own code.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.pages import write_between
from specdistill.command import run
from specdistill.errors import ExitCode, UserError
from specdistill.gate.decide import Estimate, Verdict, holds
from specdistill.gate.rules import Rule, load_gate
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.report.files import read_report
from specdistill.report.text import table
from specdistill.statistics.intervals import relative_change
from specdistill.statistics.metrics import METRICS, PromptSums
from specdistill.statistics.records import PromptRecord

MEASURED = Path(__file__).with_suffix(".json")
PAGE, PICTURE = ROOT / "docs" / "gate.md", ROOT / "docs" / "images" / "gate.svg"
GATE = "release"
NUM_PROMPTS = {"mean_acceptance_length": (48, 128, 192, 384), "speedup": (48, 128, 192, 384)}
CHANGES = (-0.06, -0.05, -0.04, -0.03, -0.02, -0.01, 0.0, 0.01)
NUM_TRIALS, NUM_TRIALS_IN_TABLE = (
    20,
    150,
)  # simulated releases for a point of a curve, and for a number of the table
TIMED = ("num_tokens", "seconds", "baseline_num_tokens", "baseline_seconds")

Counts = NDArray[np.int64]
Table = NDArray[np.float64]
Chances = dict[Verdict, float]
Curve = dict[
    int, dict[float, Chances]
]  # number of prompts -> true change -> chance of each verdict


class Options(Section):
    comparisons: list[str] = option(
        [], "folders that specdistill compare left; none: what bench/gate.json holds"
    )
    before: str = option("", "the draft that is compared with, by its name in those folders")
    after: list[str] = option([], "the drafts that are compared with it")
    again: list[str] = option([], "two report folders of one draft on the same prompts")


@dataclass(frozen=True)
class Drafts:
    """Two drafts on the same P prompts: rounds_PA[p, a] is how many rounds of prompt p had a accepted tokens."""

    name: str
    before_PA: Counts
    after_PA: Counts
    metric: str = "mean_acceptance_length"

    def release(
        self, change: float, num_prompts: int, generator: np.random.Generator
    ) -> tuple[PromptSums, PromptSums]:
        """Prompt sums of (after, before) on prompts drawn with replacement; the true acceptance length changes by `change`."""
        wanted = (1 + change) * (1 + _mean(self.before_PA)) - (1 + _mean(self.after_PA))
        drawn = generator.integers(len(self.before_PA), size=num_prompts)
        return _accepted(shifted(self.after_PA, wanted, drawn, generator)), _accepted(
            self.before_PA[drawn]
        )


@dataclass(frozen=True)
class Timings:
    """One draft on the same P prompts, timed twice: [P, 4] of TIMED."""

    name: str
    first_PT: Table
    again_PT: Table
    metric: str = "speedup"

    def release(
        self, change: float, num_prompts: int, generator: np.random.Generator
    ) -> tuple[PromptSums, PromptSums]:
        """Prompt sums of (again, first) on prompts drawn with replacement; the second times are scaled to a true change of `change`."""
        drift = _speedup(self.again_PT) / _speedup(self.first_PT)
        drawn = generator.integers(len(self.first_PT), size=num_prompts)
        again = dict(zip(TIMED, self.again_PT[drawn].T, strict=True))
        again["seconds"] = again["seconds"] * drift / (1 + change)
        return again, dict(zip(TIMED, self.first_PT[drawn].T, strict=True))


def main(options: Options) -> ExitCode:
    if options.comparisons:
        MEASURED.write_text(json.dumps(read(options), ensure_ascii=False) + "\n", encoding="utf-8")
    rules = {rule.metric: rule for rule in load_gate(GATE) if rule.requirement == "max_regression"}
    populations = load(MEASURED)
    with ProcessPoolExecutor() as pool:
        curves = [curve(population, rules[population.metric], pool) for population in populations]
    draw(populations, curves, rules)
    each = zip(populations, curves, strict=True)
    shown = "\n\n".join(
        table_of(population, curve, rules[population.metric]) for population, curve in each
    )
    write_between(PAGE, "chances", shown)
    print(shown)
    return ExitCode.DONE


def load(path: Path) -> list[Drafts | Timings]:
    measured = json.loads(path.read_text(encoding="utf-8"))
    drafts = [
        Drafts(pair["name"], np.array(pair["before"]), np.array(pair["after"]))
        for pair in measured["drafts"]
    ]
    timings = [
        Timings(pair["name"], np.array(pair["first"]), np.array(pair["again"]))
        for pair in measured["timings"]
    ]
    return [*drafts, *timings]


def chances(
    population: Drafts | Timings,
    rule: Rule,
    change: float,
    num_prompts: int,
    *,
    trials: int,
    seed: int = 0,
) -> Chances:
    """The share of simulated releases that pass the rule, fail it, and leave it undecided."""
    generator = np.random.default_rng([seed, num_prompts])
    counts: Counter[Verdict] = Counter()
    for trial in range(trials):
        after, before = population.release(change, num_prompts, generator)
        estimate = Estimate(
            *relative_change(
                METRICS[rule.metric], after, before, confidence=rule.confidence, seed=trial
            )
        )
        counts[holds(rule, estimate)[0]] += 1
    return {verdict: counts[verdict] / trials for verdict in get_args(Verdict)}


def curve(population: Drafts | Timings, rule: Rule, pool: Executor) -> Curve:
    """The chances for each number of prompts and each true change."""
    points = list(itertools.product(NUM_PROMPTS[population.metric], CHANGES))
    trials = {
        change: NUM_TRIALS_IN_TABLE if change in (0.0, -float(rule.threshold)) else NUM_TRIALS
        for change in CHANGES
    }
    futures = [
        pool.submit(chances, population, rule, change, number, trials=trials[change])
        for number, change in points
    ]
    found: Curve = {}
    for (number, change), chance in zip(points, futures, strict=True):
        found.setdefault(number, {})[change] = chance.result()
    return found


def shifted(
    rounds_PA: Counts, wanted: float, drawn: NDArray[np.int64], generator: np.random.Generator
) -> Counts:
    """The drawn prompts' rounds, each that can accept one token more (less, for a negative `wanted`) doing so with the probability
    that moves the mean over all of `rounds_PA` by `wanted`.
    """
    chosen_PA = rounds_PA[drawn]
    movable = slice(0, -1) if wanted > 0 else slice(1, None)
    share = abs(wanted) * rounds_PA.sum() / rounds_PA[:, movable].sum()
    moved = generator.binomial(chosen_PA[:, movable], share)
    result = chosen_PA.copy()
    result[:, movable] -= moved
    result[:, slice(1, None) if wanted > 0 else slice(0, -1)] += moved
    return result


def draw(
    populations: Sequence[Drafts | Timings], curves: Sequence[Curve], rules: dict[str, Rule]
) -> None:
    """A panel for each population, a curve for each number of prompts."""
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "gate",
            "font.family": "sans-serif",
            "font.size": 9,
        }
    )
    figure = Figure(figsize=(3.6 * len(populations), 3.2), layout="constrained")
    panels = figure.subplots(1, len(populations), sharey=True, squeeze=False)[0]
    for panel, population, curve in zip(panels, populations, curves, strict=True):
        for shade, (num_prompts, found) in zip((0.25, 0.5, 0.75, 1.0), curve.items(), strict=True):
            percents, shares = (
                [100 * change for change in found],
                [each["passed"] for each in found.values()],
            )
            panel.plot(
                percents, shares, color=(0.1, 0.35, 0.6, shade), label=f"{num_prompts} prompts"
            )
        for stated in (0.0, -100 * float(rules[population.metric].threshold)):
            panel.axvline(stated, color="0.6", linewidth=0.8, linestyle=":")
        panel.set_title(f"{population.metric.replace('_', ' ')}:\n{population.name}", fontsize=9)
        panel.set_xlabel("true change in %")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="upper left", fontsize=7)
    panels[0].set_ylabel("chance to pass")
    figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")


def table_of(population: Drafts | Timings, curve: Curve, rule: Rule) -> str:
    """The rule and the population, and a table with a line for each number of prompts."""
    threshold = float(rule.threshold)
    rows = [
        (
            str(number),
            *(
                f"{found[change][verdict]:.1%}"
                for change in (0.0, -threshold)
                for verdict in get_args(Verdict)
            ),
        )
        for number, found in curve.items()
    ]
    states = ("no change", f"a true drop of {threshold:.0%}")
    head = (
        "prompts",
        *(f"{state}: {verdict}" for state in states for verdict in get_args(Verdict)),
    )
    return f"`{rule.metric}`, `max_regression: {threshold:g}`, {population.name}:\n\n{table(head, rows)}"


def read(options: Options) -> dict[str, Any]:
    """The content of bench/gate.json, from the folders of comparisons and reports."""
    if not options.before or not options.after or len(options.again) != 2:
        raise UserError(
            "comparisons",
            got="folders alone",
            expected="also before, after, and two folders in again",
        )
    before = _rounds(options.comparisons, options.before)
    drafts = [
        {
            "name": f"{options.before} to {name}",
            "before": before,
            "after": _rounds(options.comparisons, name),
        }
        for name in options.after
    ]
    first, again = (read_report(Path(folder), "again")[1] for folder in options.again)
    if [record.id for record in first] != [record.id for record in again]:
        raise UserError(
            "again",
            got="reports of different prompts",
            expected="one draft on the same prompts, twice",
        )
    timings = [
        {
            "name": "one draft, timed twice",
            "first": [_timed(one) for one in first],
            "again": [_timed(one) for one in again],
        }
    ]
    return {"drafts": drafts, "timings": timings}


def _rounds(folders: Sequence[str], name: str) -> list[list[int]]:
    records = [
        record
        for folder in folders
        for record in read_report(Path(folder) / name, "comparisons")[1]
    ]
    k = max(len(entry.drafted) for record in records for entry in record.rounds)
    return [
        [
            sum(len(entry.accepted) == a for entry in record.rounds if entry.drafted)
            for a in range(k + 1)
        ]
        for record in records
    ]


def _timed(record: PromptRecord) -> list[float]:
    sides = (record.speculative, record.baseline)
    return [number for side in sides for number in (side.num_tokens, round(side.seconds, 6))]


def _mean(rounds_PA: Counts) -> float:
    return float((rounds_PA @ np.arange(rounds_PA.shape[1])).sum() / rounds_PA.sum())


def _accepted(rounds_PA: Counts) -> PromptSums:
    accepted = rounds_PA @ np.arange(rounds_PA.shape[1])
    return {
        "num_accepted_tokens": accepted.astype(np.float64),
        "num_drafts": rounds_PA.sum(axis=1).astype(np.float64),
    }


def _speedup(times_PT: Table) -> float:
    return float(METRICS["speedup"].formula(*times_PT.sum(axis=0)))


if __name__ == "__main__":
    sys.exit(run(main, Options))
