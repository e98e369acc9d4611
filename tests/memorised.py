"""Heads that have learned one text by heart, so that decoding accepts nearly all their draft tokens until something about them is wrong."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from specdistill.decoding.decoder import Decoder
from specdistill.losses.divergence import forward_kl
from specdistill.methods.chains.unroll import TrainingTimeTest
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import training_arguments
from specdistill.training.history import HISTORY, History
from specdistill.training.trainer import DraftTrainer
from tests.heads import build_head, save_head

PROMPT = "def f(x):"
NUM_TOKENS = 100  # that the target generates and the head learns


def memorise(method: str, target: FrozenTarget, run: Path, *, max_steps: int = 200, **shape: Any) -> Path:
    """Train a head of this shape, and leave it as a run does: `draft` and `run/history.json`. Returns the draft's folder."""
    prompt = target.tokenizer(PROMPT)["input_ids"]
    text = [*prompt, *Decoder(target).generate(prompt, max_new_tokens=NUM_TOKENS).token_ids]
    row = {"input_ids": text, "loss_mask": [1] * len(text), "document_ids": [0] * len(text)}
    sample = Dataset.from_list([row | {"position_ids": list(range(len(text)))}])
    head = build_head(method, target, **shape)
    for norm, size in (("input_layernorm", 2.0), ("hidden_norm", 0.5)):  # as different as long training makes them
        if hasattr(head.layers[0], norm) and method == "eagle3":
            getattr(head.layers[0], norm).weight.data.fill_(size)
    arguments = training_arguments(
        {
            "output_dir": str(run / "trainer"),
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "max_steps": max_steps,
            "learning_rate": 8e-3,
            "lr_scheduler_type": "linear",
        }
    )
    fit = DraftTrainer(
        TrainingTimeTest(head, forward_kl, 4, step_decay=0.8),
        target,
        arguments,
        sample,
        sample,
        save=partial(save_head, method),
        optimizer=torch.optim.AdamW(head.parameters(), lr=arguments.learning_rate),  # half the time of Muon on a CPU
    )
    fit.train()
    fit.evaluate()
    save_head(method, head, run / "draft")
    (run / HISTORY).parent.mkdir()
    (run / HISTORY).write_text(json.dumps(asdict(History(None, max_steps, fit.state.log_history))))
    return run / "draft"
