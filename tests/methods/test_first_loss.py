"""A fresh draft of every method on every class begins no worse than one that guesses evenly among
its tokens."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdistill.data.rows.packing import index_batch
from specdistill.methods import METHODS
from specdistill.methods.early_exit.checkpoint import load_exit, save_exit
from specdistill.methods.first_loss import check_first_loss
from specdistill.methods.load import create_draft
from specdistill.serving.export import NO_ROWS
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl
from tests.heads import document_rows
from tests.targets.architectures import ROWS, SERVED, TRAINED, read_page, recipe_of, tiny_model
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # some of two hundred classes warn
# These have norms of weight and of 1 + weight, scaled embeddings, capped and scaled logits,
# LayerNorm, recurrent layers.
QUICK = ("llama", "gemma3_text", "gemma4_text", "granite", "cohere", "qwen3_next")
# A head, an exit and a model, which read the target's scale in different places.
QUICK_METHODS = ("eagle3", "early_exit", "draft_model")
ROW_OF = {row.cells[0]: row.cells[3] for row in read_page() if row.part == SERVED}
LARGE = 26.0  # the mean weight of Gemma 3 270M's final norm
# In units of ln W. An even guess has a loss of ln W where the target is nearly certain, and no
# fresh draft guesses quite evenly.
TOLERANCE = 0.001


def list_cases() -> list[Any]:
    """Return each class with each method that may have a draft for it.

    There are a hundred classes. The quick suite runs all methods of one class, and three methods of
    five others.
    """
    cases = []
    for kind, methods in ROW_OF.items():
        for method in TRAINED:
            if methods == "all" or method in methods.split(", "):
                is_quick = kind == "llama" or (kind in QUICK and method in QUICK_METHODS)
                marks = [] if is_quick else [pytest.mark.long]
                cases.append(pytest.param(kind, method, marks=marks))
    return cases


@cache
@torch.no_grad()
def build_target(kind: str, gain: float = LARGE) -> FrozenTarget:
    """Return a random target whose final norm multiplies by 13 to 39, where it has weights."""
    target = FrozenTarget(tiny_model(kind), tiny_tokenizer(), name=kind)
    weight = getattr(target.norm, "weight", None)
    if weight is not None:
        gains = gain * (0.5 + torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)))
        # A class whose weights begin at 0 multiplies by 1 + weight; at 1, by the weight.
        weight.copy_(gains if weight.any() else gains - 1)
    return target


@torch.no_grad()
def compute_first_losses(method: str, target: FrozenTarget, draft: Any) -> list[float]:
    """Return the loss of each drafted position on random text, in units of ln W."""
    objective: Any = METHODS[method].load().build_objective(draft, recipe_of(method), target)
    objective.divergence = forward_kl
    ids = torch.randint(
        3, target.vocab_size, (96,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    batch = objective.eval().prepare(index_batch(document_rows(ids)), None)
    _, sums = objective(**{**batch, **objective.read_target(target, batch)})
    ids_W = getattr(draft, "target_ids_W", None)
    num_tokens = target.vocab_size if ids_W is None else len(ids_W)
    losses: list[float] = (sums.loss / sums.loss_tokens / math.log(num_tokens)).tolist()
    return losses


@pytest.mark.parametrize(("kind", "method"), list_cases())
def test_a_fresh_draft_begins_no_worse_than_even_guesses(kind: str, method: str) -> None:
    target = build_target(kind)
    draft = create_draft(recipe_of(method), target, NO_ROWS)
    assert max(compute_first_losses(method, target, draft)) <= 1 + TOLERANCE


@pytest.mark.parametrize(
    "method", ["eagle3", "eagle", "mtp", "early_exit", "dflash", "draft_model"]
)
def test_drafts_for_a_target_of_ordinary_scale_are_not_rescaled(method: str) -> None:
    target = build_target("llama", gain=1.0)
    draft = create_draft(recipe_of(method), target, NO_ROWS)
    expected = METHODS[method].load().create(recipe_of(method), target, ROWS)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name


def test_a_scaled_exit_is_saved_and_loaded(tmp_path: Path) -> None:
    """The gain is a tensor of its own; the config of an exit without a gain has no such key."""
    target = build_target("llama")
    exit = create_draft(recipe_of("early_exit"), target, NO_ROWS)
    save_exit(exit, tmp_path)
    loaded = load_exit(tmp_path, target)
    hidden = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    assert loaded.layers[0].output_gain.max() < 0.5
    assert torch.equal(loaded(hidden), exit(hidden))
    ordinary = create_draft(recipe_of("early_exit"), build_target("llama", gain=1.0), NO_ROWS)
    save_exit(ordinary, tmp_path / "ordinary")
    assert "gain" not in (tmp_path / "ordinary" / "config.json").read_text()


@torch.no_grad()
def test_a_trained_draft_that_begins_badly_is_warned_of_and_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A draft for another target begins so: its logits are large and do not fit this target."""
    target = build_target("llama", gain=1.0)
    draft = create_draft(recipe_of("eagle3"), target, NO_ROWS)
    draft.lm_head.weight.mul_(100)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    objective: Any = METHODS["eagle3"].load().build_objective(draft, recipe_of("eagle3"), target)
    check_first_loss(objective, target, ROWS, is_fresh=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())
    (message,) = caplog.messages
    assert "worse than guessing evenly among its tokens (5.1)" in message
    assert "draft.init" in message
