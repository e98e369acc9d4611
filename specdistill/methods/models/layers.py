"""A plain Llama's layers as a draft's, with the KV cache of one sequence or of several: faster than transformers' own.

A draft model's step is launches more than arithmetic: on two CPU cores two layers of 128 take 0.70 ms in transformers and 0.39 ms in
`LlamaLayers`, which is built of the parts of draft heads. transformers' own model stays the oracle, and serves all other architectures.

Shapes: B rows, T positions of one step, H hidden size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.tree import Step
from specdistill.methods.layers import PlainLayer


class LlamaLayers(nn.Module):
    """`TransformersLayers` of a plain Llama, faster. It shares the model's weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        assert is_plain_llama(model), model.config
        config: Any = model.config
        decoder: Any = model.get_decoder()
        self.rotary = decoder.rotary_emb
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(
                PlainLayer(config, index) for index in range(config.num_hidden_layers)
            )
            self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.load_state_dict(decoder.state_dict(), assign=True)

    def begin(self, num_rows: int) -> None:
        like = self.norm.weight
        self.cache = DraftKVCache(num_rows, partial(self.rotary, like), like.device)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.cache.truncate(lengths)

    def forward(self, ids_BT: Tensor, counts: Sequence[int], level: Step | None = None) -> Tensor:
        """Hidden states [B, T, H] after the final norm."""
        rotary = self.cache.level(level) if level else self.cache.extend(counts)
        hidden = self.embed_tokens(ids_BT)
        for layer in self.layers:
            hidden = layer(hidden, rotary, self.cache)
        return self.norm(hidden)


def is_plain_llama(model: PreTrainedModel) -> bool:
    """Whether `LlamaLayers` computes what the model does: no biases, SiLU, and rotary angles that do not depend on a sequence's length."""
    config: Any = model.config
    return (
        config.model_type == "llama"
        and getattr(config, "quantization_config", None) is None
        and not config.attention_bias
        and not config.mlp_bias
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope")
    )
