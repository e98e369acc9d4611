"""One multi-token-prediction layer for a Hugging Face causal language model.

The method is DeepSeek-V3's (arXiv 2412.19437, section 2.2).

Shapes: B batch, T positions, H hidden size, N query heads, G key/value heads, d key head size, e
value head size, W = V vocabulary.

At position t the draft pairs the embedding of the *next* token x_{t+1} with the target's last
hidden state h_t and predicts x_{t+2}:

    o_t = norm(layer(fc(cat(token_norm(embed(x_{t+1})), hidden_norm(h_t)))))
    q_t = softmax(logits(o_t))

h_t is taken after the target's final norm, and in a later step o_t takes its place: vLLM and SGLang
feed both this way. Embedding and head are the target's own modules, frozen. The layer has the class
and the kind of the target's last full-attention layer.

The caller computes attention. transformers hands query, key and value to the function that the
config names, which is `attend_kv_cache`. It passes them on to the `KVCache` (see
specdistill.methods.layers) that travels through the layer's keyword arguments. The KVCache takes
care of causality and of the boundaries of documents, so no mask is made here.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specdistill.common.documents import parse_json
from specdistill.common.errors import UserError, convert_errors
from specdistill.methods.chains.head import Head
from specdistill.methods.layers import KVCache, scale_norm
from specdistill.methods.sizes import RawConfig
from specdistill.targets.anatomy import CLASS_ERRORS, LogitsHead
from specdistill.targets.frozen import Features, FrozenTarget

# What errors expect of a target whose attention cannot be taken over by a `KVCache`.
EXPECTED = (
    "a target whose attention takes plain queries, keys and values (transformers'"
    " AttentionInterface)"
)
# Arguments that layers pass to an attention function and that full causal attention does not need.
# Any other argument would change the result.
ARGUMENTS_WITHOUT_EFFECT = {"dropout", "is_causal", "output_attentions", "use_cache"}


@dataclass(frozen=True)
class MtpConfig:
    """The config of a draft: above all, the text config of its target.

    Attributes:
        vocab_size: V.
        text_config: the target's text config.
        num_layers: the draft has one layer.
        sliding_window: the draft has no window.
    """

    vocab_size: int
    text_config: RawConfig
    num_layers: int = 1
    sliding_window: None = None


class MtpDraft(Head):
    """A multi-token-prediction layer with its norms and its projection.

    Embedding, head and rotary embedding stay the target's, and are no part of its state.

    Raises:
        UserError: naming the architecture, if the target's layers do not let a `KVCache` answer
            their queries.
    """

    config: MtpConfig
    aux_layers: tuple[int, ...] = ()
    target_ids_W = None
    shared: frozenset[str] = frozenset()
    embed_tokens: nn.Module

    def __init__(self, target: FrozenTarget) -> None:
        super().__init__()

        # Copy the target's config, and name our function for attention in the copy. Layers built
        # from it call `attend_kv_cache`.
        source = copy.deepcopy(target.config)
        source._attn_implementation = "specdistill_kv_cache"

        # Configs without `layer_types` describe layers that are all of one kind.
        kinds = getattr(source, "layer_types", None) or ["full_attention"] * target.num_layers
        if "full_attention" not in kinds:
            raise UserError(
                "target.model",
                got=f"{target.name} with layers {', '.join(sorted(set(kinds)))}",
                expected="a target with a full-attention layer",
            )

        # The draft's layer has the class and the index of the target's last full-attention layer.
        index = max(index for index, kind in enumerate(kinds) if kind == "full_attention")
        layer_class = type(target.layers[index])

        # Check that the target has the parts that the draft takes over.
        rotary = getattr(target.backbone, "rotary_emb", None)
        if rotary is None or target.norm is None or getattr(source, "rms_norm_eps", None) is None:
            raise UserError(
                "target.model",
                got=layer_class.__name__,
                expected="layers with RMS norms and a rotary embedding",
            )

        # Build the draft's own modules: fc [H, 2H], three norms [H], and one decoder layer.
        size = target.hidden_size
        norm_class = type(target.norm)
        self.config = MtpConfig(
            target.vocab_size, parse_json(target.config.to_json_string(use_diff=False))
        )
        self.fc = nn.Linear(2 * size, size, bias=False)
        with convert_errors(CLASS_ERRORS, "target.model", layer_class.__name__, EXPECTED):
            self.token_norm, self.hidden_norm, self.norm = (
                norm_class(size, eps=source.rms_norm_eps) for _ in range(3)
            )
            self.layers = nn.ModuleList([layer_class(source, index)])

        # Embedding and rotary embedding must not become submodules: checkpoints then leave them
        # out, and `.to(bfloat16)` of the draft rounds neither the target's weights nor the rotary
        # frequencies. So the embedding is set without nn.Module's `__setattr__`, and only the
        # `forward` of the rotary embedding is kept. The rotary embedding is a copy, because some
        # classes remember the longest sequence in it.
        vars(self).update(embed_tokens=target.model.get_input_embeddings())
        self._logits = target.logits
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = copy.deepcopy(rotary).forward

        # Gemma 3's rotary embedding serves several kinds of layers and wants to know which.
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._rotary_options = {"layer_type": "full_attention"} if by_kind else {}

        # Names of parameters that must stay in float32 (see `_apply`).
        self._float32_parts = tuple(target.model._keep_in_fp32_modules_strict or ())
        self.to(target.device)
        self._check_route()

    @property
    def logits(self) -> LogitsHead:
        """The module that turns hidden states into logits."""
        return self._logits

    def fuse(self, features: Features) -> Tensor:
        """Return the first hidden state [B, T, H]: the target's last, after its final norm."""
        return features.last_hidden.to(self.fc.weight.dtype)

    def scale_output(self, factor: float) -> None:
        """Multiply the logits by a factor, by scaling the final norm.

        The result is not exact for large logits if the target's LM head caps its logits.
        """
        scale_norm(self.norm, factor)

    def rotary(self, like: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (cos, sin) of positions [B, T], in the dtype of `like`."""
        return self._rotary(like, positions_BT, **self._rotary_options)

    def forward(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """Run one draft step over T positions of B rows, with hidden size H.

        Args:
            next_ids_BT: [B, T], the token after each position.
            hidden_BTH: [B, T, H], the hidden state at each position: the target's in the first
                draft step, the draft's own in later steps.
            rotary: the cosines and sines of the positions.
            kv_cache: computes the attention.

        Returns:
            The normed state [B, T, H] twice: once for the LM head, and once as the hidden state of
            the next step.
        """
        # Embed the next token, norm both inputs, and project [B, T, 2H] to [B, T, H].
        embedding_BTH = self.embed_tokens(next_ids_BT).to(self.fc.weight.dtype)
        inputs_BT2H = torch.cat(
            (self.token_norm(embedding_BTH), self.hidden_norm(hidden_BTH)), dim=-1
        )
        normed_BTH: Tensor = self.norm(self._run_layer(self.fc(inputs_BT2H), rotary, kv_cache))
        return normed_BTH, normed_BTH

    def _run_layer(
        self, hidden_BTH: Tensor, rotary: tuple[Tensor, Tensor], kv_cache: KVCache
    ) -> Tensor:
        """Run the decoder layer on hidden states [B, T, H].

        The layer has no attention mask, because its attention is replaced by that of `kv_cache`,
        which knows what each position sees.
        """
        # Depending on the class, a layer returns the hidden state, or a tuple that begins with it.
        output = self.layers[0](
            hidden_BTH, attention_mask=None, position_embeddings=rotary, kv_cache=kv_cache
        )
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    @torch.no_grad()
    def _check_route(self) -> None:
        """Check that the layer's class computes its attention through the KVCache.

        Raises:
            UserError: if it computes the attention in another way.
        """
        calling_layers: list[int] = []

        def attend(layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
            """Record that a layer called this function, and return a tensor of the right shape.

            The check only needs the call, so no attention is computed. The layer expects an output
            [B, N, T, d]. The values have this shape once each of the G value heads is repeated for
            the N / G query heads that share it.
            """
            calling_layers.append(layer)
            return value_BGTd.repeat_interleave(query_BNTd.shape[1] // value_BGTd.shape[1], dim=1)

        # Run the layer over one position of zeros, with a stand-in for the KVCache.
        layer_class = type(self.layers[0])
        hidden = self.fc.weight.new_zeros(1, 1, self.fc.out_features)
        with convert_errors(CLASS_ERRORS, "target.model", layer_class.__name__, EXPECTED):
            rotary = self.rotary(hidden, torch.zeros(1, 1, dtype=torch.long, device=hidden.device))
            self._run_layer(hidden, rotary, SimpleNamespace(attend=attend))
        if not calling_layers:
            raise UserError(
                "target.model",
                got=f"{layer_class.__name__}, whose attention does not use AttentionInterface",
                expected=EXPECTED,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MtpDraft":
        """Apply `fn` to all tensors, but keep float32 where transformers keeps it.

        PyTorch calls this function for `.to(…)` and similar. DeepSeek's routing bias, for example,
        stays in float32 when the draft changes to bfloat16.
        """
        # Save the tensors that must not be rounded, apply the function to everything, and put the
        # saved data back on the new device. With `keep_vars` a state dict holds the parameters
        # themselves, so that their data can be replaced.
        old_state = self.state_dict(keep_vars=True)
        float32_tensors = {}
        for name in old_state:
            if any(part in name for part in self._float32_parts):
                float32_tensors[name] = old_state[name].data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        new_state = self.state_dict(keep_vars=True)
        for name, tensor in float32_tensors.items():
            new_state[name].data = tensor.to(new_state[name].device)
        return self


def attend_kv_cache(
    module: nn.Module,
    query_BNTd: Tensor,
    key_BGTd: Tensor,
    value_BGTe: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kv_cache: KVCache | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute the attention of the draft's decoder layer in a `KVCache`.

    transformers calls this function in place of its own attention functions, because the layer's
    config names it. Shapes: B rows, T positions, N query heads, G key/value heads, d size of a
    query or key, e size of a value.

    Returns:
        The output [B, T, N, e], as transformers wants it, and None for the attention weights.

    Raises:
        UserError: if the layer asks for more than plain attention softmax(scaling q k) v, for
            example for a window, sinks, a cap or biases.
    """
    # List everything that asks for more than plain causal attention. `MtpDraft` passes no
    # attention mask, so a mask would be the layer's own. A missing KVCache means that the layer
    # did not pass its keyword arguments on.
    unsupported = [
        name
        for name, value in options.items()
        if value is not None and name not in ARGUMENTS_WITHOUT_EFFECT
    ]
    if attention_mask is not None:
        unsupported.append("a mask of its own")
    if kv_cache is None:
        unsupported.append("keyword arguments that do not reach its attention")
    if unsupported:
        raise UserError(
            "target.model",
            got=f"{type(module).__name__} with {', '.join(sorted(unsupported))}",
            expected=EXPECTED,
        )

    # Compute the attention in the KVCache. Index 0: the draft has one layer.
    assert kv_cache is not None
    size = query_BNTd.shape[-1]
    if scaling is not None and scaling != size**-0.5:
        query_BNTd = query_BNTd * (scaling * size**0.5)  # the KVCache scales by d^-1/2
    return kv_cache.attend(0, query_BNTd, key_BGTd, value_BGTe).transpose(1, 2), None


AttentionInterface.register("specdistill_kv_cache", attend_kv_cache)
