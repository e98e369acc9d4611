"""What bench/train.py compares: a trainer in a process of its own, which takes a step for each line that it reads.

    python -P bench/trainers.py NAME SETTINGS    # a name of TRAINERS, its settings in JSON; the Python that has the trainer's library

It answers with the seconds of the step's parts, its loss, and the memory that it took at its peak above what stood before it. Trainers of a
head have the same weights, tokens and target features, and the same loss: in nats, the mean of each step of the unroll, summed over these.

Shapes: B rows of one document each, T positions, H hidden size of target and draft, K steps of the unroll, R rows of hidden states.
"""

import json
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_AUX = 3  # layers of the target that a head reads
MAX_NORM = 1.0  # speculators' own, as is the weight decay
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}

MicroBatch = Callable[[], tuple[Tensor, float]]  # the loss to be followed backward, and the loss to be compared


@dataclass
class Trainer:
    """optimizer: None clears gradients alone."""

    micro_batches: Sequence[MicroBatch]
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer | None

    def step(self) -> dict[str, float]:
        """One step of training: its `seconds`, also of `forward`, `backward` and `optimizer`, its `loss`, and `peak`, in bytes."""
        stands, losses, times = from_now(), [], {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        start = last = now()

        def passed(part: str) -> None:
            nonlocal last
            reached = now()
            times[part] += reached - last
            last = reached

        for micro_batch in self.micro_batches:
            loss, compared = micro_batch()
            passed("forward")
            (loss / len(self.micro_batches)).backward()
            passed("backward")
            losses.append(compared)
        if self.optimizer is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        passed("optimizer")
        measured = {"loss": sum(losses) / len(losses), "peak": peak() - stands}
        return {"seconds": last - start, **times, **measured}


def now() -> float:
    """Seconds on the clock, once the device is idle."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def from_now() -> int:
    """Bytes of memory that are taken, above which `peak` is from now on."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else resident("VmHWM")


def resident(name: str) -> int:
    """Bytes of this process in the machine's memory: now (VmRSS), or at the most since the mark was reset (VmHWM)."""
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


def precision(bf16: bool) -> torch.autocast:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16)


def noise(*shape: int, bf16: bool, seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, torch.bfloat16 if bf16 else torch.float32)


