"""What was measured for each prompt: the rows of `samples.jsonl`, from which every number of a report can be computed again.

A report's first row is the main configuration's; a sweep adds configurations that differ from it in one setting.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from specdistill.engines.client import ServerCounts
from specdistill.errors import UserError
from specdistill.files.documents import json_rows

ALL = "all"
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # of a speed
STRICT = ConfigDict(extra="forbid")  # a record with an unknown key is no record of ours


@dataclass(frozen=True)
class Configuration:
    """How completions were generated and how prompts were cut.

    num_speculative_tokens: K; of a tree its depth. tree: its budget, depth and top_k, or its branching; None drafts a chain,
    or what the proposer's own settings say.
    context_bucket: tokens that prompts were cut to; `all`: prompts as the suite has them.
    """

    __pydantic_config__ = STRICT
    num_speculative_tokens: int
    temperature: float = 0.0
    batch_size: int = 1
    tree: Mapping[str, int | list[int]] | None = None
    context_bucket: str = ALL


CONFIGURATION_KEYS = tuple(field.name for field in fields(Configuration))


@dataclass(frozen=True)
class RoundRecord:
    """One draft-verify round: token ids, and each token's text as it continues the tokens before it.

    `accepted` is the emitted prefix of `drafted`; `emitted` is that prefix and, unless a stop token cut it off, the target's next token.
    Of a tree, `drafted` is the accepted path continued by first children, and `num_off_path` counts the other nodes.
    """

    __pydantic_config__ = STRICT
    drafted: tuple[int, ...]
    drafted_text: tuple[str, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    emitted_text: tuple[str, ...]
    num_off_path: int = 0

    @property
    def num_drafted(self) -> int:
        """Draft tokens in all: every node of a tree."""
        return len(self.drafted) + self.num_off_path


@dataclass(frozen=True)
class Timing:
    """Decoding of a prompt with or without a draft: over repetitions, in seconds; draft and verify seconds summed over rounds.

    None for what a server does not show. num_disturbed_rounds: those that took far longer than in other repetitions.
    """

    __pydantic_config__ = STRICT
    num_tokens: AtLeastOne
    num_rounds: int | None
    seconds: Seconds
    prefill_seconds: float | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    num_disturbed_rounds: int = 0


@dataclass(frozen=True)
class HFGenerate:
    """Decoding of the same prompt by transformers' `generate()`, greedy or sampled as the rest."""

    __pydantic_config__ = STRICT
    num_tokens: AtLeastOne
    seconds: Seconds


@dataclass(frozen=True)
class PromptRecord:
    """A prompt, its completion with the draft, round by round, and the times with and without the draft.

    num_in_draft_vocabulary: tokens of the baseline completion that the draft could have proposed; None when it can propose any.
    baseline, baseline_text: the completion without the draft; None without one.
    counts: in place of rounds and first token, for a completion by a server.
    batch: number of the batch that the prompt was decoded in, whose times are shared out among its prompts; None: alone.
    cluster: what was drawn for the suite, of which it is one of several prompts: the conversation of a turn, or the prompt of several
    adapters; None: itself.
    """

    __pydantic_config__ = STRICT
    suite: str
    configuration: Configuration
    id: str
    category: str
    num_prompt_tokens: AtLeastOne
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
    cluster: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The completion's with the draft; empty where a server does not return them."""
        if self.counts:
            return self.counts.token_ids
        first = () if self.first_token is None else (self.first_token,)
        return (*first, *(token for round in self.rounds for token in round.emitted))

    def drafts(self) -> list[tuple[int, int]]:
        """(drafted, accepted) tokens of each draft. A server returns totals only: its draft tokens are shared out evenly."""
        if self.counts is None:
            return [
                (round.num_drafted, len(round.accepted)) for round in self.rounds if round.drafted
            ]
        number, total, reached = (
            self.counts.num_drafts,
            self.counts.num_draft_tokens,
            self.counts.accepted_per_position,
        )
        # Positions are accepted in order, so the drafts can be put in an order in which the first reached[k] have position k.
        accepted = [sum(draft < count for count in reached) for draft in range(number)]
        return [
            (total // number + (draft < total % number), accepted[draft]) for draft in range(number)
        ]


def records_of(row: Mapping[str, Any], records: Sequence[PromptRecord]) -> list[PromptRecord]:
    """The records that a report's row is made of."""
    suite, category = row["suite"], row["category"]
    configuration = Configuration(**{name: row[name] for name in CONFIGURATION_KEYS})
    return [
        record
        for record in records
        if record.suite == suite
        and record.configuration == configuration
        and category in (ALL, record.category)
    ]


def write_records(records: Iterable[PromptRecord], path: Path) -> None:
    lines = [
        json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records
    ]
    path.write_text("".join(lines), encoding="utf-8")


def read_records(path: Path, key: str) -> list[PromptRecord]:
    """Raises UserError when the file is missing or was not written by `write_records`."""
    records: list[PromptRecord] = []
    try:
        with path.open("rb") as stream:
            for _, record in json_rows(stream):
                records.append(read_record(record))
    except (OSError, ValueError) as error:
        got, expected = (
            f"{path}, after {len(records)} records: {error}",
            "the samples.jsonl next to a report",
        )
        raise UserError(key, got=got, expected=expected) from error
    return records


read_record = TypeAdapter(
    PromptRecord
).validate_python  # a record from its JSON object; raises a ValueError for another
