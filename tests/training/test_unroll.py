"""The unroll's shifts, masks and attention, against decoding and against toy sequences."""

import pytest
import torch

from specdistill.decoding.proposers import DecodingState, Eagle3Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.drafts.build import build_eagle3
from specdistill.drafts.eagle3 import Eagle3Draft
from specdistill.losses.divergence import forward_kl
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.sums import StepSums
from specdistill.training.teacher import predicts, shift_left, teach
from specdistill.training.unroll import ChainMemory, TrainingTimeTest
from tests.tiny import tiny_target_model, tiny_tokenizer

K = 4


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


def unrolled_logits(draft: Eagle3Draft, target: FrozenTarget, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Logits [T, W] of each unroll step over one document."""
    memory = ChainMemory(torch.zeros_like(ids), draft.config.num_layers)
    hidden = draft.fuse(target.features(ids, draft.config.aux_layers).aux)
    positions = torch.arange(ids.shape[1])[None]
    logits = []
    for k in range(steps):
        normed, hidden = draft(shift_left(ids, 1 + k, 0), hidden, positions + k, memory)
        logits.append(draft.lm_head(normed)[0])
    return logits


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True}]
)
def test_the_unroll_guesses_what_the_decoder_guesses(target: FrozenTarget, options: dict[str, bool]) -> None:
    """Chains of the decoder, put back into the text as if they had been accepted, are what the unroll predicts at their root."""
    draft = build_eagle3(target, **options)  # type: ignore[arg-type]
    text = torch.randint(3, target.vocab_size, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    root = len(text) - 2  # the chain starts from the features of this position
    features = target.features(torch.tensor([text[:-1]]), draft.config.aux_layers)
    proposer = Eagle3Proposer(draft)
    proposer.begin(len(text) + K)
    with torch.no_grad():
        chain = proposer.propose(DecodingState(text, features.aux), K, Sampling(), None).tokens
        logits = unrolled_logits(draft, target, torch.tensor([text + chain]), K)
    assert [int(step[root].argmax()) for step in logits] == chain


def test_only_supervised_tokens_of_the_roots_document_are_predicted() -> None:
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]])
    supervise = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0]])
    assert predicts(document, supervise, ahead=2).nonzero()[:, 1].tolist() == [1, 2, 5]  # predict x_3, x_4 and x_7
    assert predicts(document, supervise, ahead=3).nonzero()[:, 1].tolist() == [0, 1]
    assert predicts(document, supervise, ahead=4).nonzero()[:, 1].tolist() == [0]


def test_the_teacher_is_the_targets_law_one_step_ahead(target: FrozenTarget) -> None:
    ids = torch.arange(3, 15)[None]
    ones, document = torch.ones_like(ids), torch.zeros_like(ids)
    hidden = target.features(ids, []).last_hidden
    everything = torch.arange(target.vocab_size)
    teacher = teach(target.lm_head, hidden, predicts(document, ones, ahead=1), everything, 1.0)
    laws = target.model(ids).logits[0].softmax(-1)
    rows = shift_left(teacher.row_BT, 1, -1)[predicts(document, ones, ahead=2)]
    assert torch.allclose(teacher.probs_RW[rows], laws[1:11], atol=1e-6)  # roots 0..9 are taught by the laws at 1..10


def test_a_pruned_teacher_is_renormalised_and_remembers_its_share(target: FrozenTarget) -> None:
    ids = torch.arange(3, 15)[None]
    kept = torch.arange(0, target.vocab_size, 2)
    teaches = predicts(torch.zeros_like(ids), torch.ones_like(ids), ahead=1)
    teacher = teach(target.lm_head, target.features(ids, []).last_hidden, teaches, kept, 1.0)
    laws = target.model(ids).logits[0, :-1].softmax(-1)
    assert torch.allclose(teacher.probs_RW.sum(-1), torch.ones(11), atol=1e-5)
    assert torch.allclose(teacher.share_R, laws[:, kept].sum(-1), atol=1e-5)
    assert torch.allclose(teacher.probs_RW * teacher.share_R[:, None], laws[:, kept], atol=1e-5)
    assert torch.equal(teacher.best_R, laws.argmax(-1))


def run(model: TrainingTimeTest, target: FrozenTarget, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, StepSums]:
    total, sums = model(**rows, **model.teach(target, rows), measure=True)
    return total, sums


def document_rows(length: int, start: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(start, start + length)[None]
    return {
        "input_ids": ids,
        "supervise": torch.ones_like(ids),
        "document_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(length)[None],
    }


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, 200, 2)])
def test_packing_changes_no_loss_and_no_gradient(target: FrozenTarget, vocabulary: torch.Tensor | None) -> None:
    model = TrainingTimeTest(build_eagle3(target, draft_vocabulary=vocabulary), forward_kl, K, step_decay=0.8)
    first, second = document_rows(11, 3), document_rows(9, 60)
    packed = {name: torch.cat((first[name], second[name]), 1) for name in first}
    packed["document_ids"][:, 11:] = 1
    padding = {"input_ids": 0, "supervise": 0, "document_ids": -1, "position_ids": 0}
    packed = {name: torch.cat((rows, torch.full((1, 5), padding[name])), 1) for name, rows in packed.items()}
    packed["position_ids"][:, 20:] = torch.arange(5)

    total, sums = run(model, target, packed)
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    separate = [run(model, target, rows) for rows in (first, second)]
    (separate[0][0] + separate[1][0]).backward()

    assert torch.allclose(total, separate[0][0] + separate[1][0], rtol=1e-4)
    assert torch.allclose(sums.table(), separate[0][1].table() + separate[1][1].table(), rtol=1e-4, atol=1e-4)
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.allclose(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5), name


def test_unsupervised_tokens_carry_no_loss(target: FrozenTarget) -> None:
    model = TrainingTimeTest(build_eagle3(target), forward_kl, 2)
    rows = document_rows(12, 3)
    rows["supervise"][:, :8] = 0
    _, sums = run(model, target, rows)
    assert [int(kept) for kept in sums.kept] == [4, 4]
    assert [int(chains) for chains in sums.chains] == [4, 3]


def test_step_weights_decay_and_sum_to_one(target: FrozenTarget) -> None:
    model = TrainingTimeTest(build_eagle3(target), forward_kl, 3, step_decay=0.5)
    assert model.step_weights.tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    total, sums = run(model, target, document_rows(12, 3))
    expected = sum(float(w) * float(loss) for w, loss in zip(model.step_weights, sums.loss, strict=True))
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)
