"""Models of transformers under masks of our own: the branches of a tree read apart in one pass, and sequences of a batch that advance by
different lengths; and which models allow it.

Shapes: B rows, T positions of one pass (of a tree: nodes), S slots of the KV cache, H hidden size, G key/value heads, d head size.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding.kv_cache import BatchKVCache
from specdistill.decoding.tree import ROOT, Step, Tree
from specdistill.errors import UserError
from specdistill.targets.anatomy import CLASS_ERRORS, backbone_of, reads_alike
from specdistill.targets.cache import is_recurrent, new_cache
from specdistill.targets.frozen import Features, FrozenTarget

MASKED = ("sdpa", "eager")  # attention implementations of transformers that take any mask
KINDS = {"full_attention", "sliding_attention"}  # of layers that a mask of ours can be made for
PROBE = Tree((ROOT, ROOT, 0, 1))  # two branches of two tokens


def layer_kinds(config: Any) -> set[str]:
    """Of a text config; one that names none has one kind: windowed if it has a window's size."""
    return set(getattr(config, "layer_types", None) or ["sliding_attention"])


def masks(
    config: Any, dtype: torch.dtype, visible: Callable[[int | None], Tensor]
) -> Tensor | dict[str, Tensor]:
    """A model's `attention_mask`: 0 or the least finite number, one for each kind of layer where they differ.

    visible: window, None for full attention -> bool [B, 1, T, S], what each query attends to. The least finite number hides as well as
    minus infinity, and gives no NaN in a row that is all hidden.
    """
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    by_kind = {}
    for kind in layer_kinds(config):
        seen = visible(windows[kind])
        by_kind[kind] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
            ~seen, torch.finfo(dtype).min
        )
    # Models with one kind of layer take its mask, models with several a mapping.
    return by_kind if len(by_kind) > 1 else by_kind.popitem()[1]


def cache_of(config: Any, num_rows: int, device: torch.device) -> DynamicCache:
    """Of a text config's model, for B sequences: a `BatchKVCache` for more than one."""
    return new_cache(config) if num_rows == 1 else BatchKVCache(num_rows, device)


def masked_pass(
    cache: DynamicCache,
    counts: Sequence[int],
    config: Any,
    dtype: torch.dtype,
    step: Step | None = None,
) -> tuple[Tensor | None, Tensor | dict[str, Tensor] | None]:
    """Position ids [B, T] and `masks` of the next pass, in which row b gets counts[b] new tokens, or nodes of its tree; None for a chain
    of one sequence, for which a model has its own. Raises UserError for a tree under attention that is neither full nor over a window.
    """
    if step and (unknown := layer_kinds(config) - KINDS):
        expected = "null: a tree needs full attention or a sliding window"
        raise UserError(
            "eval.tree", got=f"layers with {', '.join(sorted(unknown))}", expected=expected
        )
    if isinstance(cache, BatchKVCache):
        position_BT = cache.place(counts, step=step)
        end_B1 = torch.tensor(cache.lengths, device=position_BT.device).unsqueeze(1)
        position_BT = position_BT.where(
            position_BT < end_B1, 0
        )  # padding needs some valid position
        return position_BT, masks(config, dtype, cache.visible)
    if step is None:
        return None, None
    position_BT = torch.tensor(step.new_positions, device=step.seen_BTF.device)
    return position_BT, masks(config, dtype, lambda window: step.visible(window).unsqueeze(1))


def read(
    target: FrozenTarget,
    token_ids: Sequence[Sequence[int]],
    cache: DynamicCache,
    aux_layers: Sequence[int] = (),
    step: Step | None = None,
) -> Features:
    """The target over each row's tokens that continue the cached ones, as a chain or as the nodes of a tree."""
    positions, mask = masked_pass(
        cache, [*map(len, token_ids)], target.config, target.model.dtype, step
    )
    ids = padded(token_ids, target.device)
    return target.features(
        ids, aux_layers, position_ids_BT=positions, attention_mask=mask, past_key_values=cache
    )


# Trees


def keep_path(cache: DynamicCache, num_nodes: int, path: Sequence[int]) -> None:
    """Keep the path's nodes of a tree at the end of a cache, and move them together."""
    first = cache.get_seq_length() - num_nodes
    slots = [first + node for node in path]
    if slots != list(range(first, first + len(path))):
        layers: Any = cache.layers
        held = [
            kept for layer in layers for kept in (layer.keys, layer.values) if kept is not None
        ]  # some share another's
        index = torch.tensor(
            slots, device=held[0].device
        )  # a list would be copied to the device for every layer
        for kept in held:
            kept[:, :, first : first + len(path)] = kept[:, :, index.to(kept.device)]
    cache.crop(len(path) - num_nodes)


