"""speculators 0.9 reads block drafters that are exported for it.

They have the same logits, targets, loss mask, confidence and gradients there.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.engines import run
from specdistill.data.rows.packing import index_batch
from specdistill.methods.blocks.checkpoint import load_block, save_block
from specdistill.methods.blocks.module import BlockDraft
from specdistill.methods.blocks.objective import BlockObjective
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.heads import KINDS, build_block
from tests.serving import layouts
from tests.with_engines.environments import environment

pytestmark = [pytest.mark.long, pytest.mark.engines]  # speculators in its own environment

BLOCK, WINDOW = 5, 20
KEPT = torch.arange(5, 105, 4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash, pruned": ("dflash", {"draft_vocabulary": KEPT, "aux_layers": [1, 3, 6]}),
    "dflash, causal window": ("dflash", {"is_causal": True, "sliding_window": WINDOW}),
    "dflash, window": ("dflash", {"sliding_window": WINDOW}),
    "dspark": ("dspark", {}),
    "dspark, pruned": ("dspark", {"draft_vocabulary": KEPT}),
    "dspark, gated": ("dspark", {"markov_head_type": "gated"}),
    "dspark, rnn": ("dspark", {"markov_head_type": "rnn"}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return layouts.saved_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """One row with a prompt of two tokens and its answer, then a prompt without an answer.

    For such a row speculators has our loss mask and borders.
    """
    ids = torch.randint(4, 260, (1, 44), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[*range(30), *range(14)]])
    rows = {
        "input_ids": ids,
        "loss_mask": ((positions > 1) & (torch.arange(44) < 30)).long(),
        "document_ids": torch.tensor([[0] * 30 + [1] * 14]),
        "position_ids": positions,
    }
    return index_batch(rows)


# The tokens with loss. Each is an anchor of speculators; ours are the tokens before them.
FIRST, LAST = 2, 29
BOTH = slice(1, LAST - FIRST + 1)  # our anchors that speculators has, too: all but the first


def make_logit_weights(draft: BlockDraft) -> Tensor:
    """Return the weights [N, P, W] of the logits in a sum.

    They are zero where a logit is not trained here, such as past the end of the document.
    """
    shape = LAST - FIRST + 1, BLOCK, draft.config.draft_vocab_size
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    drafted = torch.arange(BLOCK) - draft.config.first_slot + 1
    label = torch.arange(FIRST, LAST + 1).unsqueeze(1) + drafted
    return (
        weights
        * ((drafted > 0) & (label <= LAST)).unsqueeze(-1)
        * find_anchors_in_window(draft).view(-1, 1, 1)
    )


def find_anchors_in_window(draft: BlockDraft) -> Tensor:
    """Return whether the block of each anchor [N] lies within every window.

    speculators counts a window from the anchor, others from each slot.
    """
    window = draft.config.sliding_window or 10 * LAST
    return torch.arange(FIRST, LAST + 1) + BLOCK <= window


@pytest.fixture(scope="module")
def cases(
    target: FrozenTarget, batch: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("speculators")
    folders = {name: folder / name.replace(" ", "-").replace(",", "") for name in CASES}
    last_hidden: list[Tensor] = []  # before the final norm, which speculators applies itself
    hook = target.norm.register_forward_pre_hook(
        lambda module, inputs: last_hidden.append(inputs[0])
    )
    for name, (method, shape) in CASES.items():
        draft = build_block(method, target, block_size=BLOCK, **shape)
        save_block(draft, KINDS[method], folders[name] / "draft")
        export(
            folders[name] / "draft", "speculators", folders[name] / "head", TargetFiles(target.name)
        )
        with torch.no_grad():
            features = target.features(
                batch["input_ids"], draft.aux_layers, position_ids_BT=batch["position_ids"]
            )
        tensors = {
            "aux": torch.cat(features.aux, -1),
            "last_hidden": last_hidden[-1],
            "weights": make_logit_weights(draft),
            **{
                name: batch[name]
                for name in ("input_ids", "loss_mask", "document_ids", "position_ids")
            },
        }
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folders[name] / "input.safetensors",
        )
    hook.remove()
    run(
        environment("speculators") / "bin" / "python",
        Path(__file__).with_name("speculators_blocks.py"),
        *folders.values(),
    )
    return folders


@pytest.mark.parametrize("name", CASES)
def test_logits_targets_mask_confidence_and_gradients_are_the_same(
    cases: dict[str, Path], target: FrozenTarget, batch: dict[str, Any], name: str
) -> None:
    method, _ = CASES[name]
    theirs, draft = (
        load_file(cases[name] / "output.safetensors"),
        load_block(KINDS[method], cases[name] / "head", target),
    )
    assert draft.config == load_block(KINDS[method], cases[name] / "draft", target).config
    first, pairs = draft.config.first_slot, []
    objective, confidences = (
        BlockObjective(draft, lambda *pair: pairs.append(pair) or sum_weighted_logits(pair[0]), 64),
        [],
    )
    inputs = objective.prepare(batch, None)
    counts = inputs["has_loss"][BOTH]
    assert theirs["anchors"].tolist() == [*range(FIRST, LAST + 1)]
    assert inputs["anchors"][:28].tolist() == [*range(FIRST - 1, LAST)]
    assert counts[:, 0].all() and counts.sum() == inputs["has_loss"][1:].sum()
    weights = torch.zeros(*inputs["has_loss"].shape, draft.config.draft_vocab_size)
    weights[BOTH] = make_logit_weights(draft)[:27, first:]
    rows_left = iter(weights.flatten(0, 1))

    def sum_weighted_logits(logits_rW: Tensor) -> Tensor:
        return (logits_rW * torch.stack([next(rows_left) for _ in logits_rW])).sum(-1)

    if draft.confidence_head is not None:
        objective.confidence_weight = 1e-9
        draft.confidence_head.register_forward_hook(
            lambda module, inputs, output: confidences.append(output.detach())
        )
    total, _ = objective(**inputs, **objective.read_target(target, inputs))
    (total * len(objective.step_weights)).backward()

    logits, probs = (
        torch.cat([pair[part] for pair in pairs]).view_as(weights)[BOTH] for part in (0, 1)
    )
    their_logits, their_probs, their_mask = (
        theirs[part][:27, first:] for part in ("logits", "targets", "mask")
    )
    if method == "dflash":
        assert torch.equal(their_mask.cumprod(1).bool(), counts)
    else:  # their mask is that of the token before the one that a slot predicts
        assert torch.equal(their_mask[:, 1:].cumprod(1).bool(), counts[:, :-1])
    counts = counts & find_anchors_in_window(draft)[:27].unsqueeze(1)
    torch.testing.assert_close(logits[counts], their_logits[counts], rtol=0, atol=1e-4)
    torch.testing.assert_close(probs[counts], their_probs[counts], rtol=0, atol=1e-5)
    if confidences:
        torch.testing.assert_close(
            confidences[0][BOTH][counts], theirs["confidence"][:27][counts], rtol=0, atol=1e-4
        )
    trained = {
        name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad
    }
    assert {f"grad.{name}" for name in trained if "confidence" not in name} <= theirs.keys()
    for parameter_name, parameter in trained.items():
        if "confidence" not in parameter_name:
            expected = theirs[f"grad.{parameter_name}"]
            assert (
                parameter.grad is not None
                and (parameter.grad - expected).norm() <= 1e-3 * expected.norm()
            ), parameter_name
