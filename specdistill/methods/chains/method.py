"""What heads that draft chains have in common as rows of the table: how they decode, learn and are examined."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from specdistill.losses.divergence import forward_kl
from specdistill.methods.chains import repairs
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.chains.unroll import TrainingTimeTest, objective
from specdistill.methods.contract import Implementation
from specdistill.methods.feature_proposer import loaded_proposer
from specdistill.targets.frozen import FrozenTarget


def head_method(
    load: Callable[..., Any],
    likely_causes: Callable[[Any, FrozenTarget], Iterator[repairs.Repair]],
    **own: Any,
) -> Implementation:
    """load: (folder, target, key=) -> the head. likely_causes: what may be wrong with one whose files are right. own: all else."""
    return Implementation(
        load_proposer=partial(loaded_proposer, load, HeadProposer),
        objective=objective,
        simulated=lambda head, num_tokens: TrainingTimeTest(head, forward_kl, num_tokens),
        repaired=partial(repairs.on_copies, likely_causes),
        **own,
    )
