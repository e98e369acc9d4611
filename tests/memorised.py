"""Heads that have learned one text by heart.

Decoding accepts nearly all their draft tokens until something about them is wrong.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specdistill.data.rows.packing import index_batch
from specdistill.decoding.decoder import Decoder
from specdistill.methods.blocks.checkpoint import save_block
from specdistill.methods.blocks.module import build_block_draft
from specdistill.methods.blocks.objective import BlockObjective
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.first_loss import check_first_loss
from specdistill.serving.export import NO_ROWS
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import HISTORY, History
from specdistill.training.losses.divergence import forward_kl
from tests.heads import KINDS, build_head, document_rows, save_head

PROMPT = "def f(x):"
NUM_TOKENS = 100  # that the target generates and the head learns
LENGTH = 4.5  # the acceptance length that its history says
K = 4


def memorise(
    method: str,
    target: FrozenTarget,
    run: Path,
    *,
    num_steps: int = 200,
    begins_evenly: bool = False,
    **shape: Any,
) -> Path:
    """Train a head of this shape, leave it as a run does, and return the draft's folder.

    A run leaves `draft` and `run/history.json`. begins_evenly: whether its output is scaled down
    first where its loss is large, as training scales it.
    """
    prompt = target.tokenizer(PROMPT)["input_ids"]
    rows: dict[str, Any] = index_batch(
        document_rows(
            [*prompt, *Decoder(target).generate(prompt, max_new_tokens=NUM_TOKENS).token_ids]
        )
    )
    if method in KINDS:
        own = {"markov_rank": 8} if method == "dspark" else {}
        head = build_block_draft(
            KINDS[method], target, num_layers=2, block_size=K + 1, mask_token_id=2, **own, **shape
        )
        unroll: Any = BlockObjective(head, forward_kl, NUM_TOKENS)
        rows = unroll.prepare(rows, None)
    else:
        head = build_head(method, target, **shape)
        unroll = TrainingTimeTest(head, forward_kl, K, step_decay=0.8)
    # as different as long training makes them
    for norm, size in (("input_layernorm", 2.0), ("hidden_norm", 0.5)):
        if hasattr(head.layers[0], norm) and method == "eagle3":
            getattr(head.layers[0], norm).weight.data.fill_(size)
    if begins_evenly:
        check_first_loss(unroll, target, NO_ROWS, is_fresh=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=8e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    seen = unroll.read_target(target, rows)
    for _ in range(num_steps):
        loss, _ = unroll(**rows, **seen)
        optimizer.zero_grad()
        (loss / NUM_TOKENS).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if method in KINDS:
        save_block(head, KINDS[method], run / "draft")
    else:
        save_head(method, head, run / "draft")
    accepted = {f"eval_acceptance_{k}": 0.9 for k in range(1, K + 1)} | {
        "eval_acceptance_length": LENGTH
    }
    (run / HISTORY).parent.mkdir()
    (run / HISTORY).write_text(
        json.dumps(asdict(History(None, num_steps, [{"step": num_steps, **accepted}])))
    )
    return run / "draft"
