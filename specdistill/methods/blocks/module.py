"""A block drafter (DFlash, arXiv 2602.06036).

One pass over a block of masks proposes all its tokens.

Shapes: B rows, T positions, N blocks of P slots, K = P - 1 or P of which predict, A layers that are
read, D target hidden size = H draft hidden size, V target vocabulary, W draft vocabulary, G
key/value heads, d head size.

The context is what the target knows: c_j = hidden_norm(fc(cat(features_j))). Each layer makes its
own keys and values of it. The input of a block is the embeddings y of (x_a, MASK, …, MASK) at the
positions a, a + 1, …. They attend to the context before a and to one another:

    h = input_layernorm(y)
    Q = rope(q_norm(q_proj h))
    K = rope(k_norm(k_proj [c ; h]))
    V = v_proj [c ; h]
    y += o_proj(attention)
    y += mlp(post_attention_layernorm(y))
    q_k = softmax(lm_head(norm(y_k)))

Slot k predicts x_{a+k}, and the anchor's own slot predicts nothing. With `sample_from_anchor` slot
k predicts x_{a+k+1}, and all slots predict. Embedding and LM head are the target's. For a pruned
vocabulary, the LM head has only the rows of its tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.common.errors import UserError
from specdistill.methods.chains.head import build_initialized, plan_head_shape
from specdistill.methods.layers import (
    Embedding,
    FeatureDraft,
    FeatureShape,
    KVCache,
    PlainLayer,
    RMSNorm,
)
from specdistill.targets.frozen import Features, FrozenTarget

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(FeatureShape):
    """The shape and the switches of a block drafter.

    A block is a known token, its anchor, followed by masks. Its positions are called slots.

    Attributes:
        block_size: P, slots of a block.
        mask_token_id: the token in slots whose own token is not drafted yet.
        is_causal: whether a slot sees only the slots up to itself.
        sample_from_anchor: whether the anchor's slot predicts a token, too.
    """

    block_size: int
    mask_token_id: int
    is_causal: bool = False
    sample_from_anchor: bool = False

    @property
    def first_slot(self) -> int:
        """The first slot of a block that predicts a token; slot 0 is that of the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafted(self) -> int:
        """The largest K, the number of draft tokens in a round: one for each slot that predicts."""
        return self.block_size - self.first_slot


class BlockLayer(PlainLayer):
    """A Llama layer with norms of query and key heads, which reads a context and a block."""

    def __init__(self, config: BlockConfig, index: int) -> None:
        """Create layer `index` with norms of query and key heads."""
        super().__init__(config, index, head_norms=True)

    def forward(
        self,
        hidden_NPH: Tensor,
        rotary: Rotation,
        kv_cache: KVCache,
        context: tuple[Tensor, Rotation] | None = None,
    ) -> Tensor:
        """Run the layer over N blocks of P slots, which attend to the context and their own block.

        Args:
            hidden_NPH: the hidden states of the slots [N, P, H].
            rotary: cos and sin [N, P, d] of the slots.
            kv_cache: keys and values of the context.
            context: the context [B, T, H] and its rotary tables, if its keys and values are not in
                the cache yet. They are computed here because a layer that FSDP shards has its whole
                weights only during `forward`.
        """
        if context is not None:
            self.self_attn.remember(*context, self.index, kv_cache)
        return super().forward(hidden_NPH, rotary, kv_cache)


class BlockDraft(FeatureDraft):
    """A draft that proposes a block of tokens in one pass.

    Attributes:
        markov_head: None, or in a subclass a correction of the logits by the tokens before a slot
            (a position of the block), once these are known (see specdistill.methods.dspark).
        confidence_head: None, or in a subclass a module that states how likely a draft token is
            accepted. It reads the hidden states [..., H] of slots and the embeddings [..., E] of
            the tokens before the slots, and returns logits [...] of that chance.
    """

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        """Create the modules of the draft, with random weights."""
        super().__init__()
        self.config = config
        # The context: the states of the A layers side by side, projected to one state and normed.
        self.fc = nn.Linear(
            len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

        # The layers, between the target's embedding and LM head, which are not trained.
        self.embed_tokens = Embedding(config).requires_grad_(False)
        self.layers = nn.ModuleList(
            [BlockLayer(config, index) for index in range(config.num_layers)]
        )
        self.create_output_modules(config)
        self.lm_head.requires_grad_(False)

        # A subclass may replace these.
        self.markov_head: Any = None
        self.confidence_head: Any = None

    @property
    def shared(self) -> frozenset[str]:
        """The names of tensors that are the target's own, neither trained nor saved.

        These are the embedding and, unless the draft vocabulary is pruned, the LM head.
        """
        return frozenset(
            {"embed_tokens.weight"}
            | (set() if self.config.prunes_vocabulary else {"lm_head.weight"})
        )

    def context(self, features: Features) -> Tensor:
        """Project the target's features to the context [B, T, H] that every layer attends to.

        The hidden states of all layers that are read are put side by side, projected to one hidden
        state and normalized.
        """
        output: Tensor = self.hidden_norm(self.fc(torch.cat(features.aux, dim=-1)))
        return output

    def remember(self, features: Features, rotary: Rotation, kv_cache: KVCache) -> None:
        """Store keys and values of context positions in each layer's KV cache, for decoding.

        Args:
            features: the target's features at the new positions.
            rotary: cos and sin [B, T, d] of the positions.
            kv_cache: the cache.
        """
        context_BTH = self.context(features)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, BlockLayer)
            layer.self_attn.remember(context_BTH, rotary, index, kv_cache)

    def forward(
        self,
        anchor_ids_N: Tensor,
        rotary: Rotation,
        kv_cache: KVCache,
        context: tuple[Tensor, Rotation] | None = None,
    ) -> Tensor:
        """Run the draft over N blocks of P slots: a known token (the anchor), then mask tokens.

        Args:
            anchor_ids_N: the token of each anchor.
            rotary: cos and sin [N, P, d] of the slots.
            kv_cache: keys and values of the context.
            context: the context and its rotary tables, if the cache does not hold its keys and
                values yet; see `BlockLayer.forward`.

        Returns:
            Hidden states [N, P, H], which `logits` reads.
        """
        # The input of a block: its anchor's token, then masks.
        ids_NP = anchor_ids_N.new_full(rotary[0].shape[:2], self.config.mask_token_id)
        ids_NP[:, 0] = anchor_ids_N

        # Run the layers, in which the slots see the context and one another.
        hidden = self.embed_tokens(ids_NP)
        for layer in self.layers:
            hidden = layer(hidden, rotary, kv_cache, context)
        output: Tensor = self.norm(hidden)
        return output


