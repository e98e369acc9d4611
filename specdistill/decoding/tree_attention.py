"""Trees in models of transformers: attention masks, the KV cache of an accepted path, and a test that a target reads branches apart.

Shapes: T nodes of a pass, S positions in kv_cache, N nodes of a tree.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding.tree import ROOT, Step, Tree
from specdistill.errors import UserError
from specdistill.targets.frozen import Features, FrozenTarget

MASKED = ("sdpa", "eager")  # attention implementations of transformers that take any mask
PROBE = Tree((ROOT, ROOT, 0, 1))  # two branches of two tokens


def attention_masks(step: Step, text_config: Any, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """A model's `attention_mask`: 0 or the least finite number [1, 1, T, S], one for each kind of layer where they differ.

    Raises UserError for attention that is neither full nor over a window.
    """
    window = getattr(text_config, "sliding_window", None)
    windows = {"full_attention": None, "sliding_attention": window}
    # A config without kinds has one: windowed if it has a window's size.
    kinds = set(getattr(text_config, "layer_types", None) or ["sliding_attention"])
    if not kinds <= windows.keys():
        got = f"layers with {', '.join(sorted(kinds - windows.keys()))}"
        raise UserError("eval.tree", got=got, expected="null: a tree needs full attention or a sliding window")
    masks = {}
    for kind in kinds:
        hidden_TS = ~step.visible(windows[kind])
        masks[kind] = (hidden_TS.to(dtype) * torch.finfo(dtype).min)[None, None]
    # Models with one kind of layer take its mask, models with several a mapping.
    return next(iter(masks.values())) if len(masks) == 1 else masks


def read(
    target: FrozenTarget,
    token_ids: list[int],
    cache: DynamicCache,
    aux_layers: Sequence[int] = (),
    step: Step | None = None,
) -> Features:
    """The target over tokens that continue the cached ones, as a chain or as the nodes of a tree."""
    ids = torch.tensor([token_ids], device=target.device)
    if step is None:
        return target.features(ids, aux_layers, past_key_values=cache)
    positions = torch.tensor([step.positions_T], device=target.device)
    masks = attention_masks(step, target.config, target.model.dtype)
    return target.features(ids, aux_layers, position_ids_BT=positions, attention_mask=masks, past_key_values=cache)


def keep_path(cache: DynamicCache, num_nodes: int, path: Sequence[int]) -> None:
    """Keep the path's nodes of a tree at the end of a cache, and move them together."""
    first = cache.get_seq_length() - num_nodes
    slots = [first + node for node in path]
    if slots != list(range(first, first + len(path))):
        layers: Any = cache.layers
        for layer in layers:
            for kept in (layer.keys, layer.values):
                if kept is not None:  # layers that share another's keys stay empty
                    kept[:, :, first : first + len(path)] = kept[:, :, slots]
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
        raise UserError("target.attn", got=got, expected=f"{' or '.join(MASKED)}, or eval.tree=null")
    text, nodes = [1, 2, 3], [4, 5, 6, 7]
    cache = DynamicCache()
    read(target, text[:-1], cache)
    step = Step.whole(PROBE, len(text) - 1, target.device)
    together = read(target, [text[-1], *nodes], cache, step=step).last_hidden[0]
    for path in ([0, 2], [1, 3]):
        alone = read(target, [*text, *(nodes[node] for node in path)], DynamicCache()).last_hidden[0, -2:]
        distance = (together[[node + 1 for node in path]] - alone).norm() / alone.norm()
        if not distance < torch.finfo(alone.dtype).eps ** 0.5:
            got = f"{name}, which reads a branch of a tree differently from the same tokens alone"
            raise UserError(key, got=got, expected="null, or a target that respects mask and position ids")
