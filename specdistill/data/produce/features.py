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
# The largest difference between stored and computed features, as a share of the vector's norm.
# Rounding changes a vector by less; the features of another layer differ by more.
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
    """Open the feature store of a recipe: the target's hidden states on disk, for training.

    In offline mode the store must be complete. In hybrid mode missing features are computed first.
    All processes of a distributed launch must call this function, because they share that work.

    Args:
        config: the `hidden_states:` section of the recipe.
        target: the target model.
        aux_layers: the auxiliary layers, whose outputs the draft reads besides the last layer's.
        sets: the data sets of packed rows, training rows first.
        autocast: the dtype of matrix products if training uses mixed precision; otherwise None.
        batch_size: how many rows the target reads in one forward pass.
        force: fill the store even if the estimate says that the disk is too small.

    Returns:
        The store; None in online mode, in which each training step computes its features.

    Raises:
        UserError: for a store that cannot be used.
        ResourceError: when the disk or a server fails.
    """
    # In online mode there is no store.
    if isinstance(config, OnlineStates):
        return None

    # The origin records what the features depend on: the target, the dtypes and the layers. In
    # `computed`, "bfloat16 under float16" means a bfloat16 target under float16 mixed precision.
    identity = target.identity
    computed = " in ".join(name for name in (target.quantization, target.dtype) if name)
    computed += "" if autocast is None else f" under {str(autocast).removeprefix('torch.')}"
    layers = tuple(aux_layers)
    origin = Origin(
        identity.weights, identity.tokenizer, computed, config.dtype, target.hidden_size, layers
    )

    # In offline mode the store must be complete.
    if isinstance(config, OfflineStates):
        return FeatureStore.open(Path(config.path), sets, origin)

    # In hybrid mode, choose how missing features are computed: by servers, or by the target in this
    # process. If servers kept hidden states while they generated the rows, these are used first.
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
    generated_note = f" ({num_generated:,} kept while generating)" if num_generated else ""
    num_stored = store.num_rows - store.num_missing
    logger.info(
        f"{config.path}: stored features of {num_stored:,} of {store.num_rows:,}"
        f" rows{generated_note}"
    )
    return store


def compute_by_target(
    target: FrozenTarget, aux_layers: Sequence[int], autocast: torch.dtype | None
) -> MakeFeatures:
    """Return a function that computes features with the target in this process.

    The function computes the features just as a training step without a feature store does.

    Args:
        target: the target model.
        aux_layers: the auxiliary layers, whose outputs the draft reads besides the last layer's.
        autocast: the dtype of matrix products if training uses mixed precision; otherwise None.
    """

    @torch.no_grad()
    def make(rows: Rows) -> list[Tensor]:
        """Run the target over a batch of packed rows, and return its hidden states.

        Returns:
            For each row [A + 1, L, D]: the outputs of A auxiliary layers and of the last layer, at
            the L tokens of the row (padding left out), with the target's hidden size D.
        """
        # Build a batch of B rows with T positions. A row holds several documents, and tokens
        # attend only to their own document.
        batch = collate(rows)
        documents = Documents(batch["cumulative_lengths"].to(target.device), batch["longest"])
        ids_BT, positions_BT = (
            batch[name].to(target.device) for name in ("input_ids", "position_ids")
        )
        with torch.autocast(target.device.type, autocast, enabled=autocast is not None):
            features = target.features(
                ids_BT, aux_layers, position_ids_BT=positions_BT, documents=documents
            )

        # Stack the layers to [B, A + 1, T, D]. Then cut off the padding at the end of each row.
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
    """Return a function that has vLLM servers compute the features of rows.

    Each document is sent to a server as a prompt, with a request for one token. The server writes
    the hidden states of the prompt to a file, and its answer names the file. Both machines must see
    the folder of the file.

    Args:
        target: the target model. Its final norm is applied in this process.
        aux_layers: the auxiliary layers, whose outputs the draft reads besides the last layer's.
        addresses: the addresses of the servers. Documents are sent to them in turn.
        timeout: how many seconds an answer may take.

    Raises:
        UserError: for servers that write other layers or another dtype.
        ResourceError: when a server fails.
    """
    # Each server serves one model, whose name is asked for.
    servers = [
        Server(address, key=SERVER_KEY, timeout=timeout, timeout_key="hidden_states.timeout")
        for address in addresses
    ]
    models = [server.json("/v1/models", ServedModels).data[0].id for server in servers]

    def request_features(number: int, ids: list[int]) -> Tensor:
        """Send a document to a server, and return the hidden states of its tokens.

        Args:
            number: the number of the document in the batch, which decides which server is asked.
            ids: the L token ids of the document.

        Returns:
            [A + 1, L, D]: the outputs of A auxiliary layers and of the last layer, with the
            target's hidden size D.
        """
        server = servers[number % len(servers)]
        model = models[number % len(servers)]

        # The server only reads the prompt, but it must be asked for at least one token. Its answer
        # names the file with the hidden states.
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        answer = server.json("/v1/completions", PromptAnswer, body)
        hidden_LND = take_hidden_states(Path(answer.path or ""), ids, server)
        return _select_features(hidden_LND, len(ids), target, aux_layers, server.address)

    def make(rows: Rows) -> list[Tensor]:
        """Have the servers read a batch of packed rows, and return the hidden states.

        Returns:
            For each row [A + 1, L, D]: the outputs of A auxiliary layers and of the last layer, at
            the L tokens of the row, with the target's hidden size D.
        """
        # Send the documents of all rows at once, from a pool of threads.
        documents_by_row = [_split_documents(row) for row in rows]
        documents = list(chain.from_iterable(documents_by_row))
        with start_request_threads(len(documents), *servers) as pool:
            document_features = list(pool.map(request_features, range(len(documents)), documents))

        # Join the documents of each row along the dimension of tokens.
        remaining = iter(document_features)
        return [
            torch.cat(list(islice(remaining, len(row_documents))), dim=1)
            for row_documents in documents_by_row
        ]

    return make


