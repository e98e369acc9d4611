"""What a plan says of n-gram look-up."""

from typing import Any

from specdistill.methods.planned import GivenDraft, PlannedDraft, PlannedTarget, Published
from specdistill.methods.sizes import Parts
from specdistill.statistics.theory import alpha_from_acceptance_length

PUBLISHED = Published(
    (alpha_from_acceptance_length(1.54, 10), alpha_from_acceptance_length(1.75, 10)),
    "AL 1.54 (Vicuna-33B) to 1.75 (Vicuna-7B), prompt look-up on Spec-Bench, K taken as 10",
    0,
    "nothing to train",
)


def planned(target: PlannedTarget, given: GivenDraft | None, settings: dict[str, Any]) -> PlannedDraft:
    """No weights, and nothing to train."""
    note = "looks the last tokens up in the sequence so far"
    return PlannedDraft(Parts(0, 0, 0), None, target.text.vocab_size, note, PUBLISHED)
