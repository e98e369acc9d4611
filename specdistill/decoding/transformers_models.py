"""Run models of transformers under our own attention masks, and check which models allow it.

With such masks one pass reads the branches of a tree apart, and the sequences of a batch advance by
different lengths.

Shapes: B rows, T positions of one pass (for a tree: nodes), S slots of the KV cache, H hidden size,
G key/value heads, d head size.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specdistill.common.errors import UserError
from specdistill.decoding.kv_cache import BatchKVCache
from specdistill.decoding.tree import ROOT, Tree, TreePass
from specdistill.targets.anatomy import CLASS_ERRORS, find_backbone, reads_alike
from specdistill.targets.cache import create_empty_cache, is_recurrent
from specdistill.targets.frozen import Features, FrozenTarget

# Attention implementations of transformers that take any mask.
MASKABLE_ATTENTION = ("sdpa", "eager")
# Kinds of layers that we can build a mask for.
MASKABLE_LAYERS = {"full_attention", "sliding_attention"}
PROBE_TREE = Tree((ROOT, ROOT, 0, 1))  # two branches of two tokens


def get_layer_kinds(config: Any) -> set[str]:
    """Return which kinds of attention layers a model has, such as "full_attention".

    A config may list the kind of each layer in `layer_types`. Otherwise all layers are of one kind,
    which this function calls "sliding_attention", even if it is full attention. That does no harm:
    `build_attention_masks` reads the size of the window from the config, and there is no window if
    the config has no `sliding_window`.

    Args:
        config: the config of the text model.
    """
    return set(getattr(config, "layer_types", None) or ["sliding_attention"])


def build_attention_masks(
    config: Any, dtype: torch.dtype, build_mask: Callable[[int | None], Tensor]
) -> Tensor | dict[str, Tensor]:
    """Return the `attention_mask` for a pass of a model: one tensor, or one per kind of layer.

    The masks are added to the attention scores. A visible slot has 0. A hidden slot has the lowest
    finite number: minus infinity would give NaN in a row where all slots are hidden.

    Args:
        config: the config of the text model.
        dtype: the dtype of the masks.
        build_mask: takes a window size (None: full attention), and returns which of the S slots of
            the KV cache each of the T new tokens attends to: bool [B, 1, T, S].
    """
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    masks = {}
    for kind in get_layer_kinds(config):
        is_visible = build_mask(windows[kind])
        zeros = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
        masks[kind] = zeros.masked_fill(~is_visible, torch.finfo(dtype).min)
    # Models with several kinds of layers take a mapping, and models with one kind take its mask.
    if len(masks) > 1:
        return masks
    (mask,) = masks.values()
    return mask


def create_cache(config: Any, num_rows: int, device: torch.device) -> DynamicCache:
    """Return an empty KV cache for a model.

    A single row gets the usual cache of transformers. Several rows need a `BatchKVCache`, in which
    each row advances by its own number of tokens.

    Args:
        config: the config of the text model.
        num_rows: the number of sequences.
        device: the model's device.
    """
    return create_empty_cache(config) if num_rows == 1 else BatchKVCache(num_rows, device)


def prepare_pass(
    cache: DynamicCache,
    counts: Sequence[int],
    config: Any,
    dtype: torch.dtype,
    tree_pass: TreePass | None = None,
) -> tuple[Tensor | None, Tensor | dict[str, Tensor] | None]:
    """Return the position ids [B, T] and attention masks of the next pass of a model.

    Both are None for one sequence without a tree: there the model creates its own.

    Args:
        cache: the model's KV cache. A `BatchKVCache` reserves slots for the new tokens.
        counts: the number of new tokens of each row. T is the largest of them.
        config: the config of the text model.
        dtype: the dtype of the masks.
        tree_pass: the nodes' ancestors and positions, if the tokens are nodes of trees.

    Raises:
        UserError: for a tree under attention that is neither full nor over a window.
    """
    other_kinds = get_layer_kinds(config) - MASKABLE_LAYERS
    if tree_pass and other_kinds:
        raise UserError(
            "eval.tree",
            got=f"layers with {', '.join(sorted(other_kinds))}",
            expected="null: a tree needs full attention or a sliding window",
        )
    if isinstance(cache, BatchKVCache):
        position_BT = cache.place(counts, tree_pass=tree_pass)
        end_B1 = torch.tensor(cache.lengths, device=position_BT.device).unsqueeze(1)
        # Padding lies behind the row's end, where a model may have no position any more. So it gets
        # position 0, which every model accepts.
        position_BT = position_BT.where(position_BT < end_B1, 0)
        return position_BT, build_attention_masks(config, dtype, cache.build_mask)
    if tree_pass is None:
        return None, None
    position_BT = torch.tensor(tree_pass.new_positions, device=tree_pass.ancestors_BTF.device)
    masks = build_attention_masks(
        config, dtype, lambda window: tree_pass.build_mask(window).unsqueeze(1)
    )
    return position_BT, masks


def run_target(
    target: FrozenTarget,
    token_ids: Sequence[Sequence[int]],
    cache: DynamicCache,
    aux_layers: Sequence[int] = (),
    tree_pass: TreePass | None = None,
) -> Features:
    """Run the target over new tokens of each row; return their features (hidden states).

    Args:
        target: the model.
        token_ids: the new tokens of each row, which may differ in number.
        cache: the KV cache of the earlier tokens. The new tokens are added.
        aux_layers: the layers whose outputs are returned besides the last hidden states.
        tree_pass: the nodes' ancestors and positions, if the tokens are nodes of trees. None if
            each token follows the one before.
    """
    counts = [len(row_ids) for row_ids in token_ids]
    positions, masks = prepare_pass(cache, counts, target.config, target.model.dtype, tree_pass)
    return target.features(
        pad_rows(token_ids, target.device),
        aux_layers,
        position_ids_BT=positions,
        attention_mask=masks,
        past_key_values=cache,
    )


# Trees


def keep_path(cache: DynamicCache, num_nodes: int, path: Sequence[int]) -> None:
    """Keep the accepted nodes of a tree in the KV cache of one sequence, and drop the other nodes.

    The accepted nodes are moved to the slots directly after the text, where the next pass expects
    them.

    Args:
        cache: its last `num_nodes` slots hold the nodes of the tree.
        num_nodes: the number of nodes of the tree.
        path: the indices of the nodes to keep.
    """
    first_slot = cache.get_seq_length() - num_nodes
    slots = [first_slot + node for node in path]
    if slots != list(range(first_slot, first_slot + len(path))):
        layers: Any = cache.layers
        buffers = []
        for layer in layers:
            if layer.keys is not None:  # None: the layer uses the cache of another layer
                buffers += [layer.keys, layer.values]
        # One tensor for all layers: a Python list would be copied to the device for each of them.
        # `to` copies it only for layers on other devices.
        index = torch.tensor(slots, device=buffers[0].device)
        for buffer in buffers:
            moved = buffer[:, :, index.to(buffer.device)]
            buffer[:, :, first_slot : first_slot + len(path)] = moved
    # Drop the other nodes: crop(-n) drops the last n slots.
    cache.crop(len(path) - num_nodes)


@torch.inference_mode()
def check_reads_trees(target: FrozenTarget) -> None:
    """Check that a target can verify all branches of a draft tree in one pass.

    It must compute the same hidden states for a branch in the tree as for the same tokens without
    the tree.

    Raises:
        UserError: if the target cannot.
    """
    if target.is_recurrent:
        raise UserError(
            "eval.tree",
            got=f"{target.name}, whose recurrent layers have one state for all branches",
            expected="null for this target",
        )
    if target.config._attn_implementation not in MASKABLE_ATTENTION:
        raise UserError(
            "target.attn",
            got=f"a tree with attention {target.config._attn_implementation}",
            expected=f"{' or '.join(MASKABLE_ATTENTION)}, or eval.tree=null",
        )
    if not _reads_branches_apart(target):
        raise UserError(
            "eval.tree",
            got=(
                f"{target.name}, which does not compute the same hidden states for a branch of a"
                " tree as for the same tokens without the tree"
            ),
            expected="null, or a target that follows the given attention mask and position ids",
        )


def _reads_branches_apart(target: FrozenTarget) -> bool:
    """Return whether the target computes each branch of a small tree as it would without the tree.

    False, too, if the model class raises an error for a tree's attention mask.
    """
    text = [1, 2, 3]
    nodes = [4, 5, 6, 7]
    tree_pass = TreePass.cover_trees([PROBE_TREE], [len(text) - 1], target.device)
    cache = create_empty_cache(target.config)
    with suppress(*CLASS_ERRORS):
        # Read the text, then its last token (the root) with all nodes in one pass. PROBE_TREE has
        # two branches: the nodes 0 and 2, and the nodes 1 and 3. Compare each branch with a pass
        # over the text and the two tokens of the branch alone.
        run_target(target, [text[:-1]], cache)
        tree_features = run_target(target, [[text[-1], *nodes]], cache, tree_pass=tree_pass)
        for path in ([0, 2], [1, 3]):
            branch = [*text, *(nodes[node] for node in path)]
            branch_features = run_target(target, [branch], create_empty_cache(target.config))
            positions = [node + 1 for node in path]  # the root comes first
            if not reads_alike(
                tree_features.last_hidden[0, positions], branch_features.last_hidden[0, -2:]
            ):
                return False
        return True
    return False


# Batches


class TransformersLayers:
    """The layers of any causal language model, with the keys and values of B sequences."""

    def __init__(self, model: Any) -> None:
        self.backbone: Any = find_backbone(model)
        self.config = model.config.get_text_config(decoder=True)
        self.device = model.device

    def begin(self, num_rows: int) -> None:
        """Start new sequences with an empty KV cache."""
        self.cache: Any = create_cache(self.config, num_rows, self.device)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all but the first lengths[b] tokens of each row b from the KV cache."""
        if isinstance(self.cache, BatchKVCache):
            self.cache.truncate(lengths)
            return
        # Any other cache holds a single row. crop(-n) drops its last n tokens.
        num_surplus = self.cache.get_seq_length() - lengths[0]
        if num_surplus:
            self.cache.crop(-num_surplus)

    def __call__(
        self, ids_BT: Tensor, counts: Sequence[int], level: TreePass | None = None
    ) -> Tensor:
        """Return the hidden states [B, T, H] of new tokens.

        Args:
            ids_BT: [B, T] token ids.
            counts: how many of the T tokens of each row are valid.
            level: the nodes' ancestors and positions, if the tokens are a level of each row's tree.
        """
        # Without masks (one sequence and no tree) the model makes its own masks and positions.
        positions, masks = prepare_pass(self.cache, counts, self.config, self.backbone.dtype, level)
        options: dict[str, Any] = {}
        if masks is not None:
            options = {"position_ids": positions, "attention_mask": masks}
        last_hidden_BTD: Tensor = self.backbone(
            input_ids=ids_BT, past_key_values=self.cache, use_cache=True, **options
        ).last_hidden_state
        return last_hidden_BTD


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return B rows of integers as a tensor [B, T]; shorter rows are padded with 0 on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


