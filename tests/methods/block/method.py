"""The toy block drafter with everything that commands ask of a method.

Shapes: B rows, N anchors of all rows, K slots of a block, k drafted slots, H hidden size, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling, draw_tokens, draw_uniforms
from specdistill.decoding.tree import has_drawn_candidates
from specdistill.methods.base import Advice, Method
from specdistill.methods.checkpoint import read_tensors, write_draft
from specdistill.methods.sizes import (
    MethodFigures,
    ModelConfigInfo,
    ParameterCounts,
    PlannedDraft,
)
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.packed_rows import Documents
from specdistill.training.losses.divergence import acceptance, forward_kl
from specdistill.training.losses.head_loss import compute_head_loss
from specdistill.training.objective import SoftTargets, StepSums, TargetDistributions
from tests.methods.block.config import BlockRecipe


class Block(nn.Module):
    """A draft that predicts the tokens after an anchor, one in each slot of a block.

    Slot k of a block after x_a predicts x_{a+1+k} from the embedding of x_a, the embedding of the
    slot, and the mean embedding of the slots of its block.
    """

    def __init__(self, vocab_size: int, hidden_size: int, block_size: int) -> None:
        super().__init__()
        self.tokens, self.slots = (
            nn.Embedding(vocab_size, hidden_size),
            nn.Embedding(block_size, hidden_size),
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, anchor_N: Tensor, width: int) -> Tensor:
        """Return the hidden states [N, width, H], which `lm_head` reads."""
        slots_KH = self.slots.weight[:width]
        return torch.tanh(self.tokens(anchor_N).unsqueeze(1) + slots_KH + slots_KH.mean(0))


class BlockLoss(nn.Module):
    """The forward KL of every slot at random anchors; each slot has a denominator of its own."""

    def __init__(self, draft: Block, num_slots: int, num_anchors: int) -> None:
        super().__init__()
        self.draft, self.num_slots, self.num_anchors = draft, num_slots, num_anchors

    def prepare(self, batch: dict[str, Any], number: int | None) -> dict[str, Any]:
        """Return the batch with anchors, their labels, and which of the labels carry loss.

        Anchors [N] and labels [N, K] are positions in the flattened batch.
        """
        rows, length = batch["input_ids"].shape
        generator = torch.Generator().manual_seed(0 if number is None else number + 1)
        first_B1 = torch.arange(rows).unsqueeze(1) * length
        places = torch.randint(
            length - self.num_slots, (rows, self.num_anchors), generator=generator
        )
        anchors_N = (first_B1 + places).flatten().to(batch["input_ids"].device)
        labels_NK = (
            anchors_N.unsqueeze(1) + 1 + torch.arange(self.num_slots, device=anchors_N.device)
        )
        documents = batch["document_ids"].flatten()
        is_inside_NK = documents[labels_NK] == documents[anchors_N].unsqueeze(1)
        has_loss_NK = (batch["loss_mask"].flatten()[labels_NK] > 0) & is_inside_NK
        return {**batch, "anchors": anchors_N, "labels": labels_NK, "has_loss": has_loss_NK.float()}

    def count_loss_tokens(self, batch: dict[str, Any]) -> Tensor:
        return batch["has_loss"].sum(0)

    def read_target(self, target, inputs: dict[str, Any]) -> dict[str, Any]:
        documents = Documents(inputs["cumulative_lengths"], inputs["longest"])
        features = target.features(
            inputs["input_ids"], (), position_ids_BT=inputs["position_ids"], documents=documents
        )
        last_hidden = features.last_hidden
        all_ids = torch.arange(target.vocab_size, device=target.device)
        return {
            "soft_targets": SoftTargets.from_hidden(
                target.logits, last_hidden, inputs["labels"], all_ids, 1.0
            )
        }

    def forward(
        self,
        input_ids,
        anchors,
        labels,
        has_loss,
        soft_targets: SoftTargets,
        measure: bool = False,
        **_,
    ) -> Any:
        hidden_NKH, has_loss_KN = (
            self.draft(input_ids.flatten()[anchors], self.num_slots),
            has_loss.T,
        )
        totals, metrics = [], []
        for k in range(self.num_slots):  # the target distributions of slot k in all rows
            soft = replace(soft_targets, hidden_RD=soft_targets.hidden_RD[:, k])
            rows = (
                hidden_NKH[:, k].unsqueeze(0),
                has_loss_KN[k].unsqueeze(0),
                LogitsHead(self.draft.lm_head),
            )
            total, metrics_M1N = compute_head_loss(
                *rows, partial(soft.at, measure=True), compute_row_losses
            )
            totals.append(total)
            metrics.append(metrics_M1N.squeeze(1) * has_loss_KN[k])
        losses_KN, correct_KN, accepted_KN = torch.stack(metrics, 1)
        return torch.stack(totals), StepSums.from_losses(
            has_loss_KN, losses_KN, *((correct_KN, accepted_KN) if measure else ())
        )


def compute_row_losses(
    logits_rV: Tensor, soft: TargetDistributions, k: int
) -> tuple[Tensor, Tensor]:
    losses_r = forward_kl(logits_rV, soft.probs_rW)
    with torch.no_grad():
        correct_r = (logits_rV.argmax(-1) == soft.top1_r).float()
        accepted_r = acceptance(logits_rV.float().softmax(-1), soft.probs_rW)
        return losses_r, torch.stack((losses_r, correct_r, accepted_r))


@dataclass
class BlockProposer:
    """A proposer of chains and of trees, each in one pass.

    The slots of a chain are drawn independently; the nodes of one level of a tree have one
    distribution.
    """

    draft: Block
    aux_layers: tuple[int, ...] = ()
    vocabulary: frozenset[int] | None = None
    reader: None = None
    depends_on_width: bool = True

    def __post_init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.num_parameters = sum(parameter.numel() for parameter in self.draft.parameters())
        self.num_bytes = 4 * self.num_parameters

    def begin(self, max_lengths: Sequence[int]) -> None:
        pass

    def keep(self, rows: Sequence[int]) -> None:
        pass

    def has_drawn_candidates(self, sampling: Sampling, tree: Any) -> bool:
        return has_drawn_candidates(sampling, tree)

    def count_passes(self, k: int) -> int:
        return 1

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        logits_BkV = self.compute_logits(state, k)
        if sampling.is_greedy:
            return [Proposal(tokens) for tokens in logits_BkV.argmax(-1).tolist()]
        probs_BkV = sampling.compute_probabilities(logits_BkV)
        pairs = zip(probs_BkV, draw_uniforms(probs_BkV.shape[1], generators), strict=True)
        return [
            Proposal(draw_tokens(probs_kV, uniforms_k).tolist(), probs_kV)
            for probs_kV, uniforms_k in pairs
        ]

    def propose_tree(
        self, state: DecodingState, shape: Any, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        first_BV, *levels_BV = self.compute_logits(state, shape.depth).unbind(1)
        levels = iter(levels_BV)
        drafts = shape.grow(
            first_BV,
            lambda index_BT, rows_BT: next(levels).unsqueeze(1).expand(-1, rows_BT.shape[1], -1),
            sampling,
            generators,
        )
        return [Proposal(index_N.tolist(), probs_NV, tree) for index_N, tree, probs_NV in drafts]

    def compute_logits(self, state: DecodingState, k: int) -> Tensor:
        width = min(k, self.draft.slots.num_embeddings)
        logits_BkV: Tensor = self.draft.lm_head(
            self.draft(torch.tensor([text[-1] for text in state.token_ids]), width)
        )
        return logits_BkV


class BlockAdvice(Advice[Block]):
    """The toy block drafter in plans and in examinations by the doctor."""

    def plan_draft(
        self, target: ModelConfigInfo, given: ModelConfigInfo | None, settings
    ) -> PlannedDraft:
        published = MethodFigures(None, "none is published", None, "none is published")
        return PlannedDraft(
            ParameterCounts(1, 0, 0),
            None,
            target.text.vocab_size,
            "drafts a block in one pass",
            published,
        )

    def build_simulation(self, draft: Block, num_tokens: int) -> BlockLoss:
        return BlockLoss(draft, min(num_tokens, draft.slots.num_embeddings), 64)

    def find_repairs(self, draft: Block, target):
        yield (
            "its first two slots are swapped",
            Block(*draft.tokens.weight.shape, draft.slots.num_embeddings),
        )


class BlockMethod(Method[BlockRecipe, Block]):
    """The toy block drafter as a method."""

    name = "block"
    advice = BlockAdvice()

    def has_tensors(self, names) -> bool:
        return names == {"tokens.weight", "slots.weight", "lm_head.weight"}

    def create(self, recipe: BlockRecipe, target, rows) -> Block:
        return Block(target.vocab_size, recipe.draft.hidden_size, recipe.draft.block_size)

    def build_objective(self, draft: Block, recipe: BlockRecipe, target) -> BlockLoss:
        return BlockLoss(draft, recipe.draft.block_size, recipe.loss.num_anchors)

    def save(self, draft: Block, target, folder: Path) -> None:
        config = {"architectures": ["ToyBlock"], "block_size": draft.slots.num_embeddings}
        write_draft(folder, config, draft.state_dict())

    def load_proposer(self, folder: Path, target, *, key: str, **options) -> BlockProposer:
        tensors = read_tensors(folder, key)
        vocab_size, hidden_size = tensors["tokens.weight"].shape
        draft = Block(vocab_size, hidden_size, len(tensors["slots.weight"]))
        draft.load_state_dict(tensors)
        return BlockProposer(draft)


METHOD = BlockMethod()
