"""What decoding and training ask of a draft head: a small module that reads the target's features and feeds back its own.

Shapes: B batch, T positions, H draft hidden size, V target vocabulary, W draft vocabulary.

At position t a head pairs the embedding of the next token x_{t+1} with a hidden state and predicts x_{t+2}. Where the target has been, that
state comes from its features; at drafted positions it is what the head itself gave back one step before.
"""

from typing import Any, Protocol

from torch import Tensor, nn

from specdistill.methods.layers import KVCache
from specdistill.targets.frozen import Features


class Head(Protocol):
    """An nn.Module with these.

    config: `vocab_size` V, `num_layers` and `sliding_window` (positions; None for all of them) are read.
    aux_layers: the target's layers it reads beside the last.
    shared: names of tensors that are the target's own: neither trained nor saved.
    lm_head: [..., H] -> [..., W]. target_ids_W: the target's id of each draft token, ascending.
    """

    config: Any
    lm_head: nn.Module

    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def shared(self) -> frozenset[str]: ...
    @property
    def target_ids_W(self) -> Tensor: ...

    def fuse(self, features: Features) -> Tensor:
        """The target's features -> the hidden state [B, T, H] of the first step."""
        ...

    def rotary(self, like: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of positions, in the dtype of `like`."""
        ...

    def __call__(
        self, next_ids_BT: Tensor, hidden_BTH: Tensor, rotary: tuple[Tensor, Tensor], kv_cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """One step over T positions: `normed` [B, T, H], which `lm_head` turns into logits, and `next_hidden` [B, T, H], the hidden
        state of the next step.
        """
        ...
