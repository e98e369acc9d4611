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
    """Return the kinds of layers of a text config.

    A config that names none has one kind: windowed if it has the size of a window.
    """
    return set(getattr(config, "layer_types", None) or ["sliding_attention"])


def build_attention_masks(
    config: Any, dtype: torch.dtype, build_mask: Callable[[int | None], Tensor]
) -> Tensor | dict[str, Tensor]:
    """Return a model's `attention_mask`: one tensor, or one for each kind of layer.

    A visible slot has 0. A hidden slot has the least finite number, which hides as well as minus
    infinity, and gives no NaN in a row that is all hidden.

    Args:
        config: of the text model.
        dtype: of the masks.
        build_mask: returns whether each query attends to each slot, bool [B, 1, T, S], for a
            window (None: full attention).
    """
    # A mask for each kind of layer, with the window of that kind.
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    masks = {}
    for kind in get_layer_kinds(config):
        is_visible = build_mask(windows[kind])
        zeros = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
        masks[kind] = zeros.masked_fill(~is_visible, torch.finfo(dtype).min)
    # Models with one kind of layer take its mask, and models with several kinds a mapping.
    return masks if len(masks) > 1 else masks.popitem()[1]


def create_cache(config: Any, num_rows: int, device: torch.device) -> DynamicCache:
    """Return an empty KV cache of a text config's model: a `BatchKVCache` for several rows."""
    return create_empty_cache(config) if num_rows == 1 else BatchKVCache(num_rows, device)


def prepare_pass(
    cache: DynamicCache,
    counts: Sequence[int],
    config: Any,
    dtype: torch.dtype,
    tree_pass: TreePass | None = None,
) -> tuple[Tensor | None, Tensor | dict[str, Tensor] | None]:
    """Return position ids [B, T] and attention masks of the next pass.

    Both are None for a chain of one sequence, for which a model makes its own.

    Args:
        cache: of the model, which the pass continues.
        counts: the new tokens of each row.
        config: of the text model.
        dtype: of the masks.
        tree_pass: if the tokens are nodes of trees.

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
        # Padding needs some valid position.
        position_BT = position_BT.where(position_BT < end_B1, 0)
        return position_BT, build_attention_masks(config, dtype, cache.build_mask)
    if tree_pass is None:
        return None, None
    # One sequence with a tree, in a cache of transformers.
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
    """Run the target over tokens that continue each row, as a chain or as the nodes of a tree."""
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
    """Keep the nodes of a path, moved to the slots after the text, and drop the others.

    Args:
        cache: ends with a tree.
        num_nodes: of the tree.
        path: indices of the nodes to keep.
    """
    # The tree's nodes are in the last slots. Nodes that stand in their place need no move.
    first_slot = cache.get_seq_length() - num_nodes
    slots = [first_slot + node for node in path]
    if slots != list(range(first_slot, first_slot + len(path))):
        layers: Any = cache.layers
        buffers = []
        for layer in layers:
            if layer.keys is not None:  # else it shares another layer's
                buffers += [layer.keys, layer.values]
        # A list would be copied to the device for every layer.
        index = torch.tensor(slots, device=buffers[0].device)
        for buffer in buffers:
            moved = buffer[:, :, index.to(buffer.device)]
            buffer[:, :, first_slot : first_slot + len(path)] = moved
    cache.crop(len(path) - num_nodes)


@torch.inference_mode()
def check_reads_trees(target: FrozenTarget) -> None:
    """Check that a target verifies a tree in one pass, and reads each branch as it would alone.

    Raises:
        UserError: if it does not.
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
                f"{target.name}, which reads a branch of a tree differently from the same tokens"
                " alone"
            ),
            expected="null, or a target that respects mask and position ids",
        )


