"""The EAGLE-3 draft head (arXiv 2503.01840), with the norms of EAGLE-3.1.

Its tensors have the names and shapes that SGLang, vLLM and SpecForge load.

Shapes: B batch, T positions, H draft hidden size, D target hidden size, A auxiliary layers, N query
heads, G key/value heads, d head size, V target vocabulary, W draft vocabulary.

At position t the draft pairs the embedding of the *next* token x_{t+1} with the fused target
features g_t and predicts x_{t+2}:

    h_t = fc(cat(aux_t))
    a_t = cat(input_layernorm(embed(x_{t+1})), hidden_norm(h_t))
    o_t = h_t + attention(a_t)
    o_t += mlp(post_attention_layernorm(o_t))
    q_t = softmax(lm_head(norm(o_t)))

h_t is fused from features only where the target has been. At later positions it is the draft's own
output of the step before. The first layer reads a_t, which is 2H wide. q_t is over the draft
vocabulary, and target id = draft id + d2t.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from specdistill.common.errors import UserError
from specdistill.methods.chains.head import Head, build_initialized, plan_head_shape
from specdistill.methods.layers import (
    Attention,
    FeatureDraft,
    FeatureShape,
    KVCache,
    PlainLayer,
    RMSNorm,
)
from specdistill.serving.engines.loader import choose_aux_layers
from specdistill.targets.frozen import Features, FrozenTarget


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureShape):
    """The shape and the switches of an EAGLE-3 head.

    Attributes:
        target_hidden_size: D.
        fc_norm: each auxiliary state has a norm of its own before fc (EAGLE-3.1).
        norm_output: the hidden state that is fed back is taken after the final norm (EAGLE-3.1).
        norm_before_residual: the first layer's residual is taken after the hidden norm.
        norm_before_fc: one norm for all auxiliary states side by side, as in speculators' heads.
        own_embedding: the head is as wide as its target, and its embedding is not the target's.
    """

    target_hidden_size: int
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    own_embedding: bool = False

    @property
    def owns_embedding(self) -> bool:
        """Whether the head trains and ships an embedding of its own.

        Otherwise it shares the target's, which must be as wide as the draft.
        """
        return self.own_embedding or self.hidden_size != self.target_hidden_size


class FirstLayer(nn.Module):
    """The layer that reads embedding and hidden state side by side; its q, k and v are 2H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        """Create the layer: Llama's modules, and a norm for each half of the input."""
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        embedding_BTH: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> Tensor:
        """Run the layer, whose attention reads embeddings and hidden states side by side.

        Args:
            embedding_BTH: embeddings of the token after each position [B, T, H].
            hidden_BTH: hidden states [B, T, H]. The outputs of attention and MLP are added to them.
            rotary: cos and sin [B, T, d] of the positions.
            kv_cache: keys and values of earlier positions and steps.
        """
        # The 0 in the call of the attention is the index of this layer in the head, under which the
        # cache stores keys and values.
        normed = self.hidden_norm(hidden_BTH)
        residual = normed if self.norm_before_residual else hidden_BTH
        concatenated = torch.cat((self.input_layernorm(embedding_BTH), normed), dim=-1)
        hidden = residual + self.self_attn(concatenated, rotary, 0, kv_cache)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Draft(FeatureDraft, Head):
    """An EAGLE-3 head (see `Head` in specdistill.methods.chains.head).

    Its embedding is a frozen copy of the target's, unless `config.owns_embedding`: it is then the
    head's own, and trains.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        """Create the modules of the head, with random weights."""
        super().__init__()
        self.config = config

        # fc fuses the auxiliary states, side by side, to one hidden state. They may have one norm
        # together, or a norm each.
        fused_size = len(config.aux_layers) * config.target_hidden_size
        self.fc = nn.Linear(fused_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layers
            )

        # The embedding, the layers, and norm, LM head and rotary embedding after them.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(config.owns_embedding)
        self.layers = nn.ModuleList(
            [
                FirstLayer(config),
                *(PlainLayer(config, index) for index in range(1, config.num_layers)),
            ]
        )
        self.create_output_modules(config)

    @property
    def shared(self) -> frozenset[str]:
        """The tensors that are the target's: the embedding, unless the head has its own."""
        return frozenset() if self.config.owns_embedding else frozenset({"embed_tokens.weight"})

    def fuse(self, features: Features) -> Tensor:
        """Fuse the target's hidden states after several layers to the head's first hidden state.

        Args:
            features: hidden states [B, T, D] of each auxiliary layer of the target.

        Returns:
            [B, T, H], the projection of all of them side by side.
        """
        # Normalize each layer's states (EAGLE-3.1), or all of them together (speculators), or
        # neither, as the config says.
        aux = features.aux
        if self.config.fc_norm:
            aux = tuple(norm(feature) for norm, feature in zip(self.fc_norm, aux, strict=True))
        fc_input = torch.cat(aux, dim=-1)
        if self.config.norm_before_fc:
            fc_input = self.input_norm(fc_input)
        output: Tensor = self.fc(fc_input)
        return output

    def forward(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """Run one draft step at T positions of B sequences.

        Args:
            next_ids_BT: the token after each position.
            hidden_BTH: hidden states [B, T, H]: fused features, or what the step before returned.
            rotary: cos and sin [B, T, d] of the positions, for head size d.
            kv_cache: keys and values of earlier positions and steps.

        Returns:
            The hidden states after the final norm [B, T, H], from which `logits` computes the
            logits, and the hidden states for the next step: before the final norm in EAGLE-3, after
            it with `norm_output`.
        """
        hidden = self.layers[0](self.embed_tokens(next_ids_BT), hidden_BTH, rotary, kv_cache)
        for layer in self.layers[1:]:
            hidden = layer(hidden, rotary, kv_cache)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden


def build_eagle3_config(
    target: FrozenTarget,
    draft_vocab_size: int,
    *,
    aux_layers: Sequence[int] | None = None,
    **options: object,
) -> Eagle3Config:
    """Return the config of a new head from the keys of a recipe's `draft:`.

    Args:
        target: the target.
        draft_vocab_size: the number of tokens that the head can propose.
        aux_layers: the layers of the target that the head reads; None for the default (see
            `check_aux_layers`).
        **options: other fields of `Eagle3Config`. Sizes that are absent are the target's.

    Raises:
        UserError: for a layer that does not exist, and for a target without RMS norms and a rotary
            embedding.
    """
    shape = plan_head_shape(target, **options)
    # The first layer normalizes the embedding, so the scale of the embedding has no effect. Engines
    # read the table unscaled.
    shape["embedding_scale"] = 1.0
    return Eagle3Config(
        **shape,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=tuple(check_aux_layers(aux_layers, target.num_layers)),
        target_num_layers=target.num_layers,
    )


def build_eagle3(
    target: FrozenTarget,
    *,
    draft_vocabulary: Tensor | None = None,
    seed: int = 0,
    aux_layers: Sequence[int] | None = None,
    **options: object,
) -> Eagle3Draft:
    """Build a fresh head, initialized from its target.

    Args:
        target: the target.
        draft_vocabulary: the target's ids of the W tokens that the head can propose, sorted; None
            for all tokens.
        seed: the seed of the initial weights.
        aux_layers: the layers of the target that the head reads; None for the default (see
            `check_aux_layers`).
        **options: other fields of `Eagle3Config`.

    Raises:
        UserError: for a layer that does not exist, for a target without RMS norms and a rotary
            embedding, and for one whose class does not give the hidden states of these layers.
    """
    config = build_eagle3_config(
        target,
        target.vocab_size if draft_vocabulary is None else len(draft_vocabulary),
        aux_layers=aux_layers,
        **options,
    )

    # Read the features of one token. This raises an error for a target whose class does not give
    # the hidden states of these layers.
    target.features(torch.zeros(1, 1, dtype=torch.long, device=target.device), config.aux_layers)

    # Build the head with random weights, and copy the target's tables. Engines do not scale the
    # logits of a head, so its LM head gets the scale of the target's logits.
    draft = build_initialized(lambda: Eagle3Draft(config), seed)
    draft.initialize_from_target(target, draft_vocabulary, scale=target.logits.scale)
    return draft.to(target.device)


def check_aux_layers(aux_layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """Return the layers of the target that a new head reads, after checking them.

    The default layers are 2, n//2 and n-3, which the engines assume, too. A target that is too
    shallow for them gets the layers 1, n//2 and n-1 instead, without duplicates.

    Args:
        aux_layers: the layers of a recipe, where L means the hidden state after L layers; None for
            the default.
        num_layers: n, the target's layers.

    Raises:
        UserError: for a repeated layer, and for one outside 0..n.
    """
    # Choose the layers. In a shallow target the default 2, n//2, n-3 does not ascend.
    layers = choose_aux_layers(num_layers) if aux_layers is None else list(aux_layers)
    if aux_layers is None and layers != sorted(set(layers)):
        layers = sorted({min(1, num_layers), num_layers // 2, max(num_layers - 1, 0)})

    # Layer 0 is the embedding, and layer n the last state before the final norm.
    if (
        not layers
        or not all(0 <= layer <= num_layers for layer in layers)
        or len(set(layers)) != len(layers)
    ):
        raise UserError(
            "draft.aux_layers",
            got=layers,
            expected=f"layers from 0 to {num_layers} (the target's depth), each only once",
        )
    return layers
