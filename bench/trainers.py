"""Take training steps that bench/train.py compares, in a process for each trainer.

The process takes a step for each line that it reads.

    # a name of TRAINERS, its settings in JSON; the Python that has the trainer's library
    python -P bench/trainers.py NAME SETTINGS

It answers with the seconds of the step's parts, its loss, and its peak memory above what the
process held before. All trainers of a draft have the same weights, tokens, target features and
loss. The loss is in nats. For a head it is the mean of each step of the unroll, summed over the
steps; for a block drafter it is the mean over the slots that predict. Each trainer draws its own
blocks; it takes all tokens with loss if there are no more of them than blocks.

Shapes: B rows of one document each, T positions, A layers of the target that are read, H hidden
size of target and draft, P slots of a block, K steps of the unroll, R rows of hidden states.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from specdistill.targets.frozen import FrozenTarget
    from specdistill.training.objective import (
        ForwardInputs,
        Objective,
        StepSums,
        TargetDistributions,
    )

DEVICE = torch.device("cpu")
NUM_AUX = {"head": 3, "block": 5}  # layers of the target that a draft reads
MAX_NORM = 1.0  # the value of speculators, like the weight decay
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}

# Returns the loss for backward, and the loss to compare.
MicroBatch = Callable[[], tuple[Tensor, float]]


@dataclass
class Trainer:
    """A trainer, whose steps are timed.

    Attributes:
        micro_batches: the forward passes of a step, whose gradients accumulate.
        parameters: the trained parameters.
        optimizer: the optimizer; None only clears the gradients.
    """

    micro_batches: Sequence[MicroBatch]
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer | None

    def step(self) -> dict[str, float]:
        """Take one step of training.

        Returns:
            `seconds` of the step, and of its parts `forward`, `backward` and `optimizer`;
            `loss`; `peak`, the bytes that the step took at most, above those that the process held
            before.
        """
        # Remember the memory before the step.
        reset_peak()
        bytes_before = read_resident_bytes("VmRSS")
        losses = []
        times = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        start = last = time.perf_counter()

        def add_time(part: str) -> None:
            """Add the time since the last call to a part of the step."""
            nonlocal last
            now = time.perf_counter()
            times[part] += now - last
            last = now

        # Run the micro-batches. The mean of their losses is the loss of the step.
        for micro_batch in self.micro_batches:
            loss, compared_loss = micro_batch()
            add_time("forward")
            (loss / len(self.micro_batches)).backward()
            add_time("backward")
            losses.append(compared_loss)

        # Update the parameters, and give back the memory of the gradients.
        if self.optimizer is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        add_time("optimizer")

        # Add the loss and the peak of memory above what the process held before.
        measured = {
            "loss": sum(losses) / len(losses),
            "peak": read_resident_bytes("VmHWM") - bytes_before,
        }
        return {"seconds": last - start, **times, **measured}


def reset_peak() -> None:
    """Set `VmHWM`, the peak of this process, to the memory that it has now."""
    # Linux resets the peak when 5 is written to this file (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")


def read_resident_bytes(name: str) -> int:
    """Return the bytes of this process in the machine's memory.

    Args:
        name: VmRSS for now, VmHWM for the most since the peak was reset.
    """
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kilobytes)


def build_autocast(bf16: bool) -> torch.autocast:
    """Return the autocast context of the trainers."""
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16)


def draw_noise(*shape: int, bf16: bool, seed: int) -> Tensor:
    """Return normally distributed random numbers of a shape."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, torch.bfloat16 if bf16 else torch.float32)