@torch.inference_mode()
def check_reads_trees(target: FrozenTarget) -> None:
    """Raises UserError when a target cannot verify a tree in one pass, or reads its branches differently from each alone."""
    key, name = "eval.tree", target.name
    if target.is_recurrent:
        got = f"{name}, whose recurrent layers have one state for all branches"
        raise UserError(key, got=got, expected="null for this target")
    if target.config._attn_implementation not in MASKED:
        got = f"a tree with attention {target.config._attn_implementation}"
        raise UserError(
            "target.attn", got=got, expected=f"{' or '.join(MASKED)}, or eval.tree=null"
        )
    if not _reads_branches_apart(target):
        got = f"{name}, which reads a branch of a tree differently from the same tokens alone"
        raise UserError(
            key, got=got, expected="null, or a target that respects mask and position ids"
        )


def _reads_branches_apart(target: FrozenTarget) -> bool:
    """Not so of a class that takes no such mask at all."""
    text, nodes = [1, 2, 3], [4, 5, 6, 7]
    cache, step = new_cache(target.config), Step.whole([PROBE], [len(text) - 1], target.device)
    with suppress(*CLASS_ERRORS):
        read(target, [text[:-1]], cache)
        together_TH = read(target, [[text[-1], *nodes]], cache, step=step).last_hidden[0]
        for path in ([0, 2], [1, 3]):
            alone_TH = read(
                target, [[*text, *(nodes[node] for node in path)]], new_cache(target.config)
            ).last_hidden[0, -2:]
            if not reads_alike(together_TH[[node + 1 for node in path]], alone_TH):
                return False
        return True
    return False


# Batches


class TransformersLayers:
    """Any causal language model's layers, and the keys and values of B sequences so far: new ids [B, T], of which counts[b] are valid ->
    hidden states [B, T, H].
    """

    def __init__(self, model: Any) -> None:
        self.backbone: Any = backbone_of(model)
        self.config, self.device = model.config.get_text_config(decoder=True), model.device

    def begin(self, num_rows: int) -> None:
        self.cache: Any = cache_of(self.config, num_rows, self.device)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first lengths[b] tokens of each row."""
        if isinstance(self.cache, BatchKVCache):
            self.cache.truncate(lengths)
        elif surplus := self.cache.get_seq_length() - lengths[0]:
            self.cache.crop(-surplus)

    def __call__(self, ids_BT: Tensor, counts: Sequence[int], level: Step | None = None) -> Tensor:
        """level: of each row's tree, if the ids are one; what the cache holds with it."""
        positions, mask = masked_pass(self.cache, counts, self.config, self.backbone.dtype, level)
        options = {} if mask is None else {"position_ids": positions, "attention_mask": mask}
        output = self.backbone(
            input_ids=ids_BT, past_key_values=self.cache, use_cache=True, **options
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, T] token ids, shorter rows padded on the right by any token."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


def last_of(x_BTH: Tensor, counts: Sequence[int]) -> Tensor:
    """[B, H]: row b at its last position, counts[b] - 1; at its first where counts[b] is 0."""
    if min(counts) == x_BTH.shape[1]:
        return x_BTH[:, -1]  # without numbers for the device to wait for
    last_B = (torch.tensor(counts, device=x_BTH.device) - 1).clamp_min(0)
    return x_BTH[torch.arange(len(counts), device=x_BTH.device), last_B]


def check_batchable(model: Any, name: str) -> None:
    """Raises UserError when a `BatchKVCache` cannot hold several sequences of the model called `name`, or the model mixes its rows."""
    if reason := unmaskable(model):
        raise UserError(
            "eval.batch_size", got=f"more than 1 for {name}, a model with {reason}", expected="1"
        )


@torch.no_grad()
def unmaskable(model: Any) -> str | None:
    """What of a model keeps it from reading sequences under masks of ours; None for one that does.

    The latter is tested by a forward pass: some models ignore the mask or the positions that they are given.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    if is_recurrent(config):
        return "recurrent layers, whose state cannot go back for one row alone"
    if not layer_kinds(config) <= KINDS:
        return f"layers of kind {', '.join(sorted(layer_kinds(config)))}"
    if config._attn_implementation not in MASKED:
        return f"attn {config._attn_implementation}, which takes no mask of ours"
    if any(entry.get("rope_type") in ("dynamic", "longrope") for entry in ropes):
        return "rotary angles that depend on the longest sequence of a batch"
    if not _reads_rows_apart(model):
        return "layers that read a row of a batch differently from the same sequence alone"
    return None


def _reads_rows_apart(model: Any) -> bool:
    """Two sequences of different lengths, with a rejected token and padding in between, against each of them alone."""
    with suppress(*CLASS_ERRORS):
        layers = TransformersLayers(model)
        layers.begin(2)
        layers(padded([[1, 2, 0], [2]], model.device), [3, 1])
        layers.truncate([2, 1])
        together_BTH = layers(padded([[3, 1], [3]], model.device), [2, 1])
        for row_TH, token_ids in zip(together_BTH, ([1, 2, 3, 1], [2, 3]), strict=True):
            ids = torch.tensor([token_ids], device=model.device)
            alone_TH = layers.backbone(input_ids=ids).last_hidden_state[0, len(token_ids) // 2 :]
            if not reads_alike(row_TH[: len(alone_TH)], alone_TH):
                return False
        return True
    return False
