"""The training-time test (EAGLE-3, arXiv 2503.01840, section 3.2; HASS, arXiv 2408.15766): training on its own states, K steps deep.

Shapes: B rows, T positions, H draft hidden, R loss tokens, V target vocabulary, W draft vocabulary, N query heads, G key/value heads.

Every position t of a packed row is the root of a chain. With g_t the target's features, y_t its distribution after x_t:

    step 0   pair (x_{t+1}, g_t)      predicts x_{t+2}      target y_{t+1}
    step k   pair (x_{t+1+k}, h_t)    predicts x_{t+2+k}    target y_{t+1+k},   h_t = the draft's own output at step k - 1

which is what happens in decoding when the first k draft tokens are accepted. So step k stands at position t + k and sees what it will
see there: the pairs of step 0 at positions <= t of its document, and its own chain's steps 1..k. A prediction of x_s has a loss when the
loss mask is 1 at x_s and x_s is in the document of the root.

A head whose output is meant to be the target's own next feature, as EAGLE's is (arXiv 2401.15077), is also held to it: step k's h_{t+1+k}
to the target's last hidden state at t + 1 + k, by SmoothL1.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdistill.errors import UserError
from specdistill.losses.divergence import Divergence, acceptance, build_divergence
from specdistill.methods.heads.head import Head
from specdistill.methods.recipe import HeadRecipe
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.training.objective import SoftTargets, StepSums, compute_soft_targets, has_loss, shift_left


class UnrollKVCache:
    """A `KVCache` for the unroll: step 0 is causal within documents; later steps add one entry per chain, their own.

    The earlier keys are not copied: scores are step 0's block beside one column for each later step. With a window of M positions, step
    k of the root t stands at t + k and sees those after t + k - M; its own chain, K - 1 long at most, is always within the window.
    """

    def __init__(self, documents_BT: Tensor, num_layers: int, window: int | None = None) -> None:
        positions = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        self.distance_TT = positions.unsqueeze(1) - positions
        visible = (documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)) & (self.distance_TT >= 0)
        self.bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)[:, None, None]
        self.window = window
        self.steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        steps = self.steps[layer]
        key, value = key_BGTd.unsqueeze(2), value_BGTd.unsqueeze(2)  # [B, G, 1, T, d], one for N / G query heads
        steps.append((key, value))
        batch, heads, length, size = query_BNTd.shape
        assert self.window is None or len(steps) <= self.window
        query = query_BNTd.reshape(batch, key_BGTd.shape[1], -1, length, size) * size**-0.5
        (root_key, root_value), *chain = steps
        scores = (query @ root_key.transpose(-1, -2)).float() + self.bias
        if self.window is not None:
            scores = scores.masked_fill(self.distance_TT + len(chain) >= self.window, -torch.inf)
        if chain:
            own = torch.stack([(query * step_key).sum(-1) for step_key, _ in chain], dim=-1)
            scores = torch.cat((scores, own.float()), dim=-1)
        weights = scores.softmax(-1).to(value.dtype)
        output = weights[..., :length] @ root_value
        for index, (_, step_value) in enumerate(chain):
            output = output + weights[..., length + index, None] * step_value
        result: Tensor = output.view(batch, heads, length, -1)
        return result


class TrainingTimeTest(nn.Module):
    """A head as the trainer sees it: target features in, per-step loss sums out.

    Args:
        num_steps: K.
        step_decay: step k counts step_decay ** k.
        feature_weight: how much SmoothL1 to the target's next feature counts, a mean over its elements, beside the divergence.
        noise: at most this much is added to each element of the first hidden state, uniformly, in training.
    """

    step_weights: Tensor

    def __init__(
        self,
        draft: Head,
        divergence: Divergence,
        num_steps: int,
        step_decay: float = 1.0,
        temperature: float = 1.0,
        feature_weight: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.draft: Any = draft
        self.divergence = divergence
        self.num_steps = num_steps
        self.temperature = temperature
        self.feature_weight = feature_weight
        self.noise = noise
        weights = torch.tensor([step_decay**k for k in range(num_steps)])
        # Weights sum to one, so that the learning rate does not depend on how deep the unroll is.
        self.register_buffer("step_weights", weights / weights.sum(), persistent=False)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Called by transformers' Trainer for `train.gradient_checkpointing`: backward computes the MLPs again, whose wide states are
        most of what a layer keeps for it. Not the attention, which would enter its keys and values into the cache a second time.
        """
        names = ("mlp", "feed_forward", "block_sparse_moe")
        mlps = [module for name, module in self.draft.layers.named_modules() if name.rpartition(".")[2] in names]
        if not mlps:
            layer = type(self.draft.layers[0]).__name__
            raise UserError(
                "train.gradient_checkpointing", got=f"true with layers of {layer}", expected=f"layers with {names[0]}"
            )
        for mlp in mlps:
            mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)

    gradient_checkpointing_enable = activation_checkpointing_enable  # older versions' name

    def num_loss_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Loss tokens of step 0: what the loss of a batch is divided by."""
        return has_loss(batch["document_ids"], batch["loss_mask"], ahead=2).sum()

    def read_target(self, target: FrozenTarget, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """What `forward` needs from the frozen target: its features [B, T, D] and soft targets."""
        features = target.features(inputs["input_ids"], self.draft.aux_layers, position_ids_BT=inputs["position_ids"])
        has_loss_BT = has_loss(inputs["document_ids"], inputs["loss_mask"], ahead=1)
        soft_targets = compute_soft_targets(
            target.logits, features.last_hidden, has_loss_BT, self.draft.target_ids_W, self.temperature
        )
        return {"features": features, "soft_targets": soft_targets}

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        features: Features,
        soft_targets: SoftTargets,
        measure: bool = False,
    ) -> tuple[Tensor, StepSums]:
        """Unroll `num_steps` steps over packed rows [B, T].

        Args:
            loss_mask: 1 where predicting a token counts.
            document_ids: which document of the row a token belongs to, -1 for padding.
            position_ids: start again at 0 in each document.
            measure: also fill the metrics that cost time (what is correct, acceptance and chains).

        Returns:
            the weighted sum of the steps' losses over all loss tokens (not yet divided), and the per-step sums.
        """
        sums = StepSums()
        kv_cache = UnrollKVCache(document_ids, self.draft.config.num_layers, self.draft.config.sliding_window)
        hidden = self.draft.fuse(features)
        if self.training and self.noise:
            hidden = hidden + (2 * torch.rand_like(hidden) - 1) * self.noise
        chain_BT = torch.ones_like(input_ids, dtype=torch.bool)
        correct_BT = torch.ones_like(chain_BT)
        total = input_ids.new_zeros((), dtype=torch.float32)
        for k in range(self.num_steps):
            rotary = self.draft.rotary(hidden, position_ids + k)
            normed, hidden = self.draft(shift_left(input_ids, 1 + k, 0), hidden, rotary, kv_cache)
            has_loss_BT = has_loss(document_ids, loss_mask, ahead=2 + k)
            logits_RW = self.draft.logits(normed[has_loss_BT]) / self.temperature
            rows = shift_left(soft_targets.row_BT, 1 + k, -1)[has_loss_BT]
            step = self.divergence(logits_RW, soft_targets.probs_RW[rows])
            total = total + self.step_weights[k] * step.total
            if self.feature_weight:
                # What the head gave back, beside the target's feature 1 + k positions on: a mean over H, summed over the loss tokens
                wanted_BTH = F.pad(features.last_hidden[:, 1 + k :], (0, 0, 0, min(1 + k, hidden.shape[1])))
                pair_RH = hidden[has_loss_BT].float(), wanted_BTH[has_loss_BT].float()
                error = F.smooth_l1_loss(*pair_RH, reduction="none").mean(-1).sum()
                total = total + self.step_weights[k] * self.feature_weight * error
            with torch.no_grad():
                sums.loss.append(step.total.detach())
                sums.loss_tokens.append(has_loss_BT.sum())
                if measure:
                    hit = self.draft.target_ids_W[logits_RW.argmax(-1)] == soft_targets.top1_R[rows]
                    sums.correct.append(hit.sum())
                    target_RW = soft_targets.probs_RW[rows] * soft_targets.mass_R[rows, None]
                    sums.accepted.append(acceptance(logits_RW.float().softmax(-1), target_RW).sum())
                    chain_BT = chain_BT & has_loss_BT
                    correct_BT = correct_BT & torch.zeros_like(has_loss_BT).masked_scatter_(has_loss_BT, hit)
                    sums.chain_correct.append((correct_BT & chain_BT).sum())
                    sums.chains.append(chain_BT.sum())
        return total, sums


def objective(draft: Head, recipe: HeadRecipe, target: FrozenTarget) -> TrainingTimeTest:
    """The training-time test that a recipe describes. EAGLE-1 recipes also hold the head to the target's features."""
    options = recipe.loss.model_dump(exclude={"divergence"})
    return TrainingTimeTest(draft, build_divergence(recipe.loss.divergence), recipe.draft.ttt_steps, **options)
