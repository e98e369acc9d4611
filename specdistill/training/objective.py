"""What the methods' objectives share: rows with loss, the frozen target's distributions there, and the metrics of each drafted position.

Rows are found once, when a batch is collated (specdistill.rows.packing). Metrics are sums and counts: divided after batches and processes
are added up.

Shapes: B rows of a batch, T positions, R loss tokens (padded), r of a chunk of them, D target hidden, V target vocabulary, W draft
vocabulary, K drafted positions.
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

from specdistill.errors import UserError
from specdistill.losses.divergence import Divergence, acceptance
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.targets.packed_rows import Documents


@dataclass(frozen=True)
class TargetDistributions:
    """The target's distributions at rows. probs_rW: renormalised over the draft vocabulary. When they are measured, mass_r: the target's
    probability of the draft vocabulary as a whole, and top1_r: its top-1 among all its tokens.
    """

    probs_rW: Tensor
    mass_r: Tensor | None = None
    top1_r: Tensor | None = None


@dataclass(frozen=True)
class SoftTargets:
    """The target's distributions that a batch learns from, made where they are read: all of them at once would fill the memory.

    hidden_RD: the target's last hidden states before the loss tokens, or [R, K, D] with K of each row. head: the target's. ids_W: its ids
    of the draft's tokens, ascending; None: all of them. pruned: the head of these tokens alone, where it can be cut.
    """

    hidden_RD: Tensor
    head: LogitsHead
    ids_W: Tensor | None
    pruned: LogitsHead | None
    temperature: float

    @classmethod
    def of(
        cls,
        head: LogitsHead,
        last_hidden_BTD: Tensor,
        loss_positions: Tensor,
        ids_W: Tensor | None,
        temperature: float,
    ) -> "SoftTargets":
        """loss_positions: [R] or [R, K], of the tokens that are predicted."""
        hidden_RD = before(last_hidden_BTD, loss_positions, 1)
        if ids_W is None or len(ids_W) == head.linear.weight.shape[0]:
            return cls(hidden_RD, head, None, head, temperature)
        return cls(hidden_RD, head, ids_W, pruned(head, ids_W), temperature)

    def at(self, rows: slice, *, measure: bool) -> TargetDistributions:
        """float32. Only what is measured takes the whole head, where the draft has fewer tokens than the target."""
        hidden_rD = self.hidden_RD[rows]
        if not measure and self.pruned is not None:
            return TargetDistributions(
                (self.pruned(hidden_rD).float() / self.temperature).softmax(-1)
            )
        logits_rV = self.head(hidden_rD).float()
        top1_r = logits_rV.argmax(-1)
        logits_rV = logits_rV / self.temperature
        if self.ids_W is None:
            return TargetDistributions(
                logits_rV.softmax(-1), torch.ones_like(top1_r, dtype=torch.float32), top1_r
            )
        logits_rW = logits_rV.index_select(-1, self.ids_W)
        return TargetDistributions(
            logits_rW.softmax(-1), (logits_rW.logsumexp(-1) - logits_rV.logsumexp(-1)).exp(), top1_r
        )


def pruned(head: LogitsHead, ids_W: Tensor) -> LogitsHead | None:
    """The head of some tokens alone; None for one that is no plain linear layer, e.g. a quantized one."""
    linear = head.linear
    if type(linear) is not nn.Linear:
        return None
    part = nn.Linear(linear.in_features, len(ids_W), linear.bias is not None, device="meta")
    for name, whole in linear.named_parameters():
        setattr(
            part,
            name,
            nn.Parameter(whole.index_select(0, ids_W.to(whole.device)), requires_grad=False),
        )
    return replace(head, linear=part)


def before(x_BTD: Tensor, positions: Tensor, by: int) -> Tensor:
    """x [*positions, D] of the flattened batch, `by` positions before those given; the first position where that is before all of it."""
    found: Tensor = x_BTD.flatten(0, 1).index_select(0, (positions - by).clamp_min(0).flatten())
    return found.view(*positions.shape, -1)


def loss_rows(position_ids_BT: Tensor, loss_positions_R: Tensor, *, ahead: int) -> Tensor:
    """Which loss tokens have `ahead` tokens of their document before them, and so are predicted from there. [R] bool."""
    return position_ids_BT.flatten()[loss_positions_R] >= ahead


def shift_left(x_BT: Tensor, by: int, fill: int) -> Tensor:
    """x[t + by] at position t, `fill` past the end."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])), value=fill)


