"""The objective of draft models: learn the target's distribution, position by position.

The method is DistillSpec's (arXiv 2310.08461). A part of the data may be on-policy.

Shapes: B rows, T positions, R loss tokens (padded), r of a chunk of them, H hidden size, V
vocabulary, K drafted positions, S = B T chains.

At every position t whose next token has a loss, the draft's distribution after x_t is compared with
the target's. With `labels="hard"` the target does not run. The loss is then the cross-entropy of
the sequence's own next token: sequence-level distillation on the target's completions, and plain
language modelling on other sequences.

On-policy data: the draft generates, and the target scores (GKD, arXiv 2306.13649; DistillSpec). A
draft that is trained on the target's completions alone never sees the prefixes that its own
mistakes lead to. In a share of the batches, therefore, the rows are cut to their first tokens, and
the draft generates the rest.
"""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdistill.common.errors import UserError
from specdistill.data.rows.packing import index_batch
from specdistill.methods.layers import scale_norm
from specdistill.targets.anatomy import examine_model
from specdistill.targets.batch_generate import generate_batch, prepare_generation
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import (
    Documents,
    build_length_inputs,
    find_length_configs,
    replace_attention,
)
from specdistill.training.arguments import is_weight_sharded
from specdistill.training.losses.divergence import Divergence
from specdistill.training.losses.head_loss import compute_head_loss
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    TargetDistributions,
    arrange_in_chains,
    gather_before,
    select_loss_rows,
)


