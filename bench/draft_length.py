"""Draft length chosen online against every fixed K, on three suites and on their mixture.

    python bench/draft_length.py draft=runs/demo/draft
    python bench/draft_length.py draft=runs/pico-dspark/draft num_speculative_tokens=4 fixed=[1,2,3,4]     # by its confidence head

decodes with pico and a draft, and prices each round at the processor time that a round with as many draft tokens takes on one
thread: what is compared are counts of rounds, which other work on the machine does not change. `timed=true` measures speed instead, all
lengths interleaved, on an idle machine. The table goes between two marks of docs/decoding.md, of each method and way of measuring its own.
"""

import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

import torch

from bench.pages import write_between
from specdistill.command import run
from specdistill.decoding import decoder as decoding
from specdistill.decoding.decoder import Decoder, Generation, Round
from specdistill.decoding.online_length import OnlineLengthProposer
from specdistill.decoding.sampling import Sampling
from specdistill.errors import ExitCode
from specdistill.measurement.configurations import Settings
from specdistill.measurement.hardware import hardware
from specdistill.measurement.measure import calibrate, measure_together, prompt_timing
from specdistill.methods.load import load_proposer, method_of
from specdistill.project import ROOT
from specdistill.recipe.fields import AtLeastOne, Section, option
from specdistill.report.text import table
from specdistill.suites.suite import Prompt, load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget

PAGE = ROOT / "docs" / "decoding.md"
SUITES, MIXTURE = ("pico", "pico-short", "pico-edit"), "all three"


class Options(Section):
    draft: str = option("runs/demo/draft", "folder of a draft for pico")
    num_speculative_tokens: int = option(8, "largest K of the online rule", ge=1)
    fixed: list[AtLeastOne] = option([1, 2, 3, 4, 5, 6, 7, 8], "every K to compare it with")
    max_new_tokens: int = option(128, "tokens generated for each prompt", ge=1)
    temperature: float = option(0.0, "0 is greedy", ge=0)
    repeats: int = option(2, "timed repetitions", ge=1)
    timed: bool = option(False, "measure speed instead of pricing rounds")


def main(options: Options) -> ExitCode:
    target = FrozenTarget.load("pico")
    if not options.timed:
        torch.set_num_threads(1)
        decoding.now = lambda device: time.thread_time()
    room = {"max_new_tokens": options.max_new_tokens, "max_length": target.max_length}
    suites = {name: tokenize(load_suite(name), target.tokenizer, **room) for name in SUITES}
    suites[MIXTURE] = [prompt for prompts in suites.values() for prompt in prompts]
    method = method_of(Path(options.draft))
    fixed, chosen = (
        load_proposer(method, options.draft, target, draft_length=how)
        for how in ("fixed", "online")
    )
    assert isinstance(chosen, OnlineLengthProposer)
    k, sampling = options.num_speculative_tokens, Sampling(options.temperature)
    seconds = prices(target, chosen, suites[MIXTURE], k)
    online, *others = (
        Settings(each, options.max_new_tokens, sampling, options.repeats)
        for each in (k, *options.fixed)
    )
    known: dict[
        tuple[tuple[int, ...], int], list[Round]
    ] = {}  # of (prompt, K): none is decoded twice with a fixed length

    rows = []
    for name, prompts in suites.items():
        calibrate(target, chosen, prompts, online)
        if options.timed:
            runs = measure_together(
                target, [chosen, *[fixed] * len(others)], prompts, online, *others
            )
            plain = speed([run.baseline for run in runs[0]])
            speeds = [speed([run.speculative for run in of_one]) / plain for of_one in runs]
            rounds = [entry for run in runs[0] for entry in run.speculative[0].rounds]
        else:
            rounds = [
                entry
                for prompt in prompts
                for entry in decoded(Decoder(target, chosen), prompt, online)
            ]
            for prompt, each in product(prompts, others):
                if (key := (prompt.token_ids, each.num_speculative_tokens)) not in known:
                    known[key] = decoded(Decoder(target, fixed), prompt, each)
            of_each = (
                [entry for prompt in prompts for entry in known[prompt.token_ids, each]]
                for each in options.fixed
            )
            speeds = [priced(own, seconds) for own in (rounds, *of_each)]
        best, lengths = max(speeds[1:]), [len(entry.drafted) for entry in rounds]
        cells = [f"**{s:.2f}**" if s == best else f"{s:.2f}" for s in speeds[1:]]
        share = lengths.count(0) / len(lengths)
        rows.append(
            [
                name,
                *cells,
                f"{speeds[0]:.2f}",
                f"{speeds[0] / best:.3f}",
                f"{mean(lengths):.1f}",
                f"{share:.1%}",
            ]
        )
        print(*rows[-1], flush=True)
    head = (
        "suite",
        *(f"K = {k}" for k in options.fixed),
        "online",
        "over the best",
        "mean K",
        "plain rounds",
    )
    shown = f"{caption(method, options, seconds)}\n\n{table(head, rows)}"
    print(shown)
    write_between(PAGE, f"draft-length-{method}{'-timed' if options.timed else ''}", shown)
    return ExitCode.DONE