class Objective(nn.Module):
    """A draft with its loss, as the trainer has it. draft: a `Head` as far as `aux_layers` and `target_ids_W` go, or a module without them,
    which reads no features and has the target's tokens.

    Its `forward(**batch, **target_outputs, measure)` returns the loss, summed over the loss tokens, and StepSums. The sum is a scalar, or
    [P], one for each drafted position, which then has a denominator of its own.

    ahead: positions from the first that is read to the first that is predicted. step_weights: [K], of the drafted positions.
    """

    ahead = 1
    step_weights: Tensor

    def __init__(
        self, draft: Any, divergence: Divergence, temperature: float, step_weights: Tensor
    ) -> None:
        super().__init__()
        self.draft: Any = draft
        self.divergence, self.temperature = divergence, temperature
        self.register_buffer("step_weights", step_weights, persistent=False)

    def prepare(self, batch: dict[str, Any], number: int | None) -> dict[str, Any]:
        """The batch as it is trained on: as it is, with its anchors, or with rows that the draft generated in its place. Its shapes do not
        depend on what it holds. What is random follows from `number`, the batch's in the run, so that a resumed run repeats it; None: in
        evaluation, where every batch is prepared the same way each time.
        """
        return batch

    def num_loss_tokens(self, batch: dict[str, Any]) -> Tensor:
        """What the loss of a prepared batch is divided by, a scalar, or [P]: the loss tokens of the first drafted position."""
        return loss_rows(batch["position_ids"], batch["loss_positions"], ahead=self.ahead).sum()

    @property
    def layers(self) -> nn.ModuleList:
        return self.draft.layers

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Called by transformers' Trainer for `train.activation_checkpointing`: from now on backward computes the layers' MLPs again, whose
        wide states are most of what a layer keeps for it. Not the attention, which would enter its keys and values into the cache twice.
        """
        names = ("mlp", "feed_forward", "block_sparse_moe")
        mlps: Any = [
            module
            for name, module in self.layers.named_modules()
            if name.rpartition(".")[2] in names
        ]
        if not mlps:
            got, expected = (
                f"true with layers of {type(self.layers[0]).__name__}",
                f"layers with {names[0]}",
            )
            raise UserError("train.activation_checkpointing", got=got, expected=expected)
        for mlp in mlps:
            mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)

    def read_target(self, target: FrozenTarget, inputs: dict[str, Any]) -> dict[str, Any]:
        """What forward needs from the frozen target; called without gradients. `inputs` has `features` [B, A + 1, T, D], in place of which
        forward is given those returned, where a store has them.
        """
        return self.of_target(target, inputs, inputs["loss_positions"])

    def of_target(
        self, target: FrozenTarget, inputs: dict[str, Any], labels: Tensor
    ) -> dict[str, Any]:
        """Features [B, T, D], which a batch from a store has, and soft targets before the tokens at these flattened positions."""
        if "features" in inputs:
            features = Features.of(
                inputs["features"].to(target.tensor("embed_tokens.weight").dtype).unbind(1)
            )
        else:
            documents = Documents(inputs["cumulative_lengths"], inputs["longest"])
            rows = {"position_ids_BT": inputs["position_ids"], "documents": documents}
            features = target.features(
                inputs["input_ids"], getattr(self.draft, "aux_layers", ()), **rows
            )
        options = getattr(self.draft, "target_ids_W", None), self.temperature
        return {
            "features": features,
            "soft_targets": SoftTargets.of(target.logits, features.last_hidden, labels, *options),
        }

    def row_losses(
        self, logits_rW: Tensor, soft: TargetDistributions, k: int
    ) -> tuple[Tensor, Tensor]:
        """Nats [r], and the metrics of each row [M, r]; see `head_loss`."""
        logits_rW = logits_rW / self.temperature
        return self.with_metrics(self.divergence(logits_rW, soft.probs_rW), logits_rW, soft)

    def with_metrics(
        self, losses_r: Tensor, logits_rW: Tensor, soft: TargetDistributions | None
    ) -> tuple[Tensor, Tensor]:
        """Nats [r] and the metrics of each row, loss, correct and accepted [3, r], or the loss alone [1, r] where nothing is measured."""
        if soft is None or soft.mass_r is None or soft.top1_r is None:
            return losses_r, losses_r.detach().unsqueeze(0)
        with torch.no_grad():
            best_r, target_ids_W = logits_rW.argmax(-1), getattr(self.draft, "target_ids_W", None)
            correct_r = (best_r if target_ids_W is None else target_ids_W[best_r]) == soft.top1_r
            accepted_r = acceptance(
                logits_rW.float().softmax(-1), soft.probs_rW * soft.mass_r.unsqueeze(-1)
            )
            return losses_r, torch.stack((losses_r, correct_r.float(), accepted_r))


@dataclass
class StepSums:
    """Sums [K] over the loss tokens of one batch; divide by `loss_tokens`, those of chains by `chains`. None: not measured.

    loss: nats; correct: the draft's top-1 is the target's; accepted: expected acceptance (losses.divergence.acceptance);
    chain_correct: correct at this and every earlier position of the chain; chain_accepted: the product of their expected acceptances;
    chain_uncorrected: as chain_correct, without a block drafter's correction.
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
    def of(
        cls,
        has_loss_KR: Tensor,
        losses_KR: Tensor,
        *measured: Tensor,
        by_chain: Callable[[Tensor], Tensor] = lambda values_KR: values_KR,
    ) -> "StepSums":
        """Of R loss tokens: losses and, where they are measured, correct and accepted, all zero where there is no loss.

        by_chain: the same values [K, S] of S chains, each of which is followed through its K drafted positions.
        """
        sums = [values_KR.sum(1) for values_KR in (losses_KR, has_loss_KR, *measured)]
        chains = (
            [chain_products(by_chain(values_KR)) for values_KR in (*measured, has_loss_KR)]
            if measured
            else []
        )
        return cls(*sums, *chains)

    def table(self) -> Tensor:
        """[8, K] float32 in the order above; what was not measured is NaN."""
        rows = [self.loss.new_empty(0) if row is None else row for row in vars(self).values()]
        return pad_sequence(
            [row.float() for row in rows], batch_first=True, padding_value=torch.nan
        )


