"""The objective of draft models that draft in one pass (PARD, arXiv 2504.18583).

They learn the target's distribution at every token, and at the masks (mask tokens) after it.

Shapes: B rows, T positions, M masks of a row (padded), N = T + M slots, L loss tokens (padded),
R = L + B M predicted tokens, H hidden size, K tokens that are predicted in one pass, S = B T.

A row is its tokens and, behind them, masks. Mask i of the token at column t is at the rotary
position of x_{t+i}. It sees the tokens of its document up to x_t, the masks 1 to i of the same
token, and nothing else. It learns the target's distribution of x_{t+1+i}. The token itself learns
the same with i = 0. All predictions have the same weight in the loss.

The conditional drop keeps mask i after a part of the tokens that it can follow. The part is chosen
at random; its share of these tokens is max(min_retention, retention ** i). Mask i reads mask i - 1,
so it is never kept without mask i - 1, and chains stay whole.

The model's own forward pass runs, under an attention mask in its own dtype. The attention mask has
4 N^2 bytes for each row in float32, and as many again for sliding windows if layers are of both
kinds. With the defaults N is at most 3.4 T: 12 MB at T = 512, 190 MB at T = 2048.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdistill.common.errors import UserError
from specdistill.decoding.transformers_models import build_attention_masks, find_mask_obstacle
from specdistill.methods.models.objective import Distillation
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import Divergence
from specdistill.training.objective import SoftTargets, StepSums, gather_before, select_loss_rows

# A row's masks are padded to multiples of T / SIZES, so that a compiled step meets few sizes.
SIZES = 8


def draw_masks(
    batch: Mapping[str, Tensor],
    num_predicted: int,
    retention: float,
    min_retention: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Choose at random which masks are trained after each token (PARD's conditional drop).

    Masks 1 to K - 1 after a token stand for the unknown next tokens. Mask i predicts the token
    i + 1 positions after the token that it follows. In the text `a b c d`, for example, `a` itself
    predicts `b`, mask 1 after `a` predicts `c`, and mask 2 predicts `d`. Mask 2 is only possible if
    `b`, `c` and `d` all have a loss; they are then in one document with `a`.

    Args:
        batch: packed rows [B, T].
        num_predicted: K, the tokens that are predicted in one pass, by a token and its masks.
        retention: mask i is kept after a random part of the tokens that it can follow. The share of
            this part is retention ** i.
        min_retention: the least share, for masks with a large i.
        seed: the seed of the random choice.

    Returns:
        Two tensors [B, M] with the kept masks of each row: the column of the token that the mask
        follows, and the mask's number i. All rows are padded to M masks. A padding mask has the
        column 0 and the number K, while kept masks have the numbers 1 to K - 1.
    """
    num_rows, length = batch["position_ids"].shape
    num_tokens = num_rows * length

    # Mark the tokens of the flattened batch (S = B T) that have a loss. Mask i can follow a token
    # whose next i + 1 tokens are all marked. They are then in the token's document, because the
    # first token of a document never has a loss. K unmarked places are added at the end, so that
    # the last tokens of the batch have next tokens, too.
    has_loss_S = torch.zeros(num_tokens + num_predicted, dtype=torch.bool).index_fill(
        0, batch["loss_positions"], True
    )
    has_loss_S[0] = False  # loss positions are padded with 0

    # Each token that masks can follow gets a random rank in [0, 1). It decides about all masks of
    # the token, so that mask i is never kept without mask i - 1.
    possible_S = has_loss_S[1 : num_tokens + 1]
    starts = possible_S.nonzero().flatten()
    rank_S = torch.ones(num_tokens)
    rank_S[starts] = torch.randperm(
        len(starts), generator=torch.Generator().manual_seed(seed)
    ) / max(len(starts), 1)

    # Keep mask i where masks 1 to i are possible and the token's rank is below the share of mask i.
    # Because shares fall with i, a kept mask has all masks before it.
    kept_masks = []
    for i in range(1, num_predicted):
        possible_S = possible_S & has_loss_S[1 + i : num_tokens + 1 + i]
        kept_masks.append(possible_S & (rank_S < max(min_retention, retention**i)))
    kept_SI = (
        torch.stack(kept_masks, 1) if kept_masks else torch.zeros(num_tokens, 0, dtype=torch.bool)
    )

    # List the kept masks of each row as pairs [column, i - 1], and pad the rows to one length M.
    kept_pairs = [row.nonzero() for row in kept_SI.view(num_rows, length, -1)]
    columns_BM = pad_sequence([pairs[:, 0] for pairs in kept_pairs], batch_first=True)
    numbers_BM = pad_sequence(
        [pairs[:, 1] + 1 for pairs in kept_pairs], batch_first=True, padding_value=num_predicted
    )

    # Pad M further to a multiple of ceil(T / SIZES), so that M has few different values.
    num_padding = -columns_BM.shape[1] % -(-length // SIZES)
    return (
        F.pad(columns_BM, (0, num_padding)),
        F.pad(numbers_BM, (0, num_padding), value=num_predicted),
    )


class ParallelDistillation(Distillation):
    """The draft model together with its loss: it maps packed rows to loss sums and metrics.

    There are sums for each drafted position. The model's config names the mask, `pard_token`.

    Args:
        draft: the draft model.
        divergence: the loss of one token.
        num_positions: K, of which K - 1 are masks.
        retention: mask i is trained after a random part of the tokens that it can follow, whose
            share is retention ** i (PARD's conditional drop).
        min_retention: the least share, for masks with a large i.
        seed: the seed of the drop. In training, the drop is drawn anew each time that a row is
            read. Held-out rows always have the same drop.
        temperature: divides both sets of logits in the loss.
        labels: `soft` for the target's distributions, or `hard` for the sequence's own tokens.

    Raises:
        UserError: for a model that cannot be run under our attention masks (see
            `find_mask_obstacle`).
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        divergence: Divergence,
        *,
        num_positions: int = 8,
        retention: float = 0.7,
        min_retention: float = 0.2,
        seed: int = 0,
        temperature: float = 1.0,
        labels: str = "soft",
    ) -> None:
        super().__init__(
            draft,
            divergence,
            temperature=temperature,
            labels=labels,
            num_positions=num_positions,
        )
        reason = find_mask_obstacle(draft)
        if reason:
            raise UserError(
                "draft.init",
                got=f"a model with {reason}",
                expected="a model that obeys a given attention mask and given position ids",
            )

        # Here documents are separated by attention masks, so no layer needs their lengths.
        self.packed_configs = []
        self.drop = (num_positions, retention, min_retention)  # the settings of `draw_masks`
        self.seed = seed

    def prepare(self, batch: dict[str, Tensor], number: int | None) -> dict[str, Tensor]:
        """Return the batch with masks that are drawn at random for it.

        Args:
            batch: a batch of packed rows.
            number: the number of the batch in training; None in evaluation.
        """
        # Evaluation always uses the number -1, so that it draws the same masks each time. With the
        # factor, different seeds give different random numbers up to a million batches.
        seed = self.seed * 1_000_003 + (-1 if number is None else number)
        num_positions, retention, min_retention = self.drop
        columns_BM, numbers_BM = draw_masks(batch, num_positions, retention, min_retention, seed)
        return batch | {"mask_columns": columns_BM, "mask_numbers": numbers_BM}

    def count_loss_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the number of predicted tokens, of all drafted positions together."""
        has_loss_R, _, _ = self._list_predictions(**batch)
        return has_loss_R.sum()

    def read_target(self, target: FrozenTarget, inputs: dict[str, Tensor]) -> dict[str, object]:
        """Return the target's distributions of all predicted tokens, as soft targets.

        In training with hard labels they are None.
        """
        # The base class reads the target's distributions at `loss_positions`. Here these are the
        # positions of all predicted tokens, those of masks included.
        _, _, labels_R = self._list_predictions(**inputs)
        return super().read_target(target, inputs | {"loss_positions": labels_R})

    def forward(  # type: ignore[override] # it takes masks, too
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        mask_columns: Tensor,
        mask_numbers: Tensor,
        soft_targets: SoftTargets | None,
        measure: bool = False,
        **unread: object,
    ) -> tuple[Tensor, StepSums]:
        """Return the sum of the losses of all predictions, and the metrics' sums by draft position.

        Args:
            input_ids: [B, T], the tokens of B rows, each of which holds several documents.
            position_ids: [B, T], which start again at 0 with each document.
            loss_positions: [L], the loss tokens, as positions in the flattened batch.
            mask_columns: [B, M], the column of the token that each mask follows.
            mask_numbers: [B, M], the number of each mask: mask i stands i positions after its
                token (see `draw_masks`). Padding masks have the number K.
            soft_targets: the target's distributions; None for hard labels in training.
            measure: also compute the metrics that cost time.
            **unread: other columns of the batch, which are not needed.
        """
        # Run the model over the N = T + M tokens and masks of each row.
        hidden_BNH = self.hidden_states(input_ids, position_ids, mask_columns, mask_numbers)
        token_states_BTH, mask_states_BMH = hidden_BNH.split(
            (input_ids.shape[1], mask_columns.shape[1]), 1
        )

        # Gather the states of all R predictions: first those before the L loss tokens, then those
        # of all masks.
        rows_RH = torch.cat(
            (gather_before(token_states_BTH, loss_positions, 1), mask_states_BMH.flatten(0, 1))
        )
        has_loss_R, numbers_R, labels_R = self._list_predictions(
            position_ids, loss_positions, mask_columns, mask_numbers
        )

        # Compute the losses of all predictions with one head pass.
        weights_R = has_loss_R.float()
        total, metrics_MR = self.losses(
            rows_RH, weights_R, input_ids.flatten()[labels_R], soft_targets, measure
        )

        # Sum by drafted position and chain. A chain belongs to the token that its masks follow.
        index_R = numbers_R * input_ids.numel() + (labels_R - 1 - numbers_R).clamp_min(0)
        empty = weights_R.new_zeros(self.num_positions * input_ids.numel())
        by_chain = (
            empty.scatter_add(0, index_R, values_R).view(self.num_positions, -1)
            for values_R in (weights_R, *metrics_MR)
        )
        return total, StepSums.from_losses(*by_chain)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, columns_BM: Tensor, numbers_BM: Tensor
    ) -> Tensor:
        """Run the model over the T tokens and M masks of each row, as N = T + M slots.

        Args:
            input_ids: [B, T], the token ids.
            position_ids: [B, T], which start again at 0 with each document.
            columns_BM: [B, M], the column of the token that each mask follows.
            numbers_BM: [B, M], the number of each mask: mask i stands i positions after its token.

        Returns:
            The hidden states [B, N, H] that the LM head reads, those of the tokens first.
        """
        # Describe each slot: the column of its token, its mask number (0 for the token itself), and
        # its position in the document.
        config = self.draft.config
        backbone = self.anatomy.backbone
        column_BN = torch.cat(
            (
                torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids),
                columns_BM,
            ),
            1,
        )
        number_BN = torch.cat((torch.zeros_like(input_ids), numbers_BM), 1)

        # `token_position_BN` is the position, within the document, of the token that the slot
        # belongs to. A mask stands as many positions after the token as its number says.
        token_position_BN = torch.cat((position_ids, position_ids.gather(1, columns_BM)), 1)
        position_BN = token_position_BN + number_BN

        def build_visibility(window: int | None) -> Tensor:
            """Return which slots each slot may attend to, as bool [B, 1, queries N, keys N].

            A slot is a token, or a mask after a token. Both have the token's column, which is its
            place in the row. The token has the number 0, and mask i after it has the number i.

            Args:
                window: the size of a sliding window in positions; None for full attention.
            """
            slots = column_BN, number_BN, position_BN
            key_column, key_number, key_position = (x_BN[:, None, None, :] for x_BN in slots)
            query_column, query_number, query_position = (x_BN[:, None, :, None] for x_BN in slots)

            # A query sees the tokens of its document up to its own column, and the masks of its
            # own column up to its own number. Its document begins at `first_column`: the column of
            # the query's token, minus the position of this token in the document.
            first_column = (column_BN - token_position_BN)[:, None, :, None]
            is_visible = torch.where(
                key_number == 0,
                (key_column >= first_column) & (key_column <= query_column),
                (key_column == query_column) & (key_number <= query_number),
            )
            return (
                is_visible
                if window is None
                else is_visible & (key_position > query_position - window)
            )

        # Run the model, with the mask token in every slot behind the tokens.
        output = backbone(
            input_ids=torch.cat((input_ids, torch.full_like(columns_BM, config.pard_token)), 1),
            position_ids=position_BN,
            attention_mask=build_attention_masks(
                config.get_text_config(decoder=True), backbone.dtype, build_visibility
            ),
            use_cache=False,
        )
        last_hidden: Tensor = output.last_hidden_state
        return last_hidden

    def _list_predictions(
        self,
        position_ids: Tensor,
        loss_positions: Tensor,
        mask_columns: Tensor,
        mask_numbers: Tensor,
        **_: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """List the R predictions of a batch: first those made by tokens, then those made by masks.

        Args:
            position_ids: [B, T], which start again at 0 with each document.
            loss_positions: [L], the loss tokens, as positions in the flattened batch.
            mask_columns: [B, M], the column of the token that each mask follows.
            mask_numbers: [B, M], the number of each mask: mask i stands i positions after its
                token. Real masks have the numbers 1 to K - 1. The masks that pad a row have K.
            **_: other columns of the batch, which are not needed.

        Returns:
            Three tensors [R]: whether the prediction has a loss, the number of the mask that
            predicts (0 for a token), and the position of the predicted token in the flattened
            batch. The predictions of padding masks have no loss.
        """
        # Mask i of the token at column t predicts the token at column t + 1 + i of the same row.
        # The label is the position of the predicted token in the flattened batch. The label of a
        # padding mask has no effect, but could be past the end of the batch, hence the clamp.
        num_rows, length = position_ids.shape
        flat_numbers = mask_numbers.flatten()
        row_starts_B1 = length * torch.arange(num_rows, device=mask_columns.device).unsqueeze(1)
        mask_labels = ((row_starts_B1 + mask_columns).flatten() + 1 + flat_numbers).clamp_max(
            num_rows * length - 1
        )

        # Join the predictions by tokens (number 0) and those by masks. Only real masks have a loss:
        # their numbers are below K. The number K of padding masks becomes K - 1, because K - 1 is
        # the last drafted position.
        has_loss_R = torch.cat(
            (
                select_loss_rows(position_ids, loss_positions, ahead=1),
                flat_numbers < self.num_positions,
            )
        )
        numbers_R = torch.cat(
            (torch.zeros_like(loss_positions), flat_numbers.clamp_max(self.num_positions - 1))
        )
        labels_R = torch.cat((loss_positions, mask_labels))
        return has_loss_R, numbers_R, labels_R
