"""The feature store that a recipe asks for, opened or filled by passes of the target, here or by servers.

Every process of a launch makes its share of the shards that are missing, damaged or of something else.

Shards are of consecutive rows, the training rows first, and each is made by itself: whichever process makes it, after however many kills,
its bytes are the same. A killed process repeats the shard that it was at.

Shapes: B rows, T positions, L tokens of a row or document, A auxiliary layers, D target hidden size.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file
from torch import Tensor

from specdistill.engines.server import JsonAnswer, ServedModels, Server, asking, at
from specdistill.errors import UserError, logger
from specdistill.files.folders import alone, check_holds, check_writable
from specdistill.processes import of_all, share
from specdistill.progress import Cost, announce, progress
from specdistill.recipe.sections import WAITING, HiddenStatesConfig
from specdistill.rows.files import on_disk
from specdistill.rows.packing import PADDING_DOCUMENT, collate
from specdistill.rows.server_states import take, waiting
from specdistill.rows.store import (
    ASIDE,
    HEADER_BYTES,
    KEY,
    SHARD,
    FeatureStore,
    Origin,
    Shard,
    Tokens,
    numpy_rows,
    shard_name,
    unfit,
    write_shard,
)
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import Documents

SERVER_KEY = "hidden_states.server"
LOCK = "lock"
MOST_OTHER = 0.1  # of a vector's norm: rounding moves it less, another layer more


class Passed(JsonAnswer):
    path: str | None = at("kv_transfer_params", "hidden_states_path", default=None)


Rows = Sequence[dict[str, Any]]  # with the columns of specdistill.rows.packing
MakeFeatures = Callable[[Rows], Sequence[Tensor]]  # rows -> the features [A + 1, L, D] of each


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
    identity = target.identity
    computed = " in ".join(filter(None, (target.quantization, target.dtype)))
    computed += "" if autocast is None else f" under {str(autocast).removeprefix('torch.')}"
    layers = tuple(aux_layers)
    origin = Origin(
        identity.weights, identity.tokenizer, computed, config.dtype, target.hidden_size, layers
    )
    if config.mode == "offline":
        return FeatureStore.open(Path(str(config.path)), sets, origin)
    make = (
        by_servers(target, layers, config.server, config.timeout)
        if config.server
        else by_target(target, layers, autocast)
    )
    generated = OfGenerated(config.waiting, target, layers, make) if config.waiting else None
    store = fill(config, sets, origin, generated or make, batch_size, force=force)
    without = (
        f", {generated.num_rows:,} as they were generated"
        if generated and generated.num_rows
        else ""
    )
    logger.info(
        f"{config.path}: features of {store.num_rows - store.num_missing:,} of {store.num_rows:,} rows{without}"
    )
    return store


def by_target(
    target: FrozenTarget, aux_layers: Sequence[int], autocast: torch.dtype | None
) -> MakeFeatures:
    """Passes as a training's steps make them."""

    @torch.no_grad()
    def make(rows: Rows) -> list[Tensor]:
        batch = collate(rows)
        documents = Documents(batch["cumulative_lengths"].to(target.device), batch["longest"])
        ids_BT, positions_BT = (
            batch[name].to(target.device) for name in ("input_ids", "position_ids")
        )
        with torch.autocast(target.device.type, autocast, enabled=autocast is not None):
            features = target.features(
                ids_BT, aux_layers, position_ids_BT=positions_BT, documents=documents
            )
        lengths = (batch["document_ids"] != PADDING_DOCUMENT).sum(1).tolist()
        return [
            row[:, :length]
            for row, length in zip(torch.stack(features.tensors, dim=1).cpu(), lengths, strict=True)
        ]

    return make


def by_servers(
    target: FrozenTarget, aux_layers: Sequence[int], addresses: Sequence[str], timeout: float
) -> MakeFeatures:
    """Passes of vLLM servers of the target, between which the documents alternate. timeout: seconds that an answer may take.

    The answer to a request for one token names a file (see `server_states`).

    Raises UserError for servers of other layers or another dtype, ResourceError when one fails.
    """
    servers = [
        Server(address, key=SERVER_KEY, timeout=timeout, timeout_key="hidden_states.timeout")
        for address in addresses
    ]
    models = [server.json("/v1/models", ServedModels).data[0].id for server in servers]

    def states(number: int, ids: list[int]) -> Tensor:
        """[A + 1, L, D] of a document."""
        server, model = servers[number % len(servers)], models[number % len(servers)]
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        hidden_LND = take(
            Path(server.json("/v1/completions", Passed, body).path or ""), ids, server
        )
        return _features(hidden_LND, len(ids), target, aux_layers, server.address)

    def make(rows: Rows) -> list[Tensor]:
        split = [_documents(row) for row in rows]
        documents = [ids for row in split for ids in row]
        with asking(len(documents), *servers) as pool:
            found = iter(list(pool.map(states, range(len(documents)), documents)))
        return [torch.cat([next(found) for _ in row], dim=1) for row in split]

    return make


