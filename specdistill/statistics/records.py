"""What was measured for each prompt, as plain data: the rows of `samples.jsonl`, from which every number of a report can be
recomputed.

No torch here: reports and gates work from these records on any machine.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdistill.engines.counters import ServerCounts
from specdistill.errors import UserError
from specdistill.statistics.configuration import ALL, Configuration, configuration_of


@dataclass(frozen=True)
class RoundRecord:
    """One draft-verify round: token ids, and each token's text as it continues what stands before it.

    `accepted` is the emitted prefix of `drafted`; `emitted` is that prefix and, unless a stop cut it off, the target's own
    next token. Of a tree, `drafted` is the accepted path and where its first guesses led on, and `num_off_path` counts its other
    nodes.
    """

    drafted: tuple[int, ...]
    drafted_text: tuple[str, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    emitted_text: tuple[str, ...]
    num_off_path: int = 0

    @property
    def num_drafted(self) -> int:
        """Drafted tokens in all: every node of a tree."""
        return len(self.drafted) + self.num_off_path


@dataclass(frozen=True)
class Timing:
    """One way of decoding a prompt: medians over the repeats, in seconds. Draft and verify seconds are summed over the
    rounds. None where it cannot be seen: a server answers with the whole text.
    """

    num_tokens: int
    num_rounds: int | None
    seconds: float
    prefill_seconds: float | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None


@dataclass(frozen=True)
class HFGenerate:
    """The library's own greedy loop on the same prompt."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class PromptRecord:
    """A prompt, the text written with the draft, how it came about, and what it cost with and without the draft.

    configuration: the settings under which both were written.
    num_in_draft_vocabulary: tokens of the target's own text that the draft could have proposed; None when it can propose any.
    baseline, baseline_text: what was written without the draft; None when nothing was.
    counts: in place of the rounds and the first token, when a server wrote the text.
    batch: the same number for prompts of a configuration that were decoded together, each with its share of the time; None: alone.
    """

    suite: str
    configuration: Configuration
    id: str
    category: str
    num_prompt_tokens: int
    prompt: str
    text: str
    first_token: int | None
    first_token_text: str
    rounds: tuple[RoundRecord, ...]
    speculative: Timing
    baseline: Timing | None
    hf_generate: HFGenerate | None = None
    num_in_draft_vocabulary: int | None = None
    baseline_text: str | None = None
    counts: ServerCounts | None = None
    batch: int | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the text written with the draft; empty where a server does not say them."""
        if self.counts:
            return self.counts.token_ids
        first = () if self.first_token is None else (self.first_token,)
        return (*first, *(token for entry in self.rounds for token in entry.emitted))

    def drafts(self) -> list[tuple[int, int]]:
        """(drafted, accepted) tokens of each draft. A server tells sums alone: its drafted tokens are shared out evenly."""
        if self.counts is None:
            return [(entry.num_drafted, len(entry.accepted)) for entry in self.rounds if entry.drafted]
        number, total, reached = self.counts.num_drafts, self.counts.num_draft_tokens, self.counts.accepted_per_position
        # Positions are accepted in order, so the drafts can be put in an order in which the first reached[k] have position k.
        accepted = [sum(draft < count for count in reached) for draft in range(number)]
        return [(total // number + (draft < total % number), accepted[draft]) for draft in range(number)]


def records_of(row: Mapping[str, Any], records: Sequence[PromptRecord]) -> list[PromptRecord]:
    """Those that a report's row is made of."""
    suite, configuration, category = row["suite"], configuration_of(row), row["category"]
    return [
        record
        for record in records
        if record.suite == suite and record.configuration == configuration and category in (ALL, record.category)
    ]


def write_records(records: Iterable[PromptRecord], path: Path) -> None:
    path.write_text(
        "".join(json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records), encoding="utf-8"
    )


def read_records(path: Path, key: str) -> list[PromptRecord]:
    """Raises UserError when the file is missing or was not written by `write_records`."""
    try:
        # Not splitlines(): model output may hold other line separators than "\n".
        return [
            read_record(json.loads(line, parse_constant=refuse_constant))
            for line in path.read_text(encoding="utf-8").split("\n")
            if line
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(key, got=f"{path} ({error!r})", expected="the samples.jsonl that stands beside a report") from error


def refuse_constant(name: str) -> None:
    """For `json.loads`, which reads NaN and Infinity though JSON has neither: what could not be measured is absent."""
    raise ValueError(f"{name}, which is no number")


def read_record(row: dict[str, Any]) -> PromptRecord:
    """A record from its JSON object, which is taken apart."""
    configuration, rounds = (
        Configuration(**row.pop("configuration")),
        tuple(RoundRecord(**_tuples(entry)) for entry in row.pop("rounds")),
    )
    speculative, baseline, hf, counts = (row.pop(name, None) for name in ("speculative", "baseline", "hf_generate", "counts"))
    return PromptRecord(
        **row,
        configuration=configuration,
        rounds=rounds,
        speculative=Timing(**speculative),
        baseline=Timing(**baseline) if baseline else None,
        hf_generate=HFGenerate(**hf) if hf else None,
        counts=ServerCounts(**_tuples(counts)) if counts else None,
    )


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
