"""Where the time of one draft-verify round goes, by part and by length of the sequence.

    python bench/round.py draft=runs/demo/draft

decodes some prompts of the pico suite with an EAGLE-3 head (K = 4, greedy), takes the parts of a round apart, and writes the tables between
two marks of docs/decoding.md. Medians over all rounds, on an otherwise idle machine. Sequences longer than pico's context, which it reads
like any other, show what grows with the length.
"""

import statistics
import sys
from collections.abc import Callable
from itertools import chain, cycle, islice
from types import SimpleNamespace
from typing import Any

from bench.pages import write_between
from specdistill.command import run
from specdistill.decoding.decoder import Decoder, now
from specdistill.errors import ExitCode
from specdistill.measurement.hardware import hardware, software
from specdistill.methods.load import load_proposer
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.report.text import table
from specdistill.suites.suite import evenly, load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget

PAGE = ROOT / "docs" / "decoding.md"
K, NEW_TOKENS, NUM_PROMPTS = 4, 96, 16
LENGTHS = (256, 2048, 8192)
PARTS = {
    "propose": f"draft: {K} steps of the head",
    "read": "target: one pass over the proposal",
    "verify": "verify: best tokens, near-ties",
    "rest": "rest: trim the cache, hand features back",
    "round": "the round",
}

Rounds = list[dict[str, float]]  # seconds of each part


class Options(Section):
    draft: str = option("runs/demo/draft", "folder of an EAGLE-3 head for pico")


class TimedDecoder(Decoder):
    """A decoder that notes how long the parts of each round take."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rounds: Rounds = []
        self.spent: dict[str, float] = {}
        for part, owner in (("propose", self.proposer), ("verify", self)):
            if owner is not None:
                setattr(owner, part, self._timed(part, getattr(owner, part)))

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = now(self.target.device)
            result = work(*arguments, **options)
            self.spent[part] = now(self.target.device) - start
            return result

        return timed

    def _reader(self, *arguments: Any) -> Any:
        reader = super()._reader(*arguments)
        return SimpleNamespace(
            begin=reader.begin, read=self._timed("read", reader.read), keep=reader.keep
        )

    def _round(self, *arguments: Any) -> Any:
        self.spent = {}
        start = now(self.target.device)
        result = super()._round(*arguments)
        whole = now(self.target.device) - start
        self.rounds.append({**self.spent, "rest": whole - sum(self.spent.values()), "round": whole})
        return result


def main(options: Options) -> ExitCode:
    target = FrozenTarget.load("pico")
    proposer = load_proposer("eagle3", options.draft, target)
    prompts = tokenize(
        load_suite("pico"),
        target.tokenizer,
        max_new_tokens=NEW_TOKENS,
        max_length=target.max_length,
    )
    prompts = evenly(prompts, [prompt.category for prompt in prompts], NUM_PROMPTS)
    drafted, plain = TimedDecoder(target, proposer), TimedDecoder(target)
    compiled = TimedDecoder(
        target, load_proposer("eagle3", options.draft, target, compile=True), compiled=True
    )
    decoders = {"with the draft": drafted, "without": plain, "compiled, with the draft": compiled}
    for repeat in range(3):
        for prompt in prompts:
            for decoder in decoders.values():
                k = K if decoder.proposer else 0
                decoder.generate(
                    prompt.token_ids, max_new_tokens=NEW_TOKENS, num_speculative_tokens=k
                )
        if not repeat:  # the first pass warms up
            for decoder in decoders.values():
                decoder.rounds.clear()
    by_part = parts({name: decoder.rounds for name, decoder in decoders.items()})
    text = chain.from_iterable(prompt.token_ids for prompt in prompts)
    shown = "\n\n".join((caption(target), by_part, by_length(drafted, [*text])))
    write_between(PAGE, "round", shown)
    print(shown)
    return ExitCode.DONE


def caption(target: FrozenTarget) -> str:
    """What was measured, in a sentence."""
    machine, versions = hardware(target.device), software()
    return (
        f"pico with an EAGLE-3 head, K = {K}, greedy, float32; medians over the rounds of {NUM_PROMPTS} prompts; {machine['cpu']}, "
        f"{machine['cpu_threads']} threads, torch {versions['torch']}, transformers {versions['transformers']}."
    )


def milliseconds(rounds: Rounds, part: str) -> float:
    return 1000 * statistics.median(entry.get(part, 0.0) for entry in rounds)


def parts(by_decoder: dict[str, Rounds]) -> str:
    """Milliseconds of each part with each decoder, and its share of the first."""
    first, *others = by_decoder
    whole = milliseconds(by_decoder[first], "round")
    rows = []
    for part, name in PARTS.items():
        own = milliseconds(by_decoder[first], part)
        rows.append(
            (
                name,
                f"{own:.2f}",
                f"{own / whole:.0%}",
                *(f"{milliseconds(by_decoder[other], part):.2f}" for other in others),
            )
        )
    return table(("ms of a round", first, "share", *others), rows)


def by_length(decoder: TimedDecoder, token_ids: list[int]) -> str:
    """Milliseconds of each part of a round with the draft, after that many tokens."""
    decoder.target.config.max_position_embeddings = 2 * max(
        LENGTHS
    )  # pico's rotary angles have no end
    rows = []
    for length in LENGTHS:
        decoder.rounds.clear()
        prompt = list(islice(cycle(token_ids), length))
        decoder.generate(prompt, max_new_tokens=NEW_TOKENS, num_speculative_tokens=K)
        rows.append(
            (f"{length:,}", *(f"{milliseconds(decoder.rounds, part):.2f}" for part in PARTS))
        )
    return table(
        ("tokens before the round", *(name.partition(":")[0] for name in PARTS.values())), rows
    )


if __name__ == "__main__":
    sys.exit(run(main, Options))