# Fields that every draft of features has.
COMMON_FIELDS = {field.name for field in fields(FeatureShape)}


@dataclass(frozen=True)
class Kind:
    """A method of block drafting: its classes and their names in files.

    Attributes:
        name: the name in the files of speculators.
        architectures: the names in config.json. The first of them is written.
        config: the class of the config.
        draft: the class of the draft.
    """

    name: str
    architectures: tuple[str, ...]
    config: type[BlockConfig]
    draft: Callable[..., BlockDraft]

    @property
    def own_fields(self) -> list[str]:
        """The names of config fields that only block drafters have, as files spell them."""
        return [field.name for field in fields(self.config) if field.name not in COMMON_FIELDS]


def build_block_draft(
    kind: Kind,
    target: FrozenTarget,
    *,
    draft_vocabulary: Tensor | None = None,
    seed: int = 0,
    aux_layers: Sequence[int] | None = None,
    **options: object,
) -> BlockDraft:
    """Build a fresh block drafter, initialized from its target.

    Args:
        kind: the method of block drafting.
        target: the target.
        draft_vocabulary: the target's ids of the W tokens that the draft can propose, sorted; None
            for all tokens.
        seed: the seed of the random weights.
        aux_layers: the layers of the target that the draft reads; None for the default.
        **options: `mask_token_id` and other keys of a recipe's `draft:`.

    Raises:
        UserError: for layers that the target does not have, and for a target without RMS norms and
            a rotary embedding.
    """
    width = target.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
    config = kind.config(**block_config(target, width, aux_layers=aux_layers, **options))

    # Read the features of one token. This raises an error for a target whose class does not give
    # the hidden states of these layers.
    target.features(torch.zeros(1, 1, dtype=torch.long, device=target.device), config.aux_layers)

    # Build the draft with random weights, and copy the target's tables.
    draft = build_initialized(lambda: kind.draft(config), seed)
    draft.initialize_from_target(target, draft_vocabulary)

    # The LM head is the target's, and engines do not scale a draft's logits. So the draft's final
    # norm gets the scale of the target's logits.
    with torch.no_grad():
        draft.norm.weight.mul_(target.logits.scale)
    if draft.markov_head is not None:
        draft.markov_head.initialize_from_target(draft.embed_tokens.weight, draft.lm_head.weight)
    return draft.to(target.device)


def block_config(
    target: FrozenTarget,
    draft_vocab_size: int,
    *,
    aux_layers: Sequence[int] | None = None,
    **options: object,
) -> dict[str, Any]:
    """Return the config fields of a new block drafter: those of a recipe, else the target's.

    Args:
        target: the target.
        draft_vocab_size: the number of tokens that the draft can propose.
        aux_layers: the layers of the target that the draft reads; None for the default.
        **options: `mask_token_id` and other keys of a recipe's `draft:`.

    Returns:
        The arguments of `BlockConfig`.

    Raises:
        UserError: for layers that the target does not have, and for a target without RMS norms and
            a rotary embedding.
    """
    # Engines read the layers in ascending order, whatever order a file states. So other orders are
    # refused.
    layers = choose_default_layers(target.num_layers) if aux_layers is None else list(aux_layers)
    if (
        not layers
        or sorted(set(layers)) != layers
        or not 0 < layers[0] <= layers[-1] <= target.num_layers
    ):
        raise UserError(
            "draft.aux_layers",
            got=layers,
            expected=(
                f"layers from 1 to {target.num_layers} (the target's depth), each only once, in"
                " ascending order"
            ),
        )
    return {
        **plan_head_shape(target, **options),
        "draft_vocab_size": draft_vocab_size,
        "aux_layers": tuple(layers),
        "target_num_layers": target.num_layers,
    }


def choose_default_layers(num_layers: int, count: int = 5) -> list[int]:
    """Choose which layers of the target a block drafter reads, as DFlash does.

    They are spread evenly from 2 to num_layers - 2. A number L in the result stands for the hidden
    state after L layers.

    Args:
        num_layers: the target's number of layers.
        count: how many layers to choose; a shallow target gives fewer.
    """
    # In a shallow target several of the numbers round to the same layer, or to one outside. So they
    # are limited to the target's layers, and each layer is taken once.
    last = max(num_layers - 2, 1)
    spread = (round(2 + index * (last - 2) / (count - 1)) for index in range(count))
    return sorted({min(max(layer, 1), num_layers) for layer in spread})
