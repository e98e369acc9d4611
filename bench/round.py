"""Measure where the time of one draft-verify round goes, by part and by length of the sequence.

    python bench/round.py draft=runs/demo/draft

decodes some prompts of the pico suite with an EAGLE-3 head (K = 4, greedy), times the parts of a
round, and writes the tables between two marks of docs/decoding.md. The numbers are medians over
all rounds, on an otherwise idle machine. Sequences longer than pico's context show what grows with
the length; pico reads them like any other.
"""

import statistics
import sys
from collections.abc import Callable
from itertools import chain, cycle, islice
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from bench.pages import write_between
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from specdistill.common.project import ROOT
from specdistill.decoding.decoder import Decoder, read_clock
from specdistill.evaluation.measurement.hardware import describe_hardware, list_software
from specdistill.evaluation.report.text import format_table
from specdistill.evaluation.suites.suite import load_suite, select_evenly, tokenize
from specdistill.methods.load import load_proposer
from specdistill.recipe.fields import Section, option
from specdistill.targets.frozen import FrozenTarget

PAGE = ROOT / "docs" / "decoding.md"
K = 4
NEW_TOKENS = 96
NUM_PROMPTS = 16

# Tokens before the first round in the table by length.
LENGTHS = (256, 2048, 8192)

# The timed parts of a round, with their names in the tables.
PARTS = {
    "propose": f"draft: {K} steps of the head",
    "read": "target: one pass over the proposal",
    "verify": "verify: best tokens, near-ties",
    "rest": "rest: trim the cache, hand features back",
    "round": "the round",
}

Rounds = list[dict[str, float]]  # for each round, the seconds of each part by name

P = ParamSpec("P")
R = TypeVar("R")


class Options(Section):
    """The options of this script."""

    draft: str = option("runs/demo/draft", "folder of an EAGLE-3 head for the model pico")


class TimedDecoder(Decoder):
    """A decoder that records how long the parts of each round take.

    Attributes:
        rounds: the seconds of each part, for each round.
        spent: the seconds of the parts of the current round.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rounds: Rounds = []
        self.spent: dict[str, float] = {}

        # Replace the methods that are timed by wrappers, in this decoder and its proposer.
        for part, owner in (("propose", self.proposer), ("verify", self)):
            if owner is not None:
                setattr(owner, part, self._wrap_timed(part, getattr(owner, part)))

    def _wrap_timed(self, part: str, work: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls `work`, and stores its seconds in `spent[part]`."""

        def run_timed(*arguments: P.args, **options: P.kwargs) -> R:
            """Call `work`, and store its seconds in `spent` under the name of the part."""
            start = read_clock(self.target.device)
            result = work(*arguments, **options)
            self.spent[part] = read_clock(self.target.device) - start
            return result

        return run_timed

    def _get_reader(self, *arguments: Any) -> Any:
        """Return the object that runs the target's passes, with its method `read` timed.

        The object stands in for the reader of the base class, with the three methods that decoding
        calls. Of these only `read` is timed, because it runs the target in each round.
        """
        reader = super()._get_reader(*arguments)
        return SimpleNamespace(
            begin=reader.begin, read=self._wrap_timed("read", reader.read), keep=reader.keep
        )

    def _run_round(self, *arguments: Any) -> Any:
        """Run a round, and record the seconds of its parts and of the remaining work."""
        # The timed methods write their seconds to `spent` while the round runs.
        self.spent = {}

        # The rest of a round is its time minus the time of its timed parts.
        start = read_clock(self.target.device)
        result = super()._run_round(*arguments)
        round_seconds = read_clock(self.target.device) - start
        rest_seconds = round_seconds - sum(self.spent.values())
        self.rounds.append({**self.spent, "rest": rest_seconds, "round": round_seconds})
        return result


