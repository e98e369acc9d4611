"""What was measured for each prompt, as plain data: the rows of `samples.jsonl`, from which every number of a report can be
recomputed.

No torch here: reports and gates work from these records on any machine.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.evaluation.cells import ALL, Cell, cell_of


@dataclass(frozen=True)
class RoundRecord:
    """One draft-verify round: token ids, and each token's text as it continues what stands before it.

    `accepted` is the emitted prefix of `drafted`; `emitted` is that prefix and, unless a stop cut it off, the target's own
    next token.
    """

    drafted: tuple[int, ...]
    drafted_text: tuple[str, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    emitted_text: tuple[str, ...]


@dataclass(frozen=True)
class Timing:
    """One way of decoding a prompt: medians over the repeats, in seconds. Draft and verify seconds are summed over the
    rounds.
    """

    num_tokens: int
    num_rounds: int
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class HFGenerate:
    """The library's own greedy loop on the same prompt."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class PromptRecord:
    """A prompt, the text written with the draft, how it came about, and what it cost with and without the draft.

    cell: the settings under which both were written.
    num_in_draft_vocabulary: tokens of the target's own text that the draft could have proposed; None when it can propose any.
    """

    suite: str
    cell: Cell
    id: str
    category: str
    num_prompt_tokens: int
    prompt: str
    text: str
    first_token: int
    first_token_text: str
    rounds: tuple[RoundRecord, ...]
    speculative: Timing
    baseline: Timing
    hf_generate: HFGenerate | None = None
    num_in_draft_vocabulary: int | None = None


def records_of(row: Mapping[str, Any], records: Sequence[PromptRecord]) -> list[PromptRecord]:
    """Those that a report's row is made of."""
    suite, cell, category = row["suite"], cell_of(row), row["category"]
    return [
        record for record in records if record.suite == suite and record.cell == cell and category in (ALL, record.category)
    ]


def write_records(records: Iterable[PromptRecord], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


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
    rounds = tuple(RoundRecord(**{name: tuple(value) for name, value in entry.items()}) for entry in row.pop("rounds"))
    speculative, baseline = Timing(**row.pop("speculative")), Timing(**row.pop("baseline"))
    cell, hf = Cell(**row.pop("cell")), row.pop("hf_generate")
    return PromptRecord(
        **row,
        cell=cell,
        rounds=rounds,
        speculative=speculative,
        baseline=baseline,
        hf_generate=HFGenerate(**hf) if hf else None,
    )
