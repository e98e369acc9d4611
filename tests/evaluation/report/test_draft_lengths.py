"""The draft length for each load: the measurement decides where there is one, else the cost model.
The length is 0 where no draft pays."""

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


def make_row(k: int, size: int, speedup: float, **costs: float) -> dict[str, Any]:
    return {**SAME, "num_speculative_tokens": k, "batch_size": size, "speedup": speedup, **costs}


def make_timed_row(
    size: int, *, step: float, verify: float, draft: float, loop: float = 1.0
) -> dict[str, Any]:
    """Return a row of K = 4 with times in milliseconds.

    `loop` is the share of the predicted speedup that was measured.
    """
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
    return make_row(4, size, loop * predicted, **costs, **counts)


def make_report(*rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
    curve = [
        {"k": k, "predicted_speedup": 2.0 if k == 2 else 1.0, "draft_passes": k} for k in range(5)
    ]
    return {
        "settings": {"tree": None, **settings},
        "results": list(rows),
        "theory": {"K": 4, "curve": curve},
    }


def test_the_fastest_measured_length_is_chosen() -> None:
    measured = make_report(
        make_row(4, 1, 1.5), make_row(2, 1, 1.8), make_row(4, 16, 0.7), make_row(2, 16, 0.9)
    )
    assert draft_lengths(measured) == (DraftLength(1, 2, 1.8, True), DraftLength(16, 0, 0.9, True))


def test_unmeasured_lengths_are_estimated_from_cost_and_acceptance() -> None:
    """The report timed every length at its own load. At another load the cost lies between a plain
    step and the pass over K + 1 tokens, and the loop reaches 0.9 of the prediction."""
    rows = (
        make_timed_row(1, step=10.0, verify=12.0, draft=1.0),
        make_timed_row(8, step=10.0, verify=20.0, draft=0.5, loop=0.9),
    )
    own, other = draft_lengths(make_report(*rows))
    assert own == DraftLength(1, 2, pytest.approx(2.0), False)
    assert other == DraftLength(
        8, 1, pytest.approx(0.9 * 10 * (1 + 0.6) / (10 + 10 / 4 + 0.5)), False
    )


def test_a_small_gain_of_an_unmeasured_length_is_ignored() -> None:
    main = {
        **make_timed_row(1, step=10.0, verify=12.0, draft=1.0),
        "speedup": 1.0,
        "predicted_speedup": 1.0,
    }
    assert draft_lengths(make_report(main, make_row(3, 1, 1.97)))[0] == DraftLength(
        1, 3, 1.97, True
    )


@pytest.mark.parametrize(
    "nothing",
    [
        make_report(make_row(4, 1, 1.5)),
        make_report(
            make_row(4, 1, 1.5), make_row(2, 1, 1.8), tree={"budget": 6, "depth": 4, "top_k": 3}
        ),
        make_report(
            make_row(4, 1, 1.5), make_row(2, 1, 1.8), drafting={"lookup_first": {"method": "ngram"}}
        ),
        None,
    ],
    ids=["no sweep", "trees", "a lookup first", "no report"],
)
def test_a_report_without_swept_chains_gives_no_draft_lengths(
    nothing: dict[str, Any] | None,
) -> None:
    assert draft_lengths(nothing) == ()