def main(options: Options) -> ExitCode:
    """Time decoding rounds with a draft, without one and compiled; write docs/decoding.md."""
    # Load pico, its head, and prompts of its suite.
    target = FrozenTarget.load("pico")
    proposer = load_proposer("eagle3", options.draft, target)
    prompts = tokenize(
        load_suite("pico"),
        target.tokenizer,
        max_new_tokens=NEW_TOKENS,
        max_length=target.max_length,
    )
    prompts = select_evenly(prompts, [prompt.category for prompt in prompts], NUM_PROMPTS)

    # One decoder for each column of the table.
    drafted = TimedDecoder(target, proposer)
    plain = TimedDecoder(target)
    compiled = TimedDecoder(
        target, load_proposer("eagle3", options.draft, target, compile=True), compiled=True
    )
    decoders = {"with the draft": drafted, "without": plain, "compiled, with the draft": compiled}

    # Decode every prompt with each decoder in turn, so that a slow minute affects all of them.
    for repeat in range(3):
        for prompt in prompts:
            for decoder in decoders.values():
                k = K if decoder.proposer else 0
                decoder.generate(
                    prompt.token_ids, max_new_tokens=NEW_TOKENS, num_speculative_tokens=k
                )
        # The first pass over the prompts warms up, so its rounds do not count.
        if repeat == 0:
            for decoder in decoders.values():
                decoder.rounds.clear()

    # Write a table of the parts with each decoder, and a table by the length of the prompt. The
    # long prompts of the second table are made from the tokens of the short ones.
    parts_table = format_parts_table({name: decoder.rounds for name, decoder in decoders.items()})
    token_ids = chain.from_iterable(prompt.token_ids for prompt in prompts)
    length_table = format_length_table(drafted, list(token_ids))
    text = "\n\n".join((format_caption(target), parts_table, length_table))
    write_between(PAGE, "round", text)
    print(text)
    return ExitCode.DONE


def format_caption(target: FrozenTarget) -> str:
    """Return a sentence that says what was measured, on which machine, with which versions."""
    machine = describe_hardware(target.device)
    versions = list_software()
    return (
        f"pico with an EAGLE-3 head, K = {K}, greedy, float32; medians over the rounds of"
        f" {NUM_PROMPTS} prompts; {machine['cpu']}, {machine['cpu_threads']} threads, torch"
        f" {versions['torch']}, transformers {versions['transformers']}."
    )


def compute_median_ms(rounds: Rounds, part: str) -> float:
    """Return the median time of a part over all rounds, in milliseconds.

    The part counts as 0 in rounds that did not run it.
    """
    return 1000 * statistics.median(entry.get(part, 0.0) for entry in rounds)


def format_parts_table(by_decoder: dict[str, Rounds]) -> str:
    """Return a table with the median milliseconds of each part of a round.

    The columns are: the name of the part, its time in the first decoder, this time as a share of
    the first decoder's round, and the part's time in each of the other decoders.

    Args:
        by_decoder: the timed rounds of each decoder, by the name of its column.
    """
    first_decoder, *remaining_decoders = by_decoder
    round_ms = compute_median_ms(by_decoder[first_decoder], "round")
    rows = []
    for part, name in PARTS.items():
        part_ms = compute_median_ms(by_decoder[first_decoder], part)
        cells = [name, f"{part_ms:.2f}", f"{part_ms / round_ms:.0%}"]
        for decoder in remaining_decoders:
            cells.append(f"{compute_median_ms(by_decoder[decoder], part):.2f}")
        rows.append(cells)
    return format_table(("ms of a round", first_decoder, "share", *remaining_decoders), rows)


def format_length_table(decoder: TimedDecoder, token_ids: list[int]) -> str:
    """Decode prompts of each length in LENGTHS, and return a table of the times of a round.

    The table has a row for each length in tokens, and a column for each part of a round. A cell is
    the median time of the part in milliseconds.

    Args:
        decoder: the decoder with the draft.
        token_ids: the tokens that the prompts are made of.
    """
    # Raise pico's limit, so that the long prompts are not refused. The model can read them, because
    # rotary angles exist for every position.
    decoder.target.config.max_position_embeddings = 2 * max(LENGTHS)
    rows = []
    for length in LENGTHS:
        decoder.rounds.clear()

        # Repeat the tokens until the prompt is long enough.
        prompt = list(islice(cycle(token_ids), length))
        decoder.generate(prompt, max_new_tokens=NEW_TOKENS, num_speculative_tokens=K)
        times = [f"{compute_median_ms(decoder.rounds, part):.2f}" for part in PARTS]
        rows.append([f"{length:,}", *times])
    head = ["tokens before the round", *(name.partition(":")[0] for name in PARTS.values())]
    return format_table(head, rows)


if __name__ == "__main__":
    sys.exit(run(main, Options))
