"""Define what all objectives share: the target's distributions, loss weights and metrics.

An objective is a draft together with its loss. The loss compares the draft's distribution with the
target's at each loss token. The positions of loss tokens are found once, when a batch is collated
(specdistill.data.rows.packing). Metrics are kept as sums and counts. The sums are divided by the
counts after all batches and processes have been added up.

Shapes: B rows of a batch, T positions, R loss tokens (padded), r of a chunk of them, D target
hidden, V target vocabulary, W draft vocabulary, K drafted positions, N drafts (blocks or chains).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import EvalPrediction

from specdistill.common.errors import UserError
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.targets.packed_rows import Documents
from specdistill.training.losses.divergence import Divergence, acceptance


@dataclass(frozen=True)
class TargetDistributions:
    """The target's distributions at some rows.

    Attributes:
        probs_rW: probabilities, renormalised over the draft vocabulary.
        mass_r: the target's probability of the draft vocabulary as a whole. It is measured for
            metrics only; None otherwise.
        top1_r: the target's top-1 among all its tokens. It is measured for metrics only; None
            otherwise.
    """

    probs_rW: Tensor
    mass_r: Tensor | None = None
    top1_r: Tensor | None = None


@dataclass(frozen=True)
class SoftTargets:
    """The target's distributions that a batch learns from.

    They are computed where they are read, because all of them at once would fill the memory.

    Attributes:
        hidden_RD: the target's last hidden states at the positions before the loss tokens, or
            [R, K, D] with K states for each row.
        head: the target's output head.
        ids_W: the ids, in the target's vocabulary, of the tokens that the draft can propose, in
            ascending order. None: all tokens.
        pruned: the head of these tokens alone; None if the head cannot be pruned.
        temperature: divides the target's logits.
    """

    hidden_RD: Tensor
    head: LogitsHead
    ids_W: Tensor | None
    pruned: LogitsHead | None
    temperature: float

    @classmethod
    def from_hidden(
        cls,
        head: LogitsHead,
        last_hidden_BTD: Tensor,
        loss_positions: Tensor,
        ids_W: Tensor | None,
        temperature: float,
    ) -> "SoftTargets":
        """Build the soft targets of a batch: what is needed to compute the target's distributions.

        Args:
            head: the target's head.
            last_hidden_BTD: the target's last hidden states, of size D.
            loss_positions: positions in the flattened batch [B T] of the tokens that are predicted,
                [R] or [R, K].
            ids_W: the ids of the W tokens that the draft can propose, in the target's vocabulary;
                None for all tokens.
            temperature: divides the target's logits.
        """
        # The hidden state at the position before a token predicts that token.
        hidden_RD = gather_before(last_hidden_BTD, loss_positions, by=1)
        # For a draft with all tokens, the whole head is also the pruned one, and needs no ids.
        if ids_W is None or len(ids_W) == head.linear.weight.shape[0]:
            return cls(hidden_RD, head, None, head, temperature)
        return cls(hidden_RD, head, ids_W, prune_head(head, ids_W), temperature)

    def at(self, rows: slice, *, measure: bool) -> TargetDistributions:
        """Compute the target's distributions at some loss tokens, in float32.

        Args:
            rows: which of the R loss tokens; r of them.
            measure: whether metrics are measured, too. Only they need logits of all V tokens of the
                target, if the draft has only W of them.
        """
        hidden_rD = self.hidden_RD[rows]
        # Without metrics, only the logits of the draft's tokens are computed.
        if not measure and self.pruned is not None:
            return TargetDistributions(
                (self.pruned(hidden_rD).float() / self.temperature).softmax(-1)
            )

        # Metrics need the logits of the whole vocabulary: the target's top-1 may be no token of the
        # draft, and the draft's tokens have a part of the probability only.
        logits_rV = self.head(hidden_rD).float()
        top1_r = logits_rV.argmax(-1)
        logits_rV = logits_rV / self.temperature
        if self.ids_W is None:
            mass_r = torch.ones_like(top1_r, dtype=torch.float32)
            return TargetDistributions(logits_rV.softmax(-1), mass_r, top1_r)

        # Renormalise over the draft's tokens. Their mass is the ratio of two sums of exp(logit):
        # over the draft's tokens, and over all tokens.
        logits_rW = logits_rV.index_select(-1, self.ids_W)
        probs_rW = logits_rW.softmax(-1)
        mass_r = (logits_rW.logsumexp(-1) - logits_rV.logsumexp(-1)).exp()
        return TargetDistributions(probs_rW, mass_r, top1_r)


def prune_head(head: LogitsHead, ids_W: Tensor) -> LogitsHead | None:
    """Return a head that computes the logits of some tokens only.

    Args:
        head: the whole head.
        ids_W: the ids of these tokens, W of them.

    Returns:
        The head of W tokens; None for a head that is no plain linear layer, e.g. a quantized one.
    """
    linear = head.linear
    if type(linear) is not nn.Linear:
        return None
    # Select the rows of the weight, and of the bias if there is one. The new layer is made on the
    # meta device, because its own parameters are replaced at once.
    part = nn.Linear(linear.in_features, len(ids_W), linear.bias is not None, device="meta")
    for name, parameter in linear.named_parameters():
        selected = parameter.index_select(0, ids_W.to(parameter.device))
        setattr(part, name, nn.Parameter(selected, requires_grad=False))
    return replace(head, linear=part)


def gather_before(x_BTD: Tensor, positions: Tensor, by: int) -> Tensor:
    """Gather the states that are `by` positions before the given positions.

    Args:
        x_BTD: states of a batch: B rows of T positions, each of size D.
        positions: positions in the flattened batch [B T], of any shape.
        by: how many positions before. Where the batch has no such position, the first position of
            the batch is taken.

    Returns:
        The states, [*positions.shape, D].
    """
    index = (positions - by).clamp_min(0).flatten()
    return x_BTD.flatten(0, 1).index_select(0, index).view(*positions.shape, -1)


def select_loss_rows(position_ids_BT: Tensor, loss_positions_R: Tensor, *, ahead: int) -> Tensor:
    """Return, for each of R loss tokens, whether the draft predicts it, [R] bool.

    A token is predicted if at least `ahead` tokens of its document are before it.

    Args:
        position_ids_BT: position ids of packed rows [B, T]; each document begins at 0.
        loss_positions_R: the positions of the loss tokens in the flattened batch.
        ahead: how many tokens of its document a predicted token needs before it.
    """
    return position_ids_BT.flatten()[loss_positions_R] >= ahead


def shift_left(x_BT: Tensor, by: int, fill: int) -> Tensor:
    """Shift each row to the left by `by` positions, and fill its end with `fill`."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])), value=fill)


