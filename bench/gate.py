"""Simulate how often a regression rule passes, fails and cannot decide.

The chances depend on the true change of a draft and on the number of prompts.

    # writes docs/images/gate.svg and the tables of docs/gate.md from the data in bench/gate.json
    python bench/gate.py

bench/gate.json holds measurements: `drafts` are pairs of two drafts on the same prompts, `timings`
is one draft that was timed twice. A simulated release draws prompts with replacement and keeps the
measurements of both drafts. It changes the later ones so that the true change over all measured
prompts is the one on the axis. The rule is from eval/gates/release.yaml, and the gate's own code
decides it.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.pages import write_between
from specdistill.common.errors import ExitCode
from specdistill.common.project import ROOT
from specdistill.evaluation.gate.decide import Estimate, Verdict, compare_with_threshold
from specdistill.evaluation.gate.rules import Rule, load_gate
from specdistill.evaluation.report.text import format_table
from specdistill.evaluation.statistics.intervals import compute_relative_change
from specdistill.evaluation.statistics.metrics import METRICS, PromptSums

MEASUREMENTS_FILE = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "gate.md"
PICTURE = ROOT / "docs" / "images" / "gate.svg"
GATE = "release"

# The numbers of prompts that are simulated, for each metric. A curve and a row of the table are
# made for each.
NUM_PROMPTS = {"mean_acceptance_length": (48, 128, 192, 384), "speedup": (48, 128, 192, 384)}

# The true relative changes at which the curves are computed.
CHANGES = (-0.06, -0.05, -0.04, -0.03, -0.02, -0.01, 0.0, 0.01)
# The simulated releases for each point of a curve, and for each point that the table shows too.
# More of them make the chances more precise and take longer.
NUM_TRIALS = 20
NUM_TRIALS_IN_TABLE = 150

# The columns of a table of timings: the sums that the speedup is computed from.
TIMING_COLUMNS = ("num_tokens", "seconds", "baseline_num_tokens", "baseline_seconds")

Counts = NDArray[np.int64]
Table = NDArray[np.float64]
Chances = dict[Verdict, float]
# Number of prompts -> true change -> chance of each verdict.
Curve = dict[int, dict[float, Chances]]


@dataclass(frozen=True)
class Drafts:
    """The acceptance of two drafts on the same P prompts.

    Attributes:
        name: what the drafts are, for captions.
        before_PA: [P, A], the rounds of the earlier draft: entry [p, a] is the number of rounds of
            prompt p that accepted a tokens, where a is from 0 to A - 1.
        after_PA: [P, A], the rounds of the later draft, counted in the same way.
        metric: the metric that the rule compares.
    """

    name: str
    before_PA: Counts
    after_PA: Counts
    metric: str = "mean_acceptance_length"

    def release(
        self, change: float, num_prompts: int, generator: np.random.Generator
    ) -> tuple[PromptSums, PromptSums]:
        """Simulate the measurements of a release whose acceptance length changes by `change`.

        Args:
            change: the true relative change of the acceptance length, over all measured prompts.
            num_prompts: the number of prompts to draw, with replacement.
            generator: draws the prompts, and the rounds that change.

        Returns:
            The sums of each drawn prompt, for the later and for the earlier draft. The gate
            computes the acceptance length from them.
        """
        # The acceptance length is 1 + accepted tokens per round. Find by how many accepted tokens
        # per round the later draft has to change.
        length_before = 1 + _compute_mean_accepted(self.before_PA)
        length_after = 1 + _compute_mean_accepted(self.after_PA)
        wanted_change = (1 + change) * length_before - length_after

        # Draw prompts, and change the later draft's rounds of these prompts.
        drawn = generator.integers(len(self.before_PA), size=num_prompts)
        shifted_rounds = shift_rounds(self.after_PA, wanted_change, drawn, generator)
        return _sum_accepted(shifted_rounds), _sum_accepted(self.before_PA[drawn])


@dataclass(frozen=True)
class Timings:
    """The times of one draft on the same P prompts, measured twice.

    Attributes:
        name: what the draft is, for captions.
        first_PT: [P, 4], the columns of TIMING_COLUMNS, in the first measurement.
        again_PT: [P, 4], in the second measurement.
        metric: the metric that the rule compares.
    """

    name: str
    first_PT: Table
    again_PT: Table
    metric: str = "speedup"

    def release(
        self, change: float, num_prompts: int, generator: np.random.Generator
    ) -> tuple[PromptSums, PromptSums]:
        """Simulate the timings of a release whose true speedup changes by `change`.

        One draft was measured twice. The first measurement stands for the earlier draft, and the
        second for the released draft. The seconds of the second are scaled so that its speedup over
        all measured prompts is exactly 1 + `change` times that of the first.

        Args:
            change: the true relative change of the speedup.
            num_prompts: the number of prompts to draw, with replacement.
            generator: draws the prompts.

        Returns:
            The sums of each drawn prompt, of the second and of the first measurement. The gate
            computes the speedup from them.
        """
        # The draft is the same, but by chance the two speedups differ a little. Multiplying the
        # seconds by their ratio removes this difference, so that only `change` is left.
        drift = _compute_speedup(self.again_PT) / _compute_speedup(self.first_PT)
        drawn = generator.integers(len(self.first_PT), size=num_prompts)
        second_sums = dict(zip(TIMING_COLUMNS, self.again_PT[drawn].T, strict=True))
        second_sums["seconds"] = second_sums["seconds"] * drift / (1 + change)
        first_sums = dict(zip(TIMING_COLUMNS, self.first_PT[drawn].T, strict=True))
        return second_sums, first_sums


def main() -> ExitCode:
    """Simulate how often releases pass their gate; write the picture and tables of docs/gate.md.

    A population is a set of measured prompts. A simulated release draws its prompts from one
    population.
    """
    # Only rules that compare with an earlier report are simulated.
    rules = {rule.metric: rule for rule in load_gate(GATE) if rule.requirement == "max_regression"}
    populations = load(MEASUREMENTS_FILE)
    with ProcessPoolExecutor() as pool:
        curves = [
            compute_curve(population, rules[population.metric], pool) for population in populations
        ]

    # Write the picture and the tables of docs/gate.md.
    draw(populations, curves, rules)
    tables = []
    for population, curve in zip(populations, curves, strict=True):
        tables.append(format_population(population, curve, rules[population.metric]))
    text = "\n\n".join(tables)
    write_between(PAGE, "chances", text)
    print(text)
    return ExitCode.DONE


def load(path: Path) -> list[Drafts | Timings]:
    """Read the measurements of bench/gate.json."""
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


def simulate_releases(
    population: Drafts | Timings,
    rule: Rule,
    change: float,
    num_prompts: int,
    *,
    trials: int,
    seed: int = 0,
) -> Chances:
    """Simulate releases, and return the share of each verdict: passed, failed or inconclusive.

    A release is a new draft that replaces an earlier one. To simulate it, prompts are drawn with
    replacement from measured prompts. The measurements of the new draft are then adjusted so that
    the true change is `change`.

    Args:
        population: the measured prompts, with two measurements of each: one for the earlier draft
            and one for the new draft.
        rule: the rule of the gate that decides.
        change: the true relative change of the rule's metric, e.g. -0.05 for 5 % worse.
        num_prompts: prompts of a release.
        trials: the number of simulated releases.
        seed: together with `num_prompts`, the seed of the draws.
    """
    # Decide on each simulated release with the code of the gate, and count the verdicts.
    generator = np.random.default_rng([seed, num_prompts])
    counts: Counter[Verdict] = Counter()
    for trial in range(trials):
        after, before = population.release(change, num_prompts, generator)
        relative_change = compute_relative_change(
            METRICS[rule.metric], after, before, confidence=rule.confidence, seed=trial
        )
        verdict, _, _ = compare_with_threshold(rule, Estimate(*relative_change))
        counts[verdict] += 1
    return {verdict: counts[verdict] / trials for verdict in get_args(Verdict)}


def compute_curve(population: Drafts | Timings, rule: Rule, pool: Executor) -> Curve:
    """Simulate how likely each verdict is, for each number of prompts and each true change.

    A true change is an assumed relative change of the rule's metric, e.g. -0.05 for a new draft
    that is 5 % worse. `CHANGES` lists the true changes.

    Args:
        population: the measured prompts from which the simulated releases are drawn.
        rule: the rule of the gate that decides.
        pool: runs the simulations in parallel.

    Returns:
        Number of prompts -> true change -> chance of each verdict.
    """
    # The tables in docs/gate.md show two of the true changes: no change, and a drop by the
    # threshold of the rule. These two are simulated more often, for more precise chances.
    points = list(itertools.product(NUM_PROMPTS[population.metric], CHANGES))
    trials = dict.fromkeys(CHANGES, NUM_TRIALS)
    for change in (0.0, -float(rule.threshold)):
        if change in trials:
            trials[change] = NUM_TRIALS_IN_TABLE

    # Each pair of a number of prompts and a true change is a separate task in the pool.
    futures = [
        pool.submit(simulate_releases, population, rule, change, number, trials=trials[change])
        for number, change in points
    ]
    curve: Curve = {}
    for (number, change), chance in zip(points, futures, strict=True):
        curve.setdefault(number, {})[change] = chance.result()
    return curve


def shift_rounds(
    rounds_PA: Counts,
    wanted_change: float,
    drawn: NDArray[np.int64],
    generator: np.random.Generator,
) -> Counts:
    """Make a draft better or worse: let some rounds of the drawn prompts accept one token more.

    If `wanted_change` is negative, these rounds accept one token less. Every round that can change
    does so with the same probability. If the same were done to all P prompts, the mean number of
    accepted tokens per round would change by about `wanted_change`.

    Args:
        rounds_PA: [P, A], counts of rounds: entry [p, a] is the number of rounds of prompt p that
            accepted a tokens.
        wanted_change: the change of the mean number of accepted tokens per round.
        drawn: the indices of the drawn prompts.
        generator: draws the rounds that change.

    Returns:
        The counts of rounds of the drawn prompts after the change, [drawn prompts, A].
    """
    # Rounds in the last column cannot accept one token more, and those in the first, which accept
    # 0, cannot accept one less. A round that moves changes the sum of accepted tokens by 1.
    chosen_PA = rounds_PA[drawn]
    all_but_last = slice(0, -1)
    all_but_first = slice(1, None)
    is_rise = wanted_change > 0
    movable = all_but_last if is_rise else all_but_first
    probability = abs(wanted_change) * rounds_PA.sum() / rounds_PA[:, movable].sum()

    # Draw how many rounds of each entry move, and move them to the next column; for a drop, to the
    # previous one.
    moved = generator.binomial(chosen_PA[:, movable], probability)
    result = chosen_PA.copy()
    result[:, movable] -= moved
    result[:, all_but_first if is_rise else all_but_last] += moved
    return result


def draw(
    populations: Sequence[Drafts | Timings], curves: Sequence[Curve], rules: dict[str, Rule]
) -> None:
    """Draw the picture of docs/gate.md: the chance to pass, plotted against the true change.

    The picture has a panel for each population of measured prompts, with a curve for each number of
    prompts.
    """
    # Text stays text in the SVG, and the fixed salt makes the file reproducible.
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "gate",
            "font.family": "sans-serif",
            "font.size": 9,
        }
    )

    # Draw one panel for each population, and one darker curve for each larger number of prompts.
    figure = Figure(figsize=(3.6 * len(populations), 3.2), layout="constrained")
    panels = figure.subplots(1, len(populations), sharey=True, squeeze=False)[0]
    for panel, population, curve in zip(panels, populations, curves, strict=True):
        shades = (0.25, 0.5, 0.75, 1.0)
        for shade, (num_prompts, chances_by_change) in zip(shades, curve.items(), strict=True):
            percents = [100 * change for change in chances_by_change]
            shares = [chances["passed"] for chances in chances_by_change.values()]
            panel.plot(
                percents, shares, color=(0.1, 0.35, 0.6, shade), label=f"{num_prompts} prompts"
            )

        # Mark the two changes that the table shows.
        for true_change in (0.0, -100 * float(rules[population.metric].threshold)):
            panel.axvline(true_change, color="0.6", linewidth=0.8, linestyle=":")
        panel.set_title(f"{population.metric.replace('_', ' ')}:\n{population.name}", fontsize=9)
        panel.set_xlabel("true change in %")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="upper left", fontsize=7)
    panels[0].set_ylabel("chance to pass")
    figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")


def format_population(population: Drafts | Timings, curve: Curve, rule: Rule) -> str:
    """Return a heading and a table for docs/gate.md: how often a rule passes or fails a draft.

    Args:
        population: the measured prompts from which the simulated releases were drawn.
        curve: number of prompts -> true change of the draft -> chance of each verdict.
        rule: the rule of the gate.
    """
    # A row for each number of prompts: the chance to pass if nothing changed, and the chance to
    # fail if the draft truly became worse by the threshold of the rule.
    threshold = float(rule.threshold)
    rows = []
    for number, chances_by_change in curve.items():
        passed = chances_by_change[0.0]["passed"]
        failed = chances_by_change[-threshold]["failed"]
        rows.append([str(number), f"{passed:.1%}", f"{failed:.1%}"])
    head = ["prompts", "no change: passed", f"a true drop of {threshold:.0%}: failed"]

    # Say which draft is the new one: "eagle3 to eagle" -> "eagle3 replaced by eagle".
    drafts = population.name.replace(" to ", " replaced by ")
    return (
        f"`{rule.metric}`, `max_regression: {threshold:g}`, {drafts}:\n\n{format_table(head, rows)}"
    )


def _compute_mean_accepted(rounds_PA: Counts) -> float:
    """Return the mean number of accepted tokens per round, from counts of rounds [P, A].

    Column a counts the rounds that accepted a tokens.
    """
    num_accepted_P = rounds_PA @ np.arange(rounds_PA.shape[1])
    return float(num_accepted_P.sum() / rounds_PA.sum())


def _sum_accepted(rounds_PA: Counts) -> PromptSums:
    """Return the three sums, for each prompt, from which a gate computes the acceptance length.

    `rounds_PA` [P, A] counts rounds: column a has the rounds that accepted a tokens. Each round
    emits its accepted tokens and one token of the target's own. The prefill emits one more token
    for each prompt.
    """
    num_rounds = rounds_PA.sum(axis=1).astype(np.float64)
    num_accepted = rounds_PA @ np.arange(rounds_PA.shape[1])
    num_prompts = np.ones(len(rounds_PA))
    return {
        "num_tokens": num_prompts + num_rounds + num_accepted,
        "num_prompts": num_prompts,
        "num_rounds": num_rounds,
    }


def _compute_speedup(times_PT: Table) -> float:
    """Return the speedup over all prompts of a table with the columns TIMING_COLUMNS."""
    return float(METRICS["speedup"].formula(*times_PT.sum(axis=0)))


if __name__ == "__main__":
    sys.exit(main())
