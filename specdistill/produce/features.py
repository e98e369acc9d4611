"""The feature store that a recipe asks for, opened or filled by passes of the target, here or by servers.

Every process of a launch makes its share of the shards that are missing, damaged or of something else.

Shards are of consecutive rows, the training rows first, and each is made by itself: whichever process makes it, after however many kills,
its bytes are the same. A killed process repeats the shard that it was at.

Shapes: B rows, T positions, L tokens of a row or document, A auxiliary layers, D target hidden size.
"""

import fcntl
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdistill.engines.server import POLL_SECONDS, JsonAnswer, ServedModels, Server, asking, at
from specdistill.errors import ResourceError, UserError, logger
from specdistill.files.folders import alone, check_holds, check_writable
from specdistill.processes import of_all, share
from specdistill.progress import Cost, announce, progress
from specdistill.recipe.sections import HiddenStatesConfig
from specdistill.rows.files import on_disk
from specdistill.rows.packing import PADDING_DOCUMENT, collate
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
    origin = Origin(identity.weights, identity.tokenizer, computed, config.dtype, target.hidden_size, layers)
    if config.mode == "offline":
        return FeatureStore.open(Path(str(config.path)), sets, origin)
    make = by_servers(target, layers, config.server, config.timeout) if config.server else by_target(target, layers, autocast)
    store = fill(config, sets, origin, make, batch_size, force=force)
    logger.info(f"{config.path}: features of {store.num_rows - store.num_missing:,} of {store.num_rows:,} rows")
    return store


def by_target(target: FrozenTarget, aux_layers: Sequence[int], autocast: torch.dtype | None) -> MakeFeatures:
    """Passes as a training's steps make them."""

    @torch.no_grad()
    def make(rows: Rows) -> list[Tensor]:
        batch = collate(rows)
        documents = Documents(batch["cumulative_lengths"].to(target.device), batch["longest"])
        ids_BT, positions_BT = (batch[name].to(target.device) for name in ("input_ids", "position_ids"))
        with torch.autocast(target.device.type, autocast, enabled=autocast is not None):
            features = target.features(ids_BT, aux_layers, position_ids_BT=positions_BT, documents=documents)
        lengths = (batch["document_ids"] != PADDING_DOCUMENT).sum(1).tolist()
        return [row[:, :length] for row, length in zip(torch.stack(features.tensors, dim=1).cpu(), lengths, strict=True)]

    return make


def by_servers(target: FrozenTarget, aux_layers: Sequence[int], addresses: Sequence[str], timeout: float) -> MakeFeatures:
    """Passes of vLLM servers of the target, between which the documents alternate. timeout: seconds that an answer may take.

    The servers write the hidden states of every prompt to a folder (vLLM 0.32, started as docs/data.md says).
    The layers are those that the draft reads, and the last one. vLLM counts them as we do, passes them on in ascending order, and takes the
    last before the target's final norm, which is applied here. The answer to a request for one token names a safetensors file of
    `hidden_states` [L, layers, D] and `token_ids` [L]; the server holds a lock on a file next to it until it is whole.

    Raises UserError for servers of other layers or another dtype, ResourceError when one fails.
    """
    servers = [Server(address, key=SERVER_KEY, timeout=timeout, timeout_key="hidden_states.timeout") for address in addresses]
    models = [server.json("/v1/models", ServedModels).data[0].id for server in servers]
    layers = sorted({*aux_layers, target.num_layers})
    wanted = [layers.index(layer) for layer in (*aux_layers, target.num_layers)]

    def states(number: int, ids: list[int]) -> Tensor:
        """[A + 1, L, D] of a document, the last one normed."""
        server, model = servers[number % len(servers)], models[number % len(servers)]
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        hidden_LND = _read(Path(server.json("/v1/completions", Passed, body).path or ""), ids, server)
        if hidden_LND.shape != (len(ids), len(layers), target.hidden_size) or str(hidden_LND.dtype) != f"torch.{target.dtype}":
            got = f"{server.address}, which writes {list(hidden_LND.shape)} {hidden_LND.dtype} for {len(ids)} tokens"
            raise UserError(SERVER_KEY, got=got, expected=f"layers {layers} of {target.hidden_size} in {target.dtype}")
        features_ALD = hidden_LND[:, wanted].transpose(0, 1).contiguous()
        with torch.no_grad():
            features_ALD[-1] = target.norm(features_ALD[-1].to(target.device)).cpu()
        return features_ALD

    def make(rows: Rows) -> list[Tensor]:
        tokens = [Tokens.of(row) for row in rows]
        split = [torch.from_numpy(row.input_ids).split(row.document_lengths.tolist()) for row in tokens]
        documents = [ids.tolist() for row in split for ids in row]
        with asking(len(documents), *servers) as pool:
            found = iter(list(pool.map(states, range(len(documents)), documents)))
        return [torch.cat([next(found) for _ in row], dim=1) for row in split]

    return make


