"""Take training steps that bench/train.py compares, in a process for each trainer.

The process takes a step for each line that it reads.

    # a name of TRAINERS, its settings in JSON; the Python that has the trainer's library
    python -P bench/trainers.py NAME SETTINGS

It answers with the seconds of the step's parts, its loss, and its peak memory above what the
process held before. All trainers of a draft have the same weights, tokens, target features and
loss. The loss is in nats. For a head it is the mean of each step of the unroll, summed over the
steps; for a block drafter it is the mean over the slots that predict. Each trainer draws its own
blocks. If no more tokens have a loss than there are blocks, all of these tokens begin a block.

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

# Runs the forward pass of a micro-batch. Returns the loss for the backward pass, and the loss that
# is compared between trainers.
MicroBatch = Callable[[], tuple[Tensor, float]]


@dataclass
class Trainer:
    """A trainer, whose steps are timed.

    Attributes:
        micro_batches: the forward passes of a step, whose gradients accumulate.
        parameters: the trained parameters.
        optimizer: the optimizer; with None, a step only clears the gradients.
    """

    micro_batches: Sequence[MicroBatch]
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer | None

    def step(self) -> dict[str, float]:
        """Take one training step, and measure its time and memory.

        Returns:
            `seconds` of the step, and of its parts `forward`, `backward` and `optimizer`; `loss`,
            which is comparable between trainers; `peak`, the most bytes that the process held
            during the step, minus the bytes that it held before.
        """
        # Reset the peak of memory, and read the memory before the step.
        reset_peak()
        bytes_before = read_resident_bytes("VmRSS")
        compared_losses = []
        times = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        start = last = time.perf_counter()

        def add_time(part: str) -> None:
            """Add the time since the last call to a part of the step."""
            nonlocal last
            now = time.perf_counter()
            times[part] += now - last
            last = now

        # Run the micro-batches. Each returns two losses: the one that this trainer minimizes, and
        # one that all trainers define alike, so that it can be compared. The micro-batches have
        # equal weights, so the loss of the step is the mean of their losses.
        for micro_batch in self.micro_batches:
            training_loss, compared_loss = micro_batch()
            add_time("forward")
            (training_loss / len(self.micro_batches)).backward()
            add_time("backward")
            compared_losses.append(compared_loss)

        # Update the parameters, and give back the memory of the gradients.
        if self.optimizer is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        add_time("optimizer")

        # Add the loss and the peak of memory above what the process held before.
        measured = {
            "loss": sum(compared_losses) / len(compared_losses),
            "peak": read_resident_bytes("VmHWM") - bytes_before,
        }
        return {"seconds": last - start, **times, **measured}


def reset_peak() -> None:
    """Reset the recorded peak of this process's memory (`VmHWM`) to the memory that it holds now.

    `VmHWM` then has the peak since this call, for example the peak of one training step.
    """
    # Linux resets the peak when 5 is written to this file (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")


def read_resident_bytes(name: str) -> int:
    """Return the resident memory of this process in bytes, as Linux reports it.

    Args:
        name: `VmRSS` for the memory held now, `VmHWM` for the peak since `reset_peak`.
    """
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kilobytes)


def build_autocast(bf16: bool) -> torch.autocast:
    """Return the autocast context in which all trainers run; it does nothing if `bf16` is false."""
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16)


def draw_noise(*shape: int, bf16: bool, seed: int) -> Tensor:
    """Return a tensor of normally distributed random numbers; a seed always gives the same ones."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, torch.bfloat16 if bf16 else torch.float32)


