"""The token view's data: each prompt's completion, round by round, as compact JSON that the page renders one prompt at a time.

Where all prompts would make the page too large, as many as fit are taken, evenly over the categories; samples.jsonl holds them all.
"""

import json
from collections.abc import Sequence
from typing import Any

from specdistill.statistics.records import PromptRecord, RoundRecord
from specdistill.suites.suite import evenly

MAX_BYTES = 4_000_000  # of the embedded JSON, so that a page stays below 5 MB and opens at once
PROMPT_CHARACTERS = 400  # shown of a prompt's end


def samples(records: Sequence[PromptRecord], max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """One sample for each prompt whose rounds are known, in the order of the records, `max_bytes` of JSON at most."""
    records = [record for record in records if record.counts is None]
    every = [_sample(record) for record in records]
    sizes = [len(json.dumps(sample, ensure_ascii=False, separators=(",", ":")).encode()) + 1 for sample in every]
    chosen = list(range(len(every)))
    while (size := sum(sizes[index] for index in chosen)) > max_bytes:
        count = min(len(chosen) - 1, len(chosen) * max_bytes // size)
        chosen = evenly(range(len(every)), [record.category for record in records], count)
    return [every[index] for index in chosen]


def _sample(record: PromptRecord) -> dict[str, Any]:
    prompt, drafts = record.prompt, [round for round in record.rounds if round.drafted]
    accepted = sum(len(draft.accepted) for draft in drafts)
    return {
        "id": record.id,
        "category": record.category.replace("_", " "),
        "prompt": prompt if len(prompt) <= PROMPT_CHARACTERS else f"…{prompt[-PROMPT_CHARACTERS:]}",
        "first": record.first_token_text,
        "rounds": [_round(one) for one in record.rounds],
        "length": round(1 + accepted / len(drafts), 2) if drafts else None,
        "speedup": _speedup(record),
    }


def _speedup(record: PromptRecord) -> float | None:
    """None without a baseline, and for a prompt decoded in a batch: its times are shares of the batch's."""
    ours, plain = record.speculative, record.baseline
    if plain is None or record.configuration.batch_size > 1:
        return None
    return round((ours.num_tokens / ours.seconds) / (plain.num_tokens / plain.seconds), 2)


def _round(one: RoundRecord) -> list[Any]:
    """[emitted tokens, how many of them were drafted, rejected draft tokens], as text; for a tree these along one path, and the number
    of other nodes.
    """
    num_accepted = len(one.accepted)
    others = [one.num_off_path] if one.num_off_path else []
    return [one.emitted_text, num_accepted, one.drafted_text[num_accepted:], *others]