def _documents(row: dict[str, Any]) -> list[list[int]]:
    tokens = Tokens.of(row)
    return [
        ids.tolist()
        for ids in torch.from_numpy(tokens.input_ids).split(tokens.document_lengths.tolist())
    ]


def _features(
    hidden_LND: Tensor, num_tokens: int, target: FrozenTarget, aux_layers: Sequence[int], of: str
) -> Tensor:
    """[A + 1, L, D] of what a server wrote: of the layers that the draft reads, and the last one. Raises UserError for other ones.

    vLLM counts them as we do, passes them on in ascending order, and takes the last before the target's final norm, which is applied here.
    """
    layers = sorted({*aux_layers, target.num_layers})
    if (
        hidden_LND.shape != (num_tokens, len(layers), target.hidden_size)
        or str(hidden_LND.dtype) != f"torch.{target.dtype}"
    ):
        got = f"{of}, which writes {list(hidden_LND.shape)} {hidden_LND.dtype} for {num_tokens} tokens"
        raise UserError(
            SERVER_KEY,
            got=got,
            expected=f"layers {layers} of {target.hidden_size} in {target.dtype}",
        )
    wanted = [layers.index(layer) for layer in (*aux_layers, target.num_layers)]
    features_ALD = hidden_LND[:, wanted].transpose(0, 1).contiguous()
    with torch.no_grad():
        features_ALD[-1] = target.norm(features_ALD[-1].to(target.device)).cpu()
    return features_ALD


@dataclass
class OfGenerated:
    """Features of rows whose documents all wait in a folder (see `server_states`), without a pass; of others what `make` makes.

    At a document's last token, from which nothing is predicted, they are 0. Files do not say of which layers and target they are: the first
    row is made, too, and compared. num_rows: without a pass.
    """

    folder: Path
    target: FrozenTarget
    aux_layers: Sequence[int]
    make: MakeFeatures
    num_rows: int = 0

    def __call__(self, rows: Rows) -> list[Tensor]:
        found = [self._found(_documents(row)) for row in rows]
        for row, features in zip(rows, found, strict=True):
            if features is not None and self.num_rows == 0:
                self._compare(features, self.make([row])[0])
            self.num_rows += features is not None
        missing = [row for row, features in zip(rows, found, strict=True) if features is None]
        made = iter(self.make(missing) if missing else ())
        return [next(made) if features is None else features for features in found]

    def _found(self, documents: Sequence[list[int]]) -> Tensor | None:
        paths = [waiting(self.folder, ids[:-1]) for ids in documents]
        if not all(path.is_file() for path in paths):
            return None
        shape = self.target, self.aux_layers, f"the server of {self.folder}"
        parts = [
            _features(load_file(path)["hidden_states"], len(ids) - 1, *shape)
            for path, ids in zip(paths, documents, strict=True)
        ]
        return torch.cat([F.pad(features_ALD, (0, 0, 0, 1)) for features_ALD in parts], dim=1)

    def _compare(self, found_ALD: Tensor, made_ALD: Tensor) -> None:
        """Raises UserError for a row of which, in a layer, not most vectors are near."""
        error_AL = (found_ALD - made_ALD).float().norm(dim=-1) / made_ALD.float().norm(dim=-1)
        if not bool((error_AL.median(dim=1).values <= MOST_OTHER).all()):
            got = f"{self.folder}, hidden states of other layers or of another target"
            raise UserError(KEY, got=got, expected="none: remove the folder")


