"""What bench/train.py compares: a trainer in a process of its own, which takes a step for each line that it reads.

    python -P bench/trainers.py NAME SETTINGS    # a name of TRAINERS, its settings in JSON; the Python that has the trainer's library

It answers with the seconds of the step's parts, its loss, and the memory that it took at its peak above what stood before it. Trainers of a
draft have the same weights, tokens and target features, and the same loss: in nats, of a head the mean of each step of the unroll, summed
over these, of a block drafter the mean over the slots that predict. Each draws its blocks, of all tokens with loss where there are no more.

Shapes: B rows of one document each, T positions, A layers of the target that are read, H hidden size of target and draft, P slots of a
block, K steps of the unroll, R rows of hidden states.
"""

import itertools
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
NUM_AUX = {"head": 3, "block": 5}  # layers of the target that a draft reads
MAX_NORM = 1.0  # speculators' own, as is the weight decay
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}

MicroBatch = Callable[
    [], tuple[Tensor, float]
]  # the loss to be followed backward, and the loss to be compared


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
    (kilobytes,) = re.findall(
        rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return 1024 * int(kilobytes)


def precision(bf16: bool) -> torch.autocast:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16)


def noise(*shape: int, bf16: bool, seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, torch.bfloat16 if bf16 else torch.float32)


def given(
    rows: int, length: int, num_aux: int, vocab_size: int, hidden_size: int, bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, T]; the target's features [B, T, A H]; its last layer's output [B, T, H]."""
    ids = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    aux, last = (
        noise(rows, length, size, bf16=bf16, seed=size)
        for size in (num_aux * hidden_size, hidden_size)
    )
    return ids, aux, last


def block_loss_mask(length: int, block_size: int) -> list[int]:
    """[T], of which both sides draw the same anchors: speculators none of a row's last P tokens, ours none without a token before it."""
    return [int(0 < position < length - block_size) for position in range(length)]


def given_target(
    folder: str, rows: int, loss_mask: list[int], num_aux: int, bf16: bool
) -> tuple[Any, dict[str, Any]]:
    """Our target, with the features that are given, and the batch that has them."""
    from transformers import AutoModelForCausalLM

    from specdistill.rows.packing import collate
    from specdistill.targets.frozen import Features, FrozenTarget

    length = len(loss_mask)
    target: Any = FrozenTarget(
        AutoModelForCausalLM.from_pretrained(f"{folder}/target").to(DEVICE), None, name=folder
    )
    ids, aux, last = given(rows, length, num_aux, target.vocab_size, target.hidden_size, bf16)
    with torch.no_grad():
        features = Features(aux.chunk(num_aux, dim=-1), target.norm(last))
    target.features = lambda *_, **__: features
    column = {
        "loss_mask": loss_mask,
        "document_ids": [0] * length,
        "position_ids": list(range(length)),
    }
    return target, collate([{"input_ids": row, **column} for row in ids.tolist()])


def our_trainer(
    objective: Any,
    target: Any,
    batch: dict[str, Any],
    compared: Callable[[Any], Tensor],
    bf16: bool,
) -> Trainer:
    """All rows at once. compared: sums of each drafted position -> the loss to be compared."""
    objective.to(DEVICE)
    numbers = itertools.count()

    def micro_batch() -> tuple[Tensor, float]:
        prepared = objective.prepare(batch, next(numbers)).items()
        inputs = {
            name: value.to(DEVICE) if isinstance(value, Tensor) else value
            for name, value in prepared
        }
        with precision(bf16):
            with torch.no_grad():
                target_outputs = objective.read_target(target, inputs)
            total, sums = objective(**inputs, **target_outputs)
        return total / objective.num_loss_tokens(inputs), float(compared(sums))

    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    return Trainer([micro_batch], parameters, torch.optim.AdamW(parameters, **ADAMW, fused=True))


def ours(
    folder: str,
    rows: int,
    length: int,
    num_steps: int,
    trains_head: bool,
    bf16: bool,
    plainly: bool = False,
) -> Trainer:
    """Of a head. plainly: attention with a dense mask, and all logits at once."""
    from specdistill.losses.chunked import head_loss_plainly
    from specdistill.losses.divergence import forward_kl
    from specdistill.methods.chains import unroll
    from specdistill.methods.eagle3.checkpoint import load_eagle3

    if plainly:
        unroll.UnrollKVCache, unroll.head_loss = DenseKVCache, head_loss_plainly
    target, batch = given_target(folder, rows, [1] * length, NUM_AUX["head"], bf16)
    draft = load_eagle3(f"{folder}/draft", target)
    draft.lm_head.weight.requires_grad_(trains_head)
    objective = unroll.TrainingTimeTest(draft, forward_kl, num_steps)

    def compared(sums: Any) -> Any:
        return sum(loss / count for loss, count in zip(sums.loss, sums.loss_tokens, strict=True))

    return our_trainer(objective, target, batch, compared, bf16)


