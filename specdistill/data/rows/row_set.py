"""A row set: a folder of packed rows that training opens, with a record of how they were made.

The folder has these files:

- `train-00000-of-00002.arrow` …, `validation-00000-of-00001.arrow`: rows with the columns of
  `specdistill.data.rows.packing`, memory-mapped.
- `manifest.json`: the `Manifest`. It is written last, so a folder without it is incomplete.

A recipe either names a row set (`data.rows`) or describes its sources. In the second case its own
row set is found by a fingerprint of everything that the rows depend on.
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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdistill.common.documents import read_json
from specdistill.common.errors import UserError, convert_errors
from specdistill.data.rows.chat import count_common_prefix
from specdistill.data.rows.files import (
    NUM_SHOWN_HASH_DIGITS,
    hash_content,
    hash_of,
    hash_tokenizer,
    on_disk,
    silence_datasets,
    write_arrow,
)
from specdistill.data.rows.packing import COLUMNS, Packed
from specdistill.recipe.data_sources import BUILT_IN_SOURCES, list_entries
from specdistill.recipe.sections import DataConfig, Regeneration, ServerRegeneration
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import choose_packing

VERSION = 2  # Raise it when this code makes other rows from equal recipes.
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
# A file of a row set, also of one that is being written.
PART = re.compile(
    rf"(({'|'.join(SPLITS)})-\d{{5}}-of-\d{{5}}\.arrow|{re.escape(MANIFEST)})(\.part)?"
)
# Tokens per shard, padding included. A token takes 13 bytes in the columns of a packed row, so a
# shard has about 440 MB.
SHARD_TOKENS = 2**25
# Keys of `data:` that do not change the rows, or that are hashed in another form.
KEYS_WITHOUT_EFFECT_ON_ROWS = (
    "source",
    "chat_template",
    "rows",
    "shard",
    "cache_dir",
    "num_proc",
    "force",
    "regenerate",
)
BAD_ROW_KEYS = ("roles", "on_bad_row", "max_bad_rows")  # see `_list_default_keys`
PACKED_ROWS = 256  # rows that are packed, held in memory and written at a time
MAKE_HINT = "run `specdistill data make` to make one"


@dataclass(frozen=True)
class RowTarget:
    """The target that rows are made for.

    Attributes:
        name: name of the target.
        weights: hash of the files of its weights.
        tokenizer: the target's tokenizer.
        end_ids: tokens that end a generation.
        model: the model; None if its weights are not loaded, because servers generate or nothing is
            generated.
        quantization: the quantization of the model; None if it has none.
    """

    name: str
    weights: str
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...] = ()
    model: PreTrainedModel | None = None
    quantization: str | None = None

    @classmethod
    def from_target(cls, target: FrozenTarget) -> "RowTarget":
        """Build a RowTarget from a loaded target."""
        return cls(
            target.name,
            target.identity.weights,
            target.tokenizer,
            tuple(target.eos_token_ids),
            target.model,
            target.quantization,
        )


class Record(BaseModel):
    """A part of a manifest: a frozen pydantic model that accepts no unknown key."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RowSetSpec(Record):
    """The target that the rows of a row set are for, and the shape of the rows.

    A recipe can use a row set if both have equal specs.

    Attributes:
        target: hash of the target's weights.
        tokenizer: hash of its tokenizer.
        chat_template: its chat template; None if it has none.
        max_length: tokens of a row.
        packing: whether a row may hold several documents.
        loss_mask: `assistant` or `all`, the tokens that carry loss.
    """

    target: str
    tokenizer: str
    chat_template: str | None
    max_length: int
    packing: bool
    loss_mask: str

    @classmethod
    def from_config(cls, config: DataConfig, target: RowTarget) -> "RowSetSpec":
        """Return the spec that a row set must have for this recipe and this target.

        Args:
            config: the `data:` section of the recipe.
            target: the target.
        """
        tokenizer = target.tokenizer
        return cls(
            target=target.weights,  # a hash of the weights
            tokenizer=hash_tokenizer(tokenizer),
            chat_template=tokenizer.chat_template,
            **config.model_dump(include={"max_length", "packing", "loss_mask"}),
        )

    def check(self, other_spec: "RowSetSpec", folder: Path) -> None:
        """Check that a row set was made for the target and the shape of rows of this spec.

        Args:
            other_spec: the spec that the row set was made with.
            folder: the folder of the row set, for the error.

        Raises:
            UserError: if a field differs, naming the first such field.
        """
        # Iterating over a pydantic model yields (field name, value).
        for name, own_value in self:
            other_value = getattr(other_spec, name)
            if other_value == own_value:
                continue

            # Templates and hashes are too long for a message. Show a part of each.
            if name == "chat_template":
                # Show both templates from where they differ, with a few characters before it.
                start = max(0, count_common_prefix(str(other_value), str(own_value)) - 20)
                other_value = repr(str(other_value)[start : start + 60])
                own_value = repr(str(own_value)[start : start + 60])
            elif name in ("target", "tokenizer"):
                other_value = other_value[:NUM_SHOWN_HASH_DIGITS]
                own_value = own_value[:NUM_SHOWN_HASH_DIGITS]
            raise UserError(
                "data.rows",
                got=f"{folder}, made with another {name.replace('_', ' ')}: {other_value}",
                expected=f"{own_value}, as in this recipe",
            )


