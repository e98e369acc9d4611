"""What the methods of the heads have in common: how a head is loaded for decoding, and how drafting is simulated."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specdistill.decoding.proposer import Proposer
from specdistill.losses.divergence import forward_kl
from specdistill.methods.contract import Mistake, Simulation
from specdistill.methods.heads.proposer import HeadProposer
from specdistill.methods.heads.unroll import TrainingTimeTest
from specdistill.targets.frozen import FrozenTarget

LIKELY_CAUSES = ("the features it was trained on came from elsewhere (other layers, quantised, before the final norm)",)


def proposer_loader(load: Callable[..., Any]) -> Callable[..., Proposer]:
    """From a method's `load(folder, target, key=)` to its `load_proposer`: the head in the target's dtype, on its device."""

    def load_proposer(folder: Path, target: FrozenTarget, *, key: str) -> Proposer:
        return HeadProposer(load(folder, target, key=key).to(device=target.device, dtype=target.model.dtype))

    return load_proposer


def simulation(mistakes: Callable[[Any, FrozenTarget], Iterator[Mistake]]) -> Simulation:
    """The training-time test with plain KL, for as many steps as tokens are drafted."""
    return Simulation(
        draft_of=lambda proposer: proposer.head,
        objective=lambda head, num_tokens: TrainingTimeTest(head, forward_kl, num_tokens),
        mistakes=mistakes,
    )
