"""The training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2): the draft is trained on its own hidden states, K steps deep.

Shapes: B rows, T positions, H draft hidden, R kept rows, V target vocabulary, W draft vocabulary, N query heads, G key/value heads.

Every position t of a packed row is the root of a chain. With g_t the target's features, y_t its law after x_t:

    step 0   pair (x_{t+1}, g_t)      predicts x_{t+2}      taught by y_{t+1}
    step k   pair (x_{t+1+k}, h_t)    predicts x_{t+2+k}    taught by y_{t+1+k},   h_t = the draft's own output at step k - 1

which is what happens in decoding when the first k guesses stand. So step k stands at position t + k and sees what it will see there:
the pairs of step 0 at positions <= t of its document, and its own chain's steps 1..k. A prediction of x_s counts when x_s is supervised
and stands in the document of the root.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specdistill.drafts.eagle3 import Eagle3Draft
from specdistill.losses.divergence import Divergence, acceptance
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.sums import StepSums
from specdistill.training.teacher import Teacher, predicts, shift_left, teach


class ChainMemory:
    """A `Memory` for the unroll: step 0 is causal within documents; later steps add one entry per chain, their own.

    The earlier keys are not copied: scores are step 0's block beside one column for each later step.
    """

    def __init__(self, documents_BT: Tensor, num_layers: int) -> None:
        positions = documents_BT.shape[1]
        causal = torch.ones(positions, positions, dtype=torch.bool, device=documents_BT.device).tril()
        visible = (documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)) & causal
        self.bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)[:, None, None]
        self.steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        steps = self.steps[layer]
        key, value = key_BGTd.unsqueeze(2), value_BGTd.unsqueeze(2)  # [B, G, 1, T, d], one for N / G query heads
        steps.append((key, value))
        batch, heads, length, size = query_BNTd.shape
        query = query_BNTd.reshape(batch, key_BGTd.shape[1], -1, length, size) * size**-0.5
        (root_key, root_value), *chain = steps
        scores = (query @ root_key.transpose(-1, -2)).float() + self.bias
        if chain:
            own = torch.stack([(query * step_key).sum(-1) for step_key, _ in chain], dim=-1)
            scores = torch.cat((scores, own.float()), dim=-1)
        weights = scores.softmax(-1).to(value.dtype)
        output = weights[..., :length] @ root_value
        for index, (_, step_value) in enumerate(chain):
            output = output + weights[..., length + index, None] * step_value
        result: Tensor = output.view(batch, heads, length, size)
        return result


class TrainingTimeTest(nn.Module):
    """The draft as the trainer sees it: target features in, per-step loss sums out."""

    step_weights: Tensor

    def __init__(
        self, draft: Eagle3Draft, divergence: Divergence, num_steps: int, step_decay: float = 1.0, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.draft = draft
        self.divergence = divergence
        self.num_steps = num_steps
        self.temperature = temperature
        weights = torch.tensor([step_decay**k for k in range(num_steps)])
        # Weights sum to one, so that the learning rate does not depend on how deep the unroll is.
        self.register_buffer("step_weights", weights / weights.sum(), persistent=False)

    def num_kept(self, batch: dict[str, Tensor]) -> Tensor:
        """How many rows step 0 keeps: what the loss of a batch is divided by."""
        return predicts(batch["document_ids"], batch["supervise"], ahead=2).sum()

    def teach(self, target: FrozenTarget, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """What `forward` needs from the frozen target: auxiliary features [B, T, D] and the laws that teach."""
        features = target.features(inputs["input_ids"], self.draft.config.aux_layers, position_ids_BT=inputs["position_ids"])
        kept_BT = predicts(inputs["document_ids"], inputs["supervise"], ahead=1)
        teacher = teach(target.lm_head, features.last_hidden, kept_BT, self.draft.target_ids_W, self.temperature)
        return {"aux": features.aux, "teacher": teacher}

    def forward(
        self,
        input_ids: Tensor,
        supervise: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        aux: tuple[Tensor, ...],
        teacher: Teacher,
        measure: bool = False,
    ) -> tuple[Tensor, StepSums]:
        """Unroll `num_steps` steps over packed rows [B, T].

        Args:
            supervise: 1 where a token is worth predicting.
            document_ids: which document of the row a token belongs to, -1 for padding.
            position_ids: start again at 0 in each document.
            measure: also fill the metrics that cost time (what is correct, acceptance and chains).

        Returns:
            the weighted sum of the steps' losses over all kept rows (not yet divided), and the per-step sums.
        """
        sums = StepSums()
        memory = ChainMemory(document_ids, len(self.draft.layers))
        hidden = self.draft.fuse(aux)
        chain_BT = torch.ones_like(input_ids, dtype=torch.bool)
        correct_BT = torch.ones_like(chain_BT)
        total = input_ids.new_zeros((), dtype=torch.float32)
        for k in range(self.num_steps):
            normed, hidden = self.draft(shift_left(input_ids, 1 + k, 0), hidden, position_ids + k, memory)
            keep_BT = predicts(document_ids, supervise, ahead=2 + k)
            logits_RW = self.draft.lm_head(normed[keep_BT]) / self.temperature
            rows = shift_left(teacher.row_BT, 1 + k, -1)[keep_BT]
            step = self.divergence(logits_RW, teacher.probs_RW[rows])
            total = total + self.step_weights[k] * step.total
            with torch.no_grad():
                sums.loss.append(step.total.detach())
                sums.kept.append(keep_BT.sum())
                if measure:
                    hit = self.draft.target_ids_W[logits_RW.argmax(-1)] == teacher.best_R[rows]
                    sums.correct.append(hit.sum())
                    alpha = acceptance(logits_RW.float().softmax(-1), teacher.probs_RW[rows] * teacher.share_R[rows, None])
                    sums.accepted.append(alpha.sum())
                    chain_BT = chain_BT & keep_BT
                    correct_BT = correct_BT & torch.zeros_like(keep_BT).masked_scatter_(keep_BT, hit)
                    sums.chain_correct.append((correct_BT & chain_BT).sum())
                    sums.chains.append(chain_BT.sum())
        return total, sums