def draw_inputs(
    rows: int, length: int, num_aux: int, vocab_size: int, hidden_size: int, bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is given to the trainers of a draft.

    Returns:
        Tokens [B, T], the target's features [B, T, A H], and the output of its last layer
        [B, T, H].
    """
    # The same seeds give every trainer the same inputs.
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocab_size, (rows, length), generator=generator).to(DEVICE)
    aux_size = num_aux * hidden_size
    aux_BTAH = draw_noise(rows, length, aux_size, bf16=bf16, seed=aux_size)
    last_BTH = draw_noise(rows, length, hidden_size, bf16=bf16, seed=hidden_size)
    return ids_BT, aux_BTAH, last_BTH


def block_loss_mask(length: int, block_size: int) -> list[int]:
    """Return a loss mask [T] with which both sides draw from the same anchors.

    speculators takes none of a row's last P tokens as an anchor, and ours takes no token without
    one before it.
    """
    return [int(0 < position < length - block_size) for position in range(length)]


def build_target_with_features(
    folder: str, rows: int, loss_mask: list[int], num_aux: int, bf16: bool
) -> "tuple[FrozenTarget, ForwardInputs]":
    """Return our target with given features, and the batch that they belong to.

    Args:
        folder: the folder of the models.
        rows: B.
        loss_mask: [T], of each row.
        num_aux: A.
        bf16: whether the features are bfloat16.
    """
    from transformers import AutoModelForCausalLM

    from specdistill.data.rows.packing import collate
    from specdistill.targets.frozen import Features, FrozenTarget

    length = len(loss_mask)

    # Load the target, and let it return the drawn features without running its layers.
    target: Any = FrozenTarget(
        AutoModelForCausalLM.from_pretrained(f"{folder}/target").to(DEVICE), None, name=folder
    )
    ids, aux, last = draw_inputs(rows, length, num_aux, target.vocab_size, target.hidden_size, bf16)
    with torch.no_grad():
        features = Features(aux.chunk(num_aux, dim=-1), target.norm(last))
    target.features = lambda *_, **__: features

    # Each row is one document.
    column = {
        "loss_mask": loss_mask,
        "document_ids": [0] * length,
        "position_ids": list(range(length)),
    }
    return target, collate([{"input_ids": row, **column} for row in ids.tolist()])


def build_own_trainer(
    objective: "Objective",
    target: "FrozenTarget",
    batch: "ForwardInputs",
    compute_compared_loss: "Callable[[StepSums], Tensor | float]",
    bf16: bool,
) -> Trainer:
    """Return our trainer, which takes all rows at once.

    Args:
        objective: the objective with the draft.
        target: the target, whose features are given.
        batch: the packed rows.
        compute_compared_loss: computes the loss to compare from the sums of each drafted position.
        bf16: whether autocast to bfloat16 is on.
    """
    objective.to(DEVICE)
    step_numbers = itertools.count()

    def micro_batch() -> tuple[Tensor, float]:
        """Return the loss of the next step, and the loss to compare."""
        prepared = objective.prepare(batch, next(step_numbers))
        inputs = {
            name: value.to(DEVICE) if isinstance(value, Tensor) else value
            for name, value in prepared.items()
        }
        with build_autocast(bf16):
            with torch.no_grad():
                target_outputs = objective.read_target(target, inputs)
            total, sums = objective(**inputs, **target_outputs)
        loss = total / objective.count_loss_tokens(inputs)
        return loss, float(compute_compared_loss(sums))

    # Frozen parameters, such as the LM head, get no state in the optimizer.
    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    return Trainer([micro_batch], parameters, torch.optim.AdamW(parameters, **ADAMW, fused=True))


def build_own_head_trainer(
    folder: str,
    rows: int,
    length: int,
    num_steps: int,
    bf16: bool,
    plainly: bool = False,
) -> Trainer:
    """Return our trainer of a head.

    Args:
        folder: the folder of the models.
        rows: B.
        length: T.
        num_steps: K.
        bf16: whether autocast to bfloat16 is on.
        plainly: use attention with a dense mask, and compute all logits at once.
    """
    from specdistill.methods.chains import objective
    from specdistill.methods.eagle3.checkpoint import load_eagle3
    from specdistill.training.losses.divergence import forward_kl
    from specdistill.training.losses.head_loss import compute_head_loss_at_once

    # Replace the attention and the loss by their plain forms.
    if plainly:
        objective.UnrollKVCache = DenseKVCache
        objective.compute_head_loss = compute_head_loss_at_once

    # Build the objective. The LM head is frozen.
    target, batch = build_target_with_features(folder, rows, [1] * length, NUM_AUX["head"], bf16)
    draft = load_eagle3(f"{folder}/draft", target)
    draft.lm_head.weight.requires_grad_(False)  # as in the trainer of speculators
    unroll = objective.TrainingTimeTest(draft, forward_kl, num_steps)

    def sum_mean_losses(sums: "StepSums") -> Tensor | float:
        """Return the sum over the steps of the unroll of each step's mean loss."""
        return sum(loss / count for loss, count in zip(sums.loss, sums.loss_tokens, strict=True))

    return build_own_trainer(unroll, target, batch, sum_mean_losses, bf16)


def build_own_block_trainer(
    folder: str,
    rows: int,
    length: int,
    block_size: int,
    num_anchors: int,
    bf16: bool,
    plainly: bool = False,
) -> Trainer:
    """Return our trainer of a DFlash drafter.

    Args:
        folder: the folder of the models.
        rows: B.
        length: T.
        block_size: P.
        num_anchors: blocks in all rows.
        bf16: whether autocast to bfloat16 is on.
        plainly: use attention with a dense mask, and compute all logits at once.
    """
    from specdistill.methods.blocks import checkpoint, objective
    from specdistill.methods.dflash.method import KIND
    from specdistill.training.losses.divergence import forward_kl
    from specdistill.training.losses.head_loss import compute_head_loss_at_once

    # Replace the attention and the loss by their plain forms: one chunk with all blocks, and all
    # logits at once.
    if plainly:
        objective.split_blocks = lambda batch, anchors_N, _: [
            (0, len(anchors_N), 0, batch["input_ids"].numel())
        ]
        objective.BlockKVCache.attend_in_one_call = objective.BlockKVCache.attend_in_chunks
        objective.compute_head_loss = lambda *rows_and_targets, group_size, **options: (
            compute_head_loss_at_once(*rows_and_targets, **options)
        )

    # Build the objective. Anchors are drawn for each row, so each row has its share of the blocks.
    target, batch = build_target_with_features(
        folder, rows, block_loss_mask(length, block_size), NUM_AUX["block"], bf16
    )
    draft = checkpoint.load_block(KIND, f"{folder}/draft", target)
    block_objective = objective.BlockObjective(draft, forward_kl, num_anchors // rows)

    def compute_mean_loss(sums: "StepSums") -> Tensor | float:
        """Return the mean loss over all slots that predict."""
        return sum(sums.loss) / sum(sums.loss_tokens)

    return build_own_trainer(block_objective, target, batch, compute_mean_loss, bf16)


class DenseKVCache:
    """A KV cache of the unroll that attends to the keys of all steps at once.

    torch computes the attention, with a dense mask.
    """

    def __init__(
        self, cumulative_lengths: Tensor, longest: int, num_layers: int, window: int | None
    ) -> None:
        assert window is None
        self.starts = cumulative_lengths.unique()
        self.steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        """Return the attention output [B, N, T, d] of a step over the keys of all steps so far."""
        # Append this step's keys and values to those of earlier steps, in the dtype of the values.
        steps = self.steps[layer]
        steps.append((key_BGTd.to(value_BGTd.dtype), value_BGTd))
        keys = torch.cat([key for key, _ in steps], dim=2)
        values = torch.cat([value for _, value in steps], dim=2)
        rows, _, length, _ = query_BNTd.shape

        # Number the documents of all positions.
        positions = torch.arange(rows * length, device=DEVICE)
        document_B1T = torch.bucketize(positions, self.starts, right=True).view(rows, 1, length)
        # In the first step a token sees the tokens of its document, up to itself. Of each later
        # step it sees its own key only.
        is_same_document_BTT = document_B1T.mT == document_B1T
        is_causal_TT = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        first_step_mask_BTT = is_same_document_BTT & is_causal_TT
        own_key_TT = torch.eye(length, dtype=torch.bool, device=DEVICE)
        later_steps_mask = own_key_TT.repeat(1, len(steps) - 1).expand(rows, -1, -1)

        # The mask is [B, 1, T, K T] for K steps so far.
        mask = torch.cat((first_step_mask_BTT, later_steps_mask), dim=-1).unsqueeze(1)
        return F.scaled_dot_product_attention(
            query_BNTd.to(values.dtype), keys, values, mask, enable_gqa=True
        )


def build_speculators_head_trainer(
    folder: str,
    rows: int,
    length: int,
    num_steps: int,
    bf16: bool,
    attention: str,
) -> Trainer:
    """Return the trainer of a head in speculators.

    Args:
        folder: the folder of the models.
        rows: B.
        length: T.
        num_steps: K.
        bf16: whether autocast to bfloat16 is on.
        attention: the implementation of attention.
    """
    model = load_speculators_model(folder, attention)
    model.lm_head.weight.requires_grad_(False)
    settings = read_speculators_settings(type(model), ttt_steps=num_steps, ttt_step_loss_decay=1.0)

    # The inputs are those of our trainer.
    ids, aux, last = draw_inputs(
        rows, length, NUM_AUX["head"], model.verifier_vocab_size, model.hidden_size, bf16
    )
    # The batch is shifted as `shift_batch` of speculators does it. Its last loss is masked, because
    # ours has none for a token that is not in the row.
    batch = {
        "input_ids": ids[:, 1:],
        "hidden_states": aux[:, :-1],
        "verifier_last_hidden_states": last[:, 1:],
        "loss_mask": (torch.arange(length - 1, device=DEVICE) < length - 2).expand(rows, -1),
        "position_ids": torch.arange(1, length, device=DEVICE).expand(rows, -1),
        "document_ids": torch.zeros(rows, length - 1, dtype=torch.long, device=DEVICE),
    }
    return build_speculators_trainer(model, batch, settings, bf16)


def build_speculators_block_trainer(
    folder: str,
    rows: int,
    length: int,
    block_size: int,
    num_anchors: int,
    bf16: bool,
    attention: str,
) -> Trainer:
    """Return the trainer of a block drafter in speculators.

    Args:
        folder: the folder of the models.
        rows: B.
        length: T.
        block_size: P.
        num_anchors: blocks in all rows.
        bf16: whether autocast to bfloat16 is on.
        attention: the implementation of attention.
    """
    model = load_speculators_model(folder, attention)
    equal_weights = {"dflash_decay_gamma": float("inf")}  # every slot has the same weight
    settings = read_speculators_settings(
        type(model), max_anchors=num_anchors // rows, **equal_weights
    )

    # The inputs are those of our trainer, unshifted.
    ids, aux, last = draw_inputs(
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
    return build_speculators_trainer(model, batch, settings, bf16)


def load_speculators_model(folder: str, attention: str) -> Any:
    """Load the exported draft as a model of speculators."""
    from speculators import SpeculatorModel

    # Choose the attention before the model is built.
    config = SpeculatorModel.config_class.from_pretrained(f"{folder}/head")
    config.transformer_layer_config._attn_implementation = attention
    return (
        SpeculatorModel.from_pretrained(f"{folder}/head", config=config, dtype=torch.float32)
        .train()
        .to(DEVICE)
    )


def build_speculators_trainer(
    model: Any, batch: dict[str, Tensor], settings: dict[str, object], bf16: bool
) -> Trainer:
    """Return a trainer with model, loss and optimizer as in the trainer of speculators.

    The model takes one row at a time, so several rows accumulate their gradients.
    """
    from speculators.train.optimizers import build_optimizers

    def micro_batch(row: int) -> tuple[Tensor, float]:
        """Return the loss of one row, for backward and to compare."""
        with build_autocast(bf16):
            row_inputs = {name: column[row : row + 1] for name, column in batch.items()}
            _, loss, _ = model(**row_inputs, **settings)
        return loss, loss.item()

    (optimizer,) = build_optimizers(model, Namespace(optimizer="adamw", **ADAMW))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    micro_batches = [partial(micro_batch, row) for row in range(len(batch["input_ids"]))]
    return Trainer(micro_batches, parameters, optimizer)


def read_speculators_settings(model_class: Any, **options: object) -> dict[str, object]:
    """Return the keyword arguments that the trainer of speculators passes to its model.

    The losses are the eager ones: the fused losses, which are the default, need Triton.
    """
    settings: dict[str, object] = model_class.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", **options
    )[0]
    return settings


def build_head_and_loss_trainer(
    rows: int, num_steps: int, hidden_size: int, vocab_size: int, bf16: bool, plainly: bool = False
) -> Trainer:
    """Return a trainer that runs K R hidden states through the head, up to the gradients of both.

    Args:
        rows: R.
        num_steps: K.
        hidden_size: H.
        vocab_size: tokens of the vocabulary.
        bf16: whether autocast to bfloat16 is on.
        plainly: compute all logits at once.
    """
    from specdistill.targets.anatomy import LogitsHead
    from specdistill.training.losses.divergence import forward_kl
    from specdistill.training.losses.head_loss import compute_head_loss, compute_head_loss_at_once
    from specdistill.training.objective import SoftTargets

    # Two heads of random weights, scaled so that logits have a variance of one.
    draft_head = torch.nn.Linear(hidden_size, vocab_size, bias=False, device=DEVICE)
    target_head = torch.nn.Linear(hidden_size, vocab_size, bias=False, device=DEVICE)
    for seed, linear in enumerate((draft_head, target_head)):
        noise_VH = draw_noise(vocab_size, hidden_size, bf16=False, seed=seed)
        linear.weight.data = noise_VH * hidden_size**-0.5

    # The target's distributions follow from R random hidden states.
    soft_targets = SoftTargets(
        draw_noise(rows, hidden_size, bf16=False, seed=2),
        LogitsHead(target_head),
        None,
        LogitsHead(target_head),
        temperature=1.0,
    )

    # The draft's hidden states need gradients. Each step of the unroll has the same weight.
    hidden_KRH = draw_noise(num_steps, rows, hidden_size, bf16=False, seed=3).requires_grad_()
    weights_KR = torch.full((num_steps, rows), 1 / rows, device=DEVICE)
    compute_loss = compute_head_loss_at_once if plainly else compute_head_loss

    def compute_row_losses(
        logits_rW: Tensor, targets: "TargetDistributions", k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the forward KL of each row, for backward and as a metric."""
        losses_r = forward_kl(logits_rW, targets.probs_rW)
        return losses_r, losses_r.detach().unsqueeze(0)

    def micro_batch() -> tuple[Tensor, float]:
        """Return the weighted loss of all rows and steps, for backward and to compare."""
        with build_autocast(bf16):
            total, _ = compute_loss(
                hidden_KRH,
                weights_KR,
                LogitsHead(draft_head),
                partial(soft_targets.at, measure=False),
                compute_row_losses,
            )
        return total, total.item()

    return Trainer([micro_batch], [hidden_KRH, draft_head.weight], None)


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "ours": build_own_head_trainer,
    "speculators": build_speculators_head_trainer,
    "ours_block": build_own_block_trainer,
    "speculators_block": build_speculators_block_trainer,
    "head_and_loss": build_head_and_loss_trainer,
}


def main(name: str, settings: dict[str, object]) -> None:
    """Take a step for each line of stdin, and print its numbers as a JSON line."""
    # Answers go to the original stdout. What libraries print there goes to stderr instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    trainer = TRAINERS[name](**settings)
    for _ in sys.stdin:
        print(json.dumps(trainer.step()), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
