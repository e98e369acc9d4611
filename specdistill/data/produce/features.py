"""Open or fill the feature store that a recipe asks for.

Features are made by passes of the target in this process, or by servers. Every process of a launch
makes its share of the shards that are missing, damaged or of another origin.

A shard holds consecutive rows, the training rows first. Each shard is made by itself: whichever
process makes it, after however many kills, its bytes are the same. A process that was killed
repeats the shard that it was making.

Shapes: B rows, T positions, L tokens of a row or document, A auxiliary layers, D target hidden
size, N layers that a server writes.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset, concatenate_datasets
from numpy.typing import ArrayLike
from safetensors.torch import load_file
from torch import Tensor

from specdistill.common.errors import UserError, logger
from specdistill.common.folders import check_holds, check_writable, exclusive_lock
from specdistill.common.processes import all_gather_object, find_rank_and_world_size
from specdistill.common.progress import Cost, announce, show_progress
from specdistill.data.rows.files import on_disk
from specdistill.data.rows.packing import PADDING_DOCUMENT, collate
from specdistill.data.rows.store import (
    HEADER_BYTES,
    KEY,
    SHARD,
    STAGING_DIR,
    FeatureStore,
    Origin,
    Shard,
    Tokens,
    convert_rows_to_numpy,
    find_waiting_path,
    make_unfit_error,
    shard_name,
    take_hidden_states,
    write_shard,
)
from specdistill.recipe.sections import (
    WAITING_FOLDER,
    HiddenStatesConfig,
    HybridStates,
    OfflineStates,
    OnlineStates,
)
from specdistill.serving.engines.server import (
    JsonAnswer,
    ServedModels,
    Server,
    locate_field,
    start_request_threads,
)
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import Documents

SERVER_KEY = "hidden_states.server"
LOCK = "lock"
FREE_DISK_HINT = (
    "free the disk, or set hidden_states.max_bytes; the same command resumes after the last shard"
)
# The largest difference of stored from computed features, as a share of the vector's norm. Rounding
# changes a vector by less; the features of another layer differ by more.
MAX_RELATIVE_DIFFERENCE = 0.1


class PromptAnswer(JsonAnswer):
    """The answer of a server that has read a prompt, with the path of its file of hidden states."""

    path: str | None = locate_field("kv_transfer_params", "hidden_states_path", default=None)


Rows = Sequence[Mapping[str, ArrayLike]]  # with the columns of specdistill.data.rows.packing
MakeFeatures = Callable[[Rows], Sequence[Tensor]]  # rows -> the features [A + 1, L, D] of each


def open_feature_store(
    config: HiddenStatesConfig,
    target: FrozenTarget,
    aux_layers: Sequence[int],
    sets: Sequence[Dataset],
    *,
    autocast: torch.dtype | None,
    batch_size: int,
    force: bool = False,
) -> FeatureStore | None:
    """Open the store that `hidden_states:` asks for, and fill it if the recipe says so.

    Every process of a launch has to call this.

    Args:
        config: the `hidden_states:` section.
        target: the target.
        aux_layers: the auxiliary layers that the draft reads.
        sets: the data sets of packed rows, training rows first.
        autocast: the dtype in which training multiplies matrices under mixed precision; None
            without it.
        batch_size: rows of a pass.
        force: fill the store even if the disk has less room than the estimate asks for.

    Returns:
        The store; None if the target makes the features in every training step.

    Raises:
        UserError: for a store that cannot be used.
        ResourceError: when the disk or a server fails.
    """
    # Online features are computed in each training step, without a store.
    if isinstance(config, OnlineStates):
        return None

    # The origin records the target, the dtypes and the layers, on which the features depend.
    identity = target.identity
    computed = " in ".join(name for name in (target.quantization, target.dtype) if name)
    computed += "" if autocast is None else f" under {str(autocast).removeprefix('torch.')}"
    layers = tuple(aux_layers)
    origin = Origin(
        identity.weights, identity.tokenizer, computed, config.dtype, target.hidden_size, layers
    )

    # Offline, the store must be complete.
    if isinstance(config, OfflineStates):
        return FeatureStore.open(Path(config.path), sets, origin)

    # Choose how missing features are made: by servers, or by passes of the target in this process.
    # Hidden states that servers kept while they generated the rows need no pass at all.
    compute = (
        compute_by_servers(target, layers, config.server, config.timeout)
        if config.server
        else compute_by_target(target, layers, autocast)
    )
    generated = (
        GeneratedFeatures(config.waiting, target, layers, compute) if config.waiting else None
    )
    store = fill(config, sets, origin, generated or compute, batch_size, force=force)

    # Say how many rows the store has.
    num_generated = generated.num_rows if generated else 0
    generated_note = f", {num_generated:,} as they were generated" if num_generated else ""
    num_stored = store.num_rows - store.num_missing
    logger.info(
        f"{config.path}: features of {num_stored:,} of {store.num_rows:,} rows{generated_note}"
    )
    return store


def compute_by_target(
    target: FrozenTarget, aux_layers: Sequence[int], autocast: torch.dtype | None
) -> MakeFeatures:
    """Return a function that makes features by passes of the target, as a training step does.

    Args:
        target: the target.
        aux_layers: the auxiliary layers that the draft reads.
        autocast: the dtype in which training multiplies matrices under mixed precision; None
            without it.
    """

    @torch.no_grad()
    def make(rows: Rows) -> list[Tensor]:
        """Run the target over a batch of rows, and return the features [A + 1, L, D] of each."""
        batch = collate(rows)
        documents = Documents(batch["cumulative_lengths"].to(target.device), batch["longest"])
        ids_BT, positions_BT = (
            batch[name].to(target.device) for name in ("input_ids", "position_ids")
        )
        with torch.autocast(target.device.type, autocast, enabled=autocast is not None):
            features = target.features(
                ids_BT, aux_layers, position_ids_BT=positions_BT, documents=documents
            )

        # Stack the layers to [B, A + 1, T, D], and cut the padding off each row.
        features_BATD = torch.stack(features.tensors, dim=1).cpu()
        lengths = (batch["document_ids"] != PADDING_DOCUMENT).sum(1).tolist()
        return [
            features_ATD[:, :length]
            for features_ATD, length in zip(features_BATD, lengths, strict=True)
        ]

    return make


def compute_by_servers(
    target: FrozenTarget, aux_layers: Sequence[int], addresses: Sequence[str], timeout: float
) -> MakeFeatures:
    """Return a function that makes features by passes of the target on vLLM servers.

    Each document is sent as a prompt, with a request for one token. The server writes the hidden
    states of the prompt to a file, and its answer names the file (see
    `specdistill.data.rows.store`). Documents alternate between the servers.

    Args:
        target: the target, whose final norm is applied here.
        aux_layers: the auxiliary layers that the draft reads.
        addresses: addresses of the servers.
        timeout: seconds that an answer may take.

    Raises:
        UserError: for servers that write other layers or another dtype.
        ResourceError: when a server fails.
    """
    servers = [
        Server(address, key=SERVER_KEY, timeout=timeout, timeout_key="hidden_states.timeout")
        for address in addresses
    ]
    models = [server.json("/v1/models", ServedModels).data[0].id for server in servers]

    # Requests go to the servers in turn.
    def request_features(number: int, ids: list[int]) -> Tensor:
        """Have a server read a document, and return its features [A + 1, L, D]."""
        server = servers[number % len(servers)]
        model = models[number % len(servers)]
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        answer = server.json("/v1/completions", PromptAnswer, body)
        hidden_LND = take_hidden_states(Path(answer.path or ""), ids, server)
        return _select_features(hidden_LND, len(ids), target, aux_layers, server.address)

    # Ask for the documents of all rows at once. Then join the documents of each row along L.
    def make(rows: Rows) -> list[Tensor]:
        """Have the servers read a batch of rows, and return the features [A + 1, L, D] of each."""
        documents_by_row = [_split_documents(row) for row in rows]
        documents = list(chain.from_iterable(documents_by_row))
        with start_request_threads(len(documents), *servers) as pool:
            document_features = list(pool.map(request_features, range(len(documents)), documents))

        remaining = iter(document_features)
        return [
            torch.cat(list(islice(remaining, len(row_documents))), dim=1)
            for row_documents in documents_by_row
        ]

    return make


def _split_documents(row: Mapping[str, ArrayLike]) -> list[list[int]]:
    """Return the token ids of each document in a packed row."""
    tokens = Tokens.from_row(row)
    return [
        ids.tolist()
        for ids in torch.from_numpy(tokens.input_ids).split(tokens.document_lengths.tolist())
    ]


def _select_features(
    hidden_LND: Tensor,
    num_tokens: int,
    target: FrozenTarget,
    aux_layers: Sequence[int],
    server_name: str,
) -> Tensor:
    """Select the features that the draft reads from the hidden states that a server wrote.

    vLLM numbers the layers as we do and writes them in ascending order. It writes the last hidden
    state from before the target's final norm, so the norm is applied here.

    Args:
        hidden_LND: [L, N, D], the hidden states that the server wrote.
        num_tokens: L, the number of tokens that were sent to it.
        target: the target.
        aux_layers: the auxiliary layers that the draft reads.
        server_name: the name of the server in errors.

    Returns:
        The features [A + 1, L, D] of the auxiliary layers and of the last layer.

    Raises:
        UserError: if the hidden states are of other layers, another shape or another dtype.
    """
    # The server must have written these layers, in the dtype of the target.
    layers = sorted({*aux_layers, target.num_layers})
    if (
        hidden_LND.shape != (num_tokens, len(layers), target.hidden_size)
        or str(hidden_LND.dtype) != f"torch.{target.dtype}"
    ):
        raise UserError(
            SERVER_KEY,
            got=f"{server_name}, which writes {list(hidden_LND.shape)} {hidden_LND.dtype} for"
            f" {num_tokens} tokens",
            expected=f"layers {layers} of {target.hidden_size} in {target.dtype}",
        )

    # Take the layers in the draft's order, as [A + 1, L, D], and apply the final norm to the last.
    layer_indices = [layers.index(layer) for layer in (*aux_layers, target.num_layers)]
    features_ALD = hidden_LND[:, layer_indices].transpose(0, 1).contiguous()
    with torch.no_grad():
        features_ALD[-1] = target.norm(features_ALD[-1].to(target.device)).cpu()
    return features_ALD


@dataclass
class GeneratedFeatures:
    """Makes the features of rows from hidden states that servers kept while generating the rows.

    Such hidden states wait in a folder (see `specdistill.data.rows.store`). A row whose documents
    all wait there needs no pass of the target. Other rows are passed to `make`. At a document's
    last token, from which nothing is predicted, the features are 0.

    The files do not say which layers and which target they come from. Therefore the features of the
    first row are also computed by `make`, and compared.

    Attributes:
        folder: the folder where the hidden states wait.
        target: the target.
        aux_layers: the auxiliary layers that the draft reads.
        make: makes the features of the other rows.
        num_rows: how many rows needed no pass so far.
    """

    folder: Path
    target: FrozenTarget
    aux_layers: Sequence[int]
    make: MakeFeatures
    num_rows: int = 0

    def __call__(self, rows: Rows) -> list[Tensor]:
        """Return the features [A + 1, L, D] of each row, from waiting files where there are any."""
        # Read the rows that wait, and check the first of them against a pass of the target.
        features_of_rows = [self._read_waiting(_split_documents(row)) for row in rows]
        for row, features in zip(rows, features_of_rows, strict=True):
            if features is not None and self.num_rows == 0:
                self._compare(features, self.make([row])[0])
            self.num_rows += features is not None

        # Compute the rows that do not wait in one batch, and put them between those that do.
        missing_rows = [
            row for row, features in zip(rows, features_of_rows, strict=True) if features is None
        ]
        computed_features = iter(self.make(missing_rows) if missing_rows else ())
        return [
            next(computed_features) if features is None else features
            for features in features_of_rows
        ]

    def _read_waiting(self, documents: Sequence[list[int]]) -> Tensor | None:
        """Read the features [A + 1, L, D] of a row; None unless files of all its documents wait."""
        # The target has not read a document's last token, so the file's tokens lack it.
        paths = [find_waiting_path(self.folder, ids[:-1]) for ids in documents]
        if not all(path.is_file() for path in paths):
            return None

        # Read the documents, give each a last position of zeros, and join them along L.
        parts = [
            _select_features(
                load_file(path)["hidden_states"],
                len(ids) - 1,
                self.target,
                self.aux_layers,
                f"the server of {self.folder}",
            )
            for path, ids in zip(paths, documents, strict=True)
        ]
        return torch.cat([F.pad(features_ALD, (0, 0, 0, 1)) for features_ALD in parts], dim=1)

    def _compare(self, waiting_ALD: Tensor, computed_ALD: Tensor) -> None:
        """Check that waiting features of a row equal those of a pass, up to rounding.

        Args:
            waiting_ALD: [A + 1, L, D], the features that waited.
            computed_ALD: [A + 1, L, D], the features of the same row, made by a pass.

        Raises:
            UserError: if in any layer the median error of the vectors is above
                MAX_RELATIVE_DIFFERENCE of their norm.
        """
        # The median ignores the last token of each document, whose features are 0 here. A layer of
        # NaN fails the comparison, too.
        difference_AL = (waiting_ALD - computed_ALD).float().norm(dim=-1)
        error_AL = difference_AL / computed_ALD.float().norm(dim=-1)
        if not bool((error_AL.median(dim=1).values <= MAX_RELATIVE_DIFFERENCE).all()):
            raise UserError(
                KEY,
                got=f"{self.folder}, hidden states of other layers or of another target",
                expected="hidden states of this target; remove the folder to compute them",
            )


def fill(
    config: HybridStates,
    sets: Sequence[Dataset],
    origin: Origin,
    make: MakeFeatures,
    batch_size: int,
    *,
    force: bool,
) -> FeatureStore:
    """Fill a store with the rows of some data sets, and open it.

    If `max_bytes` has no room for all rows, the store gets the first of them. Every process of a
    launch has to call this. Log lines say which shards are made again and why, and after the first
    shard what the other shards will cost.

    Args:
        config: the `hidden_states:` section.
        sets: the data sets of packed rows.
        origin: where the features come from.
        make: the function that computes the features of rows.
        batch_size: rows that `make` gets at a time.
        force: continue even if the disk has less room than the estimate asks for.

    Returns:
        The store.

    Raises:
        UserError: while another launch fills the same folder, and if machines do not share it.
        ResourceError: for a disk that is full or cannot be written or, unless `force`, has no room
            for the other shards. The next call resumes there.
    """
    folder = Path(config.path)
    rows = concatenate_datasets(list(sets))

    # Plan which rows go into which shard.
    check_writable(folder, KEY)
    rank, _ = find_rank_and_world_size()
    shards = _plan_shards(rows, origin, config.shard_tokens, config.max_bytes)
    with ExitStack() as stack, on_disk(folder, FREE_DISK_HINT):
        # The first process prepares the folder before any process writes to it, and keeps a lock on
        # it, so that no second launch fills the same folder.
        if rank == 0:
            check_holds(
                folder,
                KEY,
                "a feature store",
                lambda name: (
                    name in (LOCK, STAGING_DIR, WAITING_FOLDER) or SHARD.fullmatch(name) is not None
                ),
            )
            stack.enter_context(
                exclusive_lock(
                    folder / LOCK, KEY, folder, saves_memory="train.per_device_train_batch_size"
                )
            )
            _remove_old_files(folder, shards)
        all_gather_object(None)  # a barrier

        # Each process makes its share of the shards.
        _make_shards(folder, rows, shards, origin, make, batch_size, force=force)
        all_gather_object(None)  # a barrier

        # All shards are complete, so the temporary files and waiting hidden states are not needed.
        if rank == 0:
            for name in (STAGING_DIR, WAITING_FOLDER):
                shutil.rmtree(folder / name, ignore_errors=True)

    # If a shard is missing here, the processes did not write to the same folder.
    try:
        return FeatureStore([Shard.open(folder / name, origin) for name in shards], sets, origin)
    except UserError as error:
        raise UserError(KEY, got=error.got, expected="a folder that all machines share") from error


def _make_shards(
    folder: Path,
    rows: Dataset,
    shards: Mapping[str, range],
    origin: Origin,
    make: MakeFeatures,
    batch_size: int,
    *,
    force: bool,
) -> None:
    """Make this process's share of the shards that are not there yet.

    After its first new shard, the first process announces what the other shards will cost.

    Args:
        folder: the folder of the store.
        rows: the packed rows of all shards.
        shards: the rows of each shard, by the shard's file name.
        origin: where the features come from.
        make: the function that computes the features of rows.
        batch_size: rows that `make` gets at a time.
        force: continue even if the disk has less room than the estimate asks for.
    """
    rank, world_size = find_rank_and_world_size()
    local_shards = list(shards.items())[rank::world_size]
    num_local_rows = sum(len(part) for _, part in local_shards)
    with show_progress("Storing features", num_local_rows, "rows") as advance:
        is_announced = rank > 0
        for name, part in local_shards:
            begin = time.monotonic()
            shard_rows = rows.select(part)
            is_new = _make_shard_if_missing(folder / name, shard_rows, origin, make, batch_size)

            # Announce the cost of the missing rows, in proportion to the cost of this shard. All
            # processes work at the same time.
            num_rows_left = sum(
                len(other_part)
                for other_name, other_part in shards.items()
                if not (folder / other_name).exists()
            )
            if is_new and num_rows_left and not is_announced:
                is_announced = True
                seconds = (time.monotonic() - begin) / world_size
                shard_cost = _compute_shard_cost(folder / name, shard_rows, seconds)
                announce(
                    "storing features",
                    shard_cost.times(num_rows_left / len(part)),
                    f"the first {len(part):,} rows",
                    folder,
                    force=force,
                )
            advance(len(part))


def _plan_shards(
    rows: Dataset, origin: Origin, shard_tokens: int, max_bytes: int | None
) -> dict[str, range]:
    """Decide which rows go into which shard, for as many shards as `max_bytes` has room for.

    Args:
        rows: the packed rows.
        origin: where the features come from, which says how many bytes a token takes.
        shard_tokens: tokens of a shard.
        max_bytes: the most bytes of all shards; None for no limit.

    Returns:
        The rows of each shard, by the shard's file name.
    """
    # Divide the rows into consecutive parts.
    rows_per_shard = max(1, shard_tokens // len(rows[0]["input_ids"]))
    parts = [
        range(first, min(first + rows_per_shard, len(rows)))
        for first in range(0, len(rows), rows_per_shard)
    ]

    # Take shards in order until one has no room. The names count all shards, made or not.
    plan: dict[str, range] = {}
    free_bytes = max_bytes
    for index, part in enumerate(parts):
        if free_bytes is not None:
            tokens = [Tokens.from_row(row) for row in convert_rows_to_numpy(rows.select(part))]
            free_bytes -= _estimate_shard_bytes(tokens, origin)
            if free_bytes < 0:
                break
        plan[shard_name(index, len(parts))] = part
    return plan


def _estimate_shard_bytes(rows: Sequence[Tokens], origin: Origin) -> int:
    """Estimate the bytes of a shard; the estimate is never too low.

    A token takes its features and 4 bytes for its id. A document takes 4 bytes for its length. A
    row takes 4 bytes for its number of documents and 8 for its checksum.
    """
    num_tokens = sum(map(len, rows))
    num_documents = sum(len(row.document_lengths) for row in rows)
    return num_tokens * (origin.token_bytes + 4) + 4 * num_documents + 12 * len(rows) + HEADER_BYTES


def _remove_old_files(folder: Path, shards: Mapping[str, range]) -> None:
    """Remove temporary files of killed processes, and shards that were made of other rows.

    A shard's name ends with the total number of shards. Another number means other rows.
    """
    shutil.rmtree(folder / STAGING_DIR, ignore_errors=True)
    total = next(iter(shards), "").rpartition("-")[2]
    foreign_shards = [
        path for path in folder.glob("*.safetensors") if path.name.rpartition("-")[2] != total
    ]
    if shards and foreign_shards:
        logger.info(f"{folder}: removed {len(foreign_shards)} shards of other rows")
        for path in foreign_shards:
            path.unlink()


def _make_shard_if_missing(
    path: Path, rows: Dataset, origin: Origin, make: MakeFeatures, batch_size: int
) -> bool:
    """Make the shard of these rows, unless it is already there and undamaged.

    Args:
        path: the file of the shard.
        rows: its rows.
        origin: where the features come from.
        make: the function that computes the features of rows.
        batch_size: rows that `make` gets at a time.

    Returns:
        Whether the shard is new.
    """
    # Keep a shard of the same rows and the same origin, if the checksum of each row is right.
    tokens = [Tokens.from_row(row) for row in convert_rows_to_numpy(rows)]
    try:
        shard = Shard.open(path, origin)
        if [row.key for row in shard.rows] != [row.key for row in tokens]:
            raise make_unfit_error(path, "holds other rows")
        for index in range(len(tokens)):
            shard.checked(index)
        return False
    except UserError as error:
        if path.exists():
            logger.info(f"{error.got}: making it again")

    # Make the features batch by batch. `make` takes rows, and datasets gives columns.
    features: list[Tensor] = []
    for batch in rows.iter(batch_size):
        batch_rows = [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]
        features += make(batch_rows)
    write_shard(path, origin, tokens, features)
    return True


def _compute_shard_cost(path: Path, rows: Dataset, seconds: float) -> Cost:
    """Return the cost of a shard that took this many seconds to make."""
    return Cost(
        rows=len(rows),
        tokens=sum(len(Tokens.from_row(row)) for row in convert_rows_to_numpy(rows)),
        loss_tokens=sum(map(sum, rows["loss_mask"])),
        num_bytes=path.stat().st_size,
        seconds=seconds,
    )
