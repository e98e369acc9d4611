"""Read sources of training rows, and convert their many forms to three common forms.

The common forms are a text, a conversation, and token ids with their loss mask.

A source is `self` (the target's own prompts, specdistill.data.produce.self_prompts), a built-in
source, a jsonl, json or parquet file, a folder or Hub id that the datasets library can load, or a
list of entries, `SourceEntry`. Every row has the keys of `COLUMNS`. The keys of its form are not
None:

- a text: `text`.
- a conversation: `messages` and perhaps `tools` (specdistill.evaluation.suites.conversations).
- token ids: `input_ids`, `loss_mask` and their `text`, by which they are compared with other rows.
"""

import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, NamedTuple

import fsspec
import numpy as np
from datasets import (
    Dataset,
    DownloadManager,
    Features,
    List,
    ReadInstruction,
    Value,
    load_dataset,
    load_dataset_builder,
)
from datasets import Json as AnyJson
from datasets.exceptions import DatasetsError
from datasets.fingerprint import Hasher
from datasets.packaged_modules.json.json import Json
from fsspec.core import OpenFile
from numpy.typing import NDArray
from pyarrow import ArrowException
from transformers import PreTrainedTokenizerBase
from yaml import YAMLError

from specdistill.common.documents import MAX_LINE_BYTES, read_json_rows
from specdistill.common.errors import ResourceError, UserError, join_lines, logger, name_sibling_key
from specdistill.data.rows.bad_rows import (
    EMPTY,
    FAULT_COLUMNS,
    check_share,
    describe_fault,
    merge_counts,
    split_faults,
)
from specdistill.data.rows.chat import answer_documents, check_prompts
from specdistill.data.rows.encoding import Row
from specdistill.data.rows.files import (
    cache_folder,
    hash_content,
    hash_of,
    hash_tokenizer,
    map_rows,
    on_disk,
    silence_datasets,
)
from specdistill.data.rows.row_set import BadRows
from specdistill.evaluation.suites.conversations import (
    Message,
    check_mappings,
    check_string,
    convert_conversation,
)
from specdistill.recipe.data_sources import (
    ANSWERS,
    BUILT_IN_SOURCES,
    CONVERSATIONS,
    EXCHANGES,
    EXPECTED,
    LOADERS,
    PROMPTS,
    SCHEMAS,
    SELF_SOURCE,
    TOKENS,
    SourceEntry,
    check_columns,
    check_path,
    list_entries,
)
from specdistill.recipe.sections import DataConfig

# The columns of a row in the common forms. A row leaves the columns of the other forms None.
COLUMNS = {
    "text": Value("string"),
    "messages": List(AnyJson()),
    "tools": List(AnyJson()),
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
}
# The kind of fault under which rows with such token ids are counted.
BAD_TOKENS = "token ids or loss mask out of range"


@dataclass(frozen=True)
class Source:
    """The rows of one source.

    Attributes:
        rows: the rows in the common forms.
        entry: the source's entry in the recipe.
        key: the name of the source in error messages.
        num_read: rows that the source has.
        bad_rows: by kind, the rows that cannot be used; they are not among `rows`.
    """

    rows: Dataset
    entry: SourceEntry
    key: str
    num_read: int = 0
    bad_rows: Mapping[str, BadRows] = field(default_factory=dict)


@dataclass(frozen=True)
class RowPlaces:
    """The places of the rows of a source in its files.

    Attributes:
        files: names of the source's files in the order of its rows; only the source's name if its
            rows have no lines.
        lines: for each file the numbers of its rows, from 1.
        unit: what is numbered, "line" or "row".
        offset: number of rows in the files before the source's first row: 100 for `train[100:200]`,
            0 if `data.split` takes no part.
    """

    files: Sequence[str]
    lines: Sequence[NDArray[np.int64]] = ()
    unit: str = "row"
    offset: int = 0

    def position(self, number: int) -> tuple[int, int]:
        """Return where a row stands: the index of its file, and its line in that file.

        Args:
            number: the number of the row in the source, from 0.

        Returns:
            (index of the file, from 0; number of the line, from 1).
        """
        # Find the file of the row: subtract the number of rows of each file before it.
        number += self.offset
        for file, lines in enumerate(self.lines):
            if number < len(lines):
                return file, int(lines[number])
            number -= len(lines)
        # Without line numbers the source counts as one file, and its rows are numbered from 1.
        return 0, number + 1

    def name(self, position: tuple[int, int]) -> str:
        """Return a position as messages write it, for example `rows.jsonl line 7`."""
        return f"{self.files[position[0]]} {self.unit} {position[1]}"


