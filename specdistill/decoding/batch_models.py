"""The layers of a model over several sequences at once, with different numbers of new tokens; and which models allow it.

Shapes: B rows, T positions of one step, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.batch_kv_cache import MaskedKVCache
from specdistill.decoding.tree_attention import MASKED
from specdistill.errors import UserError
from specdistill.targets.frozen import is_recurrent


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, T] token ids, shorter rows padded on the right by any token."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


def last_of(x_BTH: Tensor, counts: Sequence[int]) -> Tensor:
    """[B, H]: row b at its last position, counts[b] - 1; at its first where counts[b] is 0."""
    last_B = (torch.tensor(counts, device=x_BTH.device) - 1).clamp_min(0)
    return x_BTH[torch.arange(len(counts), device=x_BTH.device), last_B]


class TransformersBatch:
    """Any causal language model's layers for B sequences: new ids [B, T], counts[b] of them valid -> hidden states [B, T, H]."""

    def __init__(self, draft: Any, num_rows: int) -> None:
        self.backbone = draft.get_decoder()
        self.cache = MaskedKVCache(draft.config.get_text_config(), num_rows, draft.dtype, draft.device)

    def __call__(self, ids_BT: Tensor, counts: Sequence[int]) -> Tensor:
        position_BT, mask = self.cache.extend(counts)
        output = self.backbone(
            input_ids=ids_BT, position_ids=position_BT, attention_mask=mask, past_key_values=self.cache.layers, use_cache=True
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


@torch.inference_mode()
def check_batchable(model: Any, name: str) -> None:
    """Raises UserError when a `MaskedKVCache` cannot hold several sequences of the model called `name`, or the model mixes its rows.

    The latter is tested by a forward pass: some models ignore the mask or the positions that they are given.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    if is_recurrent(config):
        reason = "recurrent layers, whose state cannot go back for one row alone"
    elif not kinds <= {"full_attention", "sliding_attention"}:
        reason = f"layers of kind {', '.join(sorted(kinds))}"
    elif config._attn_implementation not in MASKED:
        reason = f"attn {config._attn_implementation}, which takes no masks with holes"
    elif any(entry.get("rope_type") in ("dynamic", "longrope") for entry in ropes):
        reason = "rotary angles that depend on the longest sequence of a batch"
    elif not _reads_rows_apart(model):
        reason = "layers that read a row of a batch differently from the same sequence alone"
    else:
        return
    raise UserError("eval.batch_size", got=f"more than 1 for {name}, a model with {reason}", expected="1")


def _reads_rows_apart(model: Any) -> bool:
    """Two sequences of different lengths, with a rejected token and padding in between, against each of them alone."""
    layers, sequences = TransformersBatch(model, 2), [[1, 2, 3, 1], [2, 3]]
    layers(padded([[1, 2, 0], [2]], model.device), [3, 1])
    layers.cache.truncate([2, 1])
    together_BTH = layers(padded([[3, 1], [3]], model.device), [2, 1])
    for row_TH, token_ids in zip(together_BTH, sequences, strict=True):
        ids = torch.tensor([token_ids], device=model.device)
        alone_TH = model.get_decoder()(input_ids=ids).last_hidden_state[0, len(token_ids) // 2 :]
        distance = (row_TH[: len(alone_TH)] - alone_TH).norm() / alone_TH.norm()
        if not distance < torch.finfo(alone_TH.dtype).eps ** 0.5:
            return False
    return True
