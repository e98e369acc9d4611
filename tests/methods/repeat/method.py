"""The toy method as a row of the table: all that commands ask of a method."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdistill.decoding.proposer import BatchProposer, DecodingState, Proposal, RowByRow
from specdistill.decoding.sampling import Sampling
from specdistill.methods.checkpoint import read_tensors, write_draft
from specdistill.methods.contract import Implementation
from specdistill.methods.sizes import Described, Parts, PlannedDraft, Published
from specdistill.training.objective import StepSums, loss_rows
from tests.methods.repeat.config import Recipe


class Repeat(nn.Module):
    """q(x_{t+1} = x_t) = sigmoid(logit)."""

    def __init__(self, confidence: float) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor([confidence]).logit())


class RepeatLoss(nn.Module):
    """Binary cross-entropy of whether the next token is the last one again."""

    def __init__(self, draft: Repeat) -> None:
        super().__init__()
        self.draft = draft

    def num_loss_tokens(self, batch):
        return loss_rows(batch["position_ids"], batch["loss_positions"], ahead=1).sum()

    def read_target(self, target, inputs):
        return {}

    def forward(self, input_ids, loss_mask, document_ids, position_ids, loss_positions, measure=False, **_):
        positions = loss_positions[loss_rows(position_ids, loss_positions, ahead=1)]
        repeats = (input_ids.flatten()[positions] == input_ids.flatten()[positions - 1]).float()
        logits = self.draft.logit.expand_as(repeats)
        total = nn.functional.binary_cross_entropy_with_logits(logits, repeats, reduction="sum")
        sums = StepSums(loss=[total.detach()], loss_tokens=[torch.tensor(len(positions))])
        if measure:
            sums.correct, sums.accepted = [repeats.sum()], [repeats.sum()]
            sums.chain_correct, sums.chain_accepted, sums.chains = [repeats.sum()], [repeats.sum()], sums.loss_tokens
        return total, sums


@dataclass
class RepeatProposer:
    aux_layers: tuple[int, ...] = ()
    num_parameters: int = 1
    num_bytes: int = 4
    vocabulary: frozenset[int] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def begin(self, max_length: int) -> None:
        pass

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        return Proposal([state.token_ids[-1]] * k)

    def draws(self, sampling: Sampling, tree: Any = None) -> bool:
        return False

    def passes(self, k: int) -> int:
        return 1

    def batched(self) -> BatchProposer:
        return RowByRow(self)


def create(recipe: Recipe, target, rows) -> Repeat:
    return Repeat(recipe.draft.confidence)


def save(draft: Repeat, target, folder: Path) -> None:
    write_draft(folder, {"architectures": ["RepeatLast"]}, {"logit": draft.logit})


def load_proposer(folder: Path, target, *, key: str) -> RepeatProposer:
    read_tensors(folder, key)
    return RepeatProposer()


def planned(target: Described, given: Described | None, settings: dict[str, Any]) -> PlannedDraft:
    published = Published(None, "none is published", None, "none is published")
    return PlannedDraft(Parts(1, 0, 0), None, target.text.vocab_size, "repeats the last token", published)


METHOD = Implementation(
    load_proposer=load_proposer,
    has_tensors=lambda names: names == {"logit"},
    create=create,
    save=save,
    objective=lambda draft, recipe, target: RepeatLoss(draft),
    planned=planned,
    num_layers=lambda config: 0,
)
