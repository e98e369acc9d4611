"""Records of rounds that are given by their counts alone."""

from collections.abc import Sequence
from dataclasses import replace

from specdistill.evaluation.statistics.records import (
    Configuration,
    PromptRecord,
    RoundRecord,
    Timing,
)


def record(
    rounds: list[tuple[int, int]], num_prompt_tokens: int = 10, *, cut: bool = False
) -> PromptRecord:
    """Return a record of rounds (drafted, accepted).

    cut: the last round ends with its last accepted token, as at a stop token or at the length
    limit.
    """
    entries = []
    for number, (drafted, accepted) in enumerate(rounds, start=1):
        num_emitted = accepted if cut and number == len(rounds) else accepted + 1
        tokens = (
            (7,) * drafted,
            ("x",) * drafted,
            (7,) * accepted,
            (7,) * num_emitted,
            ("x",) * num_emitted,
        )
        entries.append(RoundRecord(*tokens))
    num_tokens = 1 + sum(len(entry.emitted) for entry in entries)
    timing = Timing(num_tokens, len(entries), 2.0, 0.5, 0.25, 1.0)
    configuration = Configuration(4)
    return PromptRecord(
        "s",
        configuration,
        "p",
        "c",
        num_prompt_tokens,
        "prompt",
        "text",
        7,
        "x",
        tuple(entries),
        timing,
        timing,
    )


def with_rounds(record: PromptRecord, rounds: Sequence[RoundRecord]) -> PromptRecord:
    """Return the record with other rounds, its numbers of tokens and rounds being theirs."""
    num_tokens = 1 + sum(len(entry.emitted) for entry in rounds)
    speculative = replace(record.speculative, num_tokens=num_tokens, num_rounds=len(rounds))
    return replace(record, rounds=tuple(rounds), speculative=speculative)