def given(rows: int, length: int, vocab_size: int, hidden_size: int, bf16: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, T]; the target's features [B, T, 3H]; its last layer's output [B, T, H]."""
    ids = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    aux, last = (noise(rows, length, size, bf16=bf16, seed=size) for size in (NUM_AUX * hidden_size, hidden_size))
    return ids, aux, last


def ours(folder: str, rows: int, length: int, num_steps: int, trains_head: bool, bf16: bool, plainly: bool = False) -> Trainer:
    """All rows at once. plainly: attention with a dense mask, and all logits at once."""
    from transformers import AutoModelForCausalLM

    from specdistill.losses.chunked import head_loss_plainly
    from specdistill.losses.divergence import forward_kl
    from specdistill.methods.chains import unroll
    from specdistill.methods.eagle3.checkpoint import load_eagle3
    from specdistill.rows.packing import collate
    from specdistill.targets.frozen import Features, FrozenTarget

    if plainly:
        unroll.UnrollKVCache, unroll.head_loss = DenseKVCache, head_loss_plainly
    target: Any = FrozenTarget(AutoModelForCausalLM.from_pretrained(f"{folder}/target").to(DEVICE), None, name=folder)
    draft = load_eagle3(f"{folder}/draft", target).to(DEVICE)
    draft.lm_head.weight.requires_grad_(trains_head)
    ids, aux, last = given(rows, length, target.vocab_size, target.hidden_size, bf16)
    with torch.no_grad():
        features = Features(aux.chunk(NUM_AUX, dim=-1), target.norm(last))
    target.features = lambda *_, **__: features
    column = {"loss_mask": [1] * length, "document_ids": [0] * length, "position_ids": list(range(length))}
    collated = collate([{"input_ids": row, **column} for row in ids.tolist()])
    batch = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in collated.items()}
    objective = unroll.TrainingTimeTest(draft, forward_kl, num_steps)

    def micro_batch() -> tuple[Tensor, float]:
        with precision(bf16):
            with torch.no_grad():
                target_outputs = objective.read_target(target, batch)
            total, sums = objective(**batch, **target_outputs)
        means = (loss / count for loss, count in zip(sums.loss, sums.loss_tokens, strict=True))
        return total / objective.num_loss_tokens(batch), float(sum(means))

    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    return Trainer([micro_batch], parameters, torch.optim.AdamW(parameters, **ADAMW, fused=True))


class DenseKVCache:
    """A KV cache of the unroll that attends to the keys of all steps at once, by torch, with a dense mask."""

    def __init__(self, cumulative_lengths: Tensor, longest: int, num_layers: int, window: int | None) -> None:
        assert window is None
        self.starts = cumulative_lengths.unique()
        self.steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        steps = self.steps[layer]
        steps.append((key_BGTd.to(value_BGTd.dtype), value_BGTd))
        keys, values = (torch.cat(part, dim=2) for part in zip(*steps, strict=True))
        rows, _, length, _ = query_BNTd.shape
        document = torch.bucketize(torch.arange(rows * length, device=DEVICE), self.starts, right=True).view(rows, 1, length)
        root = (document.mT == document) & torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        chain = torch.eye(length, dtype=torch.bool, device=DEVICE).repeat(1, len(steps) - 1).expand(rows, -1, -1)
        mask = torch.cat((root, chain), dim=-1).unsqueeze(1)
        return F.scaled_dot_product_attention(query_BNTd.to(values.dtype), keys, values, mask, enable_gqa=True)


def speculators(
    folder: str, rows: int, length: int, num_steps: int, trains_head: bool, bf16: bool, attention: str | None
) -> Trainer:
    """Its model, loss and optimizer as its trainer has them; the model takes one row at a time: several accumulate. attention: None for its
    own default.
    """
    from speculators import SpeculatorModel
    from speculators.train.optimizers import build_optimizers

    config = SpeculatorModel.config_class.from_pretrained(f"{folder}/head")
    if attention is not None:
        config.transformer_layer_config._attn_implementation = attention
    model = SpeculatorModel.from_pretrained(f"{folder}/head", config=config, dtype=torch.float32).train().to(DEVICE)
    model.lm_head.weight.requires_grad_(trains_head)
    settings = call_settings(type(model), num_steps)
    ids, aux, last = given(rows, length, model.verifier_vocab_size, model.hidden_size, bf16)
    # Shifted as its `shift_batch` does. Its last loss, of a token that is not in the row, is not ours.
    batch = {
        "input_ids": ids[:, 1:],
        "hidden_states": aux[:, :-1],
        "verifier_last_hidden_states": last[:, 1:],
        "loss_mask": (torch.arange(length - 1, device=DEVICE) < length - 2).expand(rows, -1),
        "position_ids": torch.arange(1, length, device=DEVICE).expand(rows, -1),
        "document_ids": torch.zeros(rows, length - 1, dtype=torch.long, device=DEVICE),
    }

    def micro_batch(row: int) -> tuple[Tensor, float]:
        with precision(bf16):
            _, loss, _ = model(**{name: part[row : row + 1] for name, part in batch.items()}, **settings)
        return loss, loss.item()

    (optimizer,) = build_optimizers(model, Namespace(optimizer="adamw", **ADAMW))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Trainer([partial(micro_batch, row) for row in range(rows)], parameters, optimizer)


def call_settings(model_class: Any, ttt_steps: int) -> dict[str, Any]:
    """What speculators' trainer hands its model; the fused losses, its default, are Triton's."""
    losses = {"loss_fn": "kl_div", "loss_implementation": "eager", "ttt_step_loss_decay": 1.0}
    settings: dict[str, Any] = model_class.get_trainer_kwargs(ttt_steps=ttt_steps, **losses)[0]
    return settings


def head_and_loss(rows: int, num_steps: int, hidden_size: int, vocab_size: int, bf16: bool, plainly: bool = False) -> Trainer:
    """K R hidden states through the head, to the gradients of both. plainly: all logits at once."""
    from specdistill.losses.chunked import head_loss, head_loss_plainly
    from specdistill.losses.divergence import forward_kl
    from specdistill.targets.anatomy import LogitsHead
    from specdistill.training.objective import SoftTargets, TargetDistributions

    own, of_target = (torch.nn.Linear(hidden_size, vocab_size, bias=False, device=DEVICE) for _ in range(2))
    for seed, linear in enumerate((own, of_target)):
        linear.weight.data = noise(vocab_size, hidden_size, bf16=False, seed=seed) * hidden_size**-0.5
    soft = SoftTargets(
        noise(rows, hidden_size, bf16=False, seed=2), LogitsHead(of_target), None, LogitsHead(of_target), temperature=1.0
    )
    hidden_KRH = noise(num_steps, rows, hidden_size, bf16=False, seed=3).requires_grad_()
    weights_KR = torch.full((num_steps, rows), 1 / rows, device=DEVICE)
    form = head_loss_plainly if plainly else head_loss

    def loss_of(logits_rW: Tensor, targets: TargetDistributions, k: int) -> tuple[Tensor, Tensor]:
        losses_r = forward_kl(logits_rW, targets.probs_rW)
        return losses_r, losses_r.detach().unsqueeze(0)

    def micro_batch() -> tuple[Tensor, float]:
        with precision(bf16):
            total, _ = form(hidden_KRH, weights_KR, LogitsHead(own), partial(soft.at, measure=False), loss_of)
        return total, total.item()

    return Trainer([micro_batch], [hidden_KRH, own.weight], None)


TRAINERS: dict[str, Callable[..., Trainer]] = {"ours": ours, "speculators": speculators, "head_and_loss": head_and_loss}


def main(name: str, settings: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    trainer = TRAINERS[name](**settings)
    for _ in sys.stdin:
        print(json.dumps(trainer.step()), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
