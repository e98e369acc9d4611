"""A feature store: a folder of shards, files of packed rows with what the target gives a draft there, which training reads by its batches.

A shard is a safetensors file:

    input_ids         int32 [N]          tokens of one row after the other, without padding
    document_lengths  int32 [M]          tokens of each document, in their order
    num_documents     int32 [R]          documents of each row
    features          [(A + 1) N, D]     row after row, of each [A + 1, L, D]: the auxiliary layers, then the last hidden state
    checksums         int64 [R]          xxh3 of the bytes of each row's features

Its header says of what target, layers and dtype these are. Rows are found by their tokens, whatever the order of a data set, and a row with
another token or another border of documents is not found. What a shard holds follows from its rows alone, not from who wrote it or when.

Shapes: A auxiliary layers, D target hidden size, R rows, M documents, L tokens of a row, N of all of them.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from datasets import Dataset
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdistill.errors import UserError, one_line
from specdistill.files.documents import parse_json
from specdistill.recipe.fields import shown
from specdistill.rows.files import SHOWN
from specdistill.rows.packing import PADDING_DOCUMENT, collate

KEY = "hidden_states.path"
SHARD = re.compile(r"\d{6}-of-(\d{6})\.safetensors")
ASIDE = ".part"  # folder of shards that are being written
WHOLE = "a whole store: `specdistill data features` makes what is missing"
VERSION = 1  # of the layout above
HEADER = (
    "specdistill"  # the one key of the header's metadata: several would be written in any order
)
HEADER_BYTES = 2048  # at most: names, shapes and what the features are of


def unfit(path: Path, why: str) -> UserError:
    """Of a file that is not the shard that is wanted. why: a clause that follows its name."""
    return UserError(KEY, got=f"{path}, which {why}", expected=WHOLE)


@dataclass(frozen=True)
class Origin:
    """What features are of: where one field differs, they are another draft's.

    weights, tokenizer: hashes of the target's files. computed: dtype of the target, and of mixed precision. stored: dtype in the file.
    """

    weights: str
    tokenizer: str
    computed: str
    stored: str
    hidden_size: int
    aux_layers: tuple[int, ...]

    @property
    def num_features(self) -> int:
        return len(self.aux_layers) + 1

    @property
    def row_dtype(self) -> torch.dtype:
        return getattr(torch, self.stored)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's features."""
        return self.num_features * self.hidden_size * self.row_dtype.itemsize

    def header(self) -> dict[str, str]:
        return {HEADER: json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)}

    def check(self, path: Path, metadata: Mapping[str, str] | None) -> None:
        """Raises UserError for a file whose header is of anything else."""
        if metadata is None or HEADER not in metadata:
            raise unfit(path, "is no shard of features")
        found, wanted_fields = dict(parse_json(metadata[HEADER])), parse_json(self.header()[HEADER])
        for name, expected in wanted_fields.items():
            if (other := found.get(name)) != expected:
                is_hash = name in ("weights", "tokenizer")
                got, wanted = (
                    str(value)[:SHOWN] if is_hash else shown(value) for value in (other, expected)
                )
                raise unfit(path, f"is of other features: {name} {got} for {wanted}")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A packed row without its padding. input_ids: int32 [L]; document_lengths: int32, that sum to L."""

    input_ids: NDArray[np.int32]
    document_lengths: NDArray[np.int32]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Tokens":
        """Of a row with the columns of `specdistill.rows.packing`."""
        document_ids = np.asarray(row["document_ids"])
        is_token = document_ids != PADDING_DOCUMENT
        lengths = np.bincount(document_ids[is_token]).astype(np.int32)
        return cls(np.asarray(row["input_ids"], np.int32)[is_token], lengths)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def key(self) -> bytes:
        return xxhash.xxh3_128_digest(self.input_ids.tobytes() + self.document_lengths.tobytes())


@dataclass(frozen=True)
class Shard:
    """A file that was opened. rows: its tokens; starts: int64 [R + 1], tokens before each row, and of all; checksums: int64 [R]; begin:
    bytes before its features.
    """

    path: Path
    origin: Origin
    rows: list[Tokens]
    starts: NDArray[np.int64]
    checksums: NDArray[np.int64]
    begin: int

    @classmethod
    def open(cls, path: Path, origin: Origin) -> "Shard":
        """Reads all but the features. Raises UserError for a file that is not there, not whole or of something else."""
        try:
            with safe_open(path, framework="np") as file:
                origin.check(path, file.metadata())
                ids, lengths, counts, checksums = map(
                    file.get_tensor, ("input_ids", "document_lengths", "num_documents", "checksums")
                )
                shape = file.get_slice("features").get_shape()
            with path.open("rb") as file:  # the library does not say where tensors are
                size = int.from_bytes(file.read(8), "little")
                begin = 8 + size + parse_json(file.read(size))["features"]["data_offsets"][0]
        except FileNotFoundError as error:
            raise unfit(path, "is missing") from error
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            raise unfit(path, f"is damaged ({one_line(str(error))[:120]})") from error
        adds_up = (
            counts.sum() == len(lengths)
            and lengths.sum() == len(ids)
            and len(counts) == len(checksums)
        )
        if not adds_up or shape != [origin.num_features * len(ids), origin.hidden_size]:
            raise unfit(path, "is damaged (its rows do not add up)")
        by_row = np.split(lengths, counts.cumsum()[:-1])
        starts = np.cumsum([0, *(part.sum() for part in by_row)])
        rows = [Tokens(*row) for row in zip(np.split(ids, starts[1:-1]), by_row, strict=True)]
        return cls(path, origin, rows, starts, checksums, begin)

    def expect(self, index: int) -> None:
        """Have the system fetch a row that is about to be read, along with others."""
        size, start = self.origin.token_bytes, int(self.starts[index])
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
        """The features of a row, into the first L positions of a tensor [A + 1, T, D] of `origin.row_dtype`, and 0 into the others.

        Raises UserError where they are not what was written.
        """
        length = len(self.rows[index])
        into_ATD[:, length:] = 0
        into_ATD[:, :length] = self.checked(index).view(-1, length, self.origin.hidden_size)

    def checked(self, index: int) -> Tensor:
        """A row's features [(A + 1) L, D], not copied. Raises UserError where they are not what was written."""
        first, last = (
            self.origin.num_features * int(self.starts[place]) for place in (index, index + 1)
        )
        found: Tensor = _opened(self.path).get_slice("features")[first:last]
        if checksum(found) != self.checksums[index]:
            raise unfit(self.path, f"is damaged (row {index})")
        return found