def fill(
    config: HiddenStatesConfig,
    sets: Sequence[Dataset],
    origin: Origin,
    make: MakeFeatures,
    batch_size: int,
    *,
    force: bool,
) -> FeatureStore:
    """The store of the rows of some sets, or of the first of them that have room in its `max_bytes`. Every process has to call it.

    batch_size: rows that `make` is given at a time. Prints which shards that were there are made again, and why, and after the first one
    what the others cost. Raises UserError while another launch fills the same folder, and ResourceError for a disk that is full, cannot be
    written or, unless `force`, has no room for the others; the next call resumes there.
    """
    folder, rows = Path(str(config.path)), concatenate_datasets(list(sets))
    check_writable(folder, KEY)
    rank, count = share()
    shards = _plan(rows, origin, config.shard_tokens, config.max_bytes)
    free = "free the disk, or set hidden_states.max_bytes; the same command resumes after the last shard"
    with ExitStack() as stack, on_disk(folder, free):
        if rank == 0:
            check_holds(
                folder,
                KEY,
                "a feature store",
                lambda name: name in (LOCK, ASIDE, WAITING) or SHARD.fullmatch(name) is not None,
            )
            stack.enter_context(alone(folder / LOCK, KEY, folder))
            _clear(folder, shards)
        of_all(None)
        own = list(shards.items())[rank::count]
        with progress("Storing features", sum(len(part) for _, part in own), "rows") as advance:
            is_announced = rank > 0
            for name, part in own:
                begin, shard_rows = time.monotonic(), rows.select(part)
                is_new = _complete(folder / name, shard_rows, origin, make, batch_size)
                left = sum(
                    len(other) for file, other in shards.items() if not (folder / file).exists()
                )
                if is_new and left and not is_announced:
                    is_announced, sample = (
                        True,
                        _cost(folder / name, shard_rows, (time.monotonic() - begin) / count),
                    )
                    estimate = sample.times(left / len(part))
                    announce(
                        "storing features",
                        estimate,
                        f"the first {len(part):,} rows",
                        folder,
                        force=force,
                    )
                advance(len(part))
        of_all(None)
        if rank == 0:
            for name in (ASIDE, WAITING):
                shutil.rmtree(folder / name, ignore_errors=True)
    try:
        return FeatureStore([Shard.open(folder / name, origin) for name in shards], sets, origin)
    except UserError as error:
        raise UserError(KEY, got=error.got, expected="a folder that all machines share") from error


def _plan(
    rows: Dataset, origin: Origin, shard_tokens: int, max_bytes: int | None
) -> dict[str, range]:
    """The rows of each shard, as many shards as have room."""
    per_shard = max(1, shard_tokens // len(rows[0]["input_ids"]))
    parts = [
        range(first, min(first + per_shard, len(rows))) for first in range(0, len(rows), per_shard)
    ]
    plan: dict[str, range] = {}
    room = max_bytes
    for index, part in enumerate(parts):
        if room is not None:
            room -= _size([Tokens.of(row) for row in numpy_rows(rows.select(part))], origin)
            if room < 0:
                break
        plan[shard_name(index, len(parts))] = part
    return plan


def _size(rows: Sequence[Tokens], origin: Origin) -> int:
    """Bytes of a shard, or a few more."""
    tokens, documents = sum(map(len, rows)), sum(len(row.document_lengths) for row in rows)
    return tokens * (origin.token_bytes + 4) + 4 * documents + 12 * len(rows) + HEADER_BYTES


def _clear(folder: Path, shards: dict[str, range]) -> None:
    """Remove what killed processes left, and shards of another number, which were of other rows."""
    shutil.rmtree(folder / ASIDE, ignore_errors=True)
    others = [
        path
        for path in folder.glob("*.safetensors")
        if path.name.rpartition("-")[2] != next(iter(shards), "").rpartition("-")[2]
    ]
    if shards and others:
        logger.info(f"{folder}: {len(others)} shards of other rows are removed")
        for path in others:
            path.unlink()


def _complete(
    path: Path, rows: Dataset, origin: Origin, make: MakeFeatures, batch_size: int
) -> bool:
    """Have a shard of these rows: the one that is there, if it is, or a new one. Whether it is new."""
    tokens = [Tokens.of(row) for row in numpy_rows(rows)]
    try:
        shard = Shard.open(path, origin)
        if [row.key for row in shard.rows] != [row.key for row in tokens]:
            raise unfit(path, "is of other rows")
        for index in range(len(tokens)):
            shard.checked(index)
        return False
    except UserError as error:
        if path.exists():
            logger.info(f"{error.got}: it is made again")
    features: list[Tensor] = []
    for batch in rows.iter(batch_size):
        features += make(
            [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        )
    write_shard(path, origin, tokens, features)
    return True


def _cost(path: Path, rows: Dataset, seconds: float) -> Cost:
    """The cost of a shard that was made in these seconds."""
    tokens, loss_tokens = (
        sum(len(Tokens.of(row)) for row in numpy_rows(rows)),
        sum(map(sum, rows["loss_mask"])),
    )
    return Cost(len(rows), tokens, loss_tokens, path.stat().st_size, seconds)
