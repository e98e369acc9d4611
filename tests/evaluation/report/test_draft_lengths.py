"""The draft length for each load: measured where it was, by the cost model elsewhere, 0 where no
draft pays."""

from typing import Any

import pytest

from specdistill.evaluation.report.tables import DraftLength, draft_lengths

SAME = {
    "suite": "pico",
    "category": "all",
    "temperature": 0.0,
    "tree": None,
    "context_bucket": "all",
}
RATES = [0.6, 0.3, 0.1, 0.05]


def row(k: int, size: int, speedup: float, **costs: float) -> dict[str, Any]:
    return {**SAME, "num_speculative_tokens": k, "batch_size": size, "speedup": speedup, **costs}


def costly(
    size: int, *, step: float, verify: float, draft: float, loop: float = 1.0
) -> dict[str, Any]:
    """K = 4 with times in milliseconds. loop: the share of the predicted speedup that was
    measured."""
    predicted = step * (1 + sum(RATES)) / (verify + 4 * draft)
    costs = {
        "verify_ms": verify,
        "draft_ms": draft,
        "baseline_step_ms": step,
        "predicted_speedup": predicted,
    }
    emitted = [100 * rate for rate in (1, *RATES)]
    counts = {
        "num_rounds": 100,
        "num_drafts": 100,
        "num_draft_tokens": 400,
        "emitted_per_position": emitted,
    }
    return row(4, size, loop * predicted, **costs, **counts)


def report(*rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
    curve = [
        {"k": k, "predicted_speedup": 2.0 if k == 2 else 1.0, "draft_passes": k} for k in range(5)
    ]
    return {
        "settings": {"tree": None, **settings},
        "results": list(rows),
        "theory": {"K": 4, "curve": curve},
    }


def test_the_fastest_of_what_was_measured() -> None:
    measured = report(row(4, 1, 1.5), row(2, 1, 1.8), row(4, 16, 0.7), row(2, 16, 0.9))
    assert draft_lengths(measured) == (DraftLength(1, 2, 1.8, True), DraftLength(16, 0, 0.9, True))


def test_other_lengths_are_known_by_cost_and_acceptance() -> None:
    """Of the report's own load as it timed them; of another between a plain step and the pass over
    K + 1 tokens, times a loop of 0.9."""
    rows = (
        costly(1, step=10.0, verify=12.0, draft=1.0),
        costly(8, step=10.0, verify=20.0, draft=0.5, loop=0.9),
    )
    own, other = draft_lengths(report(*rows))
    assert own == DraftLength(1, 2, pytest.approx(2.0), False)
    assert other == DraftLength(
        8, 1, pytest.approx(0.9 * 10 * (1 + 0.6) / (10 + 10 / 4 + 0.5)), False
    )


def test_a_small_gain_of_what_was_not_measured_counts_for_nothing() -> None:
    main = {
        **costly(1, step=10.0, verify=12.0, draft=1.0),
        "speedup": 1.0,
        "predicted_speedup": 1.0,
    }
    assert draft_lengths(report(main, row(3, 1, 1.97)))[0] == DraftLength(1, 3, 1.97, True)


@pytest.mark.parametrize(
    "nothing",
    [
        report(row(4, 1, 1.5)),
        report(row(4, 1, 1.5), row(2, 1, 1.8), tree={"budget": 6, "depth": 4, "top_k": 3}),
        report(row(4, 1, 1.5), row(2, 1, 1.8), drafting={"lookup_first": {"method": "ngram"}}),
        None,
    ],
    ids=["no sweep", "trees", "a lookup first", "no report"],
)
def test_what_says_nothing_of_chains(nothing: dict[str, Any] | None) -> None:
    assert draft_lengths(nothing) == ()
