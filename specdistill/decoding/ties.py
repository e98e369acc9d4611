"""Near-ties of a float32 target, decided in float64: greedy text must not depend on how many tokens one pass held.

A pass over five tokens adds up in another order than five passes over one. Where the two best logits lie within that rounding, either of
them may come out on top, and two texts that should be one part for good. This happens about once in a hundred thousand tokens; then the
whole text goes through the target once more in float64, with and without a draft alike.

Targets in 16 bits are left alone: there near-ties are frequent, and are counted instead (specdistill.measurement.losslessness).

Shapes: B texts, T positions, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.targets.frozen import FrozenTarget

NEAR_TIE = 2.0**-14  # of the best logit: 512 roundings of float32, where a 16-layer target was seen to err by 5


def break_ties(target: FrozenTarget, token_ids: Sequence[int], logits_1TV: Tensor) -> Tensor:
    """The logits after the last T of `token_ids`; rows whose two best lie within NEAR_TIE are replaced by float64 ones."""
    return break_ties_in_rows(target, [token_ids], logits_1TV)


def break_ties_in_rows(target: FrozenTarget, texts: Sequence[Sequence[int]], logits_BTV: Tensor) -> Tensor:
    """`break_ties` of several texts: the logits [B, T, V] after the last T of texts[b]."""
    if logits_BTV.dtype != torch.float32:
        return logits_BTV
    best_BT, second_BT = logits_BTV.topk(2).values.unbind(-1)
    tied_BT = best_BT - second_BT <= NEAR_TIE * best_BT.abs()
    if not tied_BT.any():
        return logits_BTV
    settled_BTV = logits_BTV.double()
    for row in tied_BT.any(1).nonzero().flatten().tolist():
        exact_TV = in_float64(target, texts[row])[0, -logits_BTV.shape[1] :]
        settled_BTV[row] = torch.where(tied_BT[row].unsqueeze(-1), exact_TV, settled_BTV[row])
    return settled_BTV


def in_float64(target: FrozenTarget, token_ids: Sequence[int]) -> Tensor:
    """Logits [1, T, V] after each token. The float32 weights are widened in place and narrowed again, which loses nothing."""
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
