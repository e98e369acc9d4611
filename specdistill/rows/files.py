"""Files of rows: datasets that are prepared once, and Arrow files that appear whole or not at all."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import xxhash
from datasets import Dataset, Features, disable_progress_bars, enable_progress_bars
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from datasets.utils import are_progress_bars_disabled
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from specdistill.errors import ResourceError, logger
from specdistill.files.documents import parse_json
from specdistill.recipe.sections import DataConfig

SHOWN = 12  # digits of a hash that a person compares
VERSION = 4  # of the code that prepares rows: raise it when equal inputs give other rows
BATCH = 100  # rows that a function is given at a time
MOST_PROCESSES, ROWS_EACH = 16, 2000  # rows that a process is worth starting for
FREE_SPACE = (
    "free disk space, or set data.cache_dir to a folder that can be written; what is there is kept"
)
TORCHS_WRITER = (
    "PytorchStreamWriter",
    "inline_container",
    "iostream",
)  # how it calls itself in errors
HEADER = b"specdistill"  # a key of an Arrow schema's metadata
Columns = Mapping[str, Sequence[Any]]
RowFunction = Callable[[dict[str, Any], int], Iterable[Mapping[str, Any]]]


def mapped(
    rows: Dataset,
    function: RowFunction,
    columns: dict[str, Any],
    inputs: object,
    what: str,
    config: DataConfig,
) -> Dataset:
    """The rows that `function(row, its number)` makes of each row; it runs only if no process has made them from equal `inputs` before.

    It runs in as many processes as `num_processes` says, which changes nothing else. The rows appear whole or not at all. what: names the
    work in the progress bar, or in a line at its end. config: says where the rows are kept, and may say how many processes.
    """
    fingerprint = Hasher.hash([VERSION, sorted(columns), inputs])
    path = cache_folder(config.cache_dir) / "prepared" / f"{fingerprint}.arrow"
    processes = num_processes(config.num_proc, len(rows))
    is_new, has_bar = (
        not any(path.parent.glob(f"{fingerprint}*")),
        sys.stderr.isatty() and is_first_here(),
    )
    begin = time.monotonic()
    with nullcontext() if is_new and has_bar else quiet(), on_disk(path.parent):
        try:
            made = rows.map(
                partial(_made_of, function=function, columns=list(columns)),
                with_indices=True,
                batched=True,
                batch_size=BATCH,
                remove_columns=rows.column_names,
                features=Features(columns),
                cache_file_name=str(path),
                load_from_cache_file=True,
                new_fingerprint=fingerprint,
                num_proc=processes if processes > 1 else None,
                desc=what,
            )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            next_step = "free memory, or take fewer processes (data.num_proc)"
            raise ResourceError(
                "a process that prepared rows was ended from outside", next_step=next_step
            ) from error
    if is_new and not has_bar and is_first_here():
        logger.info(f"{what}: {len(rows):,} rows in {time.monotonic() - begin:.1f} s")
    return made


def _made_of(
    rows: Columns, numbers: Sequence[int], function: RowFunction, columns: Sequence[str]
) -> Columns:
    each = (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True))
    made = [row for number, raw in zip(numbers, each, strict=True) for row in function(raw, number)]
    return {name: [row.get(name) for row in made] for name in columns}


def num_processes(asked: int | None, num_rows: int) -> int:
    """As many as were asked for; else one for each core that this process may use, but for few rows fewer."""
    if asked is not None:
        return min(asked, num_rows)
    return max(1, min(len(os.sched_getaffinity(0)), MOST_PROCESSES, num_rows // ROWS_EACH))


def cache_folder(cache_dir: str | None) -> Path:
    return Path(cache_dir or HF_DATASETS_CACHE)


def is_first_here() -> bool:
    """Whether this is the first process of its launch on this machine, which speaks for the others there."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of the datasets library, which count rows that mean nothing to the user, and without its log: what fails is
    raised, too.
    """
    were_disabled, verbosity = are_progress_bars_disabled(), datasets.logging.get_verbosity()
    disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not were_disabled:
            enable_progress_bars()


def array(rows: Dataset, column: str) -> NDArray[Any]:
    """A column of numbers. Read item by item, it would take a hundred times as long."""
    return np.asarray(rows.with_format("numpy")[column][:])


def hash_of(path: Path) -> str:
    """A hash of a file's bytes; empty where there is no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def content_of(name: str) -> str:
    """The hash of the file or folder that has this name on this machine; the name where there is none."""
    path = Path(name)
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else []
    )
    return " ".join(map(hash_of, files)) or name


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that turns text into token ids; the chat template, which turns conversations into text, is compared as it is."""
    backend = parse_json(tokenizer.backend_tokenizer.to_str())
    # A call with truncation or padding leaves its settings behind in the tokenizer.
    rules = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    return str(Hasher.hash([rules, tokenizer.special_tokens_map]))


def write_arrow(
    path: Path, columns: Mapping[str, Any], batches: Iterable[Columns], header: str = ""
) -> None:
    """Write rows to an Arrow file, aside and then in place. header: what `read_header` reads."""
    schema = Features(columns).arrow_schema
    if header:
        schema = schema.with_metadata({**schema.metadata, HEADER: header.encode()})
    aside = path.with_name(f"{path.name}.part")
    with aside.open("wb") as file:
        with pyarrow.ipc.new_stream(file, schema) as writer:
            for batch in batches:
                arrays = [pyarrow.array(batch[name], schema.field(name).type) for name in columns]
                writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_header(path: Path) -> str:
    with pyarrow.memory_map(str(path)) as file:
        return str((pyarrow.ipc.open_stream(file).schema.metadata or {}).get(HEADER, b"").decode())


@contextmanager
def on_disk(what: Path, next_step: str = FREE_SPACE) -> Iterator[None]:
    """Raises ResourceError for a disk that is full or cannot be written; torch's writer reports either as a RuntimeError."""
    try:
        yield
    except (OSError, SafetensorError, DatasetGenerationError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(
            name in str(error) for name in TORCHS_WRITER
        ):
            raise
        raise ResourceError(
            f"{what} could not be written ({error.__cause__ or error})", next_step=next_step
        ) from error
