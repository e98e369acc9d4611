"""The draft length for each load as it was measured, 0 where no draft pays."""

from typing import Any

import pytest

from specdistill.report.draft_lengths import DraftLength, draft_lengths, usual_length

SAME = {"suite": "pico", "category": "all", "temperature": 0.0, "tree": None, "context_bucket": "all"}


def row(k: int, size: int, speedup: float) -> dict[str, Any]:
    return {**SAME, "num_speculative_tokens": k, "batch_size": size, "speedup": speedup}


def report(*rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"settings": {"tree": None, **settings}, "results": list(rows)}


def test_the_fastest_of_what_was_measured() -> None:
    measured = report(row(4, 1, 1.5), row(2, 1, 1.8), row(4, 16, 0.7), row(2, 16, 0.9))
    assert draft_lengths(measured) == (DraftLength(1, 2, 1.8), DraftLength(16, 0, 0.9))


@pytest.mark.parametrize(
    "nothing",
    [
        report(row(4, 1, 1.5)),
        report(row(4, 1, 1.5), row(2, 1, 1.8), tree={"budget": 6, "depth": 4, "top_k": 3}),
        report(row(4, 1, 1.5), row(2, 1, 1.8), drafting={"lookup_first": {"method": "ngram"}}),
        report(row(4, 1, 1.5), row(2, 1, 1.8), drafting={"draft_length": "online"}),
        None,
    ],
    ids=["no sweep", "trees", "a lookup first", "chosen online", "no report"],
)
def test_what_says_nothing_of_chains(nothing: dict[str, Any] | None) -> None:
    assert draft_lengths(nothing) == ()


def test_engines_draft_the_mean_of_lengths_that_were_chosen_online() -> None:
    counts = {"num_rounds_per_length": [4, 1, 0, 3, 0], "num_drafts": 4, "num_draft_tokens": 10}
    settings = {"num_speculative_tokens": 4, "drafting": {"draft_length": "online"}}
    assert usual_length(report(row(4, 1, 1.5) | counts, **settings)) == 2
    assert usual_length(report(row(4, 1, 1.5), num_speculative_tokens=4)) == 4
    behind = {"drafting": {"draft_length": "online", "lookup_first": {"method": "ngram"}}}
    assert usual_length(report(row(4, 1, 1.5) | counts, **settings | behind)) == 4  # which a lookup gives
