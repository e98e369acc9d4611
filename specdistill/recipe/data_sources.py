"""The entries of `data.source`, and what is known about sources without reading their rows.

This file knows the names of sources and of their columns, their licences, and which sources have no
pinned revision.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from specdistill.common.documents import convert_csv, read_json_rows
from specdistill.common.errors import UserError, find_nearest, name_sibling_key
from specdistill.recipe.fields import Condition, Section, option
from specdistill.recipe.load import REQUIRED_MARK, validate_recipe

# The value names a function that takes a split. It returns a fingerprint of the split's rows and a
# function that yields them.
BUILT_IN_SOURCES = {"pico": "specdistill.data.produce.pico:load_rows"}
# The text of pico is Python's standard library, which has Python's own licence.
BUILT_IN_LICENSES = {"pico": "PSF-2.0"}
# The source whose prompts the target generates itself.
SELF_SOURCE = "self"
# Loaders of the `datasets` library by the suffix of a file.
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Columns that training data may have.
CONVERSATIONS = ("messages", "conversations", "conversation", "turns")
# A column of token ids, for rows that were tokenized elsewhere.
TOKENS = "input_ids"
# Pairs of columns that hold a question and its answer.
EXCHANGES = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
)
PROMPTS = tuple(dict.fromkeys(question for question, _ in EXCHANGES))
# For each column of questions, the columns that may hold its answers.
ANSWERS = {
    prompt: {answer for question, answer in EXCHANGES if question == prompt} for prompt in PROMPTS
}
# Columns with descriptions of tools, for chat templates that show tools to the model.
SCHEMAS = ("tools", "functions", "function")  # The last one is in BFCL.
KNOWN_COLUMNS = (
    "text",
    TOKENS,
    *CONVERSATIONS,
    "instances",
    *dict.fromkeys(chain.from_iterable(EXCHANGES)),
)
# All columns that something reads; the last ones are only read next to others.
READ_COLUMNS = (*KNOWN_COLUMNS, *SCHEMAS, "loss_mask", "system", "input", "context")
EXPECTED = (
    "text, messages, conversations, turns, input_ids, or instruction and output (prompt and"
    " response, question and answer)"
)
# Small enough to be read in a moment, before training starts.
MAX_CHECKED_BYTES = 2**25  # bytes; the columns of larger files are not checked before loading
SOURCE_IS_SELF = Condition("with source: self", lambda entry: entry.source == SELF_SOURCE)
SOURCE_HAS_ROWS = Condition(
    "with rows that exist: those of self are generated", lambda entry: entry.source != SELF_SOURCE
)
# Keys of a source that do not change which rows are read.
KEYS_WITHOUT_EFFECT_ON_READING = {"weight", "license"}
SOURCE_IS_ON_HUB = Condition(
    "of a data set on the Hub: files and folders have no revisions",
    lambda entry: (
        entry.source not in {SELF_SOURCE, *BUILT_IN_SOURCES} and not Path(entry.source).exists()
    ),
)


class SourceEntry(Section):
    """A source with its settings, as an entry of `data.source`."""

    source: str = option(..., "source: pico, self, a file, a folder or a Hub id")
    revision: str | None = option(
        None, "branch, tag or commit of a Hub id", condition=SOURCE_IS_ON_HUB
    )
    weight: float = option(
        1.0, "how often the source's rows are used; 2: every row twice; 0.5: half of the rows", gt=0
    )
    split: str | None = option(
        None, "split of the source; null: the value of data.split", condition=SOURCE_HAS_ROWS
    )
    name: str | None = option(
        None, "configuration (subset) of a data set on the Hub", condition=SOURCE_HAS_ROWS
    )
    columns: dict[str, str] = option(
        {},
        "column names: specdistill's name, then the source's, e.g. {messages: turns}; {}: as in"
        " data.columns",
        condition=SOURCE_HAS_ROWS,
    )
    where: dict[str, object] = option(
        {},
        "use only rows whose columns hold one of these values, e.g. {language: [English, German]}",
        condition=SOURCE_HAS_ROWS,
    )
    min_turns: int = option(
        0,
        "use only conversations with at least this many user turns; 0: use all rows, also texts",
        ge=0,
        condition=SOURCE_HAS_ROWS,
    )
    license: str | None = option(
        None,
        "licence of the source, for the model card of a published draft; null: the licence of pico,"
        " or the one that the card of the data set on the Hub states",
        condition=SOURCE_HAS_ROWS,
    )
    num_prompts: int | None = option(
        None,
        "number of prompts that the target generates; null: as many as data.regenerate.num_tokens"
        " needs",
        ge=2,
        condition=SOURCE_IS_SELF,
    )
    temperature: float = option(
        1.0,
        "sampling temperature for prompts that the target generates",
        gt=0,
        condition=SOURCE_IS_SELF,
    )
    system: list[str] = option(
        [],
        "system messages that set the topic of generated prompts, each for an equal share of the"
        " prompts; the training data do not contain these messages",
        condition=SOURCE_IS_SELF,
    )

    @property
    def known_license(self) -> str | None:
        """The licence of the source, if the entry or this package states one."""
        return self.license or BUILT_IN_LICENSES.get(self.source)


def list_entries(source: object) -> Iterator[tuple[str, SourceEntry]]:
    """Yield each source of the training data as an entry with its settings.

    Args:
        source: the value of `data.source`: a name, or a list of names and of mappings.

    Yields:
        The key that errors name, and the entry. The key is `data.source` for a single name,
        `data.source[0]` for a name in a list, and `data.source[0].source` for a mapping in a list.

    Raises:
        UserError: if the value is neither a name nor a list, or if the settings of an entry are not
            valid.
    """
    # A single name stands for a list of one source.
    if isinstance(source, str):
        yield "data.source", SourceEntry(source=source)
        return
    if not isinstance(source, Sequence) or not source:
        raise UserError(
            "data.source",
            got=repr(source),
            expected="pico, self, a file, a Hub id, or a list of these and of"
            " {source, weight, split}",
        )

    # Entries are names, or mappings with settings.
    for index, entry in enumerate(source):
        key = f"data.source[{index}]"
        if isinstance(entry, str):
            yield key, SourceEntry(source=entry)
        elif isinstance(entry, Mapping):
            yield f"{key}.source", validate_recipe(SourceEntry, entry, f"{key}.")
        else:
            raise UserError(
                key,
                got=repr(entry),
                expected="the name of a source, or a mapping such as {source: NAME, weight: 2}",
            )


def check_files(source: object, split: str, columns: Mapping[str, str]) -> None:
    """Check that the files of all sources exist, and that small JSONL files have known columns.

    The check needs no slow import, so that a mistake is reported at once. Columns are checked in
    files of up to MAX_CHECKED_BYTES. Lines that are no JSON objects are reported later, when the
    file is loaded.

    Args:
        source: the value of `data.source`.
        split: the split that is read from sources that name no split.
        columns: the column names of sources that give none: specdistill's name, then the source's.

    Raises:
        UserError: if a path does not exist or is of a wrong kind, if a file does not have the
            split, or if a file has no column that training can use.
    """
    for key, entry in list_entries(source):
        # Built-in sources, and prompts that the target generates, have no files.
        if entry.source in {SELF_SOURCE, *BUILT_IN_SOURCES}:
            continue
        check_path(entry, entry.split or split, key)

        # Look for known columns in small files, before anything slow is imported or loaded. With a
        # `report` that does nothing, lines that cannot be read are skipped here.
        path = Path(entry.source)
        if path.suffix == ".jsonl" and path.stat().st_size <= MAX_CHECKED_BYTES:
            column_names: dict[str, None] = {}  # a dict keeps the order, a set does not
            with path.open("rb") as file:
                for _, row in read_json_rows(file, report=lambda number, error: None):
                    column_names.update(dict.fromkeys(row))
            if column_names:
                check_columns(
                    [*column_names],
                    entry.model_copy(update={"columns": entry.columns or columns}),
                    key,
                )


def check_path(entry: SourceEntry, split: str, key: str) -> None:
    """Check that a source is an existing file or folder, or may be a data set on the Hub.

    Args:
        entry: the source.
        split: the split that is read.
        key: the key that errors name.

    Raises:
        UserError: if the source is neither a file, a folder nor a possible Hub id, or if the split
            of a file is not `train`.
    """
    source = entry.source
    path = Path(entry.source)
    is_file_name = path.suffix in LOADERS

    # A file must exist. The error suggests a file in the same folder with a similar name.
    if is_file_name and not path.is_file():
        paths_by_stem = {
            sibling.stem: str(sibling)
            for sibling in path.parent.glob("*")
            if sibling.suffix in LOADERS
        }
        nearest_stem = find_nearest(path.stem, paths_by_stem)
        raise UserError(
            key,
            got=f"{path}, which does not exist",
            expected="an existing file",
            nearest=paths_by_stem[nearest_stem] if nearest_stem else None,
        )

    # A file has only the split `train`, of which `train[:100]` is a slice.
    if is_file_name and split.partition("[")[0] != "train":
        raise UserError(
            "data.split", got=split, expected=f"train, the only split of the file {path.name}"
        )

    # Anything else must be a folder, or look like a Hub id.
    if not is_file_name and not path.is_dir() and source.count("/") != 1:
        expected = "pico, self, a jsonl, json or parquet file, a folder, or a Hub id as owner/name"
        if path.suffix == ".csv" and path.is_file():
            expected = f"a jsonl, json or parquet file; to convert it: {convert_csv(path)}"
        raise UserError(
            key,
            got="nothing" if source == REQUIRED_MARK else source,
            expected=expected,
            nearest=find_nearest(source, [SELF_SOURCE, *BUILT_IN_SOURCES]),
        )


def check_columns(own_columns: Sequence[str], entry: SourceEntry, key: str) -> None:
    """Check that a source has a column to train on, and all columns that its entry names.

    Args:
        own_columns: the names of the source's columns.
        entry: the source.
        key: the key that errors name.

    Raises:
        UserError: for a source without text or conversations, or without a column that `columns` or
            `where` names.
    """
    source = entry.source
    columns = entry.columns

    # The source must have all columns that the entry names: those by which `where` selects rows,
    # and those that `columns` renames to specdistill's names.
    for setting, wanted_columns in (("where", entry.where), ("columns", columns.values())):
        for column in wanted_columns:
            if column not in own_columns:
                raise UserError(
                    name_sibling_key(key, setting),
                    got=f"{column}, which is no column of {source}",
                    expected=f"one of {', '.join(own_columns)}",
                    nearest=find_nearest(column, own_columns),
                )

    # The keys of `columns` must be names of columns that specdistill reads.
    for our_name in columns:
        if our_name not in READ_COLUMNS:
            raise UserError(
                name_sibling_key(key, "columns"),
                got=our_name,
                expected=(
                    f"{{specdistill's name: the source's name}}, where specdistill's name is one of"
                    f" {', '.join(READ_COLUMNS)}"
                ),
                nearest=find_nearest(our_name, READ_COLUMNS),
            )

    # The rows need a column that training reads. If `columns` is set, only the columns that it
    # names count.
    named_columns = set(columns or own_columns)
    if not named_columns & {"text", TOKENS, *CONVERSATIONS, *PROMPTS}:
        similar_names = [find_nearest(column, KNOWN_COLUMNS) for column in own_columns]
        raise UserError(
            key,
            got=f"{source} with columns {', '.join(named_columns if columns else own_columns)}",
            expected=f"{EXPECTED}; if the source names them differently, state data.columns",
            nearest=next((name for name in similar_names if name), None),
        )


def list_source_names(source: object) -> list[str]:
    """Return a name for each source: the source and the settings that change which rows are read.

    Two entries of one file with different splits, for example, get different names.
    """
    # An entry may be a bare name. Turn all entries into mappings.
    listed_entries = source if isinstance(source, (list, tuple)) else [source]
    entries = [
        entry if isinstance(entry, Mapping) else {"source": entry} for entry in listed_entries
    ]

    # Join the values of all keys that change which rows are read.
    names = []
    for entry in entries:
        values = [
            str(value)
            for key, value in entry.items()
            if key not in KEYS_WITHOUT_EFFECT_ON_READING and value
        ]
        names.append(" ".join(values))
    return names


def warn_unpinned_sources(source: object) -> Iterator[str]:
    """Yield a warning for each Hub source without a revision, and each file without a licence.

    A source on the Hub needs no licence in its entry, because its card may state one.

    Args:
        source: the value of `data.source`.

    Raises:
        UserError: if the value of `data.source` is not valid.
    """
    for _, entry in list_entries(source):
        # A source is on the Hub if its name has one slash, and is no file, folder or file name.
        is_on_hub = (
            entry.source.count("/") == 1
            and SOURCE_IS_ON_HUB.holds(entry)
            and Path(entry.source).suffix not in LOADERS
        )
        if is_on_hub and entry.revision is None:
            yield (
                f"data.source: {entry.source} has no revision, so its rows may change: pin revision"
                " to a commit"
            )
        if not is_on_hub and entry.source != SELF_SOURCE and entry.known_license is None:
            yield (
                f"data.source: {entry.source} has no license, which publishing a draft needs: state"
                " it in the entry of the source"
            )