class BadLine(NamedTuple):
    """A line of a file that is no JSON object.

    Attributes:
        position: (index of the file, number of the line), as `RowPlaces.position` returns it.
        reason: what is wrong with the line.
    """

    position: tuple[int, int]
    reason: str


def load_sources(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Source]:
    """Read the rows of all sources that `data.source` lists.

    The source `self`, whose prompts the target generates later, is returned without rows.

    Args:
        config: the `data:` section.
        tokenizer: the target's tokenizer, with whose chat template conversations are checked.

    Returns:
        The sources, in the order of the recipe.

    Raises:
        UserError: for a wrong name or setting.
        ResourceError: when the Hub fails.
    """
    # The source `self` gives only prompts. So the recipe must have the target generate answers.
    sources = list(list_entries(config.source))
    self_keys = [key for key, entry in sources if entry.source == SELF_SOURCE]
    if self_keys and config.regenerate.num_tokens == 0:
        raise UserError(
            self_keys[0],
            got="self with data.regenerate.num_tokens=0",
            expected="data.regenerate.num_tokens above 0, so that the target answers its own"
            " prompts, or another source",
        )

    # These keys say how the rows of a source are read. If every source is `self`, there are no rows
    # to read, so the keys must have their defaults.
    if len(self_keys) == len(sources):
        for key, value, default in (
            ("data.columns", config.columns, {}),
            ("data.split", config.split, "train"),
        ):
            if value != default:
                raise UserError(
                    key,
                    got=f"{value} with self as the only source",
                    expected=f"the default {default}, because self has no rows to which this key"
                    " applies",
                )

    return [_read_source(entry, key, config, tokenizer) for key, entry in sources]


