"""Create the KV cache of a target for decoding, and drop rejected tokens from it.

Attention layers drop their last positions (`crop`). The state of a recurrent layer cannot forget
what it has read, so it is copied before the pass and restored afterwards. Only such states are
copied, never keys and values. Their size does not depend on the length of the sequence.

Shapes: B sequences, G key/value heads, T new positions, S positions held, d head size.
"""

import copy

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

# The fewest positions by which a full buffer grows. It grows by a quarter of its length where that
# is more. Larger steps copy less often, but leave more memory unused.
MIN_SPARE_POSITIONS = 256


class BufferedLayer(DynamicLayer):
    """The cache of a full attention layer, with room for more positions.

    Keys and values [B, G, S, d] are views of the beginnings of longer buffers. A pass writes its T
    new positions behind them and copies nothing. transformers' own layer concatenates in every
    pass, which copies all positions.
    """

    _buffers: tuple[Tensor | None, Tensor | None] = (None, None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device from the first pass, and begin with empty keys and values.

        This replaces transformers' own method. That method copies empty tensors to the device, and
        the host waits for the copy.
        """
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True
        self.keys = key_states[..., :0, :]
        self.values = value_states[..., :0, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_options: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of T new positions, and return those of all positions.

        Args:
            key_states: keys [B, G, T, d] of B sequences and G key/value heads of size d.
            value_states: values [B, G, T, d].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)

        # Write the new positions into the buffers, and show the part that is filled.
        num_held = self.get_seq_length()
        keys = _append_positions(self._buffers[0], self.keys, num_held, key_states)
        values = _append_positions(self._buffers[1], self.values, num_held, value_states)
        self._buffers = (keys, values)
        end = num_held + key_states.shape[-2]
        self.keys = keys.narrow(-2, 0, end)
        self.values = values.narrow(-2, 0, end)
        return self.keys, self.values


def _append_positions(
    buffer: Tensor | None, shown: Tensor | None, num_held: int, new: Tensor
) -> Tensor:
    """Write new positions into a buffer of keys or values, and return the buffer.

    If the new positions do not fit, they are written into a longer copy of the buffer. B is the
    number of sequences, G the number of key/value heads, and d the size of a head.

    Args:
        buffer: [B, G, room, d], with room for S positions or more; None before the first pass.
        shown: the keys or values [B, G, S, d] of the S positions that the layer holds. Usually it
            is a view of the beginning of the buffer.
        num_held: S.
        new: keys or values [B, G, T, d] of the T new positions.

    Returns:
        The buffer, or its longer copy.
    """
    # transformers sets keys and values to None until a layer is initialized, which it is by now.
    assert shown is not None
    end = num_held + new.shape[-2]
    # Allocate a new buffer if there is none, if the new positions do not fit, or if `shown` is no
    # view of the buffer (their addresses differ). The last case comes after rows of the batch were
    # dropped: transformers then copies the remaining rows into tensors of their own.
    if buffer is None or buffer.data_ptr() != shown.data_ptr() or buffer.shape[-2] < end:
        buffer = new.new_empty(
            *new.shape[:-2], end + max(MIN_SPARE_POSITIONS, end // 4), new.shape[-1]
        )
        if num_held:
            buffer.narrow(-2, 0, num_held).copy_(shown)

    # Write the new positions behind the S positions that are held.
    buffer.narrow(-2, num_held, end - num_held).copy_(new)
    return buffer


# Layers that can drop their last tokens.
CROPPABLE_LAYERS = (DynamicLayer, BufferedLayer, DynamicIndexedLayer, DummyLayer)


def create_empty_cache(text_config: PreTrainedConfig) -> DynamicCache:
    """Return an empty KV cache from which tokens can be dropped.

    Layers with a sliding window are cached in full, and the mask applies the window. A layer that
    keeps only its window could not restore older tokens when newer ones are rejected.
    """
    cache = DynamicCache(config=text_config)
    attention_layers = (DynamicLayer, DynamicSlidingWindowLayer)
    cache.layers = [
        BufferedLayer() if type(layer) in attention_layers else layer  # type: ignore[no-untyped-call]
        for layer in cache.layers
    ]
    return cache


def is_recurrent(text_config: PreTrainedConfig) -> bool:
    """Return whether some layers of a model keep a recurrent state, and not keys and values.

    Such layers are those of linear attention and of state space models. Tokens cannot be dropped
    from their state.
    """
    return any(
        type(layer) not in CROPPABLE_LAYERS for layer in create_empty_cache(text_config).layers
    )


# For each layer, the attributes that `crop` does not restore.
Snapshot = list[dict[str, object]]


def copy_state(cache: Cache) -> Snapshot:
    """Copy the recurrent states of a cache before a pass, so that `roll_back` can restore them.

    Returns:
        One entry for each layer; empty for a layer that can drop its last tokens.
    """
    # A layer with both linear and full attention can drop tokens from its keys and values, so only
    # its other attributes, the state, are copied.
    states: Snapshot = []
    for layer in cache.layers:
        cropped = (
            {"keys", "values"} if type(layer) is LinearAttentionAndFullAttentionLayer else set()
        )
        state = {} if type(layer) in CROPPABLE_LAYERS else vars(layer)
        states.append(
            copy.deepcopy({name: value for name, value in state.items() if name not in cropped})
        )
    return states


def roll_back(cache: Cache, count: int, before: Snapshot) -> None:
    """Drop the last `count` tokens from a cache, and restore the saved recurrent states.

    Args:
        cache: the cache.
        count: the number of all tokens that were read since `before` was copied.
        before: the states that `copy_state` returned. They become part of the cache, so they cannot
            be used again.
    """
    for layer, state in zip(cache.layers, before, strict=True):
        if type(layer) in CROPPABLE_LAYERS:
            assert isinstance(layer, CROPPABLE_LAYERS)
            layer.crop(-count)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            # Crop only keys and values. The state is restored below.
            DynamicLayer.crop(layer, -count)
        # The saved state of a layer that was cropped as a whole is empty, and changes nothing.
        vars(layer).update(state)