def gather_last(x_BTH: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the vector at the last valid position of each row.

    Args:
        x_BTH: [B, T, H], rows padded on the right.
        counts: the number of valid positions of each row. For a row with none, the vector at
            position 0 is returned.

    Returns:
        [B, H].
    """
    # If no row is padded, no index has to be copied to the device.
    if min(counts) == x_BTH.shape[1]:
        return x_BTH[:, -1]
    last_B = (torch.tensor(counts, device=x_BTH.device) - 1).clamp_min(0)
    return x_BTH[torch.arange(len(counts), device=x_BTH.device), last_B]


def check_batchable(model: Any, name: str) -> None:
    """Check that a model can decode several sequences of different lengths as one batch.

    Args:
        model: a model of transformers.
        name: the model's name, for the error message.

    Raises:
        UserError: if its layers do not support this, or one row influences another.
    """
    obstacle = find_mask_obstacle(model)
    if obstacle:
        raise UserError(
            "eval.batch_size", got=f"more than 1 for {name}, a model with {obstacle}", expected="1"
        )


@torch.no_grad()
def find_mask_obstacle(model: Any) -> str | None:
    """Return why a model cannot read several sequences as one batch; None if it can.

    A batch needs attention masks and position ids that differ between rows. The last test is a
    forward pass, because some model classes ignore the masks or positions that they are given.

    Returns:
        The obstacle, as words that follow "a model with".
    """
    config = model.config.get_text_config(decoder=True)
    kinds = get_layer_kinds(config)
    # Models whose kinds of layers differ in their rotary embedding have a mapping for each kind.
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    if is_recurrent(config):
        return "recurrent layers, whose state cannot go back for one row alone"
    if not kinds <= MASKABLE_LAYERS:
        return f"layers of kind {', '.join(sorted(kinds))}"
    if config._attn_implementation not in MASKABLE_ATTENTION:
        return f"attn {config._attn_implementation}, which does not accept custom masks"
    if any(entry.get("rope_type") in ("dynamic", "longrope") for entry in ropes):
        return "rotary angles that depend on the longest sequence of a batch"
    if not _reads_rows_apart(model):
        return "layers that read a row of a batch differently from the same sequence alone"
    return None


def _reads_rows_apart(model: Any) -> bool:
    """Return whether a model computes two sequences in a batch as it computes each of them alone.

    The two have different lengths, padding, and a rejected token that is dropped from the cache.
    False, too, if the model class raises an error.
    """
    with suppress(*CLASS_ERRORS):
        # Read the beginnings of two sequences. The second row is padded. In the first row, token 0
        # is no padding, but stands for a rejected draft token. The cache then drops both.
        layers = TransformersLayers(model)
        layers.begin(2)
        layers(pad_rows([[1, 2, 0], [2]], model.device), [3, 1])
        layers.truncate([2, 1])

        # Read the rest of both sequences: two tokens in the first row, one in the second.
        counts = [2, 1]
        batch_BTH = layers(pad_rows([[3, 1], [3]], model.device), counts)

        # Compare these last tokens with a pass over each whole sequence alone.
        for row_TH, token_ids, count in zip(batch_BTH, ([1, 2, 3, 1], [2, 3]), counts, strict=True):
            input_ids = torch.tensor([token_ids], device=model.device)
            hidden_TH = layers.backbone(input_ids=input_ids).last_hidden_state[0]
            if not reads_alike(row_TH[:count], hidden_TH[-count:]):
                return False
        return True
    return False
