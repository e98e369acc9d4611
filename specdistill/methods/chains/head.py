"""Draft heads: what decoding and training ask of one, a small module that reads the target's features and feeds back its own; and how
EAGLE's are created.

Shapes: B batch, T positions, H draft hidden size, V target vocabulary, W draft vocabulary.

At position t a head pairs the embedding of the next token x_{t+1} with a hidden state and predicts x_{t+2}. Where the target has been, that
state comes from its features; at drafted positions it is what the head itself gave back one step before.
"""

from collections.abc import Callable, Set
from typing import Any, Protocol, TypeVar

import torch
from datasets import Dataset
from torch import Tensor, nn

from specdistill.errors import UserError
from specdistill.methods.checkpoint import ROPE_TYPES
from specdistill.methods.layers import KVCache, check_window
from specdistill.methods.load import locate
from specdistill.methods.sizes import ParameterCounts, shape_of
from specdistill.recipe.fields import default_of
from specdistill.rows.packing import draft_vocabulary
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import Features, FrozenTarget

T = TypeVar("T", bound=nn.Module)
OF_PARALLEL_DRAFTS = {
    "mask_hidden",
    "hidden_norm.weight",
}  # tensors of P-EAGLE's and DFlash's drafts that heads do not have


def drafts_chains(names: Set[str]) -> bool:
    """Whether a draft with tensors of these names drafts one token per pass, as far as they say."""
    return not names & OF_PARALLEL_DRAFTS


class Head(Protocol):
    """An nn.Module with these.

    config: `vocab_size` V, `num_layers` and `sliding_window` (positions; None for all of them) are read.
    aux_layers: the target's layers it reads in addition to the last.
    shared: names of tensors that are the target's own: neither trained nor saved.
    logits: [..., H] -> [..., W], over the draft vocabulary; the target's own head scales and caps them as the target does.
    target_ids_W: the target's id of each draft token, ascending; None where a draft token is the target's.
    """

    config: Any
    aux_layers: tuple[int, ...]
    shared: frozenset[str]
    logits: LogitsHead
    target_ids_W: Tensor | None

    def fuse(self, features: Features) -> Tensor:
        """The target's features -> the hidden state [B, T, H] of the first step."""

    def rotary(self, like: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of positions, in the dtype of `like`."""

    def __call__(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """One step over T positions: `normed` [B, T, H], which `logits` reads, and `next_hidden` [B, T, H], the next step's state."""


def head_shape(target: FrozenTarget, **options: Any) -> dict[str, Any]:
    """The fields of a head's config from the keys of a recipe (see `HeadSizes.shape`): those that are not None, and for the rest of
    `HeadShape` what the target has.

    Raises UserError for a target without RMS norms and one rotary embedding, and for heads that cannot be shared out evenly.
    """
    source, rope = target.config, dict(getattr(target.config, "rope_parameters", None) or {})
    needed = {
        "num_attention_heads": int,
        "num_key_value_heads": int,
        "rms_norm_eps": float,
        "intermediate_size": int,
    }
    try:
        lacking = [
            name
            for name, kind in needed.items()
            if not isinstance(getattr(source, name, None), kind)
        ]
        getattr(source, "head_dim", None)
        embedding = target.tensor("embed_tokens.weight").shape
        lacking += ["an embedding of its vocabulary and hidden size"] * (
            embedding != (target.vocab_size, target.hidden_size)
        )
    except RuntimeError:  # transformers names no size that differs from layer to layer
        lacking = ["sizes that all layers share"]
    if lacking or "rope_theta" not in rope or rope.get("rope_type", "default") not in ROPE_TYPES:
        what = " and ".join(lacking) or f"rope_parameters {rope}"
        got = f"{target.name}, a {source.model_type} with{'out' * bool(lacking)} {what}"
        raise UserError(
            "target.model",
            got=got,
            expected=f"RMS norms and one rotary embedding ({', '.join(ROPE_TYPES)})",
        )
    asked = {name: size for name, size in options.items() if size is not None}
    shape = {**vars(shape_of(source)), "num_layers": 1, **asked}
    heads, key_value_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    if heads % key_value_heads:
        raise UserError(
            "draft.num_key_value_heads",
            got=key_value_heads,
            expected=f"a divisor of {heads} attention heads",
        )
    return {
        **shape,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_theta": float(rope.pop("rope_theta")),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": target.max_length,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
    }


def parameter_counts(head: Any, once_per_round: Set[str] = frozenset()) -> ParameterCounts:
    """Of a head's tensors, which need have no content. once_per_round: those that a draft step does not read."""
    sizes = {name: parameter.numel() for name, parameter in head.named_parameters()}
    copied = sum(sizes[name] for name in head.shared)
    read = sum(
        size
        for name, size in sizes.items()
        if name != "embed_tokens.weight" and name not in once_per_round
    )
    return ParameterCounts(sum(sizes.values()) - copied, read, head.config.num_layers, copied)


def initialized(head: Callable[[], T], seed: int) -> T:
    """A head whose matrices keep the size of what passes through them; embeddings and what the target gives are left."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = head()
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 2 and name != "embed_tokens.weight":
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return draft


def create_or_load(
    recipe: Any,
    target: FrozenTarget,
    build: Callable[..., Any],
    load: Callable[..., Any],
    longest: str = "",
    rows: Dataset | None = None,
) -> Any:
    """The draft of a recipe before its first step: trained, from `draft.init`, or fresh.

    longest: of a head with a window, the key of what must fit in it. rows: training data, by which a draft vocabulary is chosen. Raises
    UserError for what does not fit, and for a shape asked of a trained head that has another; as `locate`.
    """
    asked = recipe.draft
    if not asked.init:
        of_data = (
            {}
            if rows is None
            else {"draft_vocabulary": draft_vocabulary(rows, target.vocab_size, asked.vocab_size)}
        )
        head = build(target, seed=recipe.seed, **of_data, **asked.shape())
    else:
        head = load(locate(asked.init, key="draft.init"), target, key="draft.init")
        for name in (*asked.shape(), *({"vocab_size"} & asked.model_fields_set)):
            value = getattr(asked, name)
            has = getattr(head.config, "draft_vocab_size" if name == "vocab_size" else name, None)
            value = tuple(value) if isinstance(value, list) else value
            if value != default_of(type(asked).model_fields[name]) and value != has:
                raise UserError(f"draft.{name}", got=value, expected=f"{has}, as {asked.init} has")
    if longest:
        check_window(head.config, getattr(asked, longest), key=f"draft.{longest}")
    return head
