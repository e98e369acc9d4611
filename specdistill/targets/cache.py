"""The KV cache that decoding reads a target over: what a pass appends to it, and how rejected tokens leave it again.

Attention forgets its last positions (`crop`). A recurrent layer's state has read them for good: a copy of it from before has to stand in,
of a state, whose size does not depend on the sequence, never of keys and values.

Shapes: B sequences, G key/value heads, T new positions, S positions held, d head size.
"""

import copy
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

LEAST_SPARE = 256  # positions that a full buffer grows by at least; a quarter where that is more


class BufferedLayer(DynamicLayer):
    """A layer of full attention whose keys and values [B, G, S, d] are the beginnings of longer buffers.

    A pass writes its T positions and copies none of those held, which transformers' own layer does in every pass.
    """

    _buffers: tuple[Tensor | None, Tensor | None] = (None, None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """transformers' own copies empty tensors to the device, for which the host waits."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        keys = _appended(self._buffers[0], self.keys, held, key_states)
        values = _appended(self._buffers[1], self.values, held, value_states)
        self._buffers, end = (keys, values), held + key_states.shape[-2]
        self.keys, self.values = keys.narrow(-2, 0, end), values.narrow(-2, 0, end)
        return self.keys, self.values


def _appended(buffer: Tensor | None, shown: Tensor | None, held: int, new: Tensor) -> Tensor:
    """The buffer, or a longer one, with new positions behind those held, which are shown."""
    assert shown is not None
    end = held + new.shape[-2]
    # What is shown is not the buffer's beginning once someone has put other tensors there, as a batch that drops rows.
    if buffer is None or buffer.data_ptr() != shown.data_ptr() or buffer.shape[-2] < end:
        buffer = new.new_empty(*new.shape[:-2], end + max(LEAST_SPARE, end // 4), new.shape[-1])
        if held:
            buffer.narrow(-2, 0, held).copy_(shown)
    buffer.narrow(-2, held, end - held).copy_(new)
    return buffer


CROPPED = (
    DynamicLayer,
    BufferedLayer,
    DynamicIndexedLayer,
    DummyLayer,
)  # layers that can forget their last tokens


def new_cache(text_config: Any) -> DynamicCache:
    """An empty KV cache. Full layers even for sliding windows: a windowed layer could not restore what it dropped. The mask applies it."""
    cache = DynamicCache(config=text_config)
    full = (DynamicLayer, DynamicSlidingWindowLayer)
    cache.layers = [BufferedLayer() if type(layer) in full else layer for layer in cache.layers]  # type: ignore[no-untyped-call]
    return cache


def is_recurrent(text_config: Any) -> bool:
    """Whether some layers keep a state that every token changes, in place of keys and values (linear attention, state spaces)."""
    return any(type(layer) not in CROPPED for layer in new_cache(text_config).layers)


Snapshot = list[dict[str, Any]]  # of each layer the attributes that `crop` does not bring back


def snapshot(cache: Cache) -> Snapshot:
    """What `roll_back` needs: copies of the recurrent layers, but for keys and values that can be cropped."""
    states: Snapshot = []
    for layer in cache.layers:
        cropped = (
            {"keys", "values"} if type(layer) is LinearAttentionAndFullAttentionLayer else set()
        )
        held = {} if type(layer) in CROPPED else vars(layer)
        states.append(
            copy.deepcopy({name: value for name, value in held.items() if name not in cropped})
        )
    return states


def roll_back(cache: Cache, count: int, before: Snapshot) -> None:
    """Forget the last `count` tokens, all that was read since the snapshot; it is used up."""
    layer: Any
    for layer, state in zip(cache.layers, before, strict=True):
        if type(layer) in CROPPED:
            layer.crop(-count)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            DynamicLayer.crop(layer, -count)
        vars(layer).update(state)
