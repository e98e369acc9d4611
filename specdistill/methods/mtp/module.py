"""One multi-token-prediction layer for a Hugging Face causal language model (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Shapes: B batch, T positions, H hidden size, N query heads, G key/value heads, d key head size, e value head size, W = V vocabulary.

At position t the draft pairs the embedding of the *next* token x_{t+1} with the target's last hidden state h_t and predicts x_{t+2}:

    o_t = norm(layer(fc(cat(token_norm(embed(x_{t+1})), hidden_norm(h_t)))))
    q_t = softmax(logits(o_t))

h_t is taken after the target's final norm, and a later step takes o_t for it: vLLM and SGLang feed both that way. Embedding and head
are the target's own modules, frozen. The layer is of the target's own class, of the kind of its last full-attention layer.

Attention is the caller's: transformers hands query, key and value to the function that the config names, and `kv_cache_attention` passes
them on to the `KVCache` (see specdistill.methods.layers) that travels through the layer's keyword arguments. Causality and the
boundaries of documents are the kv_cache's, so no mask is made here.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specdistill.errors import UserError, refusing
from specdistill.files.documents import parse_json
from specdistill.methods.layers import KVCache
from specdistill.targets.anatomy import CLASS_ERRORS
from specdistill.targets.frozen import Features, FrozenTarget

EXPECTED = "a target whose attention takes plain queries, keys and values (transformers' AttentionInterface)"
# What layers pass to an attention function and full causal attention need not know; any other argument would change its result.
WITHOUT_EFFECT = {"dropout", "is_causal", "output_attentions", "use_cache"}


@dataclass(frozen=True)
class MtpConfig:
    """What a draft is for: the target's text config."""

    vocab_size: int
    text_config: dict[str, Any]
    num_layers: int = 1
    sliding_window: None = None


