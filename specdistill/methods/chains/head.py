"""The interface of a head, and functions to plan, create and count heads.

A head is a small module that reads the target's features and feeds back its own hidden state.

Shapes: B batch, T positions, H draft hidden size, V target vocabulary, W draft vocabulary.

At position t a head pairs the embedding of the next token x_{t+1} with a hidden state and predicts
x_{t+2}. At positions that the target has read, this state comes from the target's features. At
drafted positions it is what the head itself returned one step before.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

import torch
from datasets import Dataset
from torch import Tensor, nn

from specdistill.common.errors import UserError
from specdistill.data.rows.packing import draft_vocabulary
from specdistill.methods.checkpoint import ROPE_TYPES
from specdistill.methods.layers import DraftModule, KVCache, check_window
from specdistill.methods.load import locate
from specdistill.methods.recipe import DraftSection
from specdistill.methods.rope import choose_entry
from specdistill.methods.sizes import ParameterCounts, read_head_shape, read_size
from specdistill.recipe.fields import find_default
from specdistill.targets.frozen import Features, FrozenTarget

T = TypeVar("T", bound=nn.Module)
# Tensors that drafts of P-EAGLE and DFlash have and heads do not.
PARALLEL_DRAFT_TENSORS = {"mask_hidden", "hidden_norm.weight"}


def is_chain_draft(names: Set[str]) -> bool:
    """Return whether a draft with these tensor names may be a head (one token per pass).

    Drafts of P-EAGLE and DFlash share most names with heads, but draft all tokens in one pass.
    """
    return not names & PARALLEL_DRAFT_TENSORS


class Head(DraftModule):
    """A draft that takes one pass for each token and feeds back its own hidden state."""

    @abstractmethod
    def fuse(self, features: Features) -> Tensor:
        """Make the hidden state [B, T, H] of the first step from the target's features."""

    @abstractmethod
    def forward(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """Run one draft step at T positions of B sequences.

        Args:
            next_ids_BT: the token after each position, [B, T].
            hidden_BTH: hidden states [B, T, H]: in the first step `fuse(features)`, later the
                `next_hidden` of the step before.
            rotary: cos and sin [B, T, d] of the positions, for head size d.
            kv_cache: keys and values of earlier positions and steps.

        Returns:
            `normed` [B, T, H], from which `logits` computes the logits, and `next_hidden`
            [B, T, H], the hidden states for the next step.
        """


def plan_head_shape(target: FrozenTarget, **options: object) -> dict[str, Any]:
    """Return the config fields of a new head: those that a recipe states, else the target's.

    Args:
        target: the target.
        **options: sizes from the recipe's `draft:`. None means the target's value.

    Returns:
        The arguments of `HeadShape`.

    Raises:
        UserError: for a target without RMS norms and a rotary embedding, and if the number of
            attention heads is no multiple of the number of key/value heads.
    """
    # Read the rotary embedding of the target.
    source = target.config
    rope = choose_entry(getattr(source, "rope_parameters", None))
    _check_target(target, rope)
    theta = float(rope.pop("rope_theta"))

    # A head has one layer of the target's sizes, unless the recipe says otherwise.
    sizes = {name: size for name, size in options.items() if size is not None}
    shape = {**vars(read_head_shape(source)), "num_layers": 1, "rope_theta": theta, **sizes}
    num_heads = shape["num_attention_heads"]
    num_key_value_heads = shape["num_key_value_heads"]
    if num_heads % num_key_value_heads:
        raise UserError(
            "draft.num_key_value_heads",
            got=num_key_value_heads,
            expected=f"a divisor of {num_heads}, the number of attention heads",
        )

    # Take over what must be the same for draft and target: vocabulary, norms, positions and special
    # tokens.
    return {
        **shape,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "embedding_scale": target.embedding_scale,
        "max_position_embeddings": target.max_length,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
    }


def _check_target(target: FrozenTarget, rope: Mapping[str, object]) -> None:
    """Raise UserError if no head can be built for a target.

    A head needs RMS norms, a rotary embedding and an embedding table of the target's size.

    Args:
        target: the target.
        rope: its rotary embedding, as config.json states it.
    """
    # Sizes that the target's config must state. A size that is missing is read as None.
    source = target.config
    missing = []
    for name in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "intermediate_size"):
        kind = float if name == "rms_norm_eps" else int
        if not isinstance(read_size(source, name), kind):
            missing.append(name)

    # The head copies the embedding table. A factorized or padded one has another shape.
    embedding = target.tensor("embed_tokens.weight").shape
    if embedding != (target.vocab_size, target.hidden_size):
        missing.append("an embedding of its vocabulary and hidden size")

    # The head's layers rotate queries and keys as the target's do.
    has_rope = rope.get("rope_theta") is not None and rope.get("rope_type", "default") in ROPE_TYPES
    if missing or not has_rope:
        what = f"without {' and '.join(missing)}" if missing else f"with rope_parameters {rope}"
        raise UserError(
            "target.model",
            got=f"{target.name}, a {source.model_type} {what}",
            expected=(
                f"a target with RMS norms and a rotary embedding of type {' or '.join(ROPE_TYPES)}"
            ),
        )