def draw_inputs(
    rows: int, length: int, num_aux: int, vocab_size: int, hidden_size: int, bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random inputs for a training step, the same ones in each trainer.

    They stand for what a target would return. No target is run.

    Args:
        rows: B, the number of rows.
        length: T, the tokens of each row.
        num_aux: A, the number of target layers whose outputs the draft reads.
        vocab_size: tokens of the vocabulary.
        hidden_size: H, the hidden size of the target.
        bf16: whether the features are bfloat16 instead of float32.

    Returns:
        Tokens [B, T]; the outputs of the A layers, concatenated along the last axis [B, T, A x H];
        the output of the target's last layer [B, T, H].
    """
    # Fixed seeds give every trainer the same inputs. The sizes serve as seeds.
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocab_size, (rows, length), generator=generator).to(DEVICE)
    aux_size = num_aux * hidden_size
    aux_BTAH = draw_noise(rows, length, aux_size, bf16=bf16, seed=aux_size)
    last_BTH = draw_noise(rows, length, hidden_size, bf16=bf16, seed=hidden_size)
    return ids_BT, aux_BTAH, last_BTH


def block_loss_mask(length: int, block_size: int) -> list[int]:
    """Return the loss mask [T] of a row for block drafters.

    A position has a loss only if both our trainer and that of speculators can let a block begin
    there. speculators begins no block at the last `block_size` tokens of a row, and our trainer
    none at the first token.
    """
    return [int(0 < position < length - block_size) for position in range(length)]


def build_target_with_features(
    folder: str, rows: int, loss_mask: list[int], num_aux: int, bf16: bool
) -> "tuple[FrozenTarget, ForwardInputs]":
    """Load the target of our trainers, and make it return random features without running.

    So only the work of the draft is timed.

    Args:
        folder: the folder of the models.
        rows: the number of rows.
        loss_mask: the loss mask [T] of every row of T tokens.
        num_aux: layers of the target that the draft reads.
        bf16: whether the features are bfloat16.

    Returns:
        The target, and the batch of rows that the features belong to.
    """
    from transformers import AutoModelForCausalLM

    from specdistill.data.rows.packing import collate
    from specdistill.targets.frozen import Features, FrozenTarget

    length = len(loss_mask)

    # Load the target, and replace its method `features` by one that returns the random features:
    # the outputs of `num_aux` layers, and the last layer's output after the target's final norm.
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
    """Return the trainer of this project for a draft. It takes all rows in one forward pass.

    Args:
        objective: the training objective, with the draft in it.
        target: the target, which returns fixed features.
        batch: the packed rows.
        compute_compared_loss: computes the loss that is compared between trainers, from the sums
            that the objective returns for each drafted position.
        bf16: whether autocast to bfloat16 is on.
    """
    objective.to(DEVICE)
    step_numbers = itertools.count()

    def micro_batch() -> tuple[Tensor, float]:
        """Return the loss for backward, and the loss that is compared between trainers."""
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
    """Return the trainer of this project for an EAGLE-3 head.

    Args:
        folder: the folder of the models.
        rows: the number of rows.
        length: tokens of a row.
        num_steps: steps of the unroll.
        bf16: whether autocast to bfloat16 is on.
        plainly: use the plain forms, which the optimized code is compared with: attention with a
            dense mask, and a loss that computes all logits at once.
    """
    from specdistill.methods.chains import objective
    from specdistill.methods.eagle3.checkpoint import load_eagle3
    from specdistill.training.losses.divergence import forward_kl
    from specdistill.training.losses.head_loss import compute_head_loss_at_once

    # Replace the optimized attention and loss in the module by their plain forms.
    if plainly:
        objective.UnrollKVCache = DenseKVCache
        objective.compute_head_loss = compute_head_loss_at_once

    # Build the objective. Every token has a loss.
    target, batch = build_target_with_features(folder, rows, [1] * length, NUM_AUX["head"], bf16)
    draft = load_eagle3(f"{folder}/draft", target)
    draft.lm_head.weight.requires_grad_(False)  # as in the trainer of speculators
    unroll = objective.TrainingTimeTest(draft, forward_kl, num_steps)

    def sum_mean_losses(sums: "StepSums") -> Tensor | float:
        """Return the mean loss of each step of the unroll, summed over the steps."""
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
    """Return the trainer of this project for a DFlash block drafter.

    Args:
        folder: the folder of the models.
        rows: the number of rows.
        length: tokens of a row.
        block_size: positions of a block.
        num_anchors: the number of blocks, over all rows.
        bf16: whether autocast to bfloat16 is on.
        plainly: use the plain forms, which the optimized code is compared with: attention with a
            dense mask, and a loss that computes all logits at once.
    """
    from specdistill.methods.blocks import checkpoint, objective
    from specdistill.methods.dflash.method import KIND
    from specdistill.training.losses.divergence import forward_kl
    from specdistill.training.losses.head_loss import compute_head_loss_at_once

    # Replace the optimized attention and loss in the modules by their plain forms.
    if plainly:
        # On a CPU, `attend_in_chunks` is the optimized attention. It builds a dense mask for each
        # chunk that `split_blocks` returns. A chunk is the tuple (first block, end of its blocks,
        # first token, end of its tokens). A single chunk with all blocks and all tokens gives one
        # dense mask.
        objective.split_blocks = lambda batch, anchors_N, _: [
            (0, len(anchors_N), 0, batch["input_ids"].numel())
        ]
        # A GPU would call `attend_in_one_call`, which is flex attention. Replace it.
        objective.BlockKVCache.attend_in_one_call = objective.BlockKVCache.attend_in_chunks
        # Compute all logits at once.
        objective.compute_head_loss = lambda *rows_and_targets, group_size, **options: (
            compute_head_loss_at_once(*rows_and_targets, **options)
        )

    # Build the objective. It draws the anchors (the tokens at which blocks begin) of each row
    # separately. So its last argument is the number of blocks of one row.
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
    """A KV cache that attends to the keys of all steps of an unroll at once, with a dense mask.

    It replaces `UnrollKVCache` for the plain form of our trainer. torch computes the attention.
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
        """Return the attention output [B, N, T, d] of one step of the unroll.

        The query attends to the keys of this step and of all steps before. B is the number of rows,
        T their length, N the number of query heads, G the number of key and value heads, d the size
        of a head.
        """
        # Append this step's keys and values to those of earlier steps. torch needs keys and values
        # of the same dtype.
        steps = self.steps[layer]
        steps.append((key_BGTd.to(value_BGTd.dtype), value_BGTd))
        keys = torch.cat([key for key, _ in steps], dim=2)
        values = torch.cat([value for _, value in steps], dim=2)
        rows, _, length, _ = query_BNTd.shape

        # Number the documents of all positions. `starts` has the position at which each document
        # starts. With right=True this position counts as a part of the document that starts there.
        positions = torch.arange(rows * length, device=DEVICE)
        document_B1T = torch.bucketize(positions, self.starts, right=True).view(rows, 1, length)
        # The keys of the first step belong to real tokens: a token sees the keys of its document
        # up to its own position. A later step continues a draft at each position: among the keys of
        # that step, a token sees only the key at its own position.
        is_same_document_BTT = document_B1T.mT == document_B1T
        is_causal_TT = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        first_step_mask_BTT = is_same_document_BTT & is_causal_TT
        own_key_TT = torch.eye(length, dtype=torch.bool, device=DEVICE)
        later_steps_mask = own_key_TT.repeat(1, len(steps) - 1).expand(rows, -1, -1)

        # Put the masks of all K steps so far side by side: [B, 1, T, K T].
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
    """Return the trainer of speculators for an EAGLE-3 head.

    Args:
        folder: the folder of the models.
        rows: the number of rows.
        length: tokens of a row.
        num_steps: steps of the unroll.
        bf16: whether autocast to bfloat16 is on.
        attention: the implementation of attention, such as `sdpa`.
    """
    # Freeze the LM head, as in our trainer, and give every step of the unroll the same weight.
    model = load_speculators_model(folder, attention)
    model.lm_head.weight.requires_grad_(False)
    settings = read_speculators_settings(type(model), ttt_steps=num_steps, ttt_step_loss_decay=1.0)

    # Draw the same inputs as our trainer.
    ids, aux, last = draw_inputs(
        rows, length, NUM_AUX["head"], model.verifier_vocab_size, model.hidden_size, bf16
    )
    # Shift the batch as `shift_batch` of speculators does: each token is paired with the features
    # (`aux`) of the token before it, and with the last hidden state of the token itself. The latter
    # gives the target's prediction, which the draft learns. The loss at the last position is
    # masked, because our trainer has none there: the token to predict is not in the row.
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
    """Return the trainer of speculators for a DFlash block drafter.

    Args:
        folder: the folder of the models.
        rows: the number of rows.
        length: tokens of a row.
        block_size: positions of a block.
        num_anchors: the number of blocks, over all rows.
        bf16: whether autocast to bfloat16 is on.
        attention: the implementation of attention, such as `sdpa`.
    """
    # The model takes one row at a time (see `build_speculators_trainer`), so each row gets its part
    # of the blocks.
    model = load_speculators_model(folder, attention)
    equal_weights = {"dflash_decay_gamma": float("inf")}  # every slot has the same weight
    settings = read_speculators_settings(
        type(model), max_anchors=num_anchors // rows, **equal_weights
    )

    # Draw the same inputs as our trainer. A block drafter reads tokens and features of the same
    # position, so they are not shifted.
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
    """Load the draft that was exported to the format of speculators, for training in float32.

    Args:
        folder: the folder of the models.
        attention: the implementation of attention, such as `sdpa`.
    """
    from speculators import SpeculatorModel

    # Set the attention in the config, because it must be known before the model is built.
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
    """Return a trainer that trains a model of speculators as that library's own trainer does.

    A model of speculators takes one row at a time. So each row is a micro-batch of a step, in which
    the gradients of all rows accumulate.

    Args:
        model: the model of the draft.
        batch: the inputs of the model by name, each with a row for each micro-batch.
        settings: further keyword arguments of the model.
        bf16: whether autocast to bfloat16 is on.
    """
    from speculators.train.optimizers import build_optimizers

    def micro_batch(row: int) -> tuple[Tensor, float]:
        """Return the loss of one row: as a tensor for backward, and as a number to compare."""
        # A slice of one row keeps the batch axis. The model returns tokens, loss and metrics.
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

    The loss is computed in eager mode. The default of speculators, a fused loss, needs Triton,
    which does not run on a CPU. speculators returns one dictionary for training and one for
    validation; the first one is used.

    Args:
        model_class: the class of the model.
        **options: options of the trainer that differ from its defaults.
    """
    settings: dict[str, object] = model_class.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", **options
    )[0]
    return settings


def build_head_and_loss_trainer(
    rows: int, num_steps: int, hidden_size: int, vocab_size: int, bf16: bool, plainly: bool = False
) -> Trainer:
    """Return a trainer whose step is only the LM head and the loss, forward and backward.

    The input is K x R random hidden states: R rows in each of K steps of an unroll. The backward
    pass computes the gradients of these hidden states and of the weight of the draft's LM head.

    Args:
        rows: R, the hidden states in each step of the unroll.
        num_steps: K, the steps of the unroll.
        hidden_size: the size of a hidden state.
        vocab_size: tokens of the vocabulary.
        bf16: whether autocast to bfloat16 is on.
        plainly: compute all logits at once, and not in chunks.
    """
    from specdistill.targets.anatomy import LogitsHead
    from specdistill.training.losses.divergence import forward_kl
    from specdistill.training.losses.head_loss import compute_head_loss, compute_head_loss_at_once
    from specdistill.training.objective import SoftTargets

    # Make the LM heads of draft and target. Their random weights are scaled so that logits have a
    # variance of 1.
    draft_head = torch.nn.Linear(hidden_size, vocab_size, bias=False, device=DEVICE)
    target_head = torch.nn.Linear(hidden_size, vocab_size, bias=False, device=DEVICE)
    for seed, linear in enumerate((draft_head, target_head)):
        noise_VH = draw_noise(vocab_size, hidden_size, bf16=False, seed=seed)
        linear.weight.data = noise_VH * hidden_size**-0.5

    # The target's next-token distributions are computed from R random hidden states. The draft has
    # the target's whole vocabulary: `ids_W` is None, and `pruned`, the head for the draft's tokens
    # alone, is the whole head.
    soft_targets = SoftTargets(
        draw_noise(rows, hidden_size, bf16=False, seed=2),
        head=LogitsHead(target_head),
        ids_W=None,
        pruned=LogitsHead(target_head),
        temperature=1.0,
    )

    # The draft's hidden states need gradients. Each step of the unroll has the same weight.
    hidden_KRH = draw_noise(num_steps, rows, hidden_size, bf16=False, seed=3).requires_grad_()
    weights_KR = torch.full((num_steps, rows), 1 / rows, device=DEVICE)
    compute_loss = compute_head_loss_at_once if plainly else compute_head_loss

    def compute_row_losses(
        logits_rW: Tensor, targets: "TargetDistributions", k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the forward KL of each of r rows: with gradients, and detached as a metric.

        `logits_rW` has a row of logits over the W tokens of the draft's vocabulary. The metric has
        the shape [1, r], because there may be several metrics. The step `k` is not used: all
        steps have the same loss.
        """
        losses_r = forward_kl(logits_rW, targets.probs_rW)
        return losses_r, losses_r.detach().unsqueeze(0)

    def micro_batch() -> tuple[Tensor, float]:
        """Return the loss of all rows and steps: as a tensor for backward, and as a number."""
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
    """Build a trainer, take a training step for each line on stdin, and print its numbers as JSON.

    Args:
        name: a name of TRAINERS.
        settings: the arguments of the function that builds the trainer.
    """
    # Answers go to the original stdout (`answers`). What libraries print to stdout goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    trainer = TRAINERS[name](**settings)
    for _ in sys.stdin:
        print(json.dumps(trainer.step()), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