class BadRows(Record):
    """The rows of a source that cannot be used for the same reason.

    Attributes:
        count: the number of these rows.
        first: where the first of them stands, and what is wrong with it.
    """

    count: int
    first: str


class SourceCounts(Record):
    """A source, with the counts of its rows and of its documents in the training split.

    Attributes:
        source: the name of the source, as a reader knows it.
        key: the recipe key that names it.
        revision: its revision on the Hub, if the recipe gives one.
        license: its licence, as far as it is known.
        weight: its weight in the recipe.
        rows: the rows of `rows_read` that can be used and were not filtered.
        fingerprint: fingerprint of these rows.
        documents: documents of the source in the training rows.
        tokens: tokens of these documents.
        loss_tokens: tokens of these documents that carry loss.
        rows_read: rows that the source has.
        bad_rows: by kind, the rows of `rows_read` that were skipped.
    """

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
    rows_read: int = 0
    bad_rows: dict[str, BadRows] = {}


class SplitCounts(Record):
    """The counts of a split: rows, documents and tokens."""

    rows: int
    documents: int
    tokens: int
    loss_tokens: int


class ShardRecord(Record):
    """A file of a row set, with its number of rows and its hash."""

    name: str = Field(pattern=r"^[\w-]+\.arrow$")
    rows: int
    hash: str


class Manifest(Record):
    """The record of a row set, `manifest.json`.

    Attributes:
        version: the version of the code that made the rows.
        fingerprint: hash of everything that the rows depend on.
        fit: the target that the rows are for, and their shape.
        sources: the sources, with their counts.
        generation: how the rows were generated; null if they are the source's own.
        filtered: how many rows and documents were filtered, by the reason.
        splits: the counts of each split.
        shards: the files of rows.
    """

    version: int
    fingerprint: str
    fit: RowSetSpec
    sources: list[SourceCounts]
    generation: dict[str, Any] | None
    filtered: dict[str, int]
    splits: dict[str, SplitCounts]
    shards: list[ShardRecord]


