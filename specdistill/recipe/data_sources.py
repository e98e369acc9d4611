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

    source: str = option(..., "the name of a source")
    revision: str | None = option(
        None, "branch, tag or commit of a Hub id", condition=SOURCE_IS_ON_HUB
    )
    weight: float = option(
        1.0, "how often its rows are used; 2: every row twice, 0.5: half of them", gt=0
    )
    split: str | None = option(
        None, "split of the source; null: data.split", condition=SOURCE_HAS_ROWS
    )
    name: str | None = option(None, "configuration of a Hub id", condition=SOURCE_HAS_ROWS)
    columns: dict[str, str] = option(
        {},
        "our names of columns, each with the source's, e.g. {messages: turns}; {}: data.columns",
        condition=SOURCE_HAS_ROWS,
    )
    where: dict[str, object] = option(
        {},
        "rows used: those whose columns hold these values, e.g. {language: [English, German]}",
        condition=SOURCE_HAS_ROWS,
    )
    min_turns: int = option(
        0,
        "rows used: conversations with at least this many user turns; 0: texts, too",
        ge=0,
        condition=SOURCE_HAS_ROWS,
    )
    license: str | None = option(
        None,
        "licence of the source, for the card of a published draft; null: pico's own, or what a"
        " Hub id's card states",
        condition=SOURCE_HAS_ROWS,
    )
    num_prompts: int | None = option(
        None,
        "prompts that the target generates; null: as many as data.regenerate.num_tokens needs",
        ge=2,
        condition=SOURCE_IS_SELF,
    )
    temperature: float = option(
        1.0, "sampling temperature of these prompts", gt=0, condition=SOURCE_IS_SELF
    )
    system: list[str] = option(
        [],
        "system messages that set the topic, an equal share of the prompts each; rows do not"
        " contain them",
        condition=SOURCE_IS_SELF,
    )

    @property
    def known_license(self) -> str | None:
        """The licence of the source, if the entry or this package states one."""
        return self.license or BUILT_IN_LICENSES.get(self.source)


def list_entries(source: object) -> Iterator[tuple[str, SourceEntry]]:
    """Yield each source with the key that errors name.

    Args:
        source: the value of `data.source`.

    Raises:
        UserError: for a wrong name or setting.
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
                expected="the name of a source, or {source, weight, split} with one",
            )


def check_files(source: object, split: str, columns: Mapping[str, str]) -> None:
    """Check that files exist, and that the columns of small JSONL files are known.

    The check needs no slow import, so that a mistake is reported at once. Columns are checked in
    files of up to MAX_CHECKED_BYTES. Lines that are no JSON objects are reported later, when the
    file is loaded.

    Args:
        source: the value of `data.source`.
        split: the split of sources that name none.
        columns: the column names of sources that state none.

    Raises:
        UserError: for a path that does not exist or is of another kind, for a split that a file
            does not have, and for columns none of which is known.
    """
    for key, entry in list_entries(source):
        # Sources that are built in have no files.
        if entry.source in {SELF_SOURCE, *BUILT_IN_SOURCES}:
            continue
        check_path(entry, entry.split or split, key)

        # Look for known columns in small files, before anything slow is imported or loaded.
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
    """Check that a source is a file or folder here, or may be a name on the Hub.

    Args:
        entry: the source.
        split: the split that is read.
        key: the key that errors name.

    Raises:
        UserError: if the source is none of these, or if a file does not have the split.
    """
    source = entry.source
    path = Path(entry.source)
    is_file_name = path.suffix in LOADERS

    # A file must exist. A similar name may be meant.
    if is_file_name and not path.is_file():
        siblings = {
            sibling.stem: str(sibling)
            for sibling in path.parent.glob("*")
            if sibling.suffix in LOADERS
        }
        raise UserError(
            key,
            got=f"{path}, which does not exist",
            expected="a file",
            nearest=siblings.get(find_nearest(path.stem, siblings) or ""),
        )

    # `train[:100]` is a slice of the only split that a file has.
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
    """Check that a source has text or conversations, and all columns that its entry names.

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

    # The columns that are named must be there.
    # `where` selects rows by columns of the source, and `columns` translates such columns into
    # ours.
    for setting, wanted_columns in (("where", entry.where), ("columns", columns.values())):
        for column in wanted_columns:
            if column not in own_columns:
                raise UserError(
                    name_sibling_key(key, setting),
                    got=f"{column}, which is no column of {source}",
                    expected=f"one of {', '.join(own_columns)}",
                    nearest=find_nearest(column, own_columns),
                )

    # The names on our side must be names that something reads.
    for our_name in columns:
        if our_name not in READ_COLUMNS:
            raise UserError(
                name_sibling_key(key, "columns"),
                got=our_name,
                expected=(
                    f"{{our name: the source's name}} with one of our names"
                    f" {', '.join(READ_COLUMNS)}"
                ),
                nearest=find_nearest(our_name, READ_COLUMNS),
            )

    # The rows need a column that training reads.
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
    """Return a name for each source in order, with the settings that tell sources apart."""
    # Bring all entries into one form.
    listed_entries = source if isinstance(source, (list, tuple)) else [source]
    entries = [
        entry if isinstance(entry, Mapping) else {"source": entry} for entry in listed_entries
    ]

    # The name of an entry is the values of all keys that change which rows are read.
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
    """Yield a warning for each source without a revision or a licence.

    Args:
        source: the value of `data.source`.

    Raises:
        UserError: for a wrong name or setting.
    """
    for _, entry in list_entries(source):
        # A name with one slash that is no file or folder is looked up on the Hub.
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