class MtpDraft(nn.Module):
    """The layer with its norms and projection; embedding, head and rotary embedding stay the target's and are no part of its state.

    Raises UserError, naming the architecture, when the target's layers do not let a `KVCache` answer their queries.
    """

    aux_layers = ()
    target_ids_W = None
    shared: frozenset[str] = frozenset()
    embed_tokens: nn.Module
    logits: Any

    def __init__(self, target: FrozenTarget) -> None:
        super().__init__()
        source = copy.deepcopy(target.config)
        source._attn_implementation = "specdistill_kv_cache"
        kinds = getattr(source, "layer_types", None) or ["full_attention"] * target.num_layers
        if "full_attention" not in kinds:
            got = f"{target.name} with layers {', '.join(sorted(set(kinds)))}"
            raise UserError(
                "target.model", got=got, expected="a target with a full-attention layer"
            )
        index = max(index for index, kind in enumerate(kinds) if kind == "full_attention")
        layer_class, rotary = (
            type(target.layers[index]),
            getattr(target.backbone, "rotary_emb", None),
        )
        if rotary is None or target.norm is None or getattr(source, "rms_norm_eps", None) is None:
            expected = "layers with RMS norms and a rotary embedding"
            raise UserError("target.model", got=layer_class.__name__, expected=expected)
        size, norm_class = target.hidden_size, type(target.norm)
        self.config = MtpConfig(
            target.vocab_size, parse_json(target.config.to_json_string(use_diff=False))
        )
        self.fc = nn.Linear(2 * size, size, bias=False)
        with refusing(CLASS_ERRORS, "target.model", layer_class.__name__, EXPECTED):
            self.token_norm, self.hidden_norm, self.norm = (
                norm_class(size, eps=source.rms_norm_eps) for _ in range(3)
            )
            self.layers = nn.ModuleList([layer_class(source, index)])
        # No submodules, hence past nn.Module's own and as a method: checkpoints leave them out, and `.to(bfloat16)` of the draft rounds
        # neither the target's weights nor rotary frequencies. The rotary embedding is a copy, for some remember the longest sequence.
        vars(self).update(embed_tokens=target.model.get_input_embeddings(), logits=target.logits)
        self._rotary: Callable[..., Any] = copy.deepcopy(rotary).forward
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._rotary_options = {"layer_type": "full_attention"} if by_kind else {}
        self._float32 = tuple(target.model._keep_in_fp32_modules_strict or ())
        self.to(target.device)
        self._check_route()

    def fuse(self, features: Features) -> Tensor:
        """The first hidden state [B, T, H]: the target's last one, after its final norm."""
        return features.last_hidden.to(self.fc.weight.dtype)

    def rotary(self, like: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotary(like, positions_BT, **self._rotary_options)

    def forward(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """One draft step over T positions: what `logits` reads [B, T, H], and the next step's hidden state, the same."""
        embedding = self.embed_tokens(next_ids_BT).to(self.fc.weight.dtype)
        both = torch.cat((self.token_norm(embedding), self.hidden_norm(hidden_BTH)), dim=-1)
        normed: Tensor = self.norm(self._layer(self.fc(both), rotary, kv_cache))
        return normed, normed

    def _layer(
        self, hidden_BTH: Tensor, rotary: tuple[Tensor, Tensor], kv_cache: KVCache
    ) -> Tensor:
        output = self.layers[0](
            hidden_BTH, attention_mask=None, position_embeddings=rotary, kv_cache=kv_cache
        )
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def _check_route(self) -> None:
        """One position through the layer: its query must reach the kv_cache."""
        asked: list[int] = []

        def attend(layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
            asked.append(layer)
            return value_BGTd.repeat_interleave(query_BNTd.shape[1] // value_BGTd.shape[1], dim=1)

        layer_class, hidden = (
            type(self.layers[0]),
            self.fc.weight.new_zeros(1, 1, self.fc.out_features),
        )
        with refusing(CLASS_ERRORS, "target.model", layer_class.__name__, EXPECTED):
            rotary = self.rotary(hidden, torch.zeros(1, 1, dtype=torch.long, device=hidden.device))
            self._layer(hidden, rotary, SimpleNamespace(attend=attend))
        if not asked:
            raise UserError(
                "target.model",
                got=f"{layer_class.__name__}, whose attention is its own",
                expected=EXPECTED,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MtpDraft":
        """What transformers keeps in float32, such as DeepSeek's routing bias, stays so when the draft changes dtype."""
        state = self.state_dict(keep_vars=True)
        exact = {
            name: state[name].data for name in state if any(part in name for part in self._float32)
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.state_dict(keep_vars=True)
        for name, tensor in exact.items():
            moved[name].data = tensor.to(moved[name].device)
        return self


def kv_cache_attention(
    module: nn.Module,
    query_BNTd: Tensor,
    key_BGTd: Tensor,
    value_BGTe: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kv_cache: KVCache | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers that asks a `KVCache`; returns [B, T, N, e], as transformers wants it.

    Raises UserError for attention that is more than softmax(scaling q k) v over what the kv_cache shows: windows, sinks, caps, biases.
    """
    more = [
        name for name, value in options.items() if value is not None and name not in WITHOUT_EFFECT
    ]
    more += ["a mask of its own"] * (attention_mask is not None) + [
        "keyword arguments that get lost"
    ] * (kv_cache is None)
    if more:
        raise UserError(
            "target.model",
            got=f"{type(module).__name__} with {', '.join(sorted(more))}",
            expected=EXPECTED,
        )
    assert kv_cache is not None
    size = query_BNTd.shape[-1]
    if scaling is not None and scaling != size**-0.5:
        query_BNTd = query_BNTd * (scaling * size**0.5)  # a kv_cache scales by d^-1/2
    return kv_cache.attend(0, query_BNTd, key_BGTd, value_BGTe).transpose(1, 2), None


AttentionInterface.register("specdistill_kv_cache", kv_cache_attention)
