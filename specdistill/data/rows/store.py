"""A feature store: packed rows with the target's features, in files that training reads.

The store is a folder of shards. A shard is a safetensors file:

    input_ids         int32 [N]          tokens of one row after the other, without padding
    document_lengths  int32 [M]          tokens of each document, in their order
    num_documents     int32 [R]          documents of each row
    features          [(A + 1) N, D]     row after row, [A + 1, L, D] each: the auxiliary layers,
                                         then the last hidden state
    checksums         int64 [R]          xxh3 of the bytes of each row's features

The header of a shard says which target, layers and dtype its features come from. A row is found by
its tokens, whatever the order of the data set. A row with another token or another border between
documents is not found. The content of a shard follows from its rows alone, not from who wrote it or
when.

Hidden states may also come from a vLLM server (0.32, started as docs/data.md says), both of prompts
and of what the server generates. The server's answer names a safetensors file with `hidden_states`
[L, layers, D] and `token_ids` [L] of the prompt. After a request with OUTPUT_STATES_REQUEST the
tensors also cover the completion without its last token, which the target has not read. The server
holds a lock on a second file until the safetensors file is complete. The files of completions wait
in a folder of the store for the rows that their documents will be in. Their names are hashes of
their tokens.

Shapes: A auxiliary layers, D target hidden size, R rows, M documents, L tokens of a row, N tokens
of all rows.
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from datasets import Dataset
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdistill.common.documents import parse_json
from specdistill.common.errors import ResourceError, UserError, join_lines
from specdistill.data.rows.files import NUM_SHOWN_HASH_DIGITS, on_disk
from specdistill.data.rows.packing import PADDING_DOCUMENT, collate
from specdistill.recipe.fields import format_value
from specdistill.serving.engines.server import POLL_SECONDS, Server

KEY = "hidden_states.path"  # the recipe key to name in errors
# The file name of a shard; the group is the total number of shards.
SHARD = re.compile(r"\d{6}-of-(\d{6})\.safetensors")
STAGING_DIR = ".part"  # folder of shards that are being written
COMPLETE_STORE_HINT = "a complete store; `specdistill data features` makes the missing shards"
VERSION = 1  # of the layout above
# The only key of the header's metadata: several keys would be written in arbitrary order.
HEADER = "specdistill"
# Fields of a completion request that ask a vLLM server for the hidden states of the answer, too.
OUTPUT_STATES_REQUEST = {"kv_transfer_params": {"include_output_tokens": True}}
HEADER_BYTES = 2048  # upper bound of the header: names, shapes and the origin


def make_unfit_error(path: Path, why: str) -> UserError:
    """Return the error for a shard of a feature store that cannot be used.

    Args:
        path: the file of the shard.
        why: what is wrong with the file, as a clause after "which", e.g. "is missing".
    """
    return UserError(KEY, got=f"{path}, which {why}", expected=COMPLETE_STORE_HINT)


@dataclass(frozen=True)
class Origin:
    """The target, layers and dtypes that features come from.

    Stored features can be used if every field equals the one that the recipe asks for.

    Attributes:
        weights: hash of the target's weights.
        tokenizer: hash of its tokenizer.
        computed: quantization and dtype of the target, and the dtype of mixed precision.
        stored: name of the dtype in the file.
        hidden_size: D, the target's hidden size.
        aux_layers: the auxiliary layers, A of them.
    """

    weights: str
    tokenizer: str
    computed: str
    stored: str
    hidden_size: int
    aux_layers: tuple[int, ...]

    @property
    def num_features(self) -> int:
        """The number of vectors of each token, A + 1: A auxiliary layers and the last layer."""
        return len(self.aux_layers) + 1

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of the features in the file."""
        dtype: torch.dtype = getattr(torch, self.stored)
        return dtype

    @property
    def token_bytes(self) -> int:
        """The bytes that the features of one token take."""
        return self.num_features * self.hidden_size * self.row_dtype.itemsize

    def build_header(self) -> dict[str, str]:
        """Return the metadata of a shard with these features."""
        return {HEADER: json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)}

    def check(self, path: Path, metadata: Mapping[str, str] | None) -> None:
        """Raise UserError if the features of a file come from another target, layers or dtype.

        Args:
            path: the file.
            metadata: the metadata in the header of the file; None if the file has none.
        """
        if metadata is None or HEADER not in metadata:
            raise make_unfit_error(path, "is no shard of a feature store")

        # The header records the origin of the file. Name the first field that differs from this
        # origin, and show only the first digits of hashes.
        header = dict(parse_json(metadata[HEADER]))
        wanted_fields = parse_json(self.build_header()[HEADER])
        for name, expected in wanted_fields.items():
            value = header.get(name)
            if value == expected:
                continue
            is_hash = name in ("weights", "tokenizer")
            shown, shown_expected = (
                str(part)[:NUM_SHOWN_HASH_DIGITS] if is_hash else format_value(part)
                for part in (value, expected)
            )
            raise make_unfit_error(
                path, f"holds other features: {name} {shown} instead of {shown_expected}"
            )