def _read_source(
    entry: SourceEntry, key: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Source:
    """Read the rows of one source, convert them to common forms, and count the bad rows.

    Args:
        entry: the source's entry in the recipe.
        key: the name of the source in error messages.
        config: the `data:` section.
        tokenizer: the target's tokenizer.
    """
    # The source `self` has no rows. The target generates its prompts later.
    if entry.source == SELF_SOURCE:
        no_rows = Dataset.from_dict({name: [] for name in COLUMNS}, features=Features(COLUMNS))
        return Source(no_rows, entry, key)
    if entry.source in BUILT_IN_SOURCES:
        return _read_built_in_source(entry, key, config)
    return _read_data_set(entry, key, config, tokenizer)


def _read_built_in_source(entry: SourceEntry, key: str, config: DataConfig) -> Source:
    """Read the rows of a built-in source, whose rows already have the common forms.

    Args:
        entry: the source's entry in the recipe.
        key: the name of the source in error messages.
        config: the `data:` section.

    Raises:
        UserError: if the recipe has a key that says how to convert or select rows.
    """
    if entry.where or entry.min_turns or entry.columns or config.columns:
        raise UserError(
            key,
            got=f"columns, where or min_turns for the built-in source {entry.source}",
            expected="none of these keys, which apply to other sources only",
        )

    # Called with the split, the function of a built-in source returns two things: a hash of the
    # content, and a function that yields the rows. By the hash, datasets finds rows in its cache.
    content, rows_of_split = resolve_name(BUILT_IN_SOURCES[entry.source])(
        entry.split or config.split
    )
    with silence_datasets(), on_disk(cache_folder(config.cache_dir)):
        rows = Dataset.from_generator(
            rows_of_split,
            Features(COLUMNS),
            config.cache_dir,
            fingerprint=Hasher.hash([entry.source, content, *COLUMNS]),
        )
    return Source(rows, entry, key, num_read=len(rows))


def _read_data_set(
    entry: SourceEntry, key: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Source:
    """Read a file, a folder or a Hub data set, and convert its rows to common forms.

    The common forms are a text, a conversation, and token ids with a loss mask.

    Args:
        entry: the source's entry in the recipe.
        key: the name of the source in error messages.
        config: the `data:` section.
        tokenizer: the target's tokenizer.

    Raises:
        UserError: for a source that cannot be read, or that has no row to use.
        ResourceError: when the Hub fails.
    """
    # Load the rows as they are. Lines of a file that are no JSON objects are already left out, and
    # count as bad rows.
    source = entry.source
    split = entry.split or config.split
    columns = entry.columns or config.columns
    raw, places, bad_lines = _load(entry, split, key, config)
    num_read = len(raw) + len(bad_lines)
    bad_rows: dict[str, BadRows] = {}
    if bad_lines:
        bad_rows["line that is no JSON object"] = BadRows(
            count=len(bad_lines),
            first=f"{places.name(bad_lines[0].position)}: {bad_lines[0].reason}",
        )

    # Without rows there is nothing to convert. If bad lines are the reason, the error names them.
    if len(raw) == 0:
        if bad_lines and config.on_bad_row == "stop":
            raise _make_line_error(bad_lines[0], places, key)
        check_share(bad_rows, max(1, num_read), source, key, config)
        raise UserError(key, got=f"{source}, which holds no rows", expected="a dataset with rows")
    entry_with_columns = entry.model_copy(update={"columns": columns})
    check_columns(raw.column_names, entry_with_columns, key)
    if config.regenerate.num_tokens > 0 and TOKENS in (columns or raw.column_names):
        raise UserError(
            key,
            got=f"{source}, which has rows of token ids, with data.regenerate.num_tokens above 0",
            expected="data.regenerate.num_tokens=0, because token ids are trained on unchanged",
        )

    # Convert the rows to the common forms.
    reader = RowReader(key, entry_with_columns, tokenizer, raw.features, places, config)
    rows = _convert_rows(raw, reader, split)

    # Say how many rows `where` and `min_turns` left out.
    num_filtered = len(raw) - len(rows)
    if num_filtered:
        logger.warning(
            "%s: left out %d of %d rows of %s, which do not match %s",
            key,
            num_filtered,
            len(raw),
            source,
            f"{name_sibling_key(key, 'where')} and min_turns",
        )

    # Separate the rows with faults, and stop if there are too many.
    rows, faults, first_row = split_faults(rows)
    if config.on_bad_row == "stop":
        _stop_at_first(bad_lines, first_row, raw, reader)
    bad_rows = merge_counts(bad_rows, faults)
    check_share(bad_rows, num_read, source, key, config)
    if len(rows) == 0:
        raise UserError(
            key,
            got=f"{source}, where no row matches `where` and `min_turns`"
            if entry.where or entry.min_turns
            else f"{source}, whose rows are all empty",
            expected=EXPECTED,
        )
    return Source(rows, entry, key, num_read, bad_rows)


def _convert_rows(raw: Dataset, reader: "RowReader", split: str) -> Dataset:
    """Convert the rows of a source to a few common forms, or load the result from the cache.

    A common form is a text, a conversation, or token ids with a loss mask. A row that cannot be
    used becomes a record of what is wrong with it (see `describe_fault`).

    Args:
        raw: the rows as they are in the source.
        reader: converts one row.
        split: the name of the split that the rows are of.

    Raises:
        UserError: for a file that is not UTF-8.
    """
    config = reader.config
    entry = reader.entry

    # The result is cached under a hash of everything that it depends on. Local files are hashed by
    # their contents, because the fingerprint of datasets depends on their names and dates, which
    # differ between machines.
    source = entry.source
    content = [hash_content(source), split] if Path(source).exists() else raw._fingerprint

    # The result also depends on the keys that select and convert rows, and on everything that
    # decides whether a conversation is usable:
    # - the target's chat template, which must be able to render the conversation;
    # - if answers are generated, the arguments that the recipe gives to the template;
    # - otherwise the loss mask: with `assistant`, the conversation must have a turn to learn.
    conditions = [entry.where, entry.min_turns] if entry.where or entry.min_turns else []
    generates = config.regenerate.num_tokens > 0
    inputs = [
        "rows",
        content,
        entry.columns,
        *conditions,
        config.roles,
        [
            reader.tokenizer.chat_template,
            config.generation.template if generates else config.loss_mask,
        ],
        reader.places.files,
        hash_tokenizer(reader.tokenizer),
    ]
    columns = {**COLUMNS, "place": Value("string"), **FAULT_COLUMNS}
    try:
        return map_rows(raw, reader, columns, inputs, "Reading", config)
    except UnicodeDecodeError as error:  # datasets does not decode a file when it loads it.
        raise UserError(
            reader.key, got=f"{source}, which is not UTF-8", expected="text in UTF-8"
        ) from error


def _make_line_error(line: BadLine, places: RowPlaces, key: str) -> UserError:
    """Return the error that names a line of a file that is no JSON object."""
    return UserError(
        f"{key} {places.name(line.position)}", got=line.reason, expected="a JSON object"
    )


def _stop_at_first(
    bad_lines: Sequence[BadLine], first_row: int | None, raw: Dataset, reader: "RowReader"
) -> None:
    """Raise the error of the first row or line that cannot be used; return if there is none.

    Args:
        bad_lines: the lines of the source's files that are no JSON objects, in order.
        first_row: the number in `raw` of the first bad row that is not just empty; None if there is
            none.
        raw: the rows as they are in the files, without the bad lines.
        reader: converts one row, and raises the error if the row cannot be used.
    """
    # The first bad line and the first bad row are known separately. Find out which comes first.
    places = reader.places
    line = bad_lines[0] if bad_lines else None
    if line and (first_row is None or line.position < places.position(first_row)):
        raise _make_line_error(line, places, reader.key)

    # The error of the row was only counted so far. Read the row again, which raises the error.
    if first_row is not None:
        reader.read(raw[first_row], f"{reader.key} {places.name(places.position(first_row))}")


@dataclass(frozen=True)
class RowReader:
    """Converts the rows of a source to the common forms.

    Attributes:
        key: the name of the source in error messages.
        entry: the source's entry in the recipe.
        tokenizer: the target's tokenizer.
        features: the types of the source's columns.
        places: where the rows are in the source's files.
        config: the `data:` section.
    """

    key: str
    entry: SourceEntry
    tokenizer: PreTrainedTokenizerBase
    features: Features
    places: RowPlaces
    config: DataConfig

    def __call__(self, raw: dict[str, object], number: int) -> list[dict[str, object]]:
        """Return a row in the common forms, or the description of its fault.

        The result is empty for a row that does not match `where` and `min_turns`.

        Args:
            raw: the row as it is in the source.
            number: its number, from 0.

        Raises:
            UserError: if a setting is wrong, and not the content of the row.
        """
        place = self.places.name(self.places.position(number))
        try:
            return [{**row, "place": place} for row in self.read(raw, f"{self.key} {place}")]
        except UserError as error:
            # Errors of a row have a kind, by which they are counted. Others are wrong settings.
            if not error.kind:
                raise
            return [describe_fault(error, place, number)]

    def read(self, raw: dict[str, object], where: str) -> list[Row]:
        """Convert a row of the source to a common form: a text, a conversation or token ids.

        Args:
            raw: the row as it is in the source.
            where: names the row in error messages.

        Returns:
            The converted row in a list, which is empty if the recipe's `where` or `min_turns`
            leaves the row out.

        Raises:
            UserError: if the row cannot be used.
        """
        entry = self.entry

        # Leave out the row if a column does not have one of the values that `where` lists.
        raw = _remove_missing_keys(raw, dict(self.features))
        for column, accepted in entry.where.items():
            accepted_values = accepted if isinstance(accepted, list) else [accepted]
            if raw.get(column) not in accepted_values:
                return []

        # Rename the columns as `columns` of the recipe says, and convert the row.
        renamed = (
            {ours: raw.get(theirs) for ours, theirs in entry.columns.items()}
            if entry.columns
            else raw
        )
        rows = list(normalize_row(renamed, where, self.tokenizer, self.config.roles))
        if not rows:
            raise UserError(where, got="a row without content", expected=EXPECTED, kind=EMPTY)

        # Check a conversation against the target's chat template. If answers are regenerated, the
        # target must be able to answer it; otherwise its recorded answers must be learnable.
        accepted_rows = []
        for row in rows:
            messages = row.get("messages") or ()
            if sum(message["role"] == "user" for message in messages) < entry.min_turns:
                continue
            if messages and self.config.regenerate.num_tokens > 0:
                check_prompts(
                    self.tokenizer,
                    messages,
                    row.get("tools"),
                    where,
                    **self.config.generation.template,
                )
            elif messages:
                answer_documents(
                    self.tokenizer,
                    messages,
                    row.get("tools"),
                    where,
                    loss_mask=self.config.loss_mask,
                )
            accepted_rows.append(row)
        return accepted_rows


def normalize_row(
    row: Mapping[str, Any],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    roles: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Row]:
    """Convert a row of a data set to a common form: a text, a conversation or token ids.

    Data sets on the Hub name the columns of a conversation, of an instruction and of its answer in
    many ways. The lists CONVERSATIONS, EXCHANGES, PROMPTS and ANSWERS have the known names.

    Args:
        row: the values of the row by column name.
        where: names the row in error messages.
        tokenizer: the target's tokenizer, which checks and decodes token ids.
        roles: additional names of roles, e.g. {"bot": "assistant"}.

    Yields:
        The converted row, or nothing if the row is empty.

    Raises:
        UserError: for a row that cannot be used.
    """
    # Ignore empty columns.
    present = {column: value for column, value in row.items() if value}
    # Self-Instruct has the input and the output of an instruction in `instances`.
    if "instances" in present:
        instances = check_mappings(present["instances"], where, "instances")
        if len(instances) > 1:
            raise UserError(
                where,
                got=f"{len(instances)} entries in `instances`",
                expected="one entry (an input with its output); give each entry a row of its own",
                kind="several entries in `instances`",
            )
        present |= instances[0]

    # Find the columns of a conversation, of an instruction with its answer, or of an instruction in
    # a row without a column for the answer. The data set BFCL has a conversation in `question`.
    turns = next((present[column] for column in CONVERSATIONS if column in present), None)
    if isinstance(present.get("question"), list):
        turns = present["question"]
    exchange_columns = next((pair for pair in EXCHANGES if present.keys() >= {*pair}), None)
    question_column = next(
        (name for name in PROMPTS if name in present and not ANSWERS[name] & row.keys()), None
    )
    context = present.get("input") or present.get("context")

    # The first form that the row has decides how it is read: token ids, a conversation, a text, an
    # instruction with its answer, or a question alone.
    if TOKENS in present:
        yield _read_token_row(present, where, tokenizer)
    elif turns is not None:
        schemas = next((present[column] for column in SCHEMAS if column in present), None)
        messages, tools = convert_conversation(turns, schemas, where, roles)
        # The system message may be in a column of its own.
        if messages and messages[0]["role"] != "system" and isinstance(present.get("system"), str):
            messages = [{"role": "system", "content": present["system"]}, *messages]
        if messages:
            yield {"text": None, "messages": messages, "tools": tools}
    elif "text" in present:
        yield {"text": check_string(present["text"], where, "text"), "messages": None}
    elif exchange_columns is not None:
        question, answer = (present[column] for column in exchange_columns)
        messages = _build_exchange(question, context, answer, where)
        yield {"text": None, "messages": messages}
    elif question_column is not None:
        # The target will answer the question, so the question is the only message.
        user_message, _ = _build_exchange(
            present[question_column], context, answer=None, where=where
        )
        yield {"text": None, "messages": [user_message]}


def _load(
    entry: SourceEntry, split: str, key: str, config: DataConfig
) -> tuple[Dataset, RowPlaces, list[BadLine]]:
    """Load the rows of a file, a folder or a Hub data set, without converting them.

    Args:
        entry: the source's entry in the recipe.
        split: the split, perhaps with the part of it to take, as in `train[:100]`.
        key: the name of the source in error messages.
        config: the `data:` section.

    Returns:
        The rows; the file and line of each row; and the lines of the files that are no JSON
        objects, which the rows lack.

    Raises:
        UserError: for a source that cannot be read.
        ResourceError: when the Hub fails.
    """
    source = entry.source
    path = Path(source)
    is_local = path.exists()
    check_path(entry, split, key)
    kind = LOADERS.get(path.suffix)
    try:
        with silence_datasets() if is_local else nullcontext():
            return _load_split(entry, split, key, config)
    except (DatasetsError, OSError, ValueError, TypeError, ArrowException, YAMLError) as error:
        # A source that is no local path comes from the Hub. For it, a ValueError says that the rows
        # or the split cannot be read. Other errors say that the Hub did not give the source.
        is_hub_failure = not is_local and not isinstance(error, ValueError)
        reason = join_lines(str(error.__cause__ or error))[:300]
        if is_hub_failure:
            raise ResourceError(
                f"{key}: {source} could not be loaded from the Hub ({reason})",
                next_step="check the id, HF_TOKEN if it is private, and the network, or give a"
                " local file",
            ) from error
        raise UserError(
            key,
            got=f"{source}, whose split {split} cannot be read as {kind or 'a data set'}: {reason}",
            expected="a split that exists (set data.split, or the keys `split` and `name` of the"
            " source's entry) and whose rows all have the same columns",
        ) from error


def _load_split(
    entry: SourceEntry, split: str, key: str, config: DataConfig
) -> tuple[Dataset, RowPlaces, list[BadLine]]:
    """Load a split of a source with the datasets library, leaving out lines that are no JSON.

    Args:
        entry: the source's entry in the recipe.
        split: the split, perhaps with the part of it to take, as in `train[:100]`.
        key: the name of the source in error messages.
        config: the `data:` section.

    Returns:
        The rows; the place of each row (its file and line in JSON files, otherwise the source and
        its number); and the lines of the files that are no JSON objects, which the rows lack.
    """
    # A single file is read by the loader of its type. A folder or a Hub data set has its own
    # loader, which datasets finds by the name.
    source = entry.source
    kind = LOADERS.get(Path(source).suffix)
    loader = kind or source
    cache_dir = config.cache_dir
    options: dict[str, object] = (
        {"data_files": source} if kind else {"name": entry.name, "revision": entry.revision}
    )
    builder = load_dataset_builder(loader, **options, cache_dir=cache_dir)

    # Check every line of JSON files first, because datasets stops at the first bad line. datasets
    # prepares all splits at once, so the files of all splits are checked. Rows of other sources
    # have no lines: messages name them by the source and the number of the row.
    path = Path(source)
    places = RowPlaces([path.name if path.exists() else source])
    bad_lines: list[BadLine] = []
    if isinstance(builder, Json):
        checked = _check_json_files(builder, key, config)
        split_files = checked.get(split.partition("[")[0], [])
        bad_lines = list(chain.from_iterable(file.bad_lines for file in split_files))
        if split_files:
            places = RowPlaces(
                [file.name for file in split_files],
                [file.lines for file in split_files],
                "row" if all(file.is_list for file in split_files) else "line",
            )
            if not any(len(file.lines) for file in split_files):
                return Dataset.from_dict({}), places, bad_lines

        # If a file has bad lines, load copies of such files without these lines. Files and splits
        # that have no other lines are left out.
        if any(file.bad_lines for file in chain.from_iterable(checked.values())):
            loader = "json"
            readable = {}
            for name, files in checked.items():
                readable[name] = [file.readable for file in files if len(file.lines)]
            options = {"data_files": {name: files for name, files in readable.items() if files}}
            builder = load_dataset_builder(loader, **options, cache_dir=cache_dir)
    builder.download_and_prepare()
    rows = builder.as_dataset(split=split)

    # `data.split` may take a part of the rows, and then also a part of the bad lines.
    if "[" in split and rows.info.splits is not None:
        sizes = {name: info.num_examples for name, info in rows.info.splits.items()}
        part = ReadInstruction.from_spec(split).to_absolute(sizes)[0]
        places = replace(places, offset=part.from_ or 0)
        bad_lines = _select_bad_lines(
            bad_lines, places, part.to - (part.from_ or 0), sizes[part.splitname]
        )

    # Load columns of mixed types again as JSON objects (see `_has_json_within`).
    columns = {
        name: List(AnyJson())
        for name, feature in rows.features.items()
        if _has_json_within(feature)
    }
    if columns and isinstance(builder, Json):
        options["features"] = Features({**rows.features, **columns})
        rows = load_dataset(loader, **options, cache_dir=cache_dir, split=split)
    return rows, places, bad_lines


def _check_json_files(
    builder: Json, key: str, config: DataConfig
) -> dict[str, list["CheckedFile"]]:
    """Check each JSON file that a data set consists of, line by line.

    Args:
        builder: the builder with which datasets would load the files.
        key: the name of the source in error messages.
        config: the `data:` section.

    Returns:
        The checked files of each split.
    """
    checked = {}
    for name, files in builder.config.data_files.items():
        checked[name] = [
            _check_json(str(file), number, key, config) for number, file in enumerate(files)
        ]
    return checked


def _select_bad_lines(
    bad_lines: Sequence[BadLine], places: RowPlaces, num_rows: int, num_all: int
) -> list[BadLine]:
    """Return the bad lines within the part of the files that the recipe takes.

    The recipe takes a part with a split such as `train[100:200]`.

    Args:
        bad_lines: the bad lines of all files.
        places: the places of the rows in the files, with the number of rows before the part.
        num_rows: the number of rows in the part.
        num_all: the number of rows in all files.
    """
    # Positions are (index of the file, line). The part reaches from its first row to the row after
    # its last row. If its first row is the first row of the files, it also has the bad lines before
    # that row. If its last row is the last row of the files, it also has the bad lines after it.
    first = (0, 0)
    after = (len(places.files), 0)
    if places.offset > 0:
        first = places.position(0)
    if places.offset + num_rows < num_all:
        after = places.position(num_rows)
    return [line for line in bad_lines if first <= line.position < after]


class CheckedFile(NamedTuple):
    """A file of JSON objects, whose lines were all checked.

    Attributes:
        name: its name, without folders.
        readable: the file, or a copy of it without the lines that are no JSON objects.
        lines: the line numbers of its JSON objects, from 1.
        bad_lines: the lines that are no JSON objects.
        is_list: whether the file is one JSON list. Its items are then numbered instead of lines.
    """

    name: str
    readable: str
    lines: NDArray[np.int64]
    bad_lines: list[BadLine]
    is_list: bool


def _check_json(name: str, number_of_file: int, key: str, config: DataConfig) -> CheckedFile:
    """Check that every line of a file is a JSON object, before Arrow reads the file.

    Arrow's JSON reader ends the process on a `null`, and holds a line of any length in memory. If
    some lines are bad, a copy of the file without them is written to the cache.

    Args:
        name: the path or address of the file: JSON lines, or one JSON list of objects.
        number_of_file: the index of the file among the files of its split, from 0.
        key: the name of the source in error messages.
        config: the `data:` section, which says where the cache is.

    Raises:
        UserError: for a JSON list that is broken, and for a file that cannot be read.
    """
    # Download a remote file, and decompress it while reading. A compressed list could expand to any
    # size, so its size is limited. A list in a plain file is at most as large as the file.
    path = DownloadManager().download(name)
    file = fsspec.open(str(path), compression="infer")
    largest_list = MAX_LINE_BYTES if file.compression else Path(path).stat().st_size
    bad_lines: list[BadLine] = []

    def report(number: int, error: ValueError) -> None:
        """Add a line that is no JSON object to `bad_lines`.

        The text of the error may begin with the number of the line, which is removed because the
        position already has it.
        """
        reason = re.sub(r"^(line|row) \d+(: |, )", "", str(error))
        bad_lines.append(BadLine((number_of_file, number), reason))

    # Find out whether the file is one list, and read all its lines. If some are bad, a copy without
    # them is loaded later.
    try:
        with file as stream:
            is_list = stream.read(1) == b"["
        with file as stream:
            rows = read_json_rows(stream, allow_nan=True, largest_list=largest_list, report=report)
            lines = [number for number, _ in rows]
        if not lines and not bad_lines:
            raise ValueError("which holds no rows")
        readable = name
        if bad_lines:
            readable = str(_copy_readable(file, Path(path), largest_list, config))
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(
            key, got=f"{path}, {error}", expected="a JSON object on each line, or a list of them"
        ) from error
    return CheckedFile(Path(name).name, readable, np.array(lines, np.int64), bad_lines, is_list)


def _copy_readable(file: OpenFile, path: Path, largest_list: int, config: DataConfig) -> Path:
    """Write a copy of a file to the cache, with only the lines that are JSON objects.

    Args:
        file: the opened file, which is decompressed while it is read.
        path: the path of the file, whose content names the copy.
        largest_list: the most bytes of a JSON list.
        config: the `data:` section, which says where the cache is.

    Returns:
        The path of the copy.
    """
    # Write under a name with the id of this process, and then move the file, so that no other
    # process sees it half-written. `report` ignores the bad lines, which are known already.
    copy = cache_folder(config.cache_dir) / "prepared" / f"{hash_of(path)}-readable.jsonl"
    aside = copy.with_suffix(f".{os.getpid()}.part")
    with on_disk(copy.parent):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with file as stream, aside.open("w", encoding="utf-8") as output:
            for _, row in read_json_rows(
                stream, allow_nan=True, largest_list=largest_list, report=lambda number, error: None
            ):
                output.write(json.dumps(row) + "\n")
        os.replace(aside, copy)
    return copy


def _read_token_row(row: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Check a row of token ids, and return it with its loss mask.

    The token ids are trained on as they are. Without a `loss_mask` all tokens carry loss. The ids
    are decoded to a text only to compare the row with other rows.

    Args:
        row: the values of the row by column name.
        where: names the row in error messages.
        tokenizer: the target's tokenizer.

    Raises:
        UserError: for ids or a mask with wrong numbers or lengths, and for a row with labels or
            another mask instead of a `loss_mask`.
    """
    # Arrow reads a whole column as floats if one of its rows has a float. Turn whole numbers back
    # into integers.
    row = dict(row)
    for name in {TOKENS, "loss_mask"} & row.keys():
        row[name] = _convert_to_integers(row[name])

    # Columns such as `labels` or `attention_mask` are not used. They are an error if they seem to
    # exclude tokens from the loss, that is, if they are not all ones.
    ids = row[TOKENS]
    full_mask = [1] * (len(ids) if isinstance(ids, list) else 0)
    unread_masks = [
        name
        for name, values in row.items()
        if (name == "labels" or name.endswith(("_mask", "_masks"))) and values != full_mask
    ]
    if unread_masks and "loss_mask" not in row:
        raise UserError(
            where,
            got=f"{TOKENS} with a column {unread_masks[0]}, which looks like a loss mask but is not"
            " read",
            expected="a loss_mask of 0 and 1 (data.columns={input_ids: input_ids, loss_mask: NAME}"
            " reads the column NAME), or data.columns={input_ids: input_ids} to ignore the column"
            " and put loss on all tokens",
        )

    # Check the ids and the mask: lists of integers of equal lengths, with ids in the vocabulary and
    # masks of 0 and 1.
    mask = row.get("loss_mask", full_mask)
    for name, values, limit in ((TOKENS, ids, len(tokenizer)), ("loss_mask", mask, 2)):
        is_ids = name == TOKENS
        if not isinstance(values, list) or len(values) != len(ids):
            length = f" of length {len(values)}" if isinstance(values, list) else ""
            raise UserError(
                where,
                got=f"{name} of type {type(values).__name__}{length}",
                expected="a list of integers" + ("" if is_ids else ", one for each input id"),
                kind=BAD_TOKENS,
            )
        for value in values:
            if type(value) is not int or not 0 <= value < limit:
                raise UserError(
                    where,
                    got=f"{value!r} in {name}",
                    expected=f"integers from 0 to {limit - 1}"
                    + (", the token ids of the target" if is_ids else ""),
                    kind=BAD_TOKENS,
                )
    return {"text": str(tokenizer.decode(ids)), "input_ids": ids, "loss_mask": mask}


def _convert_to_integers(values: object) -> object:
    """Replace floats in a list that are whole numbers, such as 2.0, by integers.

    A value that is not a list is returned unchanged.
    """
    if not isinstance(values, list):
        return values
    return [
        int(value) if isinstance(value, float) and value.is_integer() else value for value in values
    ]


def _has_json_within(feature: object) -> bool:
    """Return whether a column has lists of objects in which some key has values of several types.

    For example, `content` is a text in one object and a number in another. datasets then gives
    this key the type Json (here imported as `AnyJson`): it stores each value of the key as JSON.
    But a text that is valid JSON itself is stored without the quotes of a JSON string. So the text
    "2" is stored as 2, and read as a number.

    To avoid this, the caller loads such a column again. Then each whole object has the type Json,
    and is stored as one JSON object, such as {"content": "2"}. In it, every text keeps its quotes.

    Args:
        feature: the type that datasets found for the column.
    """
    # The type must be a list of dicts, with the type Json somewhere within it: the `repr` of a type
    # contains the `repr` of each type within it.
    return (
        isinstance(feature, List)
        and isinstance(feature.feature, dict)
        and repr(AnyJson()) in repr(feature)
    )


def _remove_missing_keys(value: Any, feature: object) -> Any:
    """Remove keys whose value is None from a row and from all objects within it.

    Arrow gives all objects of a column the same keys. An object that lacks a key of another row
    gets the key with the value None.

    Args:
        value: the row, or a value within it.
        feature: the type of the value in datasets: a dict for an object, `List` for a list.
    """
    # Objects and lists are cleaned recursively. Other values stay as they are.
    if value is not None and isinstance(feature, dict):
        return {
            name: _remove_missing_keys(item, feature[name])
            for name, item in value.items()
            if item is not None
        }
    if value and isinstance(feature, List):
        return [_remove_missing_keys(item, feature.feature) for item in value]
    return value


def _build_exchange(question: object, context: object, answer: object, where: str) -> list[Message]:
    """Return an instruction and its answer as a conversation of two messages.

    Args:
        question: the instruction.
        context: a text that the instruction applies to. It comes below the instruction in the
            user's message; None if there is none.
        answer: the answer; None for an empty message of the assistant.
        where: names the row in error messages.
    """
    parts = [check_string(part, where, "instruction") for part in (question, context) if part]
    return [
        {"role": "user", "content": "\n\n".join(parts)},
        {"role": "assistant", "content": check_string(answer or "", where, "output")},
    ]