def read_rows(folder: Path, fit: RowSetSpec | None = None) -> tuple[Dataset, Dataset, Manifest]:
    """Open a row set, after checking that its files are complete and unchanged.

    Args:
        folder: the folder of the row set.
        fit: the target and the shape of rows that the row set must have been made for; None to
            accept any.

    Returns:
        The training rows, the validation rows and the manifest.

    Raises:
        UserError: if a file is missing or was changed, if the row set is of another version, or if
            it was not made for `fit`.
    """
    # The manifest is written last, so a folder without one is incomplete.
    if not is_whole(folder):
        raise UserError(
            "data.rows",
            got=f"{folder}, which lacks {MANIFEST}",
            expected=f"a complete row set: {MAKE_HINT}",
        )

    # The manifest must be written by this version of the code.
    with convert_errors((OSError, ValueError), "data.rows", folder / MANIFEST, "a manifest"):
        manifest = Manifest.model_validate(read_json(folder / MANIFEST))
    if manifest.version != VERSION:
        raise UserError(
            "data.rows",
            got=f"{folder}, a row set of version {manifest.version}",
            expected=f"a row set of version {VERSION}: {MAKE_HINT}",
        )

    # Every file must be there as it was written, and every split must have a file.
    damaged = [
        shard.name for shard in manifest.shards if hash_of(folder / shard.name) != shard.hash
    ]
    if not damaged:
        for split in SPLITS:
            if not any(shard.name.startswith(split) for shard in manifest.shards):
                damaged.append(split)
    if damaged:
        raise UserError(
            "data.rows",
            got=f"{folder}, where {', '.join(damaged)} is missing or was changed",
            expected=f"a complete row set: {MAKE_HINT}",
        )

    # The rows must fit the recipe and the target.
    if fit is not None:
        fit.check(manifest.fit, folder)

    # Open each split, with a fingerprint that does not depend on the files' names.
    splits = []
    with silence_datasets():
        for split in SPLITS:
            names = [shard.name for shard in manifest.shards if shard.name.startswith(split)]
            rows = concatenate_datasets([Dataset.from_file(str(folder / name)) for name in names])
            rows._fingerprint = f"{manifest.fingerprint}-{split}"
            splits.append(rows)
    return splits[0], splits[1], manifest


def is_whole(folder: Path) -> bool:
    """Return whether a row set was finished: its manifest, which is written last, exists.

    The other files are not looked at; `read_rows` checks that they exist and are unchanged.
    """
    return (folder / MANIFEST).is_file()


def check_row_set(config: DataConfig, target: RowTarget) -> None:
    """Raise UserError if a target cannot read the rows that a recipe asks for.

    Args:
        config: the `data:` section of the recipe.
        target: the target. If its model is not loaded, only its tokenizer is checked.
    """
    # The loss mask needs the characters of each token, which only fast tokenizers return.
    if not target.tokenizer.is_fast:
        raise UserError(
            "target.model",
            got=f"the tokenizer {type(target.tokenizer).__name__}",
            expected="a model with a fast tokenizer, which has a tokenizer.json",
        )
    if target.model is None:
        return

    # A row must fit the context of the target.
    positions = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.max_length > positions:
        raise UserError(
            "data.max_length",
            got=config.max_length,
            expected=f"at most {positions}, the target's context length",
        )

    # A packed row has several documents, which the target must keep apart.
    if config.packing and choose_packing(target.model) is None:
        raise UserError(
            "data.packing",
            got="true with a target whose layers carry state from one document to the next",
            expected="false, so that each row holds one document",
        )