def count_parameters(head: DraftModule, once_per_round: Set[str] = frozenset()) -> ParameterCounts:
    """Count the parameters of a head: in its file, read in each draft step, copied from the target.

    The file holds all parameters except those that are copied from the target.

    Args:
        head: the head. Its tensors may be on the meta device.
        once_per_round: names of tensors that are read once in a round and not in each draft step.
    """
    # A step reads only a few rows of the embedding table, so the table does not count as read.
    sizes = {name: parameter.numel() for name, parameter in head.named_parameters()}
    num_copied = sum(sizes[name] for name in head.shared)
    not_counted = {"embed_tokens.weight", *once_per_round}
    num_read = sum(size for name, size in sizes.items() if name not in not_counted)
    return ParameterCounts(
        sum(sizes.values()) - num_copied, num_read, head.config.num_layers, num_copied
    )


def build_initialized(build: Callable[[], T], seed: int) -> T:
    """Build a head with random matrices that keep the scale of their input.

    The embedding table keeps its values, because the caller copies the target's into it. The random
    state of the process is not changed.

    Args:
        build: builds the head.
        seed: the seed of the random weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = build()
        # Normal numbers with the variance 1 / input size give an output as large as the input.
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 2 and name != "embed_tokens.weight":
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return draft


def create_or_load(
    recipe: Any,
    target: FrozenTarget,
    build: Callable[..., T],
    load: Callable[..., T],
    chain_length_key: str = "",
    rows: Dataset | None = None,
) -> T:
    """Return the draft of a recipe as it is before training: fresh, or loaded from `draft.init`.

    Args:
        recipe: a recipe of the method.
        target: the target.
        build: a function (target, seed=, and keys of `draft:`) -> a fresh draft.
        load: a function (folder, target, key=) -> a trained draft.
        chain_length_key: the key of `draft:` that says how many positions a chain has. They must
            fit into the sliding window of the draft, if it has one. Empty for no check.
        rows: training data, by which a draft vocabulary is chosen; None for a draft without one.

    Raises:
        UserError: for settings that do not fit the target, if `draft.init` names no draft, and if
            the recipe states another shape than the trained draft has.
        ResourceError: if the Hub fails.
    """
    settings = recipe.draft
    if settings.init:
        # Continue a trained draft. A recipe cannot change its shape.
        head = load(locate(settings.init, key="draft.init"), target, key="draft.init")
        _check_shape(head, settings)
    else:
        # Build a fresh draft. Its draft vocabulary is the most frequent tokens of the rows.
        options = settings.shape()
        if rows is not None:
            options["draft_vocabulary"] = draft_vocabulary(
                rows, target.vocab_size, settings.vocab_size
            )
        head = build(target, seed=recipe.seed, **options)
    if chain_length_key:
        config: Any = head.config
        check_window(config, getattr(settings, chain_length_key), key=f"draft.{chain_length_key}")
    return head


def _check_shape(head: nn.Module, settings: DraftSection) -> None:
    """Raise UserError if a recipe states another shape than the trained head of `draft.init` has.

    Args:
        head: the trained head.
        settings: the recipe's `draft:`.
    """
    # `shape()` returns all sizes except `vocab_size`, which is compared only if the recipe states
    # it.
    for name in (*settings.shape(), *({"vocab_size"} & settings.model_fields_set)):
        value = getattr(settings, name)
        # Recipes have lists where configs have tuples.
        if isinstance(value, list):
            value = tuple(value)
        field = "draft_vocab_size" if name == "vocab_size" else name
        actual = getattr(head.config, field, None)
        # A value that is the default is not compared, because the recipe need not have stated it.
        default = find_default(type(settings).model_fields[name])
        if value not in (default, actual):
            raise UserError(
                f"draft.{name}", got=value, expected=f"{actual}, as {settings.init} has"
            )
