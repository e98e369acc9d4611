"""Where the time of one draft-verify round goes, and how near the theory of it comes to what is measured.

    python bench/round.py draft=runs/demo/draft

decodes some prompts of the pico suite with an EAGLE-3 head (K = 4, greedy), takes the parts of a round apart, and writes the table between
two marks of docs/decoding.md. Medians over all rounds, on an otherwise idle machine.
"""

import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from specdistill.decoding.decoder import Decoder, now
from specdistill.measurement.hardware import hardware, software
from specdistill.methods.load import load_proposer
from specdistill.project import ROOT
from specdistill.report.text import table
from specdistill.suites.suite import evenly, load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget

PAGE = ROOT / "docs" / "decoding.md"
MARKS = re.compile(r"(<!-- round -->\n).*(<!-- /round -->)", re.DOTALL)
K, NEW_TOKENS, NUM_PROMPTS = 4, 96, 16
PARTS = ("_propose", "_forward", "_verify")


class TimedDecoder(Decoder):
    """A decoder that notes how long the parts of each round take."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rounds: list[dict[str, float]] = []
        self.spent: dict[str, float] = {}
        for part in PARTS:
            setattr(self, part, self._timed(part, getattr(self, part)))

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = now(self.target.device)
            result = work(*arguments, **options)
            self.spent[part] = self.spent.get(part, 0.0) + now(self.target.device) - start
            return result

        return timed

    def _round(self, *arguments: Any) -> Any:
        self.spent = {}
        start = now(self.target.device)
        result = super()._round(*arguments)
        self.rounds.append({**self.spent, "round": now(self.target.device) - start})
        return result


def main() -> None:
    (draft,) = [argument.removeprefix("draft=") for argument in sys.argv[1:]]
    target = FrozenTarget.load("pico")
    prompts = tokenize(load_suite("pico"), target.tokenizer, max_new_tokens=NEW_TOKENS, max_length=target.max_length)
    prompts = evenly(prompts, [prompt.category for prompt in prompts], NUM_PROMPTS)
    plain, drafted = TimedDecoder(target), TimedDecoder(target, load_proposer("eagle3", draft, target))
    for repeat in range(3):
        for prompt in prompts:
            plain.generate(prompt.token_ids, max_new_tokens=NEW_TOKENS)
            drafted.generate(prompt.token_ids, max_new_tokens=NEW_TOKENS, num_speculative_tokens=K)
        if not repeat:  # the first pass warms up
            plain.rounds.clear()
            drafted.rounds.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        drafted.generate(prompts[0].token_ids, max_new_tokens=NEW_TOKENS, num_speculative_tokens=K)
    shown = f"{caption(target)}\n\n{parts(drafted.rounds, plain.rounds)}\n\n{operators(profiled)}"
    PAGE.write_text(MARKS.sub(lambda marks: f"{marks[1]}{shown}\n{marks[2]}", PAGE.read_text(encoding="utf-8")), "utf-8")
    print(shown)


def caption(target: FrozenTarget) -> str:
    """What was measured, in a sentence."""
    machine, versions = hardware(target.device), software()
    return (
        f"pico with an EAGLE-3 head, K = {K}, greedy, float32; medians over the rounds of {NUM_PROMPTS} prompts; {machine['cpu']}, "
        f"{machine['cpu_threads']} threads, torch {versions['torch']}, transformers {versions['transformers']}."
    )


def parts(drafted: list[dict[str, float]], plain: list[dict[str, float]]) -> str:
    """Milliseconds of each part in a round with a draft, their share of it, and the same without a draft."""
    names = {
        "_propose": f"draft: {K} steps of the head",
        "_forward": "target: one pass over the proposal",
        "_verify": "verify: best tokens, near-ties",
        "rest": "rest: trim the cache, hand features back",
        "round": "the round",
    }
    for rounds in (drafted, plain):
        for entry in rounds:
            entry["rest"] = entry["round"] - sum(entry.get(part, 0.0) for part in PARTS)
    whole = statistics.median(entry["round"] for entry in drafted)
    rows = []
    for part, name in names.items():
        with_draft, without = (
            1000 * statistics.median(entry.get(part, 0.0) for entry in rounds) for rounds in (drafted, plain)
        )
        rows.append((name, f"{with_draft:.2f}", f"{with_draft / 1000 / whole:.0%}", f"{without:.2f}"))
    return table(("part", "ms with the draft", "share", "ms without"), rows)


def operators(profiled: profile) -> str:
    """The operators that take most of the processor's time in torch, with their share of it."""
    times = {entry.key: entry.self_cpu_time_total for entry in profiled.key_averages()}
    most = sorted(times, key=lambda name: -times[name])[:8]
    listed = ", ".join(f"`{name}` {times[name] / sum(times.values()):.0%}" for name in most)
    return f"Of the time inside torch's operators: {listed}."


if __name__ == "__main__":
    main()
