"""Check the loss that a draft begins with, and make it small for a fresh draft.

A draft that guesses evenly among its W tokens has a loss of at most ln W. A fresh draft can begin
far above that. It borrows the target's head, and this head is as sure about the output of random
layers as about the target's own. The weights of Gemma's final norm average 26, and first losses
were 30 times ln W. So the loss is measured before training. If it is too large, the output of a
fresh draft is scaled down until the draft guesses nearly evenly. From there it learns at once.

For targets with an ordinary output scale, a first loss of 1.2 to 1.5 ln W is kept (measured on the
shipped target pico). Scaling down gave a lower loss in the first steps but a lower acceptance
length, because the target's head ranks the tokens from the start.
"""

import math
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn

from specdistill.common.errors import logger
from specdistill.common.processes import is_first
from specdistill.data.rows.packing import PADDING_DOCUMENT, index_batch
from specdistill.methods.layers import is_one_plus_weight
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl

# Sample size: at most MAX_ROWS rows of NUM_TOKENS tokens, or fewer rows if these would need more
# than MAX_LOGITS logits.
MAX_ROWS = 8
NUM_TOKENS = 64
MAX_LOGITS = 2**24
# Each step of scaling multiplies the draft's output by this. A smaller number would take fewer
# steps and scale down further than necessary.
SCALE_STEP = 0.25
# The most steps. Together they divide by 4 ** 8 = 65,536, enough for logits in the ten thousands.
# The limit keeps the output away from zero, where the layers would have no gradient.
MAX_FACTORS = 8
# Scaling stops when a further factor lowers the loss by less than this share of ln W. An even guess
# can reach ln W exactly, so the warning uses the same tolerance.
TOLERANCE = 0.001
# Up to this output scale a target counts as ordinary. It is the scale of the final norm's weights
# times the scale of the logits: 1.1 for pico, 1 for random models, 26 for Gemma.
ORDINARY_SCALE = 2.0
# Losses, in units of ln W, above which a fresh draft is scaled down. With an ordinary output scale
# the limit is above the first losses of 1.2 to 1.5 ln W that were better kept (see the module).
# With a large one it is below ln W, because such a draft is far too sure of its guesses.
MAX_LOSS_ORDINARY = 2.0
MAX_LOSS_LARGE = 0.8


@torch.no_grad()
def check_first_loss(
    objective: Any, target: FrozenTarget, rows: Dataset, *, is_fresh: bool
) -> None:
    """Measure a draft's loss before training, and make it smaller if a fresh draft's is too high.

    To make the loss smaller, the output of the fresh draft is scaled down. A warning is logged if
    the loss stays above that of guessing evenly among all tokens that the draft can propose.

    Args:
        objective: the module that holds the draft and computes its loss. Its divergence is changed
            to the forward KL, so it must not be used for training afterwards.
        target: the target.
        rows: packed training rows, of which a few are read. If empty, random tokens are read.
        is_fresh: whether the draft has new weights. Only such a draft is scaled.
    """
    # An even guess among the draft's W tokens has the loss ln W.
    target_ids = getattr(objective.draft, "target_ids_W", None)
    even_loss = math.log(target.vocab_size if target_ids is None else len(target_ids))

    # Choose the highest loss at which a fresh draft is left as it is. The draft uses the target's
    # LM head. If the target's logits are larger than those of ordinary targets, so are the draft's:
    # it is far too sure of its guesses. The limit is then lower.
    has_large_logits = _compute_output_scale(target) > ORDINARY_SCALE
    max_loss = even_loss * (MAX_LOSS_LARGE if has_large_logits else MAX_LOSS_ORDINARY)

    # ln W says nothing about other divergences, so the loss is measured by forward KL.
    objective.divergence = forward_kl
    was_training = objective.draft.training
    objective.eval()
    # The check must not change the random numbers of the run. It computes in the target's dtype if
    # that has 16 bits.
    dtype = getattr(torch, target.dtype)
    with (
        torch.random.fork_rng(),
        torch.autocast(target.device.type, dtype, enabled=dtype.itemsize == 2),
    ):
        # Measure the loss on a few rows. They are not a batch of the run, so they have no number,
        # and are prepared as in an evaluation.
        batch_number = None
        batch = objective.prepare(_build_probe(target, rows), batch_number)
        inputs = {**batch, **objective.read_target(target, batch)}
        loss = _measure(objective, inputs)

        # Scale a fresh draft's output down if its loss is too high.
        if is_fresh and loss > max_loss:
            loss = _scale_down(objective, inputs, loss, even_loss)

    # Warn of a first loss that is above the loss of an even guess.
    objective.draft.train(was_training)
    if loss > even_loss * (1 + TOLERANCE) and is_first():
        remedy = (
            "The draft may be broken, or made for another target. Check draft.init, or train a"
            " fresh draft."
        )
        if is_fresh:
            remedy = (
                "A new draft may begin this way. If the loss does not soon fall below"
                f" {even_loss:.1f}, lower train.learning_rate."
            )
        logger.warning(
            f"The draft begins with a loss of {loss:.1f}, worse than guessing evenly among its"
            f" tokens ({even_loss:.1f}). {remedy}"
        )