def compute_geometric_weights(decay: float, num_positions: int) -> Tensor:
    """Return the weights [K] of drafted positions in the loss, proportional to decay ** k.

    Later positions get smaller weights, because a later token counts only if all tokens before it
    are accepted. The weights add up to one, so that the learning rate does not depend on K.

    The weights exp(-k / gamma) of DFlash (arXiv 2602.06036) are those for decay = exp(-1 / gamma).
    """
    weights = torch.tensor([decay**k for k in range(num_positions)])
    return weights / weights.sum()


def compute_d_pace_weights(chances_NK: Tensor, has_loss_NK: Tensor, alpha: float) -> Tensor:
    """Return the weights [N, K] of the K drafted positions of N drafts by D-PACE.

    The method is that of arXiv 2605.18810. The draft gives the right token at position k the
    probability q_k, which is smoothed to s_k = alpha + (1 - alpha) q_k. The expected length of an
    accepted draft is sum_j prod_{i<=j} s_i. The weight of position k is the sum of those terms that
    contain s_k, sum_{j>=k} prod_{i<=j} s_i, divided by K. The weights take no gradient.

    Args:
        chances_NK: q_k of each draft.
        has_loss_NK: whether there is a loss at the position. Other positions have weight zero.
        alpha: the strength of the smoothing, from 0 (none) to 1.
    """
    # Products up to each position (cumprod), then sums from each position to the end (cumsum of the
    # flipped tensor). A position without loss is a factor of 1 in the products, and no term of the
    # sums.
    smoothed_NK = alpha + (1 - alpha) * chances_NK.detach()
    reached_NK = smoothed_NK.masked_fill(~has_loss_NK, 1.0).cumprod(1) * has_loss_NK
    return reached_NK.flip(1).cumsum(1).flip(1) * has_loss_NK / chances_NK.shape[1]