def in_a_row(
    loss_positions_R: Tensor, shape: torch.Size, num_positions: int, values_1R: Tensor
) -> Tensor:
    """[K, S] of chains of K draft tokens, where a draft predicts every token [B, T] from the one before. Consecutive positions with a loss
    are in one document: its last token has none.
    """
    roots_R = (loss_positions_R - 1).clamp_min(0)
    values_BT = values_1R.new_zeros(shape.numel()).scatter_add(0, roots_R, values_1R[0]).view(shape)
    return torch.stack([shift_left(values_BT, k, 0).flatten() for k in range(num_positions)])


def chain_products(values_KS: Tensor) -> Tensor:
    """[K]: the sum over chains of what was at this and every earlier position."""
    return values_KS.float().cumprod(0).sum(1)


def step_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """The loss; loss_k, accuracy_k, acceptance_k for every drafted position k, from 1, that was measured; the simulated acceptance lengths.

    acceptance_length = 1 + sum_k cumulative_acceptance_k, the share of chains whose first k draft tokens are all correct, counted chain
    by chain and not as a product of marginals. The 1 is the bonus token, so that it compares with the acceptance length of greedy
    decoding. acceptance_length_sampled is that of sampling: the first k draft tokens are accepted with the product of their expected
    acceptances. acceptance_length_uncorrected: what a block drafter's tokens would have without its correction.
    """
    table = torch.as_tensor(prediction.predictions).double().sum(0)
    (
        loss,
        loss_tokens,
        correct,
        accepted,
        chain_correct,
        chain_accepted,
        chains,
        chain_uncorrected,
    ) = table
    total, count = torch.as_tensor(prediction.label_ids).double().sum(0)
    metrics = {"loss": float((total / count).sum())}
    for k in loss_tokens.isfinite().nonzero().flatten().tolist():
        metrics[f"loss_{k + 1}"] = float(loss[k] / loss_tokens[k])
        metrics[f"accuracy_{k + 1}"] = float(correct[k] / loss_tokens[k])
        metrics[f"acceptance_{k + 1}"] = float(accepted[k] / loss_tokens[k])
    metrics |= {
        f"cumulative_acceptance_{k}": rate
        for k, rate in enumerate((chain_correct / chains).tolist(), start=1)
    }
    metrics["acceptance_length"] = 1.0 + float((chain_correct / chains).sum())
    metrics["acceptance_length_sampled"] = 1.0 + float((chain_accepted / chains).sum())
    if chain_uncorrected.isfinite().all():
        metrics["acceptance_length_uncorrected"] = 1.0 + float((chain_uncorrected / chains).sum())
    return metrics
