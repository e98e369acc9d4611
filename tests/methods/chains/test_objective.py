"""The unroll's shifts, masks and attention equal their formulas.

That decoding computes the same is tested in test_heads.py.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from specdistill.data.rows.packing import index_batch
from specdistill.methods.chains.objective import TrainingTimeTest, UnrollKVCache
from specdistill.methods.eagle.module import build_eagle
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import Features, FrozenTarget, compile_layers
from specdistill.training.losses.divergence import forward_kl
from specdistill.training.objective import SoftTargets, StepSums, shift_left
from tests.heads import build_head, causal, document_rows
from tests.tiny import tiny_target_model, tiny_tokenizer


def run_objective(
    model: TrainingTimeTest, target: FrozenTarget, rows: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, StepSums]:
    batch = index_batch(rows)
    total, sums = model(**batch, **model.read_target(target, batch), measure=True)
    return total, sums


def make_numbered_rows(length: int, start: int) -> dict[str, torch.Tensor]:
    return document_rows(range(start, start + length))


WINDOW, TEMPERATURE = 4, 1.5
BEND = torch.linspace(-0.3, 0.3, 64)


class Toy(torch.nn.Module):
    """A head in a few lines.

    The value of a pair is its embedding plus its hidden state. Attention weights all that a pair
    sees alike, and positions are added.
    """

    aux_layers = ()

    def __init__(self, target: FrozenTarget, target_ids_W: torch.Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1, sliding_window=WINDOW)
        self.target_ids_W = target_ids_W
        self.embedding = target.tensor("embed_tokens.weight")
        self.logits = LogitsHead(torch.nn.Linear(target.hidden_size, len(target_ids_W), bias=False))
        self.logits.linear.weight.data = target.lm_head.weight[target_ids_W] / 2

    def fuse(self, features: Features) -> torch.Tensor:
        return features.last_hidden

    def rotary(self, like: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def forward(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: UnrollKVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        value = (self.embedding[next_ids] + hidden).unsqueeze(1)
        seen = kv_cache.attend(0, torch.zeros_like(value), value, value).squeeze(1)
        normed = seen + positions.unsqueeze(-1) * BEND
        return normed, normed - hidden


def compute_by_formula(
    toy: Toy, target: FrozenTarget, ids: list[int]
) -> dict[tuple[int, int], list[float]]:
    """Return three metrics of one document, by step and by the token that it predicts.

    The metrics are the divergence, whether the top-1 is the target's, and the acceptance.
    """
    output = target.model(torch.tensor([ids]), output_hidden_states=True)
    features, target_logits = output.hidden_states[-1][0], output.logits[0]
    pairs = [toy.embedding[ids[t + 1]] + features[t] for t in range(len(ids) - 1)]
    kept_ids, metrics = toy.target_ids_W, {}
    for root in range(len(ids) - 2):
        hidden, chain = features[root], []
        for k in range(min(3, len(ids) - 2 - root)):
            chain += [toy.embedding[ids[root + 1 + k]] + hidden] if k else []
            seen = pairs[max(0, root + k - WINDOW + 1) : root + 1] + chain
            normed = torch.stack(seen).mean(0) + (root + k) * BEND
            hidden = normed - hidden
            p = (target_logits[root + 1 + k] / TEMPERATURE).softmax(-1)
            q = (toy.logits.linear.weight @ normed / TEMPERATURE).softmax(-1)
            soft = p[kept_ids] / p[kept_ids].sum()
            is_correct = float(kept_ids[q.argmax()] == p.argmax())
            metrics[k, root + 2 + k] = [
                float((soft * (soft / q).log()).sum()),
                is_correct,
                float(torch.minimum(p[kept_ids], q).sum()),
            ]
    return metrics


@torch.no_grad()
def test_loss_acceptance_and_chains_equal_their_formulas() -> None:
    """The row has two documents and padding, and tokens without loss.

    The vocabulary is pruned, and the window is shorter than the documents.
    """
    target = FrozenTarget(
        tiny_target_model(num_layers=2, vocab_size=24, seed=8), tiny_tokenizer(), name="tiny"
    )
    toy = Toy(target, torch.tensor([1, 2, 4, 5, 7, *range(9, 24)]))
    texts = [[3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 7, 2], [2, 7, 1, 4, 2, 1, 5, 2, 4]]
    masks = [[0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]]
    columns = {
        "input_ids": [*texts[0], *texts[1], 0, 0, 0],
        "loss_mask": [*masks[0], *masks[1], 0, 0, 0],
        "document_ids": [0] * 12 + [1] * 9 + [-1] * 3,
        "position_ids": [*range(12), *range(9), *range(3)],
    }
    expected = torch.zeros(7, 3)  # in the order of StepSums
    for text, mask in zip(texts, masks, strict=True):
        metrics = compute_by_formula(toy, target, text)
        for root in range(len(text)):
            chain = torch.ones(3)
            for k in range(3):
                has_loss = mask[root + 2 + k : root + 3 + k] == [1]
                loss, correct, accepted = metrics[k, root + 2 + k] if has_loss else (0.0, 0.0, 0.0)
                expected[:4, k] += torch.tensor([loss, has_loss, correct, accepted])
                chain *= torch.tensor([correct, accepted, has_loss])
                expected[4:, k] += chain
    rows = {name: torch.tensor([column]) for name, column in columns.items()}
    unroll = TrainingTimeTest(toy, forward_kl, 3, step_decay=0.5, temperature=TEMPERATURE)
    total, sums = run_objective(unroll, target, rows)
    assert (
        torch.allclose(sums.table()[:7], expected, rtol=1e-4)
        and unroll.count_loss_tokens(index_batch(rows)) == expected[1, 0]
    )
    assert float(total) == pytest.approx(
        float((expected[0] * torch.tensor([4, 2, 1]) / 7).sum()), rel=1e-4
    )
    assert (expected[2:4] > 0).all() and 0 < expected[4, 1] < expected[2, 1]


@pytest.mark.parametrize("plain_linear", [True, False])
def test_pruned_soft_targets_are_renormalised_and_keep_their_mass(
    target: FrozenTarget, plain_linear: bool
) -> None:
    """This also holds where the head of the target cannot be pruned."""
    ids, kept_ids = torch.arange(3, 15)[None], torch.arange(0, target.vocab_size, 2)
    soft_targets = SoftTargets.from_hidden(
        target.logits,
        target.features(ids, []).last_hidden,
        torch.arange(1, ids.shape[1]),
        kept_ids,
        0.7,
    )
    soft_targets = soft_targets if plain_linear else dataclasses.replace(soft_targets, pruned=None)
    distributions = (target.model(ids).logits[0, :-1] / 0.7).softmax(-1)
    soft = soft_targets.at(slice(None), measure=True)
    assert soft.mass_r is not None and soft.top1_r is not None
    assert torch.allclose(soft.probs_rW.sum(-1), torch.ones(11), atol=1e-5)
    assert torch.allclose(soft.mass_r, distributions[:, kept_ids].sum(-1), atol=1e-5)
    assert torch.allclose(
        soft.probs_rW * soft.mass_r[:, None], distributions[:, kept_ids], atol=1e-5
    )
    assert torch.equal(soft.top1_r, distributions.argmax(-1))
    assert torch.allclose(
        soft_targets.at(slice(None), measure=False).probs_rW, soft.probs_rW, atol=1e-6
    )


@pytest.mark.long  # a compiler
@pytest.mark.parametrize(("method", "num_steps"), [("eagle3", 7), ("eagle", 2), ("mtp", 2)])
def test_compiled_layers_make_one_graph_for_each_step(
    target: FrozenTarget, method: str, num_steps: int
) -> None:
    options = {"draft_vocabulary": torch.arange(1, 200, 2)} if method == "eagle3" else {}
    model = TrainingTimeTest(
        build_head(method, target, **options), forward_kl, num_steps, feature_weight=0.1
    )
    torch._dynamo.reset()
    counters.clear()
    gradients = []
    for compiled in (False, True):
        if compiled:
            no_target: Any = SimpleNamespace(compile=lambda **options: None)
            compile_layers(
                {"torch_compile": True, "torch_compile_backend": "aot_eager"}, no_target, model
            )
        model.zero_grad()
        run_objective(model, target, make_numbered_rows(24, 3))[0].backward()
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        )
    # one graph for each step, and one for the loss
    assert counters["stats"]["unique_graphs"] == num_steps + 1 and not counters["graph_break"]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-6), name


def test_predicted_features_are_regressed_on_the_targets_next_features(
    target: FrozenTarget,
) -> None:
    """The expected loss of two tokens adds the weighted SmoothL1 to f_{t+1} to the divergence."""
    rows = make_numbered_rows(6, 3)
    rows["loss_mask"][:, :4] = 0
    draft = build_eagle(target)
    plain, _ = run_objective(TrainingTimeTest(draft, forward_kl, 1), target, rows)
    regressed, _ = run_objective(
        TrainingTimeTest(draft, forward_kl, 1, feature_weight=0.5), target, rows
    )
    with torch.no_grad():
        features = target.features(rows["input_ids"], ()).last_hidden
        ids = shift_left(rows["input_ids"], 1, 0)
        rotary = draft.rotary(features, rows["position_ids"])
        predicted, _ = draft(ids, features, rotary, causal(ids))
        gap = (predicted[0, 2:4] - features[0, 3:5]).abs()  # x_4 and x_5 are predicted at 2 and 3
        smooth = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean(-1).sum()
    assert float(regressed.detach() - plain.detach()) == pytest.approx(
        0.5 * float(smooth), rel=1e-4
    )


def test_noise_is_added_in_training_alone(target: FrozenTarget) -> None:
    model, rows = (
        TrainingTimeTest(build_eagle(target), forward_kl, 1, noise=0.1),
        make_numbered_rows(9, 3),
    )
    quiet = [float(run_objective(model.eval(), target, rows)[0].detach()) for _ in range(2)]
    noisy = [float(run_objective(model.train(), target, rows)[0].detach()) for _ in range(2)]
    assert quiet[0] == quiet[1] and noisy[0] != noisy[1]
    assert noisy[0] == pytest.approx(quiet[0], rel=0.2)
