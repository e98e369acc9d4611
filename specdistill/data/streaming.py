"""Rows from a source that does not fit a disk: read, tokenised, shuffled and packed while training goes on.

A process reads its share of the source's rows: whole files of it where they can be shared out evenly, else every n-th row. It takes
`buffer_size` of them at a time, leaves out those that are held out or overlap a suite, and shuffles and packs the rest. Nothing is carried
from one buffer to the next. The place in a stream is thus the place of the source before the buffer under way, as `datasets` gives it, and
how many of the buffer's rows have been taken; from there a stream goes on to the same rows. Files are read in another order each epoch.

Sources with weights are read in proportion to them, each row once an epoch: a source that is at its end leaves its place to the others.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow
from datasets import Dataset, IterableDataset, interleave_datasets
from datasets.exceptions import DatasetsError
from datasets.fingerprint import Hasher
from torch.utils.data import IterableDataset as Endless
from transformers import PreTrainedTokenizerBase

from specdistill.data.cache import Row, cached
from specdistill.data.cleaning.decontamination import SuiteIndex
from specdistill.data.cleaning.left_out import suites_at_hand
from specdistill.data.encoding import ENCODED_COLUMNS, Encoder
from specdistill.data.held_out import is_below, row_hash
from specdistill.data.packing import MIN_TOKENS, packed_rows, pad_token_id
from specdistill.data.sources import stream_sources
from specdistill.errors import ResourceError, UserError, one_line
from specdistill.recipe.sections import DataConfig
from specdistill.repositories import HTTP_ERROR

logger = logging.getLogger(__name__)

VALIDATION, FIRST = 512, 1024  # documents at a stream's beginning: held out, and looked at before training
MOST_READ = 1_000_000  # rows of the source that are searched for them


@dataclass
class Preparation:
    """What becomes of the source's rows. encoders: one for each source; proved: those whose template has been tried. index: of the suites
    that rows are compared with; overlapped: those of which an overlap has been said.
    """

    encoders: Sequence[Encoder]
    index: SuiteIndex | None
    validation_fraction: float
    max_length: int
    packing: bool
    pad_token_id: int
    seed: int
    overlapped: set[str] = field(default_factory=set)
    proved: set[int] = field(default_factory=set)

    def is_held_out(self, row: Row) -> bool:
        return is_below(row_hash(row, self.seed), self.validation_fraction)

    def overlaps(self, row: Row) -> bool:
        """Whether a prompt of a suite is in the row; the first time of each suite it is said."""
        overlap = self.index.overlap(row) if self.index else None
        if overlap and overlap.suite not in self.overlapped:
            self.overlapped.add(overlap.suite)
            place = f"{self.encoders[row['source']].key} row {row['row']}"
            told = "%s overlaps %s: %s (%s) and is left out, as are others without a word"
            logger.warning(told, place, overlap.suite, overlap.prompt, overlap.words)
        return overlap is not None

    def documents(self, rows: Sequence[Row]) -> list[Row]:
        """Rows as documents with ENCODED_COLUMNS, without those that are too short, and conversations too long, to use."""
        made = []
        for number, encode in enumerate(self.encoders):
            own = [row for row in rows if row["source"] == number]
            if number not in self.proved and any(row["messages"] is not None for row in own):
                encode.prove()
                self.proved.add(number)
            columns = encode({name: [row[name] for row in own] for name in ("text", "messages")}, [row["row"] for row in own])
            made += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [it for it in made if it["length"] >= MIN_TOKENS and (it["is_text"] or it["length"] <= self.max_length)]

    def packed(self, rows: Sequence[Row], place: str) -> list[Row]:
        """A buffer's rows for training, in an order that follows from the seed and the buffer's place."""
        documents = self.documents([row for row in rows if not self.is_held_out(row) and not self.overlaps(row)])
        return packed_rows(documents, self.max_length, self.packing, self.pad_token_id, f"{self.seed} {place}")


class PackedStream(Endless[Row]):
    """This process's rows for training, without end, with the columns of `packing`.

    first: rows of the stream's beginning, to look at. fingerprint: of those, and of the settings.
    """

    def __init__(
        self, source: IterableDataset, preparation: Preparation, buffer_size: int, first: Dataset, fingerprint: str
    ) -> None:
        self.source = source
        self.preparation = preparation
        self.buffer_size = buffer_size
        self.first = first
        self.fingerprint = fingerprint
        self.place: dict[str, Any] = {"epoch": 0, "buffer": 0, "taken": 0, "source": None}

    def state_dict(self) -> dict[str, Any]:
        """The place behind the row that was taken last, as JSON holds it."""
        return dict(self.place)

    def load_state_dict(self, place: Mapping[str, Any]) -> None:
        self.place = dict(place)

    def __iter__(self) -> Iterator[Row]:
        place = self.place
        while True:
            found = place["buffer"] > 0
            self.source.set_epoch(place["epoch"] + 1)  # in an epoch 0 datasets would not shuffle the files
            self.source.load_state_dict(place["source"])
            rows = read(self.source)
            while buffer := list(islice(rows, self.buffer_size)):
                behind = self.source.state_dict()
                for row in self.preparation.packed(buffer, f"{place['epoch']} {place['buffer']}")[place["taken"] :]:
                    place["taken"] += 1
                    yield row
                found = found or place["taken"] > 0
                place |= {"buffer": place["buffer"] + 1, "taken": 0, "source": behind}
            if not found:
                got = "a stream of which no row is left to train on, in this process at least"
                raise UserError("data.source", got=got, expected="more rows, or fewer processes")
            place |= {"epoch": place["epoch"] + 1, "buffer": 0, "source": None}


def read(source: IterableDataset) -> Iterator[Row]:
    """Its rows. Raises UserError for what is no row, ResourceError when the network or a disk fails."""
    rows = iter(source)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except (DatasetsError, pyarrow.ArrowException, ValueError, TypeError) as error:
            got = f"a stream that does not read ({one_line(str(error.__cause__ or error))[:300]})"
            raise UserError("data.source", got=got, expected="rows of one form") from error
        except (OSError, HTTP_ERROR) as error:
            next_step = "check the network, then repeat the command: it goes on from the last checkpoint"
            raise ResourceError(f"data.source could not be read any further ({error})", next_step=next_step) from error
        yield row


def open_stream(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, measured_on: Sequence[str]
) -> tuple[IterableDataset, Preparation]:
    """The rows of all sources, of all processes, and what becomes of them."""
    sources = stream_sources(config.source, config.split, columns=config.columns)
    if len(sources) == 1:
        rows = sources[0].rows
    else:
        shares = [source.weight / sum(other.weight for other in sources) for source in sources]
        parts = [source.rows for source in sources]
        rows = interleave_datasets(parts, shares, config.seed, stopping_strategy="all_exhausted_without_replacement")
    suites = suites_at_hand(config.decontaminate, measured_on)
    keys = enumerate(source.key for source in sources)
    return rows, Preparation(
        [Encoder(tokenizer, config.loss_mask, config.max_length, key, number) for number, key in keys],
        SuiteIndex(suites) if suites else None,
        config.validation_fraction,
        config.max_length,
        config.packing,
        pad_token_id(tokenizer),
        config.seed,
    )


def beginning(rows: IterableDataset, preparation: Preparation, cache_dir: str | None = None) -> tuple[Dataset, Dataset]:
    """(first, held out) documents of a stream, read from its beginning: up to FIRST and VALIDATION of them."""
    rows.set_epoch(1)
    first: list[Row] = []
    held_out: list[Row] = []
    for row in islice(read(rows), MOST_READ):
        part, most = (held_out, VALIDATION) if preparation.is_held_out(row) else (first, FIRST)
        if len(part) < most and not preparation.overlaps(row):
            part += preparation.documents([row])
        if len(first) >= FIRST and len(held_out) >= VALIDATION:
            break
    if not first or not held_out:
        got = f"a stream that begins with {len(first)} documents to train on and {len(held_out)} to hold out"
        raise UserError("data.source", got=got, expected="some of both: more rows, or another data.validation_fraction")
    return _kept(first, cache_dir), _kept(held_out, cache_dir)


def _kept(documents: list[Row], cache_dir: str | None) -> Dataset:
    return cached(lambda: documents, ENCODED_COLUMNS, ["streamed", Hasher.hash(documents)], cache_dir)


def look_at(rows: Dataset | PackedStream) -> Dataset:
    """The rows for training, of a stream those of its beginning."""
    return rows.first if isinstance(rows, PackedStream) else rows


def record_of(rows: Dataset | PackedStream) -> dict[str, Any]:
    """What a run's record says of its rows for training; a stream's number is not known."""
    if isinstance(rows, PackedStream):
        return {"data_fingerprint": rows.fingerprint, "rows": None}
    return {"data_fingerprint": rows._fingerprint, "rows": len(rows)}