# The arguments of an objective's forward by name: the columns of packed rows, which are tensors [B,
# T], and the entries that `prepare` and `read_target` add to them.
ForwardInputs = dict[str, Any]


class Objective(nn.Module):
    """A draft together with its loss: the module that the trainer trains.

    A subclass defines `forward(**batch, **target_outputs, measure)`. It returns the loss, summed
    over the loss tokens, and `StepSums`. The sum is a scalar, or [P] with a value for each of P
    drafted positions. The trainer then divides each value by a count of its own.

    Attributes:
        ahead: how many tokens of its document a predicted token needs before it.
        step_weights: [K], weights of the drafted positions.
        draft: the draft. It may have `aux_layers` and `target_ids_W`, as a `Head` has. A module
            without them reads no features and has the target's tokens.
        divergence: the loss of one token.
        temperature: divides the logits in the loss.
        num_positions: how many drafted positions are simulated; K unless a subclass says otherwise.
    """

    ahead = 1
    step_weights: Tensor

    def __init__(
        self, draft: nn.Module, divergence: Divergence, temperature: float, step_weights: Tensor
    ) -> None:
        """Set the attributes of the same names, and K as the number of weights."""
        super().__init__()
        self.draft: Any = draft
        self.divergence = divergence
        self.temperature = temperature
        self.num_positions = len(step_weights)
        self.register_buffer("step_weights", step_weights, persistent=False)

    def prepare(self, batch: ForwardInputs, number: int | None) -> ForwardInputs:
        """Prepare a batch for the loss: by default, return it as it is.

        A subclass may add entries, such as the positions where blocks begin, or replace the rows by
        rows that the draft generated. The shapes must not depend on the content of the batch.

        Args:
            batch: packed rows.
            number: the batch's number in the run. It seeds what is random, so that a resumed run
                draws the same. None in evaluation, where every batch is prepared the same way each
                time.
        """
        return batch

    def count_loss_tokens(self, batch: ForwardInputs) -> Tensor:
        """Count the loss tokens of a prepared batch; the trainer divides the loss by their number.

        By default these are the tokens that the draft predicts at its first position. The count is
        a scalar. In a subclass whose loss has P sums, one for each drafted position, it may be [P]:
        each sum is then divided by its own count.
        """
        return select_loss_rows(
            batch["position_ids"], batch["loss_positions"], ahead=self.ahead
        ).sum()

    @property
    def layers(self) -> nn.ModuleList:
        """The draft's decoder layers."""
        layers: nn.ModuleList = self.draft.layers
        return layers

    def scale_output(self, factor: float) -> None:
        """Multiply the logits of a freshly initialized draft by a factor.

        With a factor below 1 the draft guesses more evenly, so that it does not begin with a large
        loss. The draft scales some of its own weights. Not every draft can do this exactly.
        """
        self.draft.scale_output(factor)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Save memory: let the backward pass recompute the MLPs of the draft's layers.

        transformers' Trainer calls this once, for `train.activation_checkpointing`. The wide states
        of the MLPs take most of the memory that a layer keeps for the backward pass. The attention
        is not recomputed, because it would append its keys and values to the cache twice.

        Raises:
            UserError: for layers without an MLP.
        """
        # The attribute names under which transformers' decoder layers hold their MLP.
        names = ("mlp", "feed_forward", "block_sparse_moe")
        mlps = [
            module
            for name, module in self.layers.named_modules()
            if name.rpartition(".")[2] in names
        ]
        if not mlps:
            raise UserError(
                "train.activation_checkpointing",
                got=f"true with layers of {type(self.layers[0]).__name__}",
                expected=f"layers with an MLP, in an attribute named {' or '.join(names)}",
            )
        # Replace the forward of each MLP by one that calls it through torch's `checkpoint`.
        for mlp in mlps:
            mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)

    def read_target(self, target: FrozenTarget, inputs: ForwardInputs) -> ForwardInputs:
        """Run the frozen target, and return the arguments of `forward` that come from the target.

        The trainer calls this without gradients. A subclass may change which tokens are predicted.

        Args:
            target: the target.
            inputs: the prepared batch. If features are read from a store and not computed by the
                target, the batch has an entry `features`: one tensor [B, A + 1, T, D] with the
                hidden states of A auxiliary layers and of the last layer. The returned `features`
                replace this entry.
        """
        return self.read_target_outputs(target, inputs, inputs["loss_positions"])

    def read_target_outputs(
        self, target: FrozenTarget, inputs: ForwardInputs, labels: Tensor
    ) -> ForwardInputs:
        """Compute the target's features, and its distributions for the tokens at some positions.

        Args:
            target: the target. Its layers are not run for a batch that has `features`, because
                these were read from a store.
            inputs: the prepared batch of B rows of T tokens.
            labels: positions in the flattened batch of the tokens that are predicted.

        Returns:
            `features`: hidden states [B, T, D] of the target's layers. `soft_targets`: the target's
            distributions for the tokens at `labels`.
        """
        # Features come from the store, as one tensor with a dimension for layers, or from a pass of
        # the target.
        if "features" in inputs:
            dtype = target.tensor("embed_tokens.weight").dtype
            features = Features.from_tensors(inputs["features"].to(dtype).unbind(1))
        else:
            features = target.features(
                inputs["input_ids"],
                getattr(self.draft, "aux_layers", ()),
                position_ids_BT=inputs["position_ids"],
                documents=Documents(inputs["cumulative_lengths"], inputs["longest"]),
            )
        soft_targets = SoftTargets.from_hidden(
            target.logits,
            features.last_hidden,
            labels,
            getattr(self.draft, "target_ids_W", None),
            self.temperature,
        )
        return {"features": features, "soft_targets": soft_targets}

    def compute_row_losses(
        self, logits_rW: Tensor, soft: TargetDistributions, k: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses [r] in nats, and M metrics [M, r], of r predicted tokens.

        This is the argument `loss_of` of `compute_head_loss`.

        Args:
            logits_rW: the draft's logits over its W tokens.
            soft: the target's distributions for the same tokens.
            k: the drafted position, from 0. Here all positions have the same loss.
        """
        logits_rW = logits_rW / self.temperature
        return self.add_metrics(self.divergence(logits_rW, soft.probs_rW), logits_rW, soft)

    def add_metrics(
        self, losses_r: Tensor, logits_rW: Tensor, soft: TargetDistributions | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of r predicted tokens together with the metrics of these tokens.

        Args:
            losses_r: the losses in nats.
            logits_rW: the draft's logits over its W tokens.
            soft: the target's distributions for the tokens; None if there are none.

        Returns:
            The losses, and three metrics [3, r]: the loss, whether draft and target have the same
            top-1 token, and the probability of acceptance. Where nothing is measured, the only
            metric is the loss [1, r].
        """
        if soft is None or soft.mass_r is None or soft.top1_r is None:
            return losses_r, losses_r.detach().unsqueeze(0)
        # The draft's top-1 is an index in the draft's vocabulary, and is translated into an id of
        # the target. Acceptance needs the target's probabilities among all its tokens. `soft` has
        # them renormalised over the draft's tokens, so they are multiplied by the probability
        # `mass_r` of all these tokens together.
        with torch.no_grad():
            best_r = logits_rW.argmax(-1)
            target_ids_W = getattr(self.draft, "target_ids_W", None)
            best_id_r = best_r if target_ids_W is None else target_ids_W[best_r]
            correct_r = best_id_r == soft.top1_r
            accepted_r = acceptance(
                logits_rW.float().softmax(-1), soft.probs_rW * soft.mass_r.unsqueeze(-1)
            )
            return losses_r, torch.stack((losses_r, correct_r.float(), accepted_r))


@dataclass
class StepSums:
    """Sums over the loss tokens of one batch, [K] each: one value per drafted position.

    A sum divided by `loss_tokens` is a mean over tokens, and a sum over chains divided by `chains`
    is a mean over chains. A sum that was not measured is None.

    Attributes:
        loss: nats.
        loss_tokens: the number of loss tokens.
        correct: how many tokens have the draft's top-1 equal to the target's.
        accepted: expected acceptances (losses.divergence.acceptance).
        chain_correct: how many chains are correct at this and every earlier position.
        chain_accepted: over chains, the product of the expected acceptances of these positions.
        chains: how many chains reach the position.
        chain_uncorrected: as chain_correct, but without the correction of a DSpark drafter, which
            changes a token's logits according to the tokens before it.
    """

    loss: Tensor
    loss_tokens: Tensor
    correct: Tensor | None = None
    accepted: Tensor | None = None
    chain_correct: Tensor | None = None
    chain_accepted: Tensor | None = None
    chains: Tensor | None = None
    chain_uncorrected: Tensor | None = None

    @classmethod
    def from_losses(
        cls,
        has_loss_KR: Tensor,
        losses_KR: Tensor,
        *measured: Tensor,
        by_chain: Callable[[Tensor], Tensor] = lambda values_KR: values_KR,
    ) -> "StepSums":
        """Sum the losses and metrics of R loss tokens at each of K drafted positions.

        The metrics are summed over tokens, and also over chains. A chain is the K draft tokens that
        the draft would propose one after the other.

        Args:
            has_loss_KR: 1 where there is a loss, else 0.
            losses_KR: nats, zero where there is no loss.
            measured: correct and accepted [K, R], if they are measured. They are zero where there
                is no loss.
            by_chain: rearranges values [K, R] to [K, S], with a column for each of S chains. This
                is needed if each column of [K, R] belongs to one loss token: the tokens of a chain
                are then in different columns. By default, each column is a chain already.
        """
        # Sum over tokens, in the order of the attributes `loss` to `accepted`.
        token_sums = [values_KR.sum(1) for values_KR in (losses_KR, has_loss_KR, *measured)]

        # Sum over chains, for `chain_correct`, `chain_accepted` and `chains`. A draft token only
        # counts if all tokens before it in the chain do. So `chain_products` replaces each value by
        # the product of the chain's values so far, and then sums over the chains. For example, a
        # chain with the values 1, 1, 0, 1 adds 1, 1, 0, 0. The products of `has_loss_KR` are 1
        # until the chain ends, so their sum is the number of chains that reach the position.
        chain_sums = []
        if measured:
            for values_KR in (*measured, has_loss_KR):
                chain_sums.append(chain_products(by_chain(values_KR)))
        return cls(*token_sums, *chain_sums)

    def table(self) -> Tensor:
        """Return the eight sums as one table [8, K] float32, in the order of the attributes.

        Sums that were not measured are NaN.
        """
        # A sum that was not measured is an empty row here, which is then padded with NaN.
        rows = [self.loss.new_empty(0) if row is None else row for row in vars(self).values()]
        return pad_sequence(
            [row.float() for row in rows], batch_first=True, padding_value=torch.nan
        )


def arrange_in_chains(
    loss_positions_R: Tensor, shape: torch.Size, num_positions: int, values_1R: Tensor
) -> Tensor:
    """Arrange values of loss tokens as chains of K consecutive draft tokens, [K, S].

    This is for a draft that is trained to predict every token of the batch [B, T] from the true
    tokens before it. K such predictions in a row stand for the chain that the draft would propose.
    There are S = B T chains, one that starts at each position. The k-th value of a chain (from 0)
    is the value of the token k + 1 positions after the start, or zero if that is no loss token. A
    chain does not continue into the next document, because the first token of a document is no loss
    token.

    For example, one row of T = 4 tokens has loss tokens at 1, 2 and 3 with the values 1, 1 and 0.
    With K = 2 the result is [[1, 1, 0, 0], [1, 0, 0, 0]]: each column is a chain.

    Args:
        loss_positions_R: the positions of the R loss tokens in the flattened batch.
        shape: [B, T] of the batch.
        num_positions: K.
        values_1R: [1, R], one value for each loss token, e.g. 1 if the draft predicts it correctly,
            else 0. The first dimension is 1, because such a draft is trained to predict only the
            next token.
    """
    # Write each value to the position that predicts it: the one before the loss token. Then read K
    # consecutive positions. `loss_positions_R` is padded with 0, for which there is no position
    # before. The padding has the value 0, so adding it to any position has no effect.
    before_R = (loss_positions_R - 1).clamp_min(0)
    values_S = values_1R.new_zeros(shape.numel()).scatter_add(0, before_R, values_1R[0])
    values_BT = values_S.view(shape)
    return torch.stack([shift_left(values_BT, k, 0).flatten() for k in range(num_positions)])


def chain_products(values_KS: Tensor) -> Tensor:
    """Return the sum over chains of the product of their values up to each position, [K].

    For two chains with the values 1, 1, 0 and 1, 0, 1 it is [2, 1, 0].
    """
    return values_KS.float().cumprod(0).sum(1)


def step_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Compute the metrics of an evaluation from the sums of its batches.

    For every drafted position k from 1:

    - loss_k, accuracy_k and acceptance_k are means over the tokens that are predicted there.
    - cumulative_acceptance_k is the share of chains whose first k draft tokens are all correct. A
      chain is the draft tokens that the draft would propose one after the other. It ends where the
      answer ends. Chains that end before position k are left out of the share. The share is counted
      chain by chain: it is not the product of accuracy_1 to accuracy_k.

    Over all positions:

    - acceptance_length = 1 + sum_k cumulative_acceptance_k. The 1 is the bonus token, so the value
      is comparable with the acceptance length of greedy decoding.
    - acceptance_length_sampled is the same for sampling: the first k draft tokens are accepted with
      the product of their expected acceptances.
    - acceptance_length_uncorrected is what acceptance_length would be without the correction of a
      DSpark drafter, which changes a token's logits according to the tokens before it.

    A position that no token reaches has no metrics, and adds nothing to the acceptance lengths.
    """
    # Add up the tables of all batches (see `StepSums.table`).
    (
        loss,
        loss_tokens,
        correct,
        accepted,
        chain_correct,
        chain_accepted,
        chains,
        chain_uncorrected,
    ) = torch.as_tensor(prediction.predictions).double().sum(0)

    # The loss is the sum over positions of the mean over their loss tokens. The trainer's
    # `prediction_step` returns the sums and the counts of a batch in place of labels.
    metrics = {}
    total, count = torch.as_tensor(prediction.label_ids).double().sum(0)
    if count.any():
        # Where a count is 0, the sum of losses is 0, too.
        metrics["loss"] = float((total / count.clamp_min(1)).sum())

    # The metrics of each position, over its loss tokens.
    for k in (loss_tokens > 0).nonzero().flatten().tolist():
        metrics[f"loss_{k + 1}"] = float(loss[k] / loss_tokens[k])
        metrics[f"accuracy_{k + 1}"] = float(correct[k] / loss_tokens[k])
        metrics[f"acceptance_{k + 1}"] = float(accepted[k] / loss_tokens[k])

    # The metrics of chains, over the chains that reach a position.
    reached = (chains > 0).nonzero().flatten()
    if not len(reached):
        return metrics
    rates = chain_correct[reached] / chains[reached]
    metrics |= {
        f"cumulative_acceptance_{k + 1}": rate
        for k, rate in zip(reached.tolist(), rates.tolist(), strict=True)
    }
    metrics["acceptance_length"] = 1.0 + float(rates.sum())
    sampled_rates = chain_accepted[reached] / chains[reached]
    metrics["acceptance_length_sampled"] = 1.0 + float(sampled_rates.sum())
    if chain_uncorrected.isfinite().all():
        uncorrected_rates = chain_uncorrected[reached] / chains[reached]
        metrics["acceptance_length_uncorrected"] = 1.0 + float(uncorrected_rates.sum())
    return metrics
