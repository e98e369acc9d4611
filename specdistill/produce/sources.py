"""Sources of training rows, and their many forms brought to three: a text, a conversation, or token ids with their loss mask.

A source is `self`, the target's own prompts (specdistill.produce.self_prompts), a built-in one, a jsonl, json or parquet file, a folder or
Hub id that the datasets library can load, or a list of entries, `SourceEntry`. Every row has the keys of `COLUMNS`, and those of its form
are not None: `text`; or `messages` and perhaps `tools` (specdistill.suites.conversations); or `input_ids`, `loss_mask` and, to be compared
with other rows, their `text`.
"""

import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import fsspec
from datasets import (
    Dataset,
    DownloadManager,
    Features,
    List,
    Value,
    load_dataset,
    load_dataset_builder,
)
from datasets import Json as AnyJson
from datasets.exceptions import DatasetsError
from datasets.fingerprint import Hasher
from datasets.packaged_modules.json.json import Json
from pyarrow import ArrowException
from transformers import PreTrainedTokenizerBase
from yaml import YAMLError

from specdistill.errors import ResourceError, UserError, logger, nearest, one_line, sibling_key
from specdistill.files.documents import LONGEST, json_rows
from specdistill.recipe.data_sources import BUILT_IN, LOADERS, SELF, SourceEntry, entries
from specdistill.recipe.sections import DataConfig
from specdistill.rows.files import (
    cache_folder,
    content_of,
    mapped,
    on_disk,
    quiet,
    tokenizer_fingerprint,
)
from specdistill.suites.conversations import conversation, mappings, string

COLUMNS = {
    "text": Value("string"),
    "messages": List(AnyJson()),
    "tools": List(AnyJson()),
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
}
CONVERSATIONS = ("messages", "conversations", "conversation", "turns")
TOKENS = "input_ids"
EXCHANGES = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
)
PROMPTS = tuple(dict.fromkeys(question for question, _ in EXCHANGES))
ANSWERS = {
    prompt: {answer for question, answer in EXCHANGES if question == prompt} for prompt in PROMPTS
}
SCHEMAS = ("tools", "functions", "function")  # the last is BFCL's
KNOWN_COLUMNS = (
    "text",
    TOKENS,
    *CONVERSATIONS,
    "instances",
    *dict.fromkeys(name for pair in EXCHANGES for name in pair),
)
READ = (*KNOWN_COLUMNS, *SCHEMAS, "loss_mask", "system", "input", "context")
EXPECTED = "text, messages, conversations, turns, input_ids, or instruction and output (prompt and response, question and answer)"


@dataclass(frozen=True)
class Source:
    """Rows of one source. key: names it in error messages."""

    rows: Dataset
    entry: SourceEntry
    key: str


def load_sources(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Source]:
    """The sources of `data.source`; `self`, whose rows are generated block by block, has none here.

    Raises UserError for a wrong name or setting, ResourceError when the Hub fails.
    """
    found = list(entries(config.source))
    of_self = [key for key, entry in found if entry.source == SELF]
    if of_self and config.regenerate.num_tokens == 0:
        expected = (
            "data.regenerate.num_tokens above 0, for answers to its prompts, or another source"
        )
        raise UserError(of_self[0], got="self with data.regenerate.num_tokens=0", expected=expected)
    if len(of_self) == len(found):
        for key, value, default in (
            ("data.columns", config.columns, {}),
            ("data.split", config.split, "train"),
        ):
            if value != default:
                expected = f"{default}: it is of rows that are there"
                raise UserError(key, got=f"{value} with the source self alone", expected=expected)
    return [Source(_rows(entry, key, config, tokenizer), entry, key) for key, entry in found]


