"""The token view's data: of each prompt, the text as it was written, round by round, as short as it can be said.

Every prompt is embedded once, as JSON that the page turns into elements one prompt at a time. Where all of them would make the page
too large, as many as fit are taken, spread evenly over the categories; samples.jsonl always holds them all.
"""

import json
from collections.abc import Sequence
from typing import Any

from specdistill.statistics.records import PromptRecord, RoundRecord
from specdistill.suites.suite import evenly

MAX_BYTES = 4_000_000  # of the embedded JSON, so that a page stays below 5 MB and opens at once
PROMPT_CHARACTERS = 400  # of a prompt's end, enough to see what is continued


def samples(records: Sequence[PromptRecord], max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """One entry a prompt whose rounds are known, in the order of the records, `max_bytes` of JSON at most."""
    records = [record for record in records if record.counts is None]
    entries = [_sample(record) for record in records]
    sizes = [len(json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()) + 1 for entry in entries]
    chosen = list(range(len(entries)))
    while (size := sum(sizes[index] for index in chosen)) > max_bytes:
        count = min(len(chosen) - 1, len(chosen) * max_bytes // size)
        chosen = evenly(range(len(entries)), [record.category for record in records], count)
    return [entries[index] for index in chosen]


def _sample(record: PromptRecord) -> dict[str, Any]:
    prompt, drafts = record.prompt, [entry for entry in record.rounds if entry.drafted]
    accepted = sum(len(entry.accepted) for entry in drafts)
    return {
        "id": record.id,
        "category": record.category.replace("_", " "),
        "prompt": prompt if len(prompt) <= PROMPT_CHARACTERS else f"…{prompt[-PROMPT_CHARACTERS:]}",
        "first": record.first_token_text,
        "rounds": [_round(entry) for entry in record.rounds],
        "length": round(1 + accepted / len(drafts), 2) if drafts else None,
        "speedup": _speedup(record),
    }


def _speedup(record: PromptRecord) -> float | None:
    """None without a baseline, and of a text decoded in a batch: its times are shares that depend on its neighbours."""
    ours, plain = record.speculative, record.baseline
    if plain is None or record.configuration.batch_size > 1:
        return None
    return round((ours.num_tokens / ours.seconds) / (plain.num_tokens / plain.seconds), 2)


def _round(entry: RoundRecord) -> list[Any]:
    """[emitted texts, how many of them were drafted, texts of the drafted tokens that were refused]; of a tree, these on one path,
    and how many others there were.
    """
    accepted = len(entry.accepted)
    others = [entry.num_off_path] if entry.num_off_path else []
    return [entry.emitted_text, accepted, entry.drafted_text[accepted:], *others]
