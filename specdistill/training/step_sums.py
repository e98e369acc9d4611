"""What one batch adds to the training-time metrics: sums and counts, divided only after batches and processes are added up."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import EvalPrediction


@dataclass
class StepSums:
    """Sums over the loss_tokens rows of each drafted position; divide by `loss_tokens` (or `chains`).

    loss in nats; correct: the draft's favourite is the target's; accepted: expected acceptance (see losses.divergence.acceptance);
    chain_correct: correct at this and every earlier position of the chain, out of `chains`.
    """

    loss: list[Tensor] = field(default_factory=list)
    loss_tokens: list[Tensor] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    accepted: list[Tensor] = field(default_factory=list)
    chain_correct: list[Tensor] = field(default_factory=list)
    chains: list[Tensor] = field(default_factory=list)

    NAMES = ("loss", "loss_tokens", "correct", "accepted", "chain_correct", "chains")

    def table(self) -> Tensor:
        """[6, K] float32 in the order of NAMES; what was not measured is NaN."""
        rows = [getattr(self, name) for name in self.NAMES]
        table = torch.full((len(rows), max(map(len, rows))), torch.nan, device=self.loss[0].device)
        for index, row in enumerate(rows):
            if row:
                table[index, : len(row)] = torch.stack(row).float()
        return table


def step_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """loss_k, accuracy_k, acceptance_k for every drafted position that was measured, and the simulated acceptance length.

    acceptance_length = 1 + sum_k P(the first k + 1 guesses are all right): counted chain by chain, not a product of marginals, and the
    bonus token counts, so that it compares with what decoding measures greedily.
    """
    table = torch.as_tensor(prediction.predictions).double().sum(0)
    loss, loss_tokens, correct, accepted, chain_correct, chains = table
    metrics = {}
    for k in loss_tokens.isfinite().nonzero().flatten().tolist():
        metrics[f"loss_{k}"] = float(loss[k] / loss_tokens[k])
        metrics[f"accuracy_{k}"] = float(correct[k] / loss_tokens[k])
        metrics[f"acceptance_{k}"] = float(accepted[k] / loss_tokens[k])
    metrics["acceptance_length"] = 1.0 + float((chain_correct / chains).sum())
    return metrics
