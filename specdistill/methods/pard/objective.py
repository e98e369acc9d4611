"""What a draft model that drafts in one pass learns: the target's distribution at every token and at the masks after it (PARD, arXiv
2504.18583).

Shapes: B rows, T positions, M masks of a row (padded), N = T + M slots, R predicted tokens (padded), H hidden size, K tokens that are
predicted in one pass, S = B T.

A row is its tokens and, behind them, masks: mask i of the token at column t is at the rotary position of x_{t+i}, sees the tokens of its
document up to x_t, the masks 1 to i of the same token, and nothing else. It learns the target's distribution of x_{t+1+i}, as the token
itself does with i = 0. All count alike.

The conditional drop: mask i is kept for a share max(min_retention, retention ** i) of the tokens, and never without mask i - 1, which it
reads: chains stay whole.

The model's own forward runs, under a mask in its own dtype: 4 N^2 bytes a row in float32, and as many for sliding windows where layers
are of both kinds. With the defaults N is at most 3.4 T, 12 MB at T = 512, 190 MB at 2048.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdistill.decoding.transformers_models import masks, unmaskable
from specdistill.errors import UserError
from specdistill.losses.divergence import Divergence, build_divergence
from specdistill.methods.models.objective import Distillation
from specdistill.methods.pard.config import PardRecipe
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.objective import SoftTargets, StepSums, before, loss_rows

SIZES = (
    8  # a row's masks are padded to multiples of T / SIZES, so that a compiled step meets few sizes
)


def draw_masks(
    batch: dict[str, Any], num_predicted: int, retention: float, least: float, seed: int
) -> tuple[Tensor, Tensor]:
    """The columns [B, M] of the tokens that masks follow, and the masks' numbers [B, M], from 1 on; padding follows column 0 and has the
    number `num_predicted`, which no mask has.

    A mask is possible if what it predicts carries loss in its token's document, and all between the two do.
    """
    num_rows, length = batch["position_ids"].shape
    num_tokens = num_rows * length
    # Loss positions are never a document's first, so a run of them is in one document. Zeros past the end end the last one.
    has_loss_S = torch.zeros(num_tokens + num_predicted, dtype=torch.bool).index_fill(
        0, batch["loss_positions"], True
    )
    has_loss_S[0] = False  # padding of loss positions
    possible_S = has_loss_S[1 : num_tokens + 1]
    starts = possible_S.nonzero().flatten()
    rank_S = torch.ones(num_tokens)
    rank_S[starts] = torch.randperm(
        len(starts), generator=torch.Generator().manual_seed(seed)
    ) / max(len(starts), 1)
    kept = []
    for i in range(1, num_predicted):
        possible_S = possible_S & has_loss_S[1 + i : num_tokens + 1 + i]
        kept.append(possible_S & (rank_S < max(least, retention**i)))
    kept_SI = torch.stack(kept, 1) if kept else torch.zeros(num_tokens, 0, dtype=torch.bool)
    found = [row.nonzero() for row in kept_SI.view(num_rows, length, -1)]
    columns_BM = pad_sequence([pairs[:, 0] for pairs in found], batch_first=True)
    numbers_BM = pad_sequence(
        [pairs[:, 1] + 1 for pairs in found], batch_first=True, padding_value=num_predicted
    )
    spare = -columns_BM.shape[1] % -(-length // SIZES)
    return F.pad(columns_BM, (0, spare)), F.pad(numbers_BM, (0, spare), value=num_predicted)


class ParallelDistillation(Distillation):
    """The draft model as the trainer sees it: rows in, loss sums of each drafted position out. Its config names the mask, `pard_token`.

    Args:
        num_positions: K, of which K - 1 are masks.
        retention, min_retention: of the conditional drop.
        seed: of the drop, which is drawn anew each time that a row is read; held-out rows always have the same.

    Raises UserError for a model that does not read what it is given under a mask of ours.
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
        **options: Any,
    ) -> None:
        super().__init__(draft, divergence, num_positions=num_positions, **options)
        if reason := unmaskable(draft):
            raise UserError(
                "draft.init",
                got=f"a model with {reason}",
                expected="a model that respects mask and position ids",
            )
        self.packed_configs = []  # no attention by documents' lengths
        self.drop, self.seed = (num_positions, retention, min_retention), seed

    def prepare(self, batch: dict[str, Any], number: int | None) -> dict[str, Any]:
        """The batch with its masks."""
        columns_BM, numbers_BM = draw_masks(
            batch, *self.drop, self.seed * 1_000_003 + (-1 if number is None else number)
        )
        return batch | {"mask_columns": columns_BM, "mask_numbers": numbers_BM}

    def num_loss_tokens(self, batch: dict[str, Any]) -> Tensor:
        """Predicted tokens, of all drafted positions together."""
        return self._predicted(**batch)[0].sum()

    def read_target(self, target: FrozenTarget, inputs: dict[str, Any]) -> dict[str, Any]:
        """The target's distributions where something is predicted; none for hard labels in training."""
        return super().read_target(
            target, inputs | {"loss_positions": self._predicted(**inputs)[2]}
        )

    def forward(  # type: ignore[override] # rows have masks
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        mask_columns: Tensor,
        mask_numbers: Tensor,
        soft_targets: SoftTargets | None,
        measure: bool = False,
        **unread: Any,  # the batch's other columns
    ) -> tuple[Tensor, StepSums]:
        """The loss summed over the predicted tokens of packed rows [B, T] (see specdistill.rows.packing), and the sums of each drafted
        position. measure: also fill the metrics that cost time.
        """
        hidden_BNH = self.hidden_states(input_ids, position_ids, mask_columns, mask_numbers)
        of_tokens_BTH, of_masks_BMH = hidden_BNH.split(
            (input_ids.shape[1], mask_columns.shape[1]), 1
        )
        rows_RH = torch.cat((before(of_tokens_BTH, loss_positions, 1), of_masks_BMH.flatten(0, 1)))
        counts_R, numbers_R, labels_R = self._predicted(
            position_ids, loss_positions, mask_columns, mask_numbers
        )
        weights_R = counts_R.float()
        total, metrics_MR = self.losses(
            rows_RH, weights_R, input_ids.flatten()[labels_R], soft_targets, measure
        )
        # Each chain is that of the token that its masks follow.
        index_R = numbers_R * input_ids.numel() + (labels_R - 1 - numbers_R).clamp_min(0)
        empty = weights_R.new_zeros(self.num_positions * input_ids.numel())
        by_chain = (
            empty.scatter_add(0, index_R, values_R).view(self.num_positions, -1)
            for values_R in (weights_R, *metrics_MR)
        )
        return total, StepSums.of(*by_chain)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, columns_BM: Tensor, numbers_BM: Tensor
    ) -> Tensor:
        """What the head reads, [B, N, H]."""
        config, backbone = self.draft.config, self.anatomy.backbone
        column_BN = torch.cat(
            (
                torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids),
                columns_BM,
            ),
            1,
        )
        number_BN = torch.cat((torch.zeros_like(input_ids), numbers_BM), 1)
        last_BN = torch.cat(
            (position_ids, position_ids.gather(1, columns_BM)), 1
        )  # positions of the last token that slots see
        position_BN = last_BN + number_BN

        def visible(window: int | None) -> Tensor:
            slots = column_BN, number_BN, position_BN
            column, number, position = (x_BN[:, None, None, :] for x_BN in slots)  # of what is seen
            last, own, place = (x_BN[:, None, :, None] for x_BN in slots)  # of what sees
            first = (column_BN - last_BN)[:, None, :, None]
            seen = torch.where(
                number == 0,
                (column >= first) & (column <= last),
                (column == last) & (number <= own),
            )
            return seen if window is None else seen & (position > place - window)

        output = backbone(
            input_ids=torch.cat((input_ids, torch.full_like(columns_BM, config.pard_token)), 1),
            position_ids=position_BN,
            attention_mask=masks(config.get_text_config(decoder=True), backbone.dtype, visible),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _predicted(
        self,
        position_ids: Tensor,
        loss_positions: Tensor,
        mask_columns: Tensor,
        mask_numbers: Tensor,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of all that is predicted, by tokens and then by masks: whether it counts [R], by which mask it is, 0 for none, and its flattened
        position.
        """
        num_rows, length = position_ids.shape
        numbers_R = mask_numbers.flatten()
        starts_B1 = length * torch.arange(num_rows, device=mask_columns.device).unsqueeze(1)
        labels_R = ((starts_B1 + mask_columns).flatten() + 1 + numbers_R).clamp_max(
            num_rows * length - 1
        )
        counts_R = loss_rows(position_ids, loss_positions, ahead=1), numbers_R < self.num_positions
        numbers_R = torch.cat(
            (torch.zeros_like(loss_positions), numbers_R.clamp_max(self.num_positions - 1))
        )
        return torch.cat(counts_R), numbers_R, torch.cat((loss_positions, labels_R))


def objective(draft: Any, recipe: PardRecipe, target: FrozenTarget) -> ParallelDistillation:
    """The objective that a recipe describes."""
    settings = recipe.draft
    return ParallelDistillation(
        draft,
        build_divergence(recipe.loss.divergence),
        num_positions=settings.parallel_tokens,
        retention=settings.retention,
        min_retention=settings.min_retention,
        seed=recipe.seed,
        **recipe.loss.model_dump(exclude={"divergence"}),
    )