def _split_documents(row: Mapping[str, ArrayLike]) -> list[list[int]]:
    """Return the token ids of each document in a packed row, without the padding of the row."""
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
    """Convert the hidden states that a vLLM server wrote to the features that the draft reads.

    Args:
        hidden_LND: [L, N, D], the hidden states that the server wrote: N layers in ascending order,
            with the target's hidden size D.
        num_tokens: L, the number of tokens that were sent to the server.
        target: the target model.
        aux_layers: the auxiliary layers in the order in which the draft reads them, A of them.
        server_name: names the server in error messages.

    Returns:
        The features [A + 1, L, D]: the auxiliary layers, and then the last layer after the target's
        final norm.

    Raises:
        UserError: if the hidden states are of other layers, another shape or another dtype.
    """
    # The server must have written the auxiliary layers and the last layer, in the target's dtype.
    layers = sorted({*aux_layers, target.num_layers})
    if (
        hidden_LND.shape != (num_tokens, len(layers), target.hidden_size)
        or str(hidden_LND.dtype) != f"torch.{target.dtype}"
    ):
        raise UserError(
            SERVER_KEY,
            got=f"{server_name}, which writes hidden states of shape {list(hidden_LND.shape)} and"
            f" dtype {hidden_LND.dtype} for {num_tokens} tokens",
            expected=f"hidden states of the layers {layers}, each of size {target.hidden_size} and"
            f" dtype {target.dtype}",
        )

    # Take the layers in the draft's order, as [A + 1, L, D]. vLLM writes the last layer without the
    # final norm, so apply the norm.
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
        """Return the features [A + 1, L, D] of each row, from kept files if it has them.

        A is the number of auxiliary layers, L the tokens of the row, D the target's hidden size.
        """
        # Read the rows whose files were kept. Check the first of all such rows, for which
        # `num_rows` is still 0, against features that `make` computes.
        features_of_rows = [self._read_waiting(_split_documents(row)) for row in rows]
        for row, features in zip(rows, features_of_rows, strict=True):
            if features is not None and self.num_rows == 0:
                self._compare(features, self.make([row])[0])
            self.num_rows += features is not None

        # Compute the features of all other rows in one batch, and return the features of all rows
        # in the order of the rows.
        missing_rows = [
            row for row, features in zip(rows, features_of_rows, strict=True) if features is None
        ]
        computed_features = iter(self.make(missing_rows) if missing_rows else ())
        return [
            next(computed_features) if features is None else features
            for features in features_of_rows
        ]

    def _read_waiting(self, documents: Sequence[list[int]]) -> Tensor | None:
        """Read the features of a row from its waiting files, if there is one for each document.

        A server wrote a document's file while it generated the document. The file waits in
        `self.folder` until a row with this document needs its features.

        Args:
            documents: the token ids of each document in the row.

        Returns:
            [A + 1, L, D]: the hidden states of A auxiliary layers and of the last layer, at the L
            tokens of the row, with the target's hidden size D. None if the file of a document is
            missing.
        """
        # A file is found by its tokens. The last token of a document is missing in the file,
        # because the server stopped when it had generated the token, without reading it.
        paths = [find_waiting_path(self.folder, ids[:-1]) for ids in documents]
        if not all(path.is_file() for path in paths):
            return None

        # Read the documents. Give each a position of zeros for its last token, and join them.
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
        """Check that the features in a server's files equal computed features, up to rounding.

        Both are features of the same row, [A + 1, L, D]: A auxiliary layers and the last layer, L
        tokens, hidden size D.

        Args:
            waiting_ALD: the features from the files.
            computed_ALD: the features that a forward pass of the target computed.

        Raises:
            UserError: if in any layer the vectors differ, in the median over the tokens, by more
                than the share MAX_RELATIVE_DIFFERENCE of their norm.
        """
        # The mean would include the last token of each document, which is 0 in the files; the
        # median ignores it. The comparison is written so that NaN fails, too.
        difference_AL = (waiting_ALD - computed_ALD).float().norm(dim=-1)
        error_AL = difference_AL / computed_ALD.float().norm(dim=-1)
        if not bool((error_AL.median(dim=1).values <= MAX_RELATIVE_DIFFERENCE).all()):
            raise UserError(
                KEY,
                got=f"{self.folder}, which holds hidden states of other layers or of another"
                " target",
                expected="hidden states of this target; remove the folder to compute them anew",
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
    """Compute the missing features of some data sets, write them to a store, and open the store.

    All processes of a distributed launch must call this function. Each makes a share of the files
    of the store, the shards.

    Args:
        config: the `hidden_states:` section of the recipe. If the features of all rows take more
            than its `max_bytes`, the store gets as many of the first rows as fit.
        sets: the data sets of packed rows.
        origin: the target, layers and dtypes that the features come from.
        make: the function that computes the features of rows.
        batch_size: how many rows `make` gets at a time.
        force: continue even if the estimate says that the disk is too small.

    Returns:
        The store.

    Raises:
        UserError: if another launch is filling the same folder, or if the machines of this launch
            do not share the folder.
        ResourceError: if the disk cannot be written or is full or, unless `force`, too small for
            all shards. The next call continues with the shards that are missing.
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
        raise UserError(
            KEY,
            got=error.got,
            expected="a folder that all machines of this launch share, to which every process"
            " writes its shards",
        ) from error


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
    """Make this process's share of the shards, except those that are there already.

    After its first new shard, the process of rank 0 announces the time and disk space that the
    missing shards will take.

    Args:
        folder: the folder of the store.
        rows: the packed rows of all shards.
        shards: for each shard's file name, the numbers of its rows.
        origin: the target, layers and dtypes that the features come from.
        make: the function that computes the features of rows.
        batch_size: how many rows `make` gets at a time.
        force: continue even if the estimate says that the disk is too small.
    """
    # Of N processes, each makes every N-th shard.
    rank, world_size = find_rank_and_world_size()
    local_shards = list(shards.items())[rank::world_size]
    num_local_rows = sum(len(part) for _, part in local_shards)
    with show_progress("Storing features", num_local_rows, "rows") as advance:
        is_announced = rank > 0
        for name, part in local_shards:
            begin = time.monotonic()
            shard_rows = rows.select(part)
            is_new = _make_shard_if_missing(folder / name, shard_rows, origin, make, batch_size)

            # Announce the cost of all missing shards, in proportion to the cost of this shard. The
            # time is divided by the number of processes, which all work at the same time.
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
                    folder_key="hidden_states.path",
                    force=force,
                )
            advance(len(part))


def _plan_shards(
    rows: Dataset, origin: Origin, shard_tokens: int, max_bytes: int | None
) -> dict[str, range]:
    """Decide which rows of a data set go into which shard of a feature store.

    Args:
        rows: the packed rows.
        origin: where the features come from. It says how many bytes a token takes.
        shard_tokens: the number of tokens in a shard.
        max_bytes: the limit on the bytes of all shards together; None for no limit. Shards at the
            end that exceed the limit are left out.

    Returns:
        For each shard's file name, the numbers of its rows.
    """
    # Divide the rows, which all have the same length, into consecutive parts.
    rows_per_shard = max(1, shard_tokens // len(rows[0]["input_ids"]))
    parts = [
        range(first, min(first + rows_per_shard, len(rows)))
        for first in range(0, len(rows), rows_per_shard)
    ]

    # Take shards in order until one exceeds the limit. The total number of shards, which is a part
    # of every name, also counts the shards that are left out.
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
    """Estimate how many bytes the file of a shard takes; the estimate is never too low.

    Args:
        rows: the tokens of the shard's rows.
        origin: where the features come from. It says how many bytes the features of a token take.
    """
    # Besides the features, a token takes 4 bytes for its id, and a document 4 for its length. A row
    # takes 12: 4 for its number of documents, and 8 for its checksum.
    num_tokens = sum(map(len, rows))
    num_documents = sum(len(row.document_lengths) for row in rows)
    return num_tokens * (origin.token_bytes + 4) + 4 * num_documents + 12 * len(rows) + HEADER_BYTES


def _remove_old_files(folder: Path, shards: Mapping[str, range]) -> None:
    """Remove temporary files of killed processes, and shards that were made for other rows.

    Args:
        folder: the folder of the store.
        shards: the shards that the store will have, by file name.
    """
    # A shard's name ends with the total number of shards: 000000-of-000002.safetensors. If the
    # number differs from that of the planned shards, the shard was made for other rows.
    shutil.rmtree(folder / STAGING_DIR, ignore_errors=True)
    total = next(iter(shards), "").rpartition("-")[2]
    foreign_shards = [
        path for path in folder.glob("*.safetensors") if path.name.rpartition("-")[2] != total
    ]
    if shards and foreign_shards:
        logger.info(f"{folder}: removed {len(foreign_shards)} shards that were made for other rows")
        for path in foreign_shards:
            path.unlink()


def _make_shard_if_missing(
    path: Path, rows: Dataset, origin: Origin, make: MakeFeatures, batch_size: int
) -> bool:
    """Compute and write the shard of some rows, unless its file is already there and undamaged.

    Args:
        path: the file of the shard.
        rows: the packed rows of the shard.
        origin: the target, layers and dtypes that the features come from.
        make: the function that computes the features of rows.
        batch_size: how many rows `make` gets at a time.

    Returns:
        True if the shard was made, False if it was already there.
    """
    # Keep a file that has these rows, this origin and a correct checksum for each row.
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
            logger.info(f"Making a shard again: {error.got}")

    # Make the features batch by batch. datasets gives a batch as columns, and `make` takes rows.
    features: list[Tensor] = []
    for batch in rows.iter(batch_size):
        batch_rows = [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]
        features += make(batch_rows)
    write_shard(path, origin, tokens, features)
    return True


def _compute_shard_cost(path: Path, rows: Dataset, seconds: float) -> Cost:
    """Return what a shard cost: its rows and tokens, the bytes of its file and the seconds."""
    return Cost(
        rows=len(rows),
        tokens=sum(len(Tokens.from_row(row)) for row in convert_rows_to_numpy(rows)),
        loss_tokens=sum(map(sum, rows["loss_mask"])),
        num_bytes=path.stat().st_size,
        seconds=seconds,
    )
