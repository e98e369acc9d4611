"""A row set: a folder of packed rows that training opens, and what they are, for whom, and from what they were made.

    train-00000-of-00002.arrow …, validation-00000-of-00001.arrow     rows with the columns of `packing`, memory-mapped
    manifest.json                                                     `Manifest`; written last: a folder without it is not whole

A recipe names one (`data.rows`), or describes its sources, and finds its own by a fingerprint of all that its rows depend on.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from datasets import Dataset, concatenate_datasets
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from specdistill.errors import UserError, refusing
from specdistill.files.documents import read_json
from specdistill.recipe.data_sources import BUILT_IN, entries
from specdistill.recipe.sections import DataConfig
from specdistill.rows.chat import alike
from specdistill.rows.files import (
    SHOWN,
    content_of,
    hash_of,
    on_disk,
    quiet,
    tokenizer_fingerprint,
    write_arrow,
)
from specdistill.rows.packing import COLUMNS, Packed
from specdistill.targets.packed_rows import packing

VERSION = 2  # of the code that makes rows: raise it when equal recipes give other ones
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
# A file of a row set, also of one that is being written.
PART = re.compile(
    rf"(({'|'.join(SPLITS)})-\d{{5}}-of-\d{{5}}\.arrow|{re.escape(MANIFEST)})(\.part)?"
)
SHARD_TOKENS = 2**25  # of a shard, padding included
PACKED_ROWS = 256  # rows that are packed at a time
MAKE = "`specdistill data make` makes it"


@dataclass(frozen=True)
class RowTarget:
    """The target that rows are for. weights: hash of its files. end_ids: tokens that end a generation. model: None where its weights are
    not loaded, since servers generate or nothing is.
    """

    name: str
    weights: str
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...] = ()
    model: Any = None
    quantization: str | None = None  # of the model

    @classmethod
    def of(cls, target: Any) -> "RowTarget":
        """The RowTarget of a FrozenTarget."""
        ends = tuple(target.eos_token_ids)
        return cls(
            target.name,
            target.identity.weights,
            target.tokenizer,
            ends,
            target.model,
            target.quantization,
        )


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fit(Record):
    """What rows fit: a target, by the hashes of its weights and tokenizer, and the shape that a recipe asks for."""

    target: str
    tokenizer: str
    chat_template: str | None
    max_length: int
    packing: bool
    loss_mask: str

    @classmethod
    def of(cls, config: DataConfig, target: RowTarget) -> "Fit":
        tokenizer = target.tokenizer
        template: Any = tokenizer.chat_template
        shape = config.model_dump(include={"max_length", "packing", "loss_mask"})
        return cls(
            target=target.weights,
            tokenizer=tokenizer_fingerprint(tokenizer),
            chat_template=template,
            **shape,
        )

    def check(self, other: "Fit", folder: Path) -> None:
        """Raises UserError, naming the first difference, unless rows that fit `other` fit this, too."""
        for name, own in self:
            found = getattr(other, name)
            if found == own:
                continue
            if name == "chat_template":
                start = max(
                    0, alike(str(found), str(own)) - 20
                )  # from where they differ, with a few characters before
                found, own = (repr(str(text)[start : start + 60]) for text in (found, own))
            elif name in ("target", "tokenizer"):
                found, own = found[:SHOWN], own[:SHOWN]
            got = f"{folder}, rows of another {name.replace('_', ' ')}, {found}"
            raise UserError("data.rows", got=got, expected=f"{own}, as of this recipe")


class SourceCounts(Record):
    """A source, and what training has of it."""

    source: str
    key: str
    revision: str | None
    license: str | None
    weight: float
    rows: int
    fingerprint: str
    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0


class SplitCounts(Record):
    rows: int
    documents: int
    tokens: int
    loss_tokens: int


class ShardRecord(Record):
    name: str = Field(pattern=r"^[\w-]+\.arrow$")
    rows: int
    hash: str


class Manifest(Record):
    """filtered: how many rows and documents were filtered, by the reason. generation: null where rows are the source's as they are."""

    version: int
    fingerprint: str
    fit: Fit
    sources: list[SourceCounts]
    generation: dict[str, Any] | None
    filtered: dict[str, int]
    splits: dict[str, SplitCounts]
    shards: list[ShardRecord]