def compute_fingerprint(
    config: DataConfig, target: RowTarget, measured_on: Sequence[str], without: Iterable[str] = ()
) -> str:
    """Hash everything that the rows of a recipe depend on, including the contents of files.

    Recipes with equal hashes can share a row set.

    Args:
        config: the `data:` section of the recipe.
        target: the target that the rows are for.
        measured_on: the suites of prompts that the draft will be measured on. They count if
            `data.decontaminate` contains `all`: rows that overlap their prompts are left out.
        without: keys of `data:` that are not hashed.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.
    """
    generates = isinstance(config.regenerate, Regeneration)
    by_servers = isinstance(config.regenerate, ServerRegeneration)
    # Leave out settings that do not change the rows: the address and the timeout of a server. If
    # servers generate the rows, each request has its own seed, so the batch size changes nothing
    # either.
    unhashed_settings = {"server", "timeout"} | ({"batch_size"} if by_servers else set())
    suites = [*config.decontaminate, *(measured_on if "all" in config.decontaminate else ())]
    excluded = {*KEYS_WITHOUT_EFFECT_ON_ROWS, *_list_default_keys(config), *without}

    # Sources and suites that are files are hashed by their contents, not by their names.
    sources: list[object] = []
    for _, entry in list_entries(config.source):
        content = _hash_source(entry.source, entry.split or config.split)
        sources.append([entry.model_dump(exclude={"source", "license"}), content])
    generation: list[object] | None = None
    if generates:
        generation = [by_servers, config.regenerate.model_dump(exclude=unhashed_settings)]
        # The target's quantization matters if the target in this process generates.
        if target.quantization and not by_servers:
            generation.append(target.quantization)

    inputs = [
        VERSION,
        RowSetSpec.from_config(config, target).model_dump(exclude=set(without)),
        config.model_dump(exclude=excluded),
        sources,
        [hash_content(suite) for suite in suites],
        generation,
    ]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _list_default_keys(config: DataConfig) -> list[str]:
    """Return the names of BAD_ROW_KEYS whose values are the defaults.

    The fingerprint of a row set leaves out these keys. The keys are newer than the fingerprint, so
    row sets that were made before the keys existed keep their fingerprints.
    """
    return [
        name
        for name in BAD_ROW_KEYS
        if getattr(config, name) == DataConfig.model_fields[name].get_default()
    ]


def _hash_source(source: str, split: str) -> str:
    """Return a hash of a source's content.

    Args:
        source: the name of a built-in source, the path of a file or folder, or the id of a Hub data
            set. The id of a Hub data set is returned as it is.
        split: the split, which matters for built-in sources.
    """
    # The table has a function for each built-in source. Called with the split, it returns a hash of
    # the content and a function that yields the rows.
    if source in BUILT_IN_SOURCES:
        return str(resolve_name(BUILT_IN_SOURCES[source])(split)[0])
    return hash_content(source)


def write_rows(
    folder: Path, splits: Mapping[str, tuple[Packed, SplitCounts]], facts: Mapping[str, Any]
) -> None:
    """Write a row set: the packed rows of each split in files, and then the manifest.

    Every file is written under a temporary name and then moved, so it appears whole or not at all.

    Args:
        folder: the folder of the row set.
        splits: for `train` and `validation`, the packed rows and their counts.
        facts: the fields of the manifest that this function does not fill in itself.

    Raises:
        ResourceError: for a disk that is full or cannot be written.
    """
    shards = []
    with on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)

        # Write each split in files of about SHARD_TOKENS tokens. Rows are packed when `packed` is
        # indexed, so only PACKED_ROWS rows at a time are held in memory.
        for split, (packed, _) in splits.items():
            rows_per_shard = max(1, SHARD_TOKENS // packed.max_length)
            count = -(-len(packed) // rows_per_shard)
            for index in range(count):
                path = folder / f"{split}-{index:05d}-of-{count:05d}.arrow"
                first = index * rows_per_shard
                part = range(first, min(first + rows_per_shard, len(packed)))
                batches = (
                    packed[part[start : start + PACKED_ROWS]]
                    for start in range(0, len(part), PACKED_ROWS)
                )
                write_arrow(path, COLUMNS, batches)
                shards.append(ShardRecord(name=path.name, rows=len(part), hash=hash_of(path)))

        # The manifest comes last, so a folder that has a manifest is complete.
        manifest = Manifest(
            version=VERSION,
            splits={split: counts for split, (_, counts) in splits.items()},
            shards=shards,
            **facts,
        )
        aside = folder / f"{MANIFEST}.part"
        aside.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(aside, folder / MANIFEST)