def prices(
    target: FrozenTarget, draft: OnlineLengthProposer, prompts: Sequence[Prompt], k: int
) -> list[float]:
    """Seconds of a round with 0, 1, … k draft tokens: medians over rounds whose lengths follow each other."""
    draft.rule.calibrate()
    rounds: list[list[Round]] = [[] for _ in range(k + 1)]
    for prompt in prompts[::2]:
        generation = Decoder(target, draft).generate(
            prompt.token_ids, max_new_tokens=64, num_speculative_tokens=k
        )
        for entry in generation.rounds:
            rounds[len(entry.drafted)].append(entry)
    return [median(entry.draft_seconds + entry.verify_seconds for entry in same) for same in rounds]


def decoded(decoder: Decoder, prompt: Prompt, settings: Settings) -> list[Round]:
    k, generator = settings.num_speculative_tokens, torch.Generator().manual_seed(settings.seed)
    options = {
        "max_new_tokens": settings.max_new_tokens,
        "sampling": settings.sampling,
        "generator": generator,
    }
    return [*decoder.generate(prompt.token_ids, num_speculative_tokens=k, **options).rounds]


def priced(rounds: Sequence[Round], seconds: Sequence[float]) -> float:
    """Tokens in the time of a plain step; without the prefill, which yields the first token of each prompt."""
    cost = sum(seconds[len(entry.drafted)] for entry in rounds) / seconds[0]
    return sum(len(entry.emitted) for entry in rounds) / cost


def speed(prompts: Sequence[Sequence[Generation]]) -> float:
    """Tokens a second of each prompt's repetitions, prefill included."""
    timings = [prompt_timing(repetitions) for repetitions in prompts]
    return sum(timing.num_tokens for timing in timings) / sum(timing.seconds for timing in timings)


def caption(method: str, options: Options, seconds: Sequence[float]) -> str:
    machine, steps = (
        hardware(torch.device("cpu")),
        [round(price / seconds[0], 2) for price in seconds],
    )
    sampling = f"T = {options.temperature:g}" if options.temperature else "greedy"
    how = (
        f"speed over plain decoding, lower medians of {options.repeats} repetitions, interleaved, {machine['cpu_threads']} threads"
        if options.timed
        else "tokens per plain step, rounds priced by processor time on one thread"
    )
    return (
        f"pico with a draft of `{method}`, {sampling}, float32, {options.max_new_tokens} tokens a prompt; {how}; {machine['cpu']}. A round "
        f"with 0, 1, … {len(steps) - 1} draft tokens costs {', '.join(f'{step:.2f}' for step in steps)} plain steps."
    )


if __name__ == "__main__":
    sys.exit(run(main, Options))