def ours_block(
    folder: str,
    rows: int,
    length: int,
    block_size: int,
    num_anchors: int,
    bf16: bool,
    plainly: bool = False,
) -> Trainer:
    """Of a DFlash drafter, with `num_anchors` blocks in all rows. plainly: attention with a dense mask, and all logits at once."""
    from specdistill.losses.chunked import head_loss_plainly
    from specdistill.losses.divergence import forward_kl
    from specdistill.methods.blocks import checkpoint, objective
    from specdistill.methods.dflash.method import KIND

    if plainly:
        objective.spans = lambda batch, anchors_N, _: [
            (0, len(anchors_N), 0, batch["input_ids"].numel())
        ]
        objective.BlockMemory.in_one_call = objective.BlockMemory.in_chunks
        objective.head_loss = lambda *of_rows, together, **options: head_loss_plainly(
            *of_rows, **options
        )
    target, batch = given_target(
        folder, rows, block_loss_mask(length, block_size), NUM_AUX["block"], bf16
    )
    draft = checkpoint.load(KIND, f"{folder}/draft", target)
    learns = objective.BlockObjective(draft, forward_kl, num_anchors // rows)
    return our_trainer(
        learns, target, batch, lambda sums: sum(sums.loss) / sum(sums.loss_tokens), bf16
    )


class DenseKVCache:
    """A KV cache of the unroll that attends to the keys of all steps at once, by torch, with a dense mask."""

    def __init__(
        self, cumulative_lengths: Tensor, longest: int, num_layers: int, window: int | None
    ) -> None:
        assert window is None
        self.starts = cumulative_lengths.unique()
        self.steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        steps = self.steps[layer]
        steps.append((key_BGTd.to(value_BGTd.dtype), value_BGTd))
        keys, values = (torch.cat(part, dim=2) for part in zip(*steps, strict=True))
        rows, _, length, _ = query_BNTd.shape
        document = torch.bucketize(
            torch.arange(rows * length, device=DEVICE), self.starts, right=True
        ).view(rows, 1, length)
        root = (document.mT == document) & torch.ones(
            length, length, dtype=torch.bool, device=DEVICE
        ).tril()
        chain = (
            torch.eye(length, dtype=torch.bool, device=DEVICE)
            .repeat(1, len(steps) - 1)
            .expand(rows, -1, -1)
        )
        mask = torch.cat((root, chain), dim=-1).unsqueeze(1)
        return F.scaled_dot_product_attention(
            query_BNTd.to(values.dtype), keys, values, mask, enable_gqa=True
        )


def speculators(
    folder: str,
    rows: int,
    length: int,
    num_steps: int,
    trains_head: bool,
    bf16: bool,
    attention: str | None,
) -> Trainer:
    """Of a head."""
    model = their_model(folder, attention)
    model.lm_head.weight.requires_grad_(trains_head)
    settings = call_settings(type(model), ttt_steps=num_steps, ttt_step_loss_decay=1.0)
    ids, aux, last = given(
        rows, length, NUM_AUX["head"], model.verifier_vocab_size, model.hidden_size, bf16
    )
    # Shifted as its `shift_batch` does. Its last loss, of a token that is not in the row, is not ours.
    batch = {
        "input_ids": ids[:, 1:],
        "hidden_states": aux[:, :-1],
        "verifier_last_hidden_states": last[:, 1:],
        "loss_mask": (torch.arange(length - 1, device=DEVICE) < length - 2).expand(rows, -1),
        "position_ids": torch.arange(1, length, device=DEVICE).expand(rows, -1),
        "document_ids": torch.zeros(rows, length - 1, dtype=torch.long, device=DEVICE),
    }
    return their_trainer(model, batch, settings, bf16)


def speculators_block(
    folder: str,
    rows: int,
    length: int,
    block_size: int,
    num_anchors: int,
    bf16: bool,
    attention: str | None,
) -> Trainer:
    """Of a block drafter."""
    model = their_model(folder, attention)
    alike = {"dflash_decay_gamma": float("inf")}  # every slot counts as much
    settings = call_settings(type(model), max_anchors=num_anchors // rows, **alike)
    ids, aux, last = given(
        rows, length, NUM_AUX["block"], model.verifier_vocab_size, model.hidden_size, bf16
    )
    batch = {
        "input_ids": ids,
        "hidden_states": aux,
        "verifier_last_hidden_states": last,
        "loss_mask": torch.tensor(block_loss_mask(length, block_size), device=DEVICE).expand(
            rows, -1
        ),
        "position_ids": torch.arange(length, device=DEVICE).expand(rows, -1),
        "document_ids": torch.zeros(rows, length, dtype=torch.long, device=DEVICE),
    }
    return their_trainer(model, batch, settings, bf16)


def their_model(folder: str, attention: str | None) -> Any:
    """speculators' model of the exported draft. attention: None for its own default."""
    from speculators import SpeculatorModel

    config = SpeculatorModel.config_class.from_pretrained(f"{folder}/head")
    if attention is not None:
        config.transformer_layer_config._attn_implementation = attention
    return (
        SpeculatorModel.from_pretrained(f"{folder}/head", config=config, dtype=torch.float32)
        .train()
        .to(DEVICE)
    )


def their_trainer(
    model: Any, batch: dict[str, Tensor], settings: dict[str, Any], bf16: bool
) -> Trainer:
    """Model, loss and optimizer as speculators' trainer has them; the model takes one row at a time: several accumulate."""
    from speculators.train.optimizers import build_optimizers

    def micro_batch(row: int) -> tuple[Tensor, float]:
        with precision(bf16):
            _, loss, _ = model(
                **{name: part[row : row + 1] for name, part in batch.items()}, **settings
            )
        return loss, loss.item()

    (optimizer,) = build_optimizers(model, Namespace(optimizer="adamw", **ADAMW))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Trainer(
        [partial(micro_batch, row) for row in range(len(batch["input_ids"]))], parameters, optimizer
    )


def call_settings(model_class: Any, **own: Any) -> dict[str, Any]:
    """What speculators' trainer hands its model; the fused losses, its default, are Triton's."""
    settings: dict[str, Any] = model_class.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", **own
    )[0]
    return settings


def head_and_loss(
    rows: int, num_steps: int, hidden_size: int, vocab_size: int, bf16: bool, plainly: bool = False
) -> Trainer:
    """K R hidden states through the head, to the gradients of both. plainly: all logits at once."""
    from specdistill.losses.chunked import head_loss, head_loss_plainly
    from specdistill.losses.divergence import forward_kl
    from specdistill.targets.anatomy import LogitsHead
    from specdistill.training.objective import SoftTargets, TargetDistributions

    own, of_target = (
        torch.nn.Linear(hidden_size, vocab_size, bias=False, device=DEVICE) for _ in range(2)
    )
    for seed, linear in enumerate((own, of_target)):
        linear.weight.data = (
            noise(vocab_size, hidden_size, bf16=False, seed=seed) * hidden_size**-0.5
        )
    soft = SoftTargets(
        noise(rows, hidden_size, bf16=False, seed=2),
        LogitsHead(of_target),
        None,
        LogitsHead(of_target),
        temperature=1.0,
    )
    hidden_KRH = noise(num_steps, rows, hidden_size, bf16=False, seed=3).requires_grad_()
    weights_KR = torch.full((num_steps, rows), 1 / rows, device=DEVICE)
    form = head_loss_plainly if plainly else head_loss

    def loss_of(logits_rW: Tensor, targets: TargetDistributions, k: int) -> tuple[Tensor, Tensor]:
        losses_r = forward_kl(logits_rW, targets.probs_rW)
        return losses_r, losses_r.detach().unsqueeze(0)

    def micro_batch() -> tuple[Tensor, float]:
        with precision(bf16):
            total, _ = form(
                hidden_KRH, weights_KR, LogitsHead(own), partial(soft.at, measure=False), loss_of
            )
        return total, total.item()

    return Trainer([micro_batch], [hidden_KRH, own.weight], None)


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "ours": ours,
    "speculators": speculators,
    "ours_block": ours_block,
    "speculators_block": speculators_block,
    "head_and_loss": head_and_loss,
}


def main(name: str, settings: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    trainer = TRAINERS[name](**settings)
    for _ in sys.stdin:
        print(json.dumps(trainer.step()), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