def _reads_branches_apart(target: FrozenTarget) -> bool:
    """Return whether the branches of a tree are read as they would be alone.

    False for a class that takes no such mask at all.
    """
    # Any token ids will do: the outputs are compared with each other.
    text = [1, 2, 3]
    nodes = [4, 5, 6, 7]
    tree_pass = TreePass.cover_trees([PROBE_TREE], [len(text) - 1], target.device)
    cache = create_empty_cache(target.config)
    with suppress(*CLASS_ERRORS):
        run_target(target, [text[:-1]], cache)
        tree_features = run_target(target, [[text[-1], *nodes]], cache, tree_pass=tree_pass)
        # Compare each branch with a pass over text and branch alone.
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
        """Start new sequences."""
        self.cache: Any = create_cache(self.config, num_rows, self.device)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first lengths[b] tokens of each row."""
        if isinstance(self.cache, BatchKVCache):
            self.cache.truncate(lengths)
            return
        num_surplus = self.cache.get_seq_length() - lengths[0]
        if num_surplus:
            self.cache.crop(-num_surplus)

    def __call__(
        self, ids_BT: Tensor, counts: Sequence[int], level: TreePass | None = None
    ) -> Tensor:
        """Return the hidden states [B, T, H] of new tokens.

        Args:
            ids_BT: [B, T] token ids.
            counts: how many of the T are valid in each row.
            level: if the tokens are a level of each row's tree.
        """
        # Without masks, a chain of one sequence, the model makes its own.
        positions, masks = prepare_pass(self.cache, counts, self.config, self.backbone.dtype, level)
        options: dict[str, Any] = {}
        if masks is not None:
            options = {"position_ids": positions, "attention_mask": masks}
        last_hidden_BTD: Tensor = self.backbone(
            input_ids=ids_BT, past_key_values=self.cache, use_cache=True, **options
        ).last_hidden_state
        return last_hidden_BTD


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of integers as a tensor [B, T], shorter rows padded with 0 on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


def gather_last(x_BTH: Tensor, counts: Sequence[int]) -> Tensor:
    """Return [B, H]: each row at its last valid position, counts[b] - 1, or 0 if it has none."""
    # This case needs no index, so the device need not wait for one.
    if min(counts) == x_BTH.shape[1]:
        return x_BTH[:, -1]
    last_B = (torch.tensor(counts, device=x_BTH.device) - 1).clamp_min(0)
    return x_BTH[torch.arange(len(counts), device=x_BTH.device), last_B]


def check_batchable(model: Any, name: str) -> None:
    """Check that several sequences of a model can be read in one pass.

    Args:
        model: of transformers.
        name: of the model, for the message.

    Raises:
        UserError: if a `BatchKVCache` cannot hold them, or the model mixes its rows.
    """
    obstacle = find_mask_obstacle(model)
    if obstacle:
        raise UserError(
            "eval.batch_size", got=f"more than 1 for {name}, a model with {obstacle}", expected="1"
        )


@torch.no_grad()
def find_mask_obstacle(model: Any) -> str | None:
    """Return what keeps a model from reading sequences under our masks, or None.

    The model is tried with a forward pass, because some classes ignore the mask or the positions
    that they are given.
    """
    # A model with several kinds of layers may have a rotary embedding for each.
    config = model.config.get_text_config(decoder=True)
    kinds = get_layer_kinds(config)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    if is_recurrent(config):
        return "recurrent layers, whose state cannot go back for one row alone"
    if not kinds <= MASKABLE_LAYERS:
        return f"layers of kind {', '.join(sorted(kinds))}"
    if config._attn_implementation not in MASKABLE_ATTENTION:
        return f"attn {config._attn_implementation}, which takes no mask of ours"
    if any(entry.get("rope_type") in ("dynamic", "longrope") for entry in ropes):
        return "rotary angles that depend on the longest sequence of a batch"
    if not _reads_rows_apart(model):
        return "layers that read a row of a batch differently from the same sequence alone"
    return None


def _reads_rows_apart(model: Any) -> bool:
    """Return whether two sequences in one batch are read as each would be alone.

    They have different lengths, with a rejected token and padding in between.
    """
    with suppress(*CLASS_ERRORS):
        # Rows of 3 and 1 tokens; the first row's third token is then rejected.
        layers = TransformersLayers(model)
        layers.begin(2)
        layers(pad_rows([[1, 2, 0], [2]], model.device), [3, 1])
        layers.truncate([2, 1])

        # The next tokens must be read as in each sequence alone, without the rejected token.
        batch_BTH = layers(pad_rows([[3, 1], [3]], model.device), [2, 1])
        for row_TH, token_ids in zip(batch_BTH, ([1, 2, 3, 1], [2, 3]), strict=True):
            input_ids = torch.tensor([token_ids], device=model.device)
            hidden_TH = layers.backbone(input_ids=input_ids).last_hidden_state[0]
            last_TH = hidden_TH[len(token_ids) // 2 :]
            if not reads_alike(row_TH[: len(last_TH)], last_TH):
                return False
        return True
    return False
