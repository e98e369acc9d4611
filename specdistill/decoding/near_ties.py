"""Break near-ties of a float32 target in float64.

Greedy output must not depend on how many tokens one pass held. But one pass over five tokens adds
up in another order than five passes over one token each. If the two best logits are closer than
that rounding, either of them may win, and outputs that should be equal diverge. This happens about
once in a hundred thousand tokens. The whole sequence then goes through the target once more in
float64, with and without a draft alike.

16-bit targets are left alone. Near-ties are frequent there, and are counted instead
(specdistill.evaluation.measurement.losslessness).

Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.targets.frozen import FrozenTarget

# The largest difference of a near-tie, as a share of the best logit: 512 roundings of float32, of
# 2^-23 each. A target of 16 layers was seen to err by 5 roundings.
NEAR_TIE = 2.0**-14


def find_near_ties(target: FrozenTarget, logits_BTV: Tensor) -> list[list[bool]]:
    """Return for each row and position whether rounding may decide between the two best tokens.

    That is so if the two best logits differ by at most the share NEAR_TIE of the best one. Only
    float32 targets with plain weights are checked: neither quantized nor sharded between processes.
    For other targets every entry is False.

    Args:
        target: the model that computed the logits.
        logits_BTV: [B, T, V]: rows, positions, vocabulary.

    Returns:
        Booleans as nested lists [B][T].
    """
    if not (target.is_plain and target.model.dtype == logits_BTV.dtype == torch.float32):
        return [[False] * logits_BTV.shape[1]] * len(logits_BTV)
    best_BT, second_BT = logits_BTV.topk(2).values.unbind(-1)
    return (best_BT - second_BT <= NEAR_TIE * best_BT.abs()).tolist()


def compute_logits_in_float64(
    target: FrozenTarget, token_ids: Sequence[int], num_last: int
) -> Tensor:
    """Run a float32 target in float64; return the logits after each of the last tokens.

    The weights are converted to float64 in place, and back to float32 at the end. This changes no
    weight.

    Args:
        target: the model.
        token_ids: the whole sequence.
        num_last: T, the number of last tokens whose logits are returned.

    Returns:
        The logits [1, T, V].

    Raises:
        UserError: for a model class that cannot compute in float64.
    """
    # Inference mode is turned off: weights that are converted in this mode could not be used in
    # training later, because autograd cannot save inference tensors.
    experts = target.config._experts_implementation
    default_dtype = torch.get_default_dtype()
    with torch.inference_mode(False), torch.no_grad():
        target.model.double()
        # Some model classes create constants in their forward pass, in the default dtype.
        torch.set_default_dtype(torch.float64)
        # torch's grouped matrix product, which runs experts fast, does not support float64.
        target.model.set_experts_implementation("eager")
        try:
            ids = torch.tensor([list(token_ids)], device=target.device)
            return target.logits(target.features(ids, ()).last_hidden[:, -num_last:])
        except RuntimeError as error:
            raise UserError(
                "target.dtype",
                got=f"float32 for {target.name}, whose model class cannot run in float64",
                text=(
                    f"target.dtype: the model class of {target.name} cannot run in float64. A"
                    " float32 target has to: where its two best tokens are nearly equal, a second"
                    " pass in float64 decides between them. Type target.dtype=bfloat16 or"
                    " target.dtype=float16, which need no second pass."
                ),
            ) from error
        finally:
            torch.set_default_dtype(default_dtype)
            target.model.set_experts_implementation(experts)
            target.model.float()
