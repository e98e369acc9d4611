"""Where the features of a store come from: passes of the target, here or in vLLM, and the store that a recipe asks for."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from specdistill.data.packing import PADDING_DOCUMENT, collate
from specdistill.features.fill import Make, Rows, fill
from specdistill.features.servers import by_servers
from specdistill.features.shard import Origin
from specdistill.features.store import FeatureStore
from specdistill.recipe.sections import HiddenStatesConfig
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import Documents


def feature_store(
    config: HiddenStatesConfig,
    target: FrozenTarget,
    aux_layers: Sequence[int],
    sets: Sequence[Dataset],
    *,
    autocast: torch.dtype | None,
    batch_size: int,
    force: bool = False,
) -> FeatureStore | None:
    """The store that `hidden_states:` asks for, filled as far as it asks; None: every step has the target make its features.

    autocast: what training multiplies matrices in under mixed precision. batch_size: rows of a pass. force: fill it although the disk has
    no room for what is estimated. Every process has to call it. Raises UserError for a store that cannot be used, ResourceError when the
    disk or a server fails.
    """
    if config.mode == "online":
        return None
    identity, folder = target.identity, Path(str(config.path))
    computed = target.dtype if autocast is None else f"{target.dtype} under {str(autocast).removeprefix('torch.')}"
    layers = tuple(aux_layers)
    origin = Origin(identity.weights, identity.tokenizer, computed, config.dtype, target.hidden_size, layers)
    if config.mode == "offline":
        return FeatureStore.open(folder, sets, origin)
    timeout = config.timeout
    make = by_servers(target, layers, config.server, timeout) if config.server else by_target(target, layers, autocast)
    limits = config.shard_tokens, config.max_bytes
    store = fill(folder, sets, origin, make, *limits, batch_size=batch_size, force=force)
    print(f"{folder}: features of {store.num_rows - store.num_missing:,} of {store.num_rows:,} rows", file=sys.stderr)
    return store


def by_target(target: FrozenTarget, aux_layers: Sequence[int], autocast: torch.dtype | None) -> Make:
    """Passes as a training's steps make them."""

    @torch.no_grad()
    def make(rows: Rows) -> list[Tensor]:
        batch = collate(rows)
        documents = Documents(batch["cumulative_lengths"].to(target.device), batch["longest"])
        ids_BT, positions_BT = (batch[name].to(target.device) for name in ("input_ids", "position_ids"))
        with torch.autocast(target.device.type, autocast, enabled=autocast is not None):
            features = target.features(ids_BT, aux_layers, position_ids_BT=positions_BT, documents=documents)
        lengths = (batch["document_ids"] != PADDING_DOCUMENT).sum(1).tolist()
        return [row[:, :length] for row, length in zip(features.stacked().cpu(), lengths, strict=True)]

    return make