def _scale_down(objective: Any, inputs: dict[str, object], loss: float, even_loss: float) -> float:
    """Scale the draft's output down until it guesses nearly evenly; return the loss after that.

    Args:
        objective: the draft with its loss.
        inputs: the batch on which the loss is measured.
        loss: the loss before scaling.
        even_loss: the loss of an even guess, ln W.
    """
    # The number of steps is limited, because layers have no gradient if the output is near zero.
    tolerance = TOLERANCE * even_loss
    previous_loss = math.inf
    for _ in range(MAX_FACTORS):
        # Stop when the loss is no worse than an even guess and the last step hardly lowered it.
        if loss - even_loss < tolerance and previous_loss - loss < tolerance:
            break
        objective.scale_output(SCALE_STEP)
        previous_loss = loss
        loss = _measure(objective, inputs)
    return loss


def _compute_output_scale(target: FrozenTarget) -> float:
    """Return how large the target's logits are, compared with those of an ordinary target (1).

    A hidden state after the final norm is about as large as the norm's weights. So this is the root
    mean square of the final norm's weights, times the factor by which the target scales its logits.
    """
    # Some norms have no weights; they count as 1. Some multiply by 1 + weight, as Gemma's do: for
    # them `is_one_plus_weight` is True, which adds 1.
    gain = getattr(target.norm, "weight", None)
    if gain is None:
        return abs(target.logits.scale)
    return float(
        (gain.float() + is_one_plus_weight(target.norm)).square().mean().sqrt()
        * abs(target.logits.scale)
    )


def _measure(objective: nn.Module, inputs: dict[str, object]) -> float:
    """Return the draft's mean loss in nats per token, at the drafted position where it is highest.

    The objective returns sums over the tokens, one for each drafted position.
    """
    _, sums = objective(**inputs)
    return float((sums.loss / sums.loss_tokens.clamp_min(1)).max())


def _build_probe(target: FrozenTarget, rows: Dataset) -> dict[str, Tensor]:
    """Build a small batch to measure the loss on: the first tokens of a few training rows.

    Without training rows the batch holds random tokens. Every token except padding counts in the
    loss.
    """
    # Take fewer rows for a large vocabulary, so that the logits fit into memory.
    num_rows = min(max(MAX_LOGITS // (NUM_TOKENS * target.vocab_size), 1), MAX_ROWS)

    # Begin with one document of random tokens per row, [rows, NUM_TOKENS].
    ids = torch.randint(
        target.vocab_size, (num_rows, NUM_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    order = torch.arange(NUM_TOKENS).expand_as(ids)
    batch: dict[str, Tensor] = {
        "input_ids": ids,
        "position_ids": order,
        "document_ids": torch.zeros_like(ids),
    }

    # Replace them by rows at even distances in the training data.
    if len(rows):
        picked = rows.select([index * len(rows) // num_rows for index in range(num_rows)])
        batch = {name: torch.tensor(picked[name])[:, :NUM_TOKENS] for name in batch}

    # Let every token except padding count in the loss, whatever the loss mask of the rows says.
    batch["loss_mask"] = (batch["document_ids"] != PADDING_DOCUMENT).long()
    return index_batch({name: tensor.to(target.device) for name, tensor in batch.items()})
