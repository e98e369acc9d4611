"""The record of each prompt of a measurement: a row of `samples.jsonl`.

Every number of a report can be computed again from these records. A report's first row is that of
the main configuration. A sweep adds configurations that differ from it in one setting.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from specdistill.common.documents import read_json_rows
from specdistill.common.errors import UserError
from specdistill.serving.engines.client import ServerCounts

ALL_PROMPTS = "all"
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # above 0, as speeds divide by it
# A record with an unknown key was not written by this package.
STRICT_CONFIG = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Configuration:
    """A configuration: how completions were generated and how prompts were cut.

    Attributes:
        num_speculative_tokens: K; for a tree, its depth.
        temperature: the sampling temperature; 0 is greedy.
        batch_size: the number of prompts decoded together.
        tree: the shape of the tree: its budget, depth and top_k, or its branching. None for a
            chain, or if the proposer's own settings say what is drafted.
        context_bucket: the number of tokens that prompts were cut to; `all` for uncut prompts.
    """

    __pydantic_config__ = STRICT_CONFIG
    num_speculative_tokens: int
    temperature: float = 0.0
    batch_size: int = 1
    tree: Mapping[str, int | list[int]] | None = None
    context_bucket: str = ALL_PROMPTS


CONFIGURATION_KEYS = tuple(field.name for field in fields(Configuration))


@dataclass(frozen=True)
class RoundRecord:
    """A draft-verify round, as token ids and as text.

    Each token's text is written as it continues the tokens before it.

    Attributes:
        drafted: the draft tokens. Of a tree, one path: the accepted nodes, then always the first
            child of the last node.
        accepted: the prefix of `drafted` that was accepted and emitted.
        emitted: `accepted` and then the target's next token, unless a stop token cut it off.
        num_off_path: the number of nodes of a tree that are not in `drafted`.
    """

    __pydantic_config__ = STRICT_CONFIG
    drafted: tuple[int, ...]
    drafted_text: tuple[str, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    emitted_text: tuple[str, ...]
    num_off_path: int = 0

    @property
    def num_drafted(self) -> int:
        """The number of draft tokens; of a tree, all its nodes."""
        return len(self.drafted) + self.num_off_path


@dataclass(frozen=True)
class Timing:
    """The times of decoding a prompt with or without a draft, over the repetitions.

    All times are in seconds. A value that a server does not show is None.

    Attributes:
        draft_seconds: the time of drafting, summed over rounds.
        verify_seconds: the time of verification, summed over rounds.
        num_disturbed_rounds: the number of rounds that took far longer than in other repetitions.
    """

    __pydantic_config__ = STRICT_CONFIG
    num_tokens: AtLeastOne
    num_rounds: int | None
    seconds: Seconds
    prefill_seconds: float | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    num_disturbed_rounds: int = 0


@dataclass(frozen=True)
class HFGenerate:
    """The time of decoding the same prompt by transformers' `generate()`.

    `generate()` samples with the settings of the measurement, so it is greedy if these are.
    """

    __pydantic_config__ = STRICT_CONFIG
    num_tokens: AtLeastOne
    seconds: Seconds


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and its completion with the draft, round by round, with the times.

    Attributes:
        speculative: the times with the draft.
        baseline: the times without the draft; None if that was not measured.
        num_in_draft_vocabulary: tokens of the baseline completion that the draft could have
            proposed; None if it can propose any.
        baseline_text: the completion without the draft; None if there is none.
        counts: the counts that a server returned with the completion. They take the place of
            rounds and first token. None if this package decoded.
        batch: the number of the batch that the prompt was decoded in. The prompts of a batch share
            its time. None for a prompt decoded alone.
        cluster: the id of what several prompts have in common: the conversation whose turns they
            are, or the prompt that several adapters get. None for a prompt on its own.
    """

    __pydantic_config__ = STRICT_CONFIG
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
        """The tokens of the completion with the draft; empty if a server did not return them."""
        # `counts` comes from a server. Without it, this package has recorded the first token, of
        # the prefill, and the tokens of each round.
        if self.counts:
            return self.counts.token_ids
        first = () if self.first_token is None else (self.first_token,)
        return (*first, *chain.from_iterable(round.emitted for round in self.rounds))

    def list_drafts(self) -> list[tuple[int, int]]:
        """Return (drafted tokens, accepted tokens) of each round in which something was drafted.

        A server returns only totals over all drafts. Then the drafts are made up, with the same
        totals: the draft tokens are divided evenly among the drafts.
        """
        # Without `counts` the completion comes from this package, which records every round.
        if self.counts is None:
            return [
                (round.num_drafted, len(round.accepted)) for round in self.rounds if round.drafted
            ]

        # The completion comes from a server: make up drafts that have the same totals.
        num_drafts = self.counts.num_drafts
        num_draft_tokens = self.counts.num_draft_tokens
        accepted_per_position = self.counts.accepted_per_position

        # Positions are accepted in order. So the drafts can be ordered such that the first
        # accepted_per_position[k] drafts have position k accepted. For example, with [2, 1] the
        # first draft has two accepted tokens, the second has one, and all others have none. The
        # first drafts also get one token more if the draft tokens cannot be divided evenly.
        drafts = []
        for draft in range(num_drafts):
            gets_one_more = draft < num_draft_tokens % num_drafts
            num_drafted = num_draft_tokens // num_drafts + gets_one_more
            num_accepted = sum(draft < count for count in accepted_per_position)
            drafts.append((num_drafted, num_accepted))
        return drafts


def select_records(row: Mapping[str, Any], records: Sequence[PromptRecord]) -> list[PromptRecord]:
    """Return the records from which a row of a report was computed.

    These are the records of the row's suite, configuration (K, temperature, …) and category. The
    category ALL_PROMPTS of a row matches every record.
    """
    suite = row["suite"]
    category = row["category"]
    configuration = Configuration(**{name: row[name] for name in CONFIGURATION_KEYS})
    return [
        record
        for record in records
        if record.suite == suite
        and record.configuration == configuration
        and category in (ALL_PROMPTS, record.category)
    ]


def write_records(records: Iterable[PromptRecord], path: Path) -> None:
    """Write records to a file, one JSON object per line."""
    # NaN is refused, because it is no JSON and other programs could not read the file.
    lines = [
        json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records
    ]
    path.write_text("".join(lines), encoding="utf-8")


def read_records(path: Path, key: str) -> list[PromptRecord]:
    """Read the records of a samples.jsonl, which `write_records` has written.

    Args:
        path: the file.
        key: the setting that named the file, for the error.

    Raises:
        UserError: if the file is missing, or a line of the file is no record.
    """
    records: list[PromptRecord] = []
    try:
        with path.open("rb") as stream:
            for _, record in read_json_rows(stream):
                records.append(read_record(record))
    except (OSError, ValueError) as error:
        raise UserError(
            key,
            got=f"{path}, which cannot be read after {len(records)} records: {error}",
            expected="the samples.jsonl that was written next to report.json",
        ) from error
    return records


# A function that makes a record from its JSON object, and raises a ValueError for any other object.
read_record = TypeAdapter(PromptRecord).validate_python
