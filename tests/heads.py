"""Heads of noise, in every shape that files can hold."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdistill.data.rows.packing import index_batch
from specdistill.decoding.proposer import DecodingState
from specdistill.decoding.sampling import Sampling
from specdistill.methods.blocks.module import BlockDraft, build_block_draft
from specdistill.methods.blocks.proposer import BlockProposer
from specdistill.methods.chains.objective import TrainingTimeTest, UnrollKVCache
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.dflash.method import KIND as DFLASH
from specdistill.methods.dspark.method import KIND as DSPARK
from specdistill.methods.eagle.checkpoint import load_eagle, save_eagle
from specdistill.methods.eagle.module import build_eagle
from specdistill.methods.eagle3.checkpoint import load_eagle3, save_eagle3
from specdistill.methods.eagle3.module import Eagle3Draft, build_eagle3
from specdistill.methods.mtp.checkpoint import build_mtp, load_mtp, save_mtp
from specdistill.targets.frozen import FrozenTarget

HEADS = ("eagle", "eagle3", "mtp")
BUILD = {"eagle": build_eagle, "eagle3": build_eagle3, "mtp": partial(build_mtp, init="scratch")}
LOAD = {"eagle": load_eagle, "eagle3": load_eagle3, "mtp": load_mtp}
SAVE = {"eagle": save_eagle, "eagle3": save_eagle3, "mtp": save_mtp}
# Options that fresh heads are not built with, or not in this order.
REPLACED = ("norm_before_fc", "own_embedding", "rope_scaling", "aux_layers")


KINDS = {"dflash": DFLASH, "dspark": DSPARK}


def build_block(method: str, target: FrozenTarget, **shape: Any) -> BlockDraft:
    """Return a fresh block drafter with a correction that counts."""
    own = {"markov_rank": 8} if method == "dspark" else {}
    draft = build_block_draft(
        KINDS[method],
        target,
        **{"num_layers": 2, "block_size": 9, "mask_token_id": 2, **own, **shape},
    )
    for name, parameter in draft.named_parameters():
        if name not in draft.shared:
            torch.nn.init.normal_(
                parameter,
                std=0.5,
                mean="norm" in name,
                generator=torch.Generator().manual_seed(len(name)),
            )
    return draft


def block_proposer(method: str, target: FrozenTarget, **shape: Any) -> BlockProposer:
    return BlockProposer(build_block(method, target, **shape))


def build_head(method: str, target: FrozenTarget, **shape: Any) -> Any:
    """Return a fresh head of a method."""
    head: Any = BUILD[method](target, **shape)
    return head


def load_head(method: str, folder: Path, target: FrozenTarget, **options: Any) -> Any:
    return LOAD[method](folder, target, **options)


def save_head(method: str, head: Any, folder: Path) -> None:
    SAVE[method](head, folder)


def head_of(
    method: str, target: FrozenTarget, shape: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return a head with every tensor random, and none the same as another."""
    replaced = {
        name: tuple(value) if name == "aux_layers" else value
        for name, value in shape.items()
        if name in REPLACED
    }
    built = {name: value for name, value in shape.items() if name not in replaced}
    if "aux_layers" in shape:
        built["aux_layers"] = sorted(shape["aux_layers"])
    head = build_head(method, target, **built)
    if replaced:
        changed = Eagle3Draft(dataclasses.replace(head.config, **replaced))
        changed.load_state_dict(head.state_dict(), strict=False)
        head = changed
    for index, (name, parameter) in enumerate(head.named_parameters()):
        if name not in head.shared:
            generator = torch.Generator().manual_seed(index)
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return head.to(dtype)


def causal(ids_BT: torch.Tensor, num_layers: int = 1, window: int | None = None) -> UnrollKVCache:
    """Return the unroll's KV cache for rows that are one document each."""
    starts = torch.arange(0, ids_BT.numel() + 1, ids_BT.shape[1], dtype=torch.int32)
    return UnrollKVCache(starts, ids_BT.shape[1], num_layers, window)


def document_rows(token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return one row that is one document, with a loss at every token."""
    ids = torch.tensor([list(token_ids)])
    return {
        "input_ids": ids,
        "loss_mask": torch.ones_like(ids),
        "document_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(ids.shape[1])[None],
    }


@torch.no_grad()
def check_unroll(
    head: Any, target: FrozenTarget, num_steps: int = 4, temperature: float = 0.7
) -> None:
    """Check that the unroll predicts a chain as the decoder drafted it.

    The chain is appended as if it had been accepted, and is predicted at its root.
    """
    sequence = torch.randint(
        3, target.vocab_size, (12,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    state = DecodingState(
        [sequence],
        target.features(torch.tensor([sequence[:-1]]), head.aux_layers),
        [len(sequence) - 1],
    )
    proposer = HeadProposer(head)
    proposer.begin([len(sequence) + num_steps])
    (chain,) = proposer.propose(
        state, num_steps, Sampling(temperature), [torch.Generator().manual_seed(1)]
    )

    predicted: list[torch.Tensor] = []

    def noted(logits_rW: torch.Tensor, _probs_rW: torch.Tensor) -> torch.Tensor:
        predicted.append(logits_rW)
        return logits_rW.sum(-1)

    rows = document_rows([*sequence, *chain.tokens])
    rows["loss_mask"][:, : len(sequence)] = 0
    unroll, batch = TrainingTimeTest(head, noted, num_steps), index_batch(rows)
    unroll(**batch, **unroll.read_target(target, batch))
    assert chain.probabilities is not None
    for k, logits_rW in enumerate(predicted):
        expected = (logits_rW[k] / temperature).softmax(-1)
        assert torch.allclose(chain.probabilities[k, head.target_ids_W], expected, atol=1e-5), k
    assert len(predicted) == num_steps
