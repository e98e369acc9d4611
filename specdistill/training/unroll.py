"""The training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2): the draft is trained on its own hidden states, K steps deep.

Shapes: B rows, T positions, H draft hidden, R kept rows, V target vocabulary, W draft vocabulary, N query heads, G key/value heads.

Every position t of a packed row is the root of a chain. With g_t the target's features, y_t its law after x_t:

    step 0   pair (x_{t+1}, g_t)      predicts x_{t+2}      taught by y_{t+1}
    step k   pair (x_{t+1+k}, h_t)    predicts x_{t+2+k}    taught by y_{t+1+k},   h_t = the draft's own output at step k - 1

which is what happens in decoding when the first k guesses stand. So step k stands at position t + k and sees what it will see there:
the pairs of step 0 at positions <= t of its document, and its own chain's steps 1..k. A prediction of x_s counts when x_s is supervised
and stands in the document of the root.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdistill.drafts.eagle3 import Eagle3Draft
from specdistill.losses.divergence import Divergence, acceptance


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


@dataclass
class Teacher:
    """The target's laws at the positions that teach, computed once for all steps.

    row_BT: index of a position's law, or -1. probs_RW: renormalised over the draft vocabulary. share_R: the target's mass inside the
    draft vocabulary. best_R: the target's favourite among all its tokens.
    """

    row_BT: Tensor
    probs_RW: Tensor
    share_R: Tensor
    best_R: Tensor


@dataclass
class StepSums:
    """Sums over the kept rows of each unroll step [K]; divide by `kept` (or `chains`) after adding up batches and processes.

    loss in nats; correct: the draft's favourite is the target's; accepted: expected acceptance (see losses.divergence.acceptance);
    chain_correct: correct at this and every earlier step of the chain, out of `chains`.
    """

    loss: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    accepted: list[Tensor] = field(default_factory=list)
    chain_correct: list[Tensor] = field(default_factory=list)
    chains: list[Tensor] = field(default_factory=list)

    NAMES = ("loss", "kept", "correct", "accepted", "chain_correct", "chains")

    def table(self) -> Tensor:
        """[6, K] float32 in the order of NAMES; rows that were not measured are NaN."""
        steps = len(self.loss)
        nothing = torch.full((steps,), torch.nan, device=self.loss[0].device)
        rows = [getattr(self, name) for name in self.NAMES]
        return torch.stack([torch.stack(row).float() if row else nothing for row in rows])


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
            keep_BT = predicts(document_ids, supervise, k)
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


def shift_left(x_BT: Tensor, by: int, fill: int) -> Tensor:
    """x[t + by] at position t, `fill` past the end."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])), value=fill)


def predicts(document_ids: Tensor, supervise: Tensor, step: int) -> Tensor:
    """Where step k's prediction counts: x_{t+2+k} is supervised and in the document of t. [B, T] bool."""
    ahead = 2 + step
    same_document = (shift_left(document_ids, ahead, -1) == document_ids) & (document_ids >= 0)
    return same_document & shift_left(supervise, ahead, 0).bool()


@torch.no_grad()
def teach(
    logits_of: nn.Module,
    last_hidden_BTD: Tensor,
    supervise: Tensor,
    document_ids: Tensor,
    target_ids_W: Tensor,
    temperature: float,
) -> Teacher:
    """The target's head at just the positions that teach: those whose next token is supervised and in their document."""
    follows = (shift_left(document_ids, 1, -1) == document_ids) & (document_ids >= 0) & shift_left(supervise, 1, 0).bool()
    row_BT = torch.where(follows, follows.flatten().cumsum(0).view_as(follows) - 1, -1)
    logits_RV = logits_of(last_hidden_BTD[follows]).float()
    best_R = logits_RV.argmax(-1)
    if len(target_ids_W) == logits_RV.shape[-1]:
        return Teacher(row_BT, (logits_RV / temperature).softmax(-1), torch.ones_like(best_R, dtype=torch.float32), best_R)
    everything = (logits_RV / temperature).logsumexp(-1)
    logits_RW = logits_RV[:, target_ids_W] / temperature
    return Teacher(row_BT, logits_RW.softmax(-1), (logits_RW.logsumexp(-1) - everything).exp(), best_R)
