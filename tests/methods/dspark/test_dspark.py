"""DSpark's correction, slot by slot and for all slots at once, and its confidence."""

from typing import Any

import pytest
import torch

from specdistill.data.rows.packing import index_batch
from specdistill.methods.blocks.module import build_block_draft
from specdistill.methods.blocks.objective import BlockObjective
from specdistill.methods.dspark.method import KIND
from specdistill.methods.dspark.module import DSparkDraft
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl
from tests.heads import build_block, document_rows


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_correction_slot_by_slot_equals_that_of_all_slots_at_once(
    target: FrozenTarget, kind: str
) -> None:
    """A correction depends on earlier tokens alone: other tokens later change nothing."""
    draft: Any = build_block("dspark", target, markov_head_type=kind)
    torch.manual_seed(0)
    hidden, previous = torch.randn(3, 5, target.hidden_size), torch.randint(3, 250, (3, 5))
    together, embedded = draft.markov_head(hidden, previous)
    state = draft.markov_head.start(hidden)
    for slot in range(5):
        correction, embedding, state = draft.markov_head.step(
            hidden[:, slot], previous[:, slot], state
        )
        assert torch.allclose(correction, together[:, slot], atol=1e-6) and torch.equal(
            embedding, embedded[:, slot]
        )
    changed = previous.clone()
    changed[:, 3] += 1
    assert torch.equal(draft.markov_head(hidden, changed)[0][:, :3], together[:, :3])
    assert not torch.allclose(draft.markov_head(hidden, changed)[0][:, 3:], together[:, 3:])


@pytest.mark.parametrize(("kind", "rank"), [("vanilla", 8), ("gated", 8), ("rnn", 8), ("rnn", 80)])
def test_a_fresh_correction_corrects_nothing(target: FrozenTarget, kind: str, rank: int) -> None:
    draft = build_block_draft(
        KIND, target, markov_rank=rank, markov_head_type=kind, block_size=4, mask_token_id=2
    )
    assert isinstance(draft, DSparkDraft)
    corrections, _ = draft.markov_head(
        torch.randn(2, 4, target.hidden_size), torch.tensor([[5, 6, 7, 8]] * 2)
    )
    assert not (corrections @ draft.markov_head.markov_w2.weight.T).any()


def test_confidence_learns_how_likely_each_slot_is_accepted(target: FrozenTarget) -> None:
    """After training on a row, the mean confidence is the acceptance that is measured."""
    draft: Any = build_block("dspark", target, block_size=4)
    objective = BlockObjective(draft, forward_kl, 16, confidence_weight=1.0)
    batch = objective.prepare(
        index_batch(document_rows(torch.randint(3, 250, (60,)).tolist())), None
    )
    inputs = objective.read_target(target, batch)
    optimizer = torch.optim.Adam(draft.confidence_head.parameters(), 3e-2)
    seen: list[torch.Tensor] = []
    draft.confidence_head.register_forward_hook(
        lambda module, inputs, logits: seen.append(logits.detach().sigmoid())
    )
    for _ in range(60):
        total, _ = objective(**batch, **inputs)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    _, sums = objective(**batch, **inputs, measure=True)
    counts = batch["has_loss"]
    confidence = (seen[-1] * counts).sum(0) / counts.sum(0)
    measured = sums.accepted / sums.loss_tokens
    assert torch.allclose(confidence, measured, atol=0.05)
