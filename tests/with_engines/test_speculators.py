"""speculators 0.9 reads heads that are exported for it, and heads that it wrote are read here.

Each step of its unroll gives our logits.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.engines import run
from specdistill.data.rows.packing import index_batch
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.eagle3.checkpoint import load_eagle3
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl
from specdistill.training.objective import select_loss_rows
from tests.heads import build_head, save_head
from tests.serving import layouts
from tests.with_engines.environments import environment

pytestmark = [pytest.mark.long, pytest.mark.engines]  # speculators in its own environment

NUM_STEPS = 4
WINDOW = 8
VOCABULARY = list(range(5, 105, 4))
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pruned vocabulary": {"draft_vocabulary": torch.tensor(VOCABULARY)},
    "two layers": {"num_layers": 2},
    "norms of 3.1": {"fc_norm": True, "norm_output": True},
    "norm_output": {"norm_output": True},
    "norm before residual": {"norm_before_residual": True},
    "two layers read": {"aux_layers": [1, 6]},
    "the last state read": {"aux_layers": [2, 4, 8]},
    "window": {"sliding_window": WINDOW},
    "other heads": {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96},
}
THEIRS: dict[str, dict[str, Any]] = {
    "their default": {"norm_before_residual": True},
    "their norm before fc": {
        "norm_before_residual": False,
        "norm_before_fc": True,
        "num_layers": 2,
    },
    "their norms of 3.1": {
        "norm_before_residual": False,
        "fc_norm": True,
        "norm_output": True,
        "target_layer_ids": [1, 3, 6],
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return layouts.saved_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    """A packed row: a document of 21 tokens and one of 13."""
    ids = torch.randint(4, 260, (1, 34), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": ids,
        "loss_mask": torch.ones_like(ids),
        "document_ids": torch.tensor([[0] * 21 + [1] * 13]),
        "position_ids": torch.tensor([[*range(21), *range(13)]]),
    }


@pytest.fixture(scope="module")
def cases(
    target: FrozenTarget, rows: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The folder of each case, with `head` and the logits of speculators' unroll of it."""
    python = environment("speculators") / "bin" / "python"
    folder = tmp_path_factory.mktemp("speculators")
    folders = {name: folder / name.replace(" ", "-") for name in [*OURS, *THEIRS]}
    for name, shape in OURS.items():
        draft = build_head("eagle3", target, **shape)
        with torch.no_grad():
            for key, parameter in draft.named_parameters():
                if "norm" in key:
                    parameter.add_(
                        0.2
                        * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
                    )
        save_head("eagle3", draft, folders[name] / "draft")
        export(
            folders[name] / "draft", "speculators", folders[name] / "head", TargetFiles(target.name)
        )
        write_input(target, rows, draft.aux_layers, folders[name])
    for name, settings in THEIRS.items():
        folders[name].mkdir()
        write_input(target, rows, settings.get("target_layer_ids", [2, 4, 5]), folders[name])
    jobs = {
        "verifier": target.name,
        "num_steps": NUM_STEPS,
        "read": [str(folders[name] / "head") for name in OURS],
        "make": {
            str(folders[name] / "head"): {"num_layers": 1, "vocabulary": VOCABULARY, **THEIRS[name]}
            for name in THEIRS
        },
    }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run(python, Path(__file__).with_name("speculators_unroll.py"), folder)
    return folders


@torch.no_grad()
def write_input(
    target: FrozenTarget, rows: dict[str, Tensor], aux_layers: Any, folder: Path
) -> None:
    """Write the pairs (next token, features) as speculators takes them.

    They are side by side, without the last position, and positions count from 1.
    """
    features = target.features(rows["input_ids"], aux_layers, position_ids_BT=rows["position_ids"])
    tensors = {
        "aux": torch.cat(features.aux, dim=-1)[:, :-1],
        "input_ids": rows["input_ids"][:, 1:],
        "position_ids": rows["position_ids"][:, :-1] + 1,
        "document_ids": rows["document_ids"][:, :-1],
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "input.safetensors",
    )


@torch.no_grad()
def compute_our_logits(draft: Any, target: FrozenTarget, rows: dict[str, Tensor]) -> list[Tensor]:
    """Return the logits [R, W] of each step of the training-time test.

    R are the positions that the step keeps.
    """
    logits: list[Tensor] = []

    def record_logits(logits_RW: Tensor, probs_RW: Tensor) -> Tensor:
        logits.append(logits_RW)
        return forward_kl(logits_RW, probs_RW)

    unroll, batch = (
        TrainingTimeTest(draft.eval(), record_logits, NUM_STEPS).eval(),
        index_batch(rows),
    )
    unroll(**batch, **unroll.read_target(target, batch))
    positions = batch["loss_positions"]
    return [
        step[select_loss_rows(rows["position_ids"], positions, ahead=2 + k)]
        for k, step in enumerate(logits)
    ]


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_every_step_of_the_unroll_gives_the_same_logits(
    cases: dict[str, Path], target: FrozenTarget, rows: dict[str, Tensor], name: str
) -> None:
    draft = load_eagle3(cases[name] / "head", target)
    theirs = load_file(cases[name] / "logits.safetensors")
    for step, ours_RW in enumerate(compute_our_logits(draft, target, rows)):
        keep_BT = torch.zeros_like(rows["position_ids"], dtype=torch.bool)
        positions = index_batch(rows)["loss_positions"]
        keep_BT.view(-1)[
            positions[select_loss_rows(rows["position_ids"], positions, ahead=2 + step)] - 2 - step
        ] = True
        theirs_RW = theirs[str(step)][keep_BT[:, :-1]]
        assert ours_RW.shape == theirs_RW.shape and len(ours_RW) > 20
        if step and draft.config.sliding_window:
            # Their window stays with the root; in decoding, and here, it moves on with the chain.
            # So logits are compared until the window drops a position.
            same_R = rows["position_ids"][keep_BT] + step < draft.config.sliding_window
            ours_RW, theirs_RW = ours_RW[same_R], theirs_RW[same_R]
            assert len(ours_RW) >= 8
        torch.testing.assert_close(ours_RW, theirs_RW, rtol=0, atol=1e-4)