@dataclass(frozen=True, eq=False)
class Tokens:
    """A packed row without its padding.

    Attributes:
        input_ids: int32 [L].
        document_lengths: int32, the tokens of each document; their sum is L.
    """

    input_ids: NDArray[np.int32]
    document_lengths: NDArray[np.int32]

    @classmethod
    def from_row(cls, row: Mapping[str, ArrayLike]) -> "Tokens":
        """Take the tokens of a packed row, without its padding.

        Args:
            row: the columns `input_ids` and `document_ids` of the row. Document ids are 0, 1, 2, …,
                and PADDING_DOCUMENT at padding.
        """
        # The length of a document is how often its id occurs.
        document_ids = np.asarray(row["document_ids"])
        is_token = document_ids != PADDING_DOCUMENT
        return cls(
            np.asarray(row["input_ids"], np.int32)[is_token],
            np.bincount(document_ids[is_token]).astype(np.int32),
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def key(self) -> bytes:
        """A hash of the tokens and of the document lengths, by which the row is found."""
        return xxhash.xxh3_128_digest(self.input_ids.tobytes() + self.document_lengths.tobytes())


@dataclass(frozen=True)
class Shard:
    """An opened shard: one of the files of a feature store, with R packed rows.

    Attributes:
        path: the file.
        origin: where its features come from.
        rows: the tokens of its rows.
        starts: int64 [R + 1], the number of tokens before each row, and at the end the number of
            all tokens.
        checksums: int64 [R], the checksum of each row's features.
        begin: the byte of the file at which the features begin.
    """

    path: Path
    origin: Origin
    rows: list[Tokens]
    starts: NDArray[np.int64]
    checksums: NDArray[np.int64]
    begin: int

    @classmethod
    def open(cls, path: Path, origin: Origin) -> "Shard":
        """Open a shard file, and read its rows' tokens and checksums but not yet their features.

        Args:
            path: the file.
            origin: the target, layers and dtypes that the features must come from.

        Raises:
            UserError: for a file that is missing or damaged, or whose features have another origin.
        """
        # Read the tokens and the checksums. A safetensors file begins with the size of its JSON
        # header in 8 bytes; the header says where the features begin.
        try:
            with safe_open(path, framework="np") as file:
                origin.check(path, file.metadata())
                ids, lengths, counts, checksums = map(
                    file.get_tensor, ("input_ids", "document_lengths", "num_documents", "checksums")
                )
                shape = file.get_slice("features").get_shape()
            with path.open("rb") as file:  # The safetensors library does not tell the offsets.
                size = int.from_bytes(file.read(8), "little")
                begin = 8 + size + parse_json(file.read(size))["features"]["data_offsets"][0]
        except FileNotFoundError as error:
            raise make_unfit_error(path, "is missing") from error
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            raise make_unfit_error(path, f"is damaged ({join_lines(str(error))[:120]})") from error

        # The sizes of the tensors must agree with one another. `counts` has the documents of each
        # row, `lengths` the tokens of each document.
        sizes_agree = (
            counts.sum() == len(lengths)
            and lengths.sum() == len(ids)
            and len(counts) == len(checksums)
        )
        if not sizes_agree or shape != [origin.num_features * len(ids), origin.hidden_size]:
            raise make_unfit_error(path, "is damaged (its rows do not add up)")

        # Divide the document lengths among the rows, and then the tokens.
        lengths_of_rows = np.split(lengths, counts.cumsum()[:-1])
        starts = np.cumsum([0, *(row_lengths.sum() for row_lengths in lengths_of_rows)])
        ids_of_rows = np.split(ids, starts[1:-1])
        rows = [Tokens(*row) for row in zip(ids_of_rows, lengths_of_rows, strict=True)]
        return cls(path, origin, rows, starts, checksums, begin)

    def prefetch(self, index: int) -> None:
        """Ask the operating system to fetch a row's features from the disk before they are read.

        The call does not wait, so all rows of a batch can be fetched at the same time.

        Args:
            index: the row's number in the shard.
        """
        # Give the system the row's range of bytes in the file: `starts` counts the tokens before
        # the row, and `begin` is the byte at which the features of the first row begin.
        size = self.origin.token_bytes
        start = int(self.starts[index])
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.posix_fadvise(
                descriptor,
                self.begin + size * start,
                size * len(self.rows[index]),
                os.POSIX_FADV_WILLNEED,
            )
        finally:
            os.close(descriptor)

    def read(self, index: int, into_ATD: Tensor) -> None:
        """Copy the features of a row from the file into the row's place in a batch.

        Args:
            index: the row's number in the shard.
            into_ATD: the place, a tensor [A + 1, T, D] for A auxiliary layers and the last layer, T
                positions and the hidden size D. The row's tokens fill the first positions, and the
                positions after them, which are padding, get 0.

        Raises:
            UserError: if the checksum of the features is wrong.
        """
        length = len(self.rows[index])
        into_ATD[:, length:] = 0
        into_ATD[:, :length] = self.checked(index).view(-1, length, self.origin.hidden_size)

    def checked(self, index: int) -> Tensor:
        """Return the features of a row after checking their checksum.

        Args:
            index: the row's number in the shard.

        Returns:
            The features [(A + 1) L, D]: for each of A auxiliary layers and then for the last layer,
            L vectors (one for each token) of the hidden size D. They are not copied.

        Raises:
            UserError: if the checksum of the features is wrong.
        """
        # `starts` counts the tokens before each row. Each token has A + 1 vectors in the file.
        first = self.origin.num_features * int(self.starts[index])
        after = self.origin.num_features * int(self.starts[index + 1])
        features: Tensor = _open_shard(self.path).get_slice("features")[first:after]
        if compute_checksum(features) != self.checksums[index]:
            raise make_unfit_error(self.path, f"is damaged (row {index})")
        return features


def write_shard(
    path: Path, origin: Origin, rows: Sequence[Tokens], features: Sequence[Tensor]
) -> None:
    """Write rows and the target's features of their tokens to a shard, a safetensors file.

    The file is first written in a folder for temporary files and flushed to the disk, and then
    moved to its path.

    Args:
        path: the file.
        origin: the target, layers and dtypes that the features come from.
        rows: the tokens of the rows.
        features: the features [A + 1, L, D] of each row: hidden states of size D for its L tokens,
            of A auxiliary layers and of the last layer.

    Raises:
        OSError: if the disk cannot be written.
        SafetensorError: if safetensors cannot write the file.
    """
    # Flatten the layers and tokens of each row to one list of vectors, [(A + 1) L, D], because rows
    # have different lengths. Convert the vectors to the dtype of the file.
    vectors = [
        row.reshape(-1, origin.hidden_size).to(origin.row_dtype).contiguous() for row in features
    ]
    checksums = np.array([compute_checksum(row) for row in vectors], np.int64)
    tensors = {
        "input_ids": torch.from_numpy(np.concatenate([row.input_ids for row in rows])),
        "document_lengths": torch.from_numpy(
            np.concatenate([row.document_lengths for row in rows])
        ),
        "num_documents": torch.tensor(
            [len(row.document_lengths) for row in rows], dtype=torch.int32
        ),
        "checksums": torch.from_numpy(checksums),
        "features": torch.cat(vectors),
    }

    # The temporary file is in a folder of its own, because safetensors writes more temporary files
    # next to it.
    aside = path.parent / STAGING_DIR / path.name
    aside.parent.mkdir(exist_ok=True)
    try:
        save_file(tensors, aside, origin.build_header())
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
        _open_shard.cache_clear()  # It may hold the file that was there before.
    finally:
        aside.unlink(missing_ok=True)


def compute_checksum(row: Tensor) -> int:
    """Return a checksum of a row's features: the xxh3 hash of their bytes, as a 64-bit integer.

    The hash is unsigned. It is converted to a signed integer, because checksums are stored in an
    int64 tensor.
    """
    return int(
        np.uint64(xxhash.xxh3_64_intdigest(row.view(torch.uint8).numpy().data)).astype(np.int64)
    )


def _sync(path: Path) -> None:
    """Flush a file to the disk. For a folder, flush its list of files, e.g. after a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4096)
def _open_shard(path: Path) -> Any:
    """Map a shard into memory, so that a row is read from the disk when it is accessed."""
    return safe_open(path, framework="pt")


class FeatureStore:
    """Packed rows with the target's features in files (shards), to be read in any order.

    All processes of a launch and their data loaders can open the same store.

    Attributes:
        origin: where the features come from.
        places: where each row is, by its key: its shard, and its index in the shard.
        num_rows: how many rows the store was opened for.
        num_missing: how many of these rows it does not have.
    """

    def __init__(self, shards: Iterable[Shard], sets: Sequence[Dataset], origin: Origin) -> None:
        # Index the rows of all shards by their keys.
        self.origin = origin
        self.places = {}
        for shard in shards:
            for index, row in enumerate(shard.rows):
                self.places[row.key] = (shard, index)

        # Count the rows of the data sets that no shard has.
        keys = []
        for rows in sets:
            for row in convert_rows_to_numpy(rows):
                keys.append(Tokens.from_row(row).key)
        self.num_rows = len(keys)
        self.num_missing = sum(key not in self.places for key in keys)

    @classmethod
    def open(cls, folder: Path, sets: Sequence[Dataset], origin: Origin) -> "FeatureStore":
        """Open a feature store, and check that it has the features of all rows of some data sets.

        Args:
            folder: the folder of the store.
            sets: the data sets of packed rows.
            origin: the target, layers and dtypes that the features must come from.

        Raises:
            UserError: if the store lacks a row, or if a shard is missing, damaged or of another
                origin. The error names the shard.
        """
        # Each shard's name contains the number of all shards that were planned together
        # (000000-of-000002.safetensors), so one name says which others must be there. If the folder
        # has names with different numbers, all shards of each number must be there.
        matches = [SHARD.fullmatch(path.name) for path in folder.glob("*")]
        totals = {int(match[1]) for match in matches if match}
        if not totals:
            raise UserError(
                KEY, got=f"{folder}, which holds no features", expected=COMPLETE_STORE_HINT
            )
        names: list[str] = []
        for total in totals:
            names.extend(shard_name(index, total) for index in range(total))

        # Open all shards. Together the shards must have every row of the data sets.
        shards = [Shard.open(folder / name, origin) for name in sorted(names)]
        store = cls(shards, sets, origin)
        if store.num_missing:
            raise UserError(
                KEY,
                got=f"{folder}, which lacks {store.num_missing:,} of the {store.num_rows:,} rows of"
                " this recipe's data",
                expected=COMPLETE_STORE_HINT,
            )
        return store

    def collate(self, rows: Sequence[Mapping[str, ArrayLike]]) -> dict[str, Any]:
        """Build a training batch from packed rows, and add the stored features of their tokens.

        Args:
            rows: packed rows.

        Returns:
            The batch of `specdistill.data.rows.packing.collate`. If the store has all the rows, the
            entry `features` is added: [B, A + 1, T, D] for B rows of T tokens, A auxiliary layers
            and the last layer, and the hidden size D. Features are 0 at padding.

        Raises:
            UserError: for a damaged shard.
        """
        # Find each row in the store by the hash of its tokens. If one is missing, the batch has no
        # features. Rows without tokens, which only fill a batch up, need none.
        batch = collate(rows)
        tokens = [Tokens.from_row(row) for row in rows]
        places = [self.places.get(row.key) if len(row) else None for row in tokens]
        if any(place is None and len(row) for place, row in zip(places, tokens, strict=True)):
            return batch

        # Allocate the features of the batch. Rows without tokens get 0.
        features = torch.empty(
            len(rows),
            self.origin.num_features,
            batch["input_ids"].shape[1],
            self.origin.hidden_size,
            dtype=self.origin.row_dtype,
        )
        features[[place is None for place in places]] = 0

        # Ask for all rows at once, and then read them into the batch.
        row_features = [
            (*place, into_ATD) for place, into_ATD in zip(places, features, strict=True) if place
        ]
        for shard, index, _ in row_features:
            shard.prefetch(index)
        # Waiting for the disk, hashing and copying release the GIL, so threads run side by side.
        with ThreadPoolExecutor(len(rows)) as pool:
            reads = [
                pool.submit(shard.read, index, into_ATD) for shard, index, into_ATD in row_features
            ]
            for read in reads:
                read.result()  # raises the error of a damaged shard
        return {**batch, "features": features}


def find_waiting_path(folder: Path, ids: Sequence[int]) -> Path:
    """Return the path at which the hidden states of these tokens wait to be stored."""
    return folder / f"{xxhash.xxh3_128_hexdigest(np.asarray(ids, np.int32).tobytes())}.safetensors"


def take_hidden_states(
    path: Path,
    ids: list[int],
    server: Server,
    folder: Path | None = None,
    prompt: Sequence[int] = (),
) -> Tensor:
    """Read the hidden states that a vLLM server wrote to a file, and remove or move the file.

    The caller sent the server one of two things:

    - A document, which the server only reads. The caller uses its hidden states at once, so the
      file is removed. Leave out `folder` and `prompt`.
    - A prompt, to which the server generates an answer. The hidden states are needed later, so the
      file is moved to `folder`. Some servers cannot write the hidden states of an answer, and write
      those of the prompt alone. Such a file is of no use, and is removed without an error.

    Args:
        path: the file that the server named in its response.
        ids: the tokens that the server should have read: those of the document, or those of the
            prompt and its answer without the last token, which the server generated but never read.
        server: the server.
        folder: the folder where files of answers wait until they are needed.
        prompt: the tokens of the prompt.

    Returns:
        The hidden states [L, layers, D] of the L tokens in the file. D is the target's hidden size.

    Raises:
        ResourceError: if the file is missing, unreadable or of other tokens, or if the server does
            not complete the file in time.
    """
    # The server may answer before its file is complete.
    tensors = _wait_and_load(path, server)

    # The file must have the hidden states of `ids`, or of the prompt alone.
    is_complete = set(tensors) == {"hidden_states", "token_ids"}
    file_token_ids = tensors["token_ids"].tolist() if is_complete else []
    if not file_token_ids or file_token_ids not in (ids, prompt):
        raise ResourceError(
            f"{server.address} answered with the file {path}, which holds the hidden states of"
            " another prompt",
            next_step="look at the server's log",
        )

    # Move the file of an answer to the folder, and remove any other file. Then remove its lock.
    if folder and file_token_ids == ids:
        # The server's name of the file is unique. The final name, a hash of the tokens, is not:
        # several requests may give the same tokens.
        moved = folder / f"{path.name}.part"
        with on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)  # This copies the file if it is on another disk.
            moved.replace(find_waiting_path(folder, ids))
    else:
        path.unlink()
    _find_lock(path).unlink()
    return tensors["hidden_states"]


def _find_lock(path: Path) -> Path:
    """Return the file that a server holds a lock on until its file of hidden states is complete."""
    return path.with_name(f"{path.name}.lock")


def _wait_and_load(path: Path, server: Server) -> dict[str, Tensor]:
    """Wait until a server has completed a file of hidden states, and read the file.

    Args:
        path: the file.
        server: the server, which must be on a machine that shares the file's folder.

    Returns:
        The tensors of the file by name.

    Raises:
        ResourceError: if the file is missing or unreadable, or if the server does not complete it
            in time.
    """
    # The server holds a lock on a second file until this file is complete. The lock is tried again
    # and again, because a `flock` that waits could not be ended after a timeout.
    try:
        lock = _find_lock(path)
        if lock.exists() and not lock.is_file():  # Opening a pipe would wait for its writer.
            raise ValueError(f"{lock} is not a regular file")
        with lock.open() as lock_file:
            deadline = time.monotonic() + server.timeout
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break  # The file is complete.
                if server.is_closed or time.monotonic() > deadline:
                    raise ResourceError(
                        f"{server.address} did not complete {path} in {server.timeout:g} s",
                        next_step=f"look at the server's log, or raise {server.timeout_key}",
                    )
                time.sleep(POLL_SECONDS)
            return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ResourceError(
            f"{server.address} wrote no hidden states that this machine can read ({error})",
            next_step="start the server with ExampleHiddenStatesConnector and with a folder that"
            " both machines see (docs/data.md)",
        ) from error


def shard_name(index: int, total: int) -> str:
    """Return the file name of a shard: its index, and the total number of shards."""
    return f"{index:06d}-of-{total:06d}.safetensors"


def convert_rows_to_numpy(rows: Dataset) -> Dataset:
    """Return the columns of packed rows that `Tokens.from_row` reads, as numpy arrays."""
    return rows.select_columns(["input_ids", "document_ids"]).with_format("numpy")
