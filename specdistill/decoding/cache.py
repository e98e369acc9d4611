"""Keys and values of a draft's committed positions, in buffers allocated once: trimming is setting a number.

Shapes: G key/value heads, S allocated positions, d head size, T positions of one step.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.drafts.eagle3 import Eagle3Config


@dataclass
class DraftCache:
    """A `Memory` (see specdistill.drafts.eagle3) for one text: causal attention over everything cached.

    `length` counts the positions held. The first layer of a step advances it, so that all layers of the step see one position.
    """

    keys: Tensor  # [layers, 1, G, S, d]
    values: Tensor
    length: int = 0

    @classmethod
    def allocate(cls, config: Eagle3Config, max_length: int, dtype: torch.dtype, device: torch.device) -> "DraftCache":
        shape = (config.num_layers, 1, config.num_key_value_heads, max_length, config.head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))

    def next_positions(self, count: int) -> Tensor:
        """Position ids [1, count] of the next step."""
        return torch.arange(self.length, self.length + count, device=self.keys.device).unsqueeze(0)

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        steps = query_BNTd.shape[2]
        if layer == 0:
            self.length += steps
        start, end = self.length - steps, self.length
        self.keys[layer, :, :, start:end] = key_BGTd
        self.values[layer, :, :, start:end] = value_BGTd
        keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        mask = None
        if steps > 1:  # query i stands at position start + i and sees itself and what came before
            mask = torch.ones(steps, end, dtype=torch.bool, device=keys.device).tril(start)
        return F.scaled_dot_product_attention(query_BNTd, keys, values, attn_mask=mask, enable_gqa=True)