def _rows(
    entry: SourceEntry, key: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    """One source's rows in the common forms."""
    source, split, columns = (
        entry.source,
        entry.split or config.split,
        entry.columns or config.columns,
    )
    if source == SELF:
        return Dataset.from_dict({name: [] for name in COLUMNS}, features=Features(COLUMNS))
    if source in BUILT_IN:
        if entry.where or entry.min_turns or columns:
            raise UserError(
                key,
                got=f"{source} with columns, where or min_turns",
                expected="all of it, or another source",
            )
        content, rows_of_split = resolve_name(BUILT_IN[source])(split)
        fingerprint = Hasher.hash([source, content, *COLUMNS])
        with quiet(), on_disk(cache_folder(config.cache_dir)):
            return Dataset.from_generator(
                rows_of_split, Features(COLUMNS), config.cache_dir, fingerprint=fingerprint
            )
    raw = _load(entry, split, key, config.cache_dir)
    if len(raw) == 0:
        raise UserError(key, got=f"{source}, which holds no rows", expected="a dataset with rows")
    entry = entry.model_copy(update={"columns": columns})
    _check_columns(raw.column_names, entry, key)

    # The library's own fingerprint of a file is of its name and date, which differ between machines.
    content = [content_of(source), split] if Path(source).exists() else raw._fingerprint
    conditions = [entry.where, entry.min_turns] if entry.where or entry.min_turns else []
    inputs = ["rows", content, columns, *conditions]
    if TOKENS in (columns or raw.column_names):
        if config.regenerate.num_tokens > 0:
            expected = "data.regenerate.num_tokens=0: they are trained on as they are"
            raise UserError(
                key, got=f"{source}, rows of token ids, with data.regenerate", expected=expected
            )
        inputs.append(tokenizer_fingerprint(tokenizer))
    read = partial(_read, key=key, entry=entry, tokenizer=tokenizer, features=raw.features)
    try:
        rows = mapped(raw, read, COLUMNS, inputs, "Reading", config)
    except UnicodeDecodeError as error:  # the library keeps the bytes of a file as they are
        raise UserError(
            key, got=f"{source}, which is not UTF-8", expected="text in UTF-8"
        ) from error
    if num_filtered := len(raw) - len(rows):
        why = (
            "hold no text"
            + f", or are not asked for by {sibling_key(key, 'where')} and min_turns,"
            * bool(conditions)
        )
        logger.warning(
            "%s: %d of %d rows of %s %s and are filtered", key, num_filtered, len(raw), source, why
        )
    if len(rows) == 0:
        got = (
            f"{source}, of which where and min_turns leave no row"
            if conditions
            else f"{source}, whose rows are all empty"
        )
        raise UserError(key, got=got, expected=EXPECTED)
    return rows


def _read(
    raw: dict[str, Any],
    number: int,
    key: str,
    entry: SourceEntry,
    tokenizer: PreTrainedTokenizerBase,
    features: Features,
) -> list[dict[str, Any]]:
    """A row in the common forms; none for one without content, or that is not asked for. Raises UserError that names it."""
    raw = _unfilled(raw, dict(features))
    if not all(
        raw.get(column) in (it if isinstance(it, list) else [it])
        for column, it in entry.where.items()
    ):
        return []
    own = (
        {ours: raw.get(theirs) for ours, theirs in entry.columns.items()} if entry.columns else raw
    )
    made = normalise(own, f"{key} row {number}", tokenizer)
    return [
        row
        for row in made
        if sum(turn["role"] == "user" for turn in row.get("messages") or ()) >= entry.min_turns
    ]


def _check_columns(own: Sequence[str], entry: SourceEntry, key: str) -> None:
    """Raises UserError for a source without text or conversations, or without a column that `columns` or `where` names."""
    source, columns = entry.source, entry.columns
    for what, wanted in (("where", entry.where), ("columns", columns.values())):
        if unknown := next((column for column in wanted if column not in own), None):
            got, expected = f"{unknown}, which is no column of {source}", f"of {', '.join(own)}"
            raise UserError(
                sibling_key(key, what), got=got, expected=expected, nearest=nearest(unknown, own)
            )
    if unknown := next((ours for ours in columns if ours not in READ), None):
        expected = f"{{our name: its own}} with our names {', '.join(READ)}"
        raise UserError(
            sibling_key(key, "columns"),
            got=unknown,
            expected=expected,
            nearest=nearest(unknown, READ),
        )
    named = set(columns or own)
    if not named & {"text", TOKENS, *CONVERSATIONS, *PROMPTS}:
        close = next((match for column in own if (match := nearest(column, KNOWN_COLUMNS))), None)
        got = f"{source} with columns {', '.join(named if columns else own)}"
        raise UserError(
            key,
            got=got,
            expected=f"{EXPECTED}, or data.columns to say which are these",
            nearest=close,
        )


def normalise(
    row: Mapping[str, Any], where: str, tokenizer: Any = None
) -> Iterator[dict[str, Any]]:
    """A row in any known form -> one in the common forms; nothing for a row without content. tokenizer: for token ids."""
    present = {column: value for column, value in row.items() if value}
    if "instances" in present:  # self-instruct's: the input and output of an instruction
        instances = mappings(present["instances"], where, "instances")
        if len(instances) > 1:
            raise UserError(
                where, got=f"{len(instances)} instances", expected="one: a row of its own for each"
            )
        present |= instances[0]
    turns = next((present[column] for column in CONVERSATIONS if column in present), None)
    if isinstance(present.get("question"), list):  # BFCL's
        turns = present["question"]
    exchange = next((pair for pair in EXCHANGES if pair[0] in present and pair[1] in present), None)
    context = present.get("input") or present.get("context")
    if TOKENS in present:
        yield _token_row(present, where, tokenizer)
    elif turns is not None:
        schemas = next((present[column] for column in SCHEMAS if column in present), None)
        messages, tools = conversation(turns, schemas, where)
        if messages and messages[0]["role"] != "system" and isinstance(present.get("system"), str):
            messages = [{"role": "system", "content": present["system"]}, *messages]
        if messages:
            yield {"text": None, "messages": messages, "tools": tools}
    elif "text" in present:
        yield {"text": string(present["text"], where, "text"), "messages": None}
    elif exchange is not None:
        yield _exchange(present[exchange[0]], context, present[exchange[1]], where)
    elif question := next(
        (name for name in PROMPTS if name in present and not ANSWERS[name] & row.keys()), None
    ):
        asked = _exchange(present[question], context, None, where)["messages"]
        yield {"text": None, "messages": asked[:1]}  # for the target to answer


def _load(entry: SourceEntry, split: str, key: str, cache_dir: str | None) -> Any:
    source, path = entry.source, Path(entry.source)
    kind = LOADERS.get(path.suffix)
    if kind and not path.is_file():
        siblings = {
            entry.stem: str(entry) for entry in path.parent.glob("*") if entry.suffix in LOADERS
        }
        near = siblings.get(nearest(path.stem, siblings) or "")
        raise UserError(key, got=f"{path}, which does not exist", expected="a file", nearest=near)
    if (
        kind and split.partition("[")[0] != "train"
    ):  # `train[:100]` is a slice of the only split a file has
        raise UserError(
            "data.split", got=split, expected=f"train, the only split of the file {path.name}"
        )
    if not kind and not path.is_dir() and source.count("/") != 1:
        expected = "pico, self, a jsonl, json or parquet file, a folder, or a Hub id as owner/name"
        raise UserError(
            key, got=source, expected=expected, nearest=nearest(source, [SELF, *BUILT_IN])
        )
    options: dict[str, Any] = (
        {"data_files": source} if kind else {"name": entry.name, "revision": entry.revision}
    )
    try:
        with quiet() if path.exists() else nullcontext():
            builder = load_dataset_builder(kind or source, **options, cache_dir=cache_dir)
            if isinstance(builder, Json):
                for file in DownloadManager().download(
                    [*chain.from_iterable(builder.config.data_files.values())]
                ):
                    _check_json(Path(file), key)
            builder.download_and_prepare()
            rows = builder.as_dataset(split=split)
            whole = {
                name: List(AnyJson()) for name, it in rows.features.items() if _has_json_within(it)
            }
            if whole and isinstance(builder, Json):
                options["features"] = Features({**rows.features, **whole})
                rows = load_dataset(kind or source, **options, cache_dir=cache_dir, split=split)
            return rows
    except (DatasetsError, OSError, ValueError, TypeError, ArrowException, YAMLError) as error:
        reason = one_line(str(error.__cause__ or error))[:300]
        if not path.exists() and not isinstance(error, ValueError):
            next_step = (
                "check the id, HF_TOKEN if it is private, and the network, or give a local file"
            )
            raise ResourceError(
                f"{key}: {source} could not be loaded from the Hub ({reason})", next_step=next_step
            ) from error
        got = f"{source}, split {split}, which does not read as {kind or 'a data set'}: {reason}"
        expected = "rows that are alike, of data.split, or of split and name of an entry"
        raise UserError(key, got=got, expected=expected) from error


def _check_json(path: Path, key: str) -> None:
    """Raises UserError for a file of anything but JSON objects. Arrow's reader, the next, ends the process on a `null`, and holds a line of
    any length, also one that a small compressed file expands to.
    """
    file = fsspec.open(str(path), compression="infer")
    largest_list = LONGEST if file.compression else path.stat().st_size
    try:
        with file as stream:
            if not sum(1 for _ in json_rows(stream, allow_nan=True, largest_list=largest_list)):
                raise ValueError("which holds no rows")
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(
            key, got=f"{path}, {error}", expected="rows that are alike, a JSON object each"
        ) from error


def _token_row(
    row: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Ids as they were read and generated, with a loss mask, or with loss on all of them."""
    ids = row[TOKENS]
    every = [1] * (len(ids) if isinstance(ids, list) else 0)
    masks = (
        name
        for name, values in row.items()
        if (name == "labels" or name.endswith(("_mask", "_masks"))) and values != every
    )
    if "loss_mask" not in row and (other := next(masks, None)):
        columns = "data.columns={input_ids: input_ids"
        expected = f"a loss_mask of 0 and 1 ({columns}, loss_mask: …}}), or {columns}}} for loss on all tokens"
        raise UserError(where, got=f"{TOKENS} with {other}, which is not read", expected=expected)
    mask = row.get("loss_mask", every)
    for name, values, limit in ((TOKENS, ids, len(tokenizer)), ("loss_mask", mask, 2)):
        if not isinstance(values, list) or len(values) != len(ids):
            length = f" of length {len(values)}" if isinstance(values, list) else ""
            expected = f"a list of integers{', one for each of input_ids' * (name != TOKENS)}"
            raise UserError(
                where, got=f"{name} of type {type(values).__name__}{length}", expected=expected
            )
        for wrong in (
            value for value in values if type(value) is not int or not 0 <= value < limit
        ):
            expected = f"integers from 0 to {limit - 1}{', the target’s tokens' * (name == TOKENS)}"
            raise UserError(where, got=f"{wrong!r} in {name}", expected=expected)
    return {"text": tokenizer.decode(ids), "input_ids": ids, "loss_mask": mask}


def _has_json_within(feature: Any) -> bool:
    """Whether it is of lists of objects, some key of which has values of several types: the library reads those that are texts as JSON, an
    answer `2` as a number. In whole objects texts stay.
    """
    return (
        isinstance(feature, List)
        and isinstance(feature.feature, dict)
        and repr(AnyJson()) in repr(feature)
    )


def _unfilled(value: Any, feature: Any) -> Any:
    """Without the None of keys that a row lacks and others have: Arrow's objects all have the same keys."""
    if value is not None and isinstance(feature, dict):
        return {
            name: _unfilled(item, feature[name]) for name, item in value.items() if item is not None
        }
    return (
        [_unfilled(item, feature.feature) for item in value]
        if value and isinstance(feature, List)
        else value
    )


def _exchange(question: Any, context: Any, answer: Any, where: str) -> dict[str, Any]:
    """An instruction, its input below it where there is one, and the answer to it."""
    parts = [string(part, where, "instruction") for part in (question, context) if part]
    turns = [("user", "\n\n".join(parts)), ("assistant", string(answer or "", where, "output"))]
    return {
        "text": None,
        "messages": [{"role": role, "content": content} for role, content in turns],
    }
