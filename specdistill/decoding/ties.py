"""Near-ties of a float32 target, broken in float64: greedy output must not depend on how many tokens one pass held.

A pass over five tokens sums in a different order than five passes over one. Where the two best logits lie within that rounding, either
of them may win, and outputs that should be equal diverge. This happens about once in a hundred thousand tokens; the whole sequence then
goes through the target once more in float64, with and without a draft alike.

16-bit targets are left alone: there near-ties are frequent, and are counted instead (specdistill.measurement.losslessness).

Shapes: B sequences, T positions, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.targets.frozen import FrozenTarget

NEAR_TIE = 2.0**-14  # of the best logit: 512 roundings of float32, where a 16-layer target was seen to err by 5


def break_ties(target: FrozenTarget, token_ids: Sequence[Sequence[int]], logits_BTV: Tensor) -> Tensor:
    """The logits after the last T tokens of each sequence; those whose two best lie within NEAR_TIE are replaced by float64 ones."""
    if logits_BTV.dtype != torch.float32:
        return logits_BTV
    best_BT, second_BT = logits_BTV.topk(2).values.unbind(-1)
    tied_BT = best_BT - second_BT <= NEAR_TIE * best_BT.abs()
    if not tied_BT.any():
        return logits_BTV
    exact_BTV = logits_BTV.double()
    for row in tied_BT.any(1).nonzero().flatten().tolist():
        exact_TV = in_float64(target, token_ids[row])[0, -logits_BTV.shape[1] :]
        exact_BTV[row] = torch.where(tied_BT[row].unsqueeze(-1), exact_TV, exact_BTV[row])
    return exact_BTV


def in_float64(target: FrozenTarget, token_ids: Sequence[int]) -> Tensor:
    """Logits [1, T, V] after each token. The float32 weights are converted in place and back, which loses nothing."""
    experts = target.config._experts_implementation
    with torch.inference_mode(False), torch.no_grad():
        target.model.double()
        target.model.set_experts_implementation("eager")  # torch's grouped product of experts has no float64
        try:
            ids = torch.tensor([list(token_ids)], device=target.device)
            return target.logits(target.features(ids, ()).last_hidden)
        finally:
            target.model.set_experts_implementation(experts)
            target.model.float()
