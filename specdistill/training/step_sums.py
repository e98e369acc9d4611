"""The training-time metrics of each drafted position, as sums and counts: divided after batches and processes are added up."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import EvalPrediction


@dataclass
class StepSums:
    """Sums over the loss tokens of one batch, an entry for each drafted position; divide by `loss_tokens`, `chain_correct` by `chains`.

    loss: nats; correct: the draft's top-1 is the target's; accepted: expected acceptance (losses.divergence.acceptance);
    chain_correct: correct at this and every earlier position of the chain.
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

    acceptance_length = 1 + sum_k P(the first k + 1 draft tokens are all correct), counted chain by chain and not as a product of
    marginals. The 1 is the bonus token, so that it compares with the acceptance length of greedy decoding.
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