class Distillation(Objective):
    """The draft model together with its loss: it maps packed rows to loss sums and metrics.

    Args:
        draft: the draft model.
        divergence: the loss of one token.
        temperature: divides both sets of logits in the loss.
        labels: `soft` for the target's distributions, or `hard` for the sequence's own tokens.
        num_positions: K of the simulated acceptance length.
        on_policy: generates some of the batches; None for none.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        divergence: Divergence,
        *,
        temperature: float = 1.0,
        labels: str = "soft",
        num_positions: int = 4,
        on_policy: "OnPolicyGeneration | None" = None,
    ) -> None:
        super().__init__(draft, divergence, temperature, step_weights=torch.ones(1))
        self.labels = labels
        self.num_positions = num_positions
        self.on_policy = on_policy
        self.anatomy = examine_model(draft, "the draft", key="draft.init")

        # The configs of the draft whose attention `forward` replaces by one that keeps the
        # documents of a row apart by their lengths. Empty if the draft keeps them apart otherwise.
        self.packed_configs = find_length_configs(draft)

        # transformers' Trainer reads this name. It then saves a tensor with two names only once.
        self._keys_to_ignore_on_save = find_repeated_names(self)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers of the draft model."""
        return self.anatomy.layers

    def scale_output(self, factor: float) -> None:
        """Multiply the draft's logits by a factor, by scaling weights that the logits pass through.

        The final norm is scaled if its weights are trained. If the norm has no weights, the LM
        head is scaled instead, but not if it is tied to the embedding, which must not change. If
        neither applies, for example with a frozen norm, nothing is scaled.

        Args:
            factor: the factor.
        """
        head = self.anatomy.head.linear
        norm_weights = list(self.anatomy.norm.parameters()) if self.anatomy.norm is not None else []
        if norm_weights and all(weight.requires_grad for weight in norm_weights):
            scale_norm(self.anatomy.norm, factor)
        elif not norm_weights and head.weight is not self.draft.get_input_embeddings().weight:
            head.weight.data.mul_(factor)

    def tie_weights(self) -> None:
        """Tie the draft's weights again, such as the LM head to the embedding.

        transformers' Trainer calls this after it has loaded a checkpoint, because checkpoints
        contain a tensor with two names only under the first name.
        """
        self.draft.tie_weights()

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, object] | None = None, **options: object
    ) -> None:
        """Turn on activation checkpointing, which is also called gradient checkpointing.

        The backward pass then computes the layers again, to save memory. transformers' Trainer
        calls this method for `train.activation_checkpointing`. Its name in earlier versions of
        transformers is `gradient_checkpointing_enable`.
        """

        def make_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            """Return the contexts of a layer's forward pass and of its recomputation.

            While `forward` runs, it replaces the attention of some models (see `packed_configs`,
            which is empty for other models). The recomputation comes after `forward`, in the
            backward pass, so it must replace the attention again.
            """
            return nullcontext(), replace_attention(self.packed_configs)

        # PyTorch calls `context_fn` for the two contexts. It accepts the function only without
        # reentrant checkpointing.
        attention_settings = {"use_reentrant": False, "context_fn": make_contexts}
        self.draft.activation_checkpointing_enable(
            {**(activation_checkpointing_kwargs or {}), **attention_settings}, **options
        )

    def prepare(self, batch: dict[str, Tensor], number: int | None) -> dict[str, Tensor]:
        """Return the batch to learn from: the batch itself, or one that the draft generates.

        Args:
            batch: a batch of the data.
            number: the number of the batch in training; None in evaluation, which always uses the
                batch itself.
        """
        return batch if self.on_policy is None or number is None else self.on_policy(batch, number)

    def read_target(self, target: FrozenTarget, inputs: dict[str, Tensor]) -> dict[str, object]:
        """Return the target's distributions as soft targets, for the loss and the metrics.

        The distributions are at temperature 1, at which acceptance is measured;
        `compute_row_losses` brings them to the temperature of the loss. In training with hard
        labels there are none (None): the loss does not need them, and the target need not run.
        """
        if self.training and self.labels == "hard":
            return {"soft_targets": None}
        soft_targets = super().read_target(target, inputs)["soft_targets"]
        return {"soft_targets": replace(soft_targets, temperature=1.0)}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        cumulative_lengths: Tensor,
        longest: int,
        soft_targets: SoftTargets | None,
        measure: bool = False,
        **unread: object,
    ) -> tuple[Tensor, StepSums]:
        """Return the loss summed over the loss tokens of packed rows, and the sums of the metrics.

        Args:
            input_ids: [B, T], the tokens of B rows with T positions. Each row holds several
                documents one after the other (see specdistill.data.rows.packing).
            position_ids: [B, T], which start again at 0 with each document.
            loss_positions: [R], the loss tokens, as positions in the flattened batch of B T tokens.
            cumulative_lengths: where the documents of the flattened batch begin, and their end.
            longest: tokens of the longest document.
            soft_targets: the target's distributions; None for hard labels in training.
            measure: also compute the metrics that cost time.
            **unread: other columns of the batch, which are not needed.
        """
        # Run the decoder layers over the packed rows. Layers that read documents by their lengths
        # need the documents' boundaries as extra arguments.
        packed = (
            build_length_inputs(input_ids, Documents(cumulative_lengths, longest))
            if self.packed_configs
            else {}
        )
        with replace_attention(self.packed_configs):
            output = self.anatomy.backbone(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **packed
            )

        # Gather the states that predict the loss tokens: the token at position t is predicted by
        # the state at t - 1. Padding of `loss_positions` points at the first token of a document,
        # which nothing predicts, so its weight is 0.
        rows_RH = gather_before(output.last_hidden_state, loss_positions, 1)
        weights_R = select_loss_rows(position_ids, loss_positions, ahead=1).float()
        next_R = input_ids.flatten()[loss_positions]

        # Compute the losses, and add the metrics up along simulated draft chains of K positions.
        total, metrics_MR = self.losses(rows_RH, weights_R, next_R, soft_targets, measure)
        by_chain = partial(arrange_in_chains, loss_positions, input_ids.shape, self.num_positions)
        return total, StepSums.from_losses(
            weights_R.unsqueeze(0), *metrics_MR.unsqueeze(1), by_chain=by_chain
        )

    def losses(
        self,
        rows_RH: Tensor,
        weights_R: Tensor,
        next_R: Tensor,
        soft_targets: SoftTargets | None,
        measure: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of R losses, and the weighted values [M, R] of M metrics.

        Args:
            rows_RH: [R, H], the draft's hidden states of size H before the LM head.
            weights_R: [R], the weight of each loss.
            next_R: [R], the next token of the training sequence after each state.
            soft_targets: the target's distributions; None for hard labels in training.
            measure: also compute the metrics that cost time.
        """

        def targets_of(rows: slice) -> tuple[Tensor, TargetDistributions | None]:
            """Return what the logits of some rows are compared with.

            These are the next token after each row, and the target's distributions, which are None
            in training with hard labels. `rows` is a slice of the rows of `rows_RH`.
            """
            distributions = None
            if soft_targets is not None:
                distributions = soft_targets.at(rows, measure=measure)
            return next_R[rows], distributions

        # Compute logits and losses chunk by chunk. The [R, V] logits of all rows are never in
        # memory at once. The dimension of length 1 is K: `compute_head_loss` also serves heads with
        # several drafted positions.
        total, metrics_MKR = compute_head_loss(
            rows_RH.unsqueeze(0),
            weights_R.unsqueeze(0),
            self.anatomy.head,
            targets_of,
            self.compute_row_losses,
        )
        return total, metrics_MKR.squeeze(1) * weights_R

    def compute_row_losses(self, logits_rV: Tensor, targets: Any, k: int) -> tuple[Tensor, Tensor]:
        """Return the losses [r] of a chunk of r rows in nats, and M metrics of each row, [M, r].

        `compute_head_loss` calls this function for each chunk.

        Args:
            logits_rV: [r, V], the draft's logits over the V tokens of the vocabulary.
            targets: the next tokens [r] of the training sequences, and the target's distributions
                at temperature 1 (None for hard labels in training).
            k: the drafted position, which this method does not need.
        """
        next_r, soft = targets
        if self.labels == "hard":
            losses_r = F.cross_entropy(logits_rV.float(), next_r, reduction="none")
        else:
            # A draft model can propose all V tokens, so the probabilities are those of all tokens.
            probs_rV = soft.probs_rW
            # To bring them from temperature 1 to the temperature of the loss, raise them to
            # 1 / temperature and normalise them again. The clamp avoids log(0).
            if self.temperature != 1.0:
                probs_rV = (
                    probs_rV.clamp_min(torch.finfo(torch.float32).tiny)
                    .log()
                    .div(self.temperature)
                    .softmax(-1)
                )
            losses_r = self.divergence(logits_rV / self.temperature, probs_rV)
        return self.add_metrics(losses_r, logits_rV, soft)


def find_repeated_names(module: nn.Module) -> list[str]:
    """Return the names in a module's state dict whose tensor also has an earlier name.

    An example is `lm_head.weight` if the LM head is tied to the embedding.
    """
    # Two names are of the same tensor if their memory begins at the same address and the shapes
    # are the same. (A view of a tensor's first rows begins there too, but has another shape.) Note
    # the first name of each tensor.
    first_names: dict[tuple[int, torch.Size], str] = {}
    repeated_names = []
    for name, tensor in module.state_dict().items():
        if first_names.setdefault((tensor.data_ptr(), tensor.shape), name) != name:
            repeated_names.append(name)
    return repeated_names


@dataclass(frozen=True)
class OnPolicyGeneration:
    """Replaces a share of the batches by batches that the draft generates.

    Attributes:
        draft: the draft that generates.
        fraction: the share of the batches.
        temperature: the sampling temperature of the draft; 0 is greedy.
        prompt_tokens: tokens of a row that are its prompt.
        num_tokens: the most tokens that are generated after a prompt.
        end_ids: the tokens that end a completion.
        seed: makes a run repeatable.
    """

    draft: PreTrainedModel
    fraction: float
    temperature: float
    prompt_tokens: int
    num_tokens: int
    end_ids: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        """Check that each process holds the whole draft, if the fraction is above 0.

        The processes generate for their own rows, which take different numbers of steps. With
        sharded weights, all processes would have to take the same number of steps together.

        Raises:
            UserError: if the weights of the draft are sharded.
        """
        if self.fraction and is_weight_sharded():
            raise UserError(
                "on_policy.fraction",
                got=f"{self.fraction} with sharded weights",
                expected="0, or a launch that leaves weights whole: ddp, zero1, zero2",
            )

    def __call__(self, batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """Return the batch itself, or a batch that the draft generates from its prompts.

        Rows whose first document has at most `prompt_tokens` tokens are left out, because they have
        nothing to continue. A batch of such rows alone is returned as it is.

        Args:
            batch: the batch.
            number: the number of the batch in the run.
        """
        # Decide by the number of the batch, so that a resumed run makes the same choice again. With
        # the factor, different seeds give different random numbers up to a million batches.
        if random.Random(self.seed * 1_000_003 + number).random() >= self.fraction:
            return batch

        # Take prompts from the rows whose first document goes on beyond the prompt.
        is_long_enough_B = (batch["document_ids"][:, : self.prompt_tokens + 1] == 0).all(1)
        prompts = batch["input_ids"][is_long_enough_B, : self.prompt_tokens].tolist()
        if not prompts:
            return batch

        # Let the draft continue the prompts. Generation casts and prepares the model for the time
        # being.
        with prepare_generation(self.draft, self.draft.dtype) as draft:
            completions = generate_batch(
                draft,
                prompts,
                [self.temperature] * len(prompts),
                max_new_tokens=self.num_tokens,
                end_ids=self.end_ids,
                seed=self.seed * 1_000_003 + number,
                num_parts=1,
            )
        return self._build_rows(prompts, completions, batch["input_ids"].device)

    def _build_rows(
        self, prompts: list[list[int]], completions: list[list[int]], device: torch.device
    ) -> dict[str, Tensor]:
        """Return a batch with one prompt and its completion in each of B rows.

        Only generated tokens have a loss.
        """
        # Pad the rows at the right to T positions, and mark which positions hold a token.
        rows = [
            torch.tensor(prompt + completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        ids_BT = pad_sequence(rows, batch_first=True).to(device)
        position_BT = torch.arange(ids_BT.shape[1], device=device).expand_as(ids_BT)
        is_token_BT = position_BT < torch.tensor(
            [len(row) for row in rows], device=device
        ).unsqueeze(1)

        # The row's only document has the number 0; padding has -1 and no loss. The loss covers the
        # tokens after the prompt, which has `prompt_tokens` tokens in every row.
        columns = {
            "input_ids": ids_BT,
            "loss_mask": (is_token_BT & (position_BT >= self.prompt_tokens)).long(),
            "document_ids": is_token_BT.long() - 1,
            "position_ids": position_BT * is_token_BT,
        }
        return index_batch(columns)
