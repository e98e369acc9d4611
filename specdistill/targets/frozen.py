"""The frozen target: any Hugging Face causal language model, and the features a draft reads from it.

Shapes: B batch, T positions, D target hidden size, V vocabulary, A auxiliary layers.

Auxiliary layers are numbered "after L layers" everywhere inside specdistill: layer L is the residual stream after L decoder layers,
that is Hugging Face's `hidden_states[L]`, the input of decoder layer L, and for L = n the last layer's output before the final norm.
vLLM and speculators count the same way; SGLang and SpecForge count L - 1, which `specdistill.methods.eagle3.checkpoint` translates.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from specdistill.hub import resolve
from specdistill.targets.loading import read_causal_lm, with_adapter


@dataclass(frozen=True)
class Features:
    """Hidden states of one pass of the target.

    aux: A tensors [B, T, D], in the order the layers were asked for.
    last_hidden: [B, T, D], after the final norm: the input of the target's head.
    """

    aux: tuple[Tensor, ...]
    last_hidden: Tensor

    def first(self, count: int) -> "Features":
        """Of the first `count` positions."""
        return Features(tuple(feature[:, :count] for feature in self.aux), self.last_hidden[:, :count])

    def at(self, positions: list[int]) -> "Features":
        """Of some positions, in the order given."""
        return Features(tuple(feature[:, positions] for feature in self.aux), self.last_hidden[:, positions])

    def rows(self, index: Sequence[int]) -> "Features":
        """Of some rows of the batch."""
        return Features(tuple(feature[index] for feature in self.aux), self.last_hidden[index])


class FrozenTarget:
    """A target in evaluation mode whose parameters take no gradient."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, name: str, revision: str | None = None) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.backbone: Any = model.get_decoder()
        self.lm_head: Any = model.get_output_embeddings()
        self.config: Any = model.config.get_text_config()

    @classmethod
    def load(
        cls,
        model: str,
        *,
        revision: str | None = None,
        adapter: str | None = None,
        dtype: str = "float32",
        attn: str = "sdpa",
        trust_remote_code: bool = False,
        device: str | torch.device | None = None,
    ) -> "FrozenTarget":
        """Load `pico`, a folder or a Hub id, and merge a LoRA adapter into it if one is named.

        Raises UserError if it is no target or no adapter of it, ResourceError when the Hub fails.
        """
        loaded, tokenizer = read_causal_lm(
            resolve(model), revision=revision, dtype=dtype, attn=attn, trust_remote_code=trust_remote_code
        )
        if adapter is not None:
            loaded = with_adapter(loaded, adapter, base=model)
        name = model if adapter is None else f"{model} + {adapter}"
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(loaded.to(device), tokenizer, name=name, revision=revision or getattr(loaded.config, "_commit_hash", None))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_layers(self) -> int:
        return len(self.backbone.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state that every token changes, in place of keys and values (linear attention, state spaces)."""
        return is_recurrent(self.config)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and generation together, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation, from the generation config or else the model's."""
        ids = self.model.generation_config.eos_token_id
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    def fingerprint(self) -> str:
        """A hash of the weights: generations are kept for one target and never taken for another's."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]

    def features(
        self,
        input_ids_BT: Tensor,
        aux_layers: Sequence[int],
        *,
        position_ids_BT: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        past_key_values: Cache | None = None,
    ) -> Features:
        """One pass of the decoder layers, without the head.

        Packed rows: position ids that start again at 0 separate the documents, from which transformers derives the mask of each kind of
        layer. With `past_key_values` the tokens continue the cached ones, and the cache grows. An `attention_mask` replaces the causal
        mask: [B, 1, T, S] over cached and new positions, added to the scores; or a dictionary with one for each kind of layer.
        """
        with _capture(self.backbone, aux_layers) as captured:
            output = self.backbone(
                input_ids=input_ids_BT,
                position_ids=position_ids_BT,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
            )
        return Features(tuple(captured[layer] for layer in aux_layers), output.last_hidden_state)

    def logits(self, last_hidden_BTD: Tensor) -> Tensor:
        """The target's head: [B, T, V]."""
        logits: Tensor = self.lm_head(last_hidden_BTD)
        return logits


RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # transformers' names of layers with a recurrent state


def is_recurrent(text_config: Any) -> bool:
    """Whether a text config names a layer with a recurrent state."""
    return bool(RECURRENT & set(getattr(text_config, "layer_types", None) or ()))


@contextmanager
def _capture(backbone: Any, aux_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Capture the inputs of the layers asked for; that of the final norm is "after all layers"."""
    captured: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    modules = [*backbone.layers, backbone.norm]
    handles = [modules[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in aux_layers]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