def _read(path: Path, ids: list[int], server: Server) -> Tensor:
    """The hidden states [L, layers, D] that a server has written for a prompt; its files are removed, and no others."""
    try:
        lock = path.with_name(f"{path.name}.lock")
        if lock.exists() and not lock.is_file():  # to open a pipe waits for who writes
            raise ValueError(f"{lock}, which is no file")
        with lock.open() as held:
            deadline = time.monotonic() + server.timeout
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break  # the file is whole
                if server.is_closed or time.monotonic() > deadline:
                    what = f"{server.address} did not write {path} in {server.timeout:g} s"
                    raise ResourceError(what, next_step=f"look at its log, or raise {server.timeout_key}")
                time.sleep(POLL_SECONDS)
            tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        what = f"{server.address} wrote no hidden states that this machine can read ({error})"
        next_step = "start it with ExampleHiddenStatesConnector and a folder that both see (docs/data.md)"
        raise ResourceError(what, next_step=next_step) from error
    if set(tensors) != {"hidden_states", "token_ids"} or tensors["token_ids"].tolist() != ids:
        what = f"{server.address} names {path}, which are not the hidden states of its prompt"
        raise ResourceError(what, next_step="look at its log")
    path.unlink()
    lock.unlink()
    return tensors["hidden_states"]


def fill(
    config: HiddenStatesConfig, sets: Sequence[Dataset], origin: Origin, make: MakeFeatures, batch_size: int, *, force: bool
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
            check_holds(folder, KEY, "a feature store", lambda name: name in (LOCK, ASIDE) or SHARD.fullmatch(name) is not None)
            stack.enter_context(alone(folder / LOCK, KEY, folder))
            _clear(folder, shards)
        of_all(None)
        own = list(shards.items())[rank::count]
        with progress("Storing features", sum(len(part) for _, part in own), "rows") as advance:
            is_announced = rank > 0
            for name, part in own:
                begin, shard_rows = time.monotonic(), rows.select(part)
                is_new = _complete(folder / name, shard_rows, origin, make, batch_size)
                left = sum(len(other) for file, other in shards.items() if not (folder / file).exists())
                if is_new and left and not is_announced:
                    is_announced, sample = True, _cost(folder / name, shard_rows, (time.monotonic() - begin) / count)
                    estimate = sample.times(left / len(part))
                    announce("storing features", estimate, f"the first {len(part):,} rows", folder, force=force)
                advance(len(part))
        of_all(None)
        if rank == 0:
            shutil.rmtree(folder / ASIDE, ignore_errors=True)
    try:
        return FeatureStore([Shard.open(folder / name, origin) for name in shards], sets, origin)
    except UserError as error:
        raise UserError(KEY, got=error.got, expected="a folder that all machines share") from error


def _plan(rows: Dataset, origin: Origin, shard_tokens: int, max_bytes: int | None) -> dict[str, range]:
    """The rows of each shard, as many shards as have room."""
    per_shard = max(1, shard_tokens // len(rows[0]["input_ids"]))
    parts = [range(first, min(first + per_shard, len(rows))) for first in range(0, len(rows), per_shard)]
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


def _complete(path: Path, rows: Dataset, origin: Origin, make: MakeFeatures, batch_size: int) -> bool:
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
        features += make([dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)])
    write_shard(path, origin, tokens, features)
    return True


def _cost(path: Path, rows: Dataset, seconds: float) -> Cost:
    """The cost of a shard that was made in these seconds."""
    tokens, loss_tokens = sum(len(Tokens.of(row)) for row in numpy_rows(rows)), sum(map(sum, rows["loss_mask"]))
    return Cost(len(rows), tokens, loss_tokens, path.stat().st_size, seconds)