def write_shard(
    path: Path, origin: Origin, rows: Sequence[Tokens], features: Sequence[Tensor]
) -> None:
    """Write rows and their features [A + 1, L, D]: aside, to the disk, then in place. Raises OSError and SafetensorError."""
    vectors = [
        row.reshape(-1, origin.hidden_size).to(origin.row_dtype).contiguous() for row in features
    ]  # [(A + 1) L, D] each
    tensors = {
        "input_ids": torch.from_numpy(np.concatenate([row.input_ids for row in rows])),
        "document_lengths": torch.from_numpy(
            np.concatenate([row.document_lengths for row in rows])
        ),
        "num_documents": torch.tensor(
            [len(row.document_lengths) for row in rows], dtype=torch.int32
        ),
        "checksums": torch.from_numpy(np.array([checksum(row) for row in vectors], np.int64)),
        "features": torch.cat(vectors),
    }
    aside = (
        path.parent / ASIDE / path.name
    )  # a folder of its own, in which safetensors has its own files, too
    aside.parent.mkdir(exist_ok=True)
    try:
        save_file(tensors, aside, origin.header())
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
        _opened.cache_clear()  # the file that was there before may be in it
    finally:
        aside.unlink(missing_ok=True)


def checksum(row: Tensor) -> int:
    return int(
        np.uint64(xxhash.xxh3_64_intdigest(row.view(torch.uint8).numpy().data)).astype(np.int64)
    )


def _sync(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4096)
def _opened(path: Path) -> Any:
    """Mapped into memory, so that a row is read from the disk when it is looked at."""
    return safe_open(path, framework="pt")


class FeatureStore:
    """Shards of one origin. Processes and their data loaders open it alike, and read rows in any order.

    num_missing: of the rows that it was opened for, those that it does not have.
    """

    def __init__(self, shards: Iterable[Shard], sets: Sequence[Dataset], origin: Origin) -> None:
        self.origin = origin
        self.places = {
            row.key: (shard, index) for shard in shards for index, row in enumerate(shard.rows)
        }
        keys = [Tokens.of(row).key for rows in sets for row in numpy_rows(rows)]
        self.num_rows, self.num_missing = len(keys), sum(key not in self.places for key in keys)

    @classmethod
    def open(cls, folder: Path, sets: Sequence[Dataset], origin: Origin) -> "FeatureStore":
        """The store of all rows of some sets. Raises UserError, naming the shard, for one that is missing, damaged or of something else."""
        found = [match for path in folder.glob("*") if (match := SHARD.fullmatch(path.name))]
        if not found:
            raise UserError(KEY, got=f"{folder}, which holds no features", expected=WHOLE)
        names = sorted(
            {shard_name(index, int(match[1])) for match in found for index in range(int(match[1]))}
        )
        store = cls([Shard.open(folder / name, origin) for name in names], sets, origin)
        if store.num_missing:
            got = f"{folder}, which lacks {store.num_missing:,} of the {store.num_rows:,} rows of this recipe's data"
            raise UserError(KEY, got=got, expected=WHOLE)
        return store

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch as `specdistill.rows.packing.collate` makes it. Where the store has all its rows, also `features` [B, A + 1, T, D], 0 at
        padding. Raises UserError for a damaged shard.
        """
        batch = collate(rows)
        tokens = [Tokens.of(row) for row in rows]
        places = [self.places.get(row.key) if len(row) else None for row in tokens]
        if any(place is None and len(row) for place, row in zip(places, tokens, strict=True)):
            return batch
        length = batch["input_ids"].shape[1]
        shape = (len(rows), self.origin.num_features, length, self.origin.hidden_size)
        features = torch.empty(shape, dtype=self.origin.row_dtype)
        features[[place is None for place in places]] = 0
        found = [
            (*place, into_ATD) for place, into_ATD in zip(places, features, strict=True) if place
        ]
        for shard, index, _ in found:
            shard.expect(index)
        with ThreadPoolExecutor(
            len(rows)
        ) as pool:  # waiting for the disk, summing and copying are not Python's
            list(pool.map(lambda row: row[0].read(*row[1:]), found))
        return {**batch, "features": features}


def shard_name(index: int, total: int) -> str:
    return f"{index:06d}-of-{total:06d}.safetensors"


def numpy_rows(rows: Dataset) -> Any:
    return rows.select_columns(["input_ids", "document_ids"]).with_format("numpy")