def read_rows(folder: Path, fit: Fit | None = None) -> tuple[Dataset, Dataset, Manifest]:
    """A row set, whole, and its manifest. Raises UserError where it is not whole, naming what it lacks, or does not fit."""
    if not is_whole(folder):
        raise UserError(
            "data.rows", got=f"{folder}, which lacks {MANIFEST}", expected=f"a row set: {MAKE}"
        )
    with refusing((OSError, ValueError), "data.rows", folder / MANIFEST, "a manifest"):
        manifest = Manifest.model_validate(read_json(folder / MANIFEST))
    if manifest.version != VERSION:
        raise UserError(
            "data.rows",
            got=f"{folder}, of version {manifest.version}",
            expected=f"{VERSION}: {MAKE}",
        )
    unfit = [shard.name for shard in manifest.shards if hash_of(folder / shard.name) != shard.hash]
    if unfit := unfit or [
        split for split in SPLITS if not any(it.name.startswith(split) for it in manifest.shards)
    ]:
        got = f"{folder}, of which {', '.join(unfit)} is not there, or not as it was written"
        raise UserError("data.rows", got=got, expected=f"a whole row set: {MAKE}")
    if fit is not None:
        fit.check(manifest.fit, folder)
    halves = []
    with quiet():
        for split in SPLITS:
            names = [shard.name for shard in manifest.shards if shard.name.startswith(split)]
            rows = concatenate_datasets([Dataset.from_file(str(folder / name)) for name in names])
            rows._fingerprint = f"{manifest.fingerprint}-{split}"
            halves.append(rows)
    return halves[0], halves[1], manifest


def is_whole(folder: Path) -> bool:
    """Whether it was finished; what became of its files since then is seen when it is read."""
    return (folder / MANIFEST).is_file()


def check(config: DataConfig, target: RowTarget) -> None:
    """Raises UserError for a shape of rows that a target cannot read."""
    if not target.tokenizer.is_fast:
        got = f"the tokenizer {type(target.tokenizer).__name__}"
        raise UserError("target.model", got=got, expected="one with a tokenizer.json")
    if target.model is None:
        return
    positions = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.max_length > positions:
        raise UserError(
            "data.max_length",
            got=config.max_length,
            expected=f"at most {positions}, the target's context length",
        )
    if config.packing and packing(target.model) is None:
        got = "true with a target whose layers read one document into the next"
        raise UserError("data.packing", got=got, expected="false")


def fingerprint(
    config: DataConfig, target: RowTarget, measured_on: Sequence[str], without: Iterable[str] = ()
) -> str:
    """A hash of all that a recipe's rows depend on, the contents of files included; without: keys of `data:` that do not count."""
    generates, by_servers = config.regenerate.num_tokens > 0, bool(config.regenerate.server)
    not_read = {"server", "timeout"} | ({"batch_size"} if by_servers else {"filter"})
    rounded = [target.quantization] if target.quantization and not by_servers else []
    suites = [*config.decontaminate, *(measured_on if "all" in config.decontaminate else ())]
    inputs = [
        VERSION,
        Fit.of(config, target).model_dump(exclude=set(without)),
        config.model_dump(exclude={"source", "chat_template", "rows", "shard", "cache_dir", "num_proc", "force", "regenerate", *without}),
        [[entry.model_dump(exclude={"source", "license"}), _rows_of(entry.source, entry.split or config.split)]
         for _, entry in entries(config.source)],
        [content_of(suite) for suite in suites],
        [by_servers, config.regenerate.model_dump(exclude=not_read), *rounded] if generates else None,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _rows_of(source: str, split: str) -> str:
    return (
        str(resolve_name(BUILT_IN[source])(split)[0]) if source in BUILT_IN else content_of(source)
    )


def write_rows(
    folder: Path, halves: Mapping[str, tuple[Packed, SplitCounts]], facts: Mapping[str, Any]
) -> None:
    """Write a row set: each shard aside and then in place, the manifest last. facts: the manifest's other fields.

    Raises ResourceError for a disk that is full or cannot be written.
    """
    shards = []
    with on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for split, (packed, _) in halves.items():
            per_shard = max(1, SHARD_TOKENS // packed.max_length)
            count = -(-len(packed) // per_shard)
            for index in range(count):
                path = folder / f"{split}-{index:05d}-of-{count:05d}.arrow"
                part = range(index * per_shard, min((index + 1) * per_shard, len(packed)))
                write_arrow(
                    path,
                    COLUMNS,
                    (
                        packed[part[at : at + PACKED_ROWS]]
                        for at in range(0, len(part), PACKED_ROWS)
                    ),
                )
                shards.append(ShardRecord(name=path.name, rows=len(part), hash=hash_of(path)))
        splits = {split: counts for split, (_, counts) in halves.items()}
        manifest = Manifest(version=VERSION, splits=splits, shards=shards, **facts)
        aside = folder / f"{MANIFEST}.part"
        aside.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(aside, folder / MANIFEST)
