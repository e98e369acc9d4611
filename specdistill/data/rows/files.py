"""Files of rows: data sets that are prepared once, and Arrow files that are written atomically."""

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

from specdistill.common.documents import parse_json
from specdistill.common.errors import ResourceError, logger
from specdistill.recipe.sections import DataConfig

NUM_SHOWN_HASH_DIGITS = 12  # digits of a hash that messages show
VERSION = 4  # Raise it when this code prepares other rows from equal inputs.
BATCH = 100  # rows per call of the function that datasets maps
MAX_PROCESSES = 16  # processes that prepare rows, each of which takes memory
# A process prepares at least so many rows, because starting it takes time, too.
MIN_ROWS_PER_PROCESS = 2000
FREE_SPACE = (
    "free disk space, or set data.cache_dir to a folder that can be written; what is there is kept"
)
# By these words the RuntimeErrors of torch's file writer are told from all other RuntimeErrors.
TORCH_WRITER_NAMES = ("PytorchStreamWriter", "inline_container", "iostream")
HEADER = b"specdistill"  # the key of our header in the metadata of an Arrow schema
Columns = Mapping[str, Sequence[object]]  # the values of each column, by its name
RowFunction = Callable[[Any, int], Iterable[Mapping[str, object]]]  # (row, number) -> new rows


def map_rows(
    rows: Dataset,
    function: RowFunction,
    columns: Mapping[str, object],
    inputs: object,
    what: str,
    config: DataConfig,
) -> Dataset:
    """Apply a function to every row of a data set, or load the result from the cache.

    The function runs in several processes. Their number does not change the result. The cache file
    is written under another name and then moved, so no other process sees a half-written file.

    Args:
        rows: the rows to map.
        function: called with a row and its number; returns the rows that take its place.
        columns: the types of the new rows' columns, by column name.
        inputs: everything that the new rows depend on. If the cache has a result for equal inputs,
            the function does not run.
        what: a title for the progress bar, or for the log line at the end.
        config: the `data:` section, with the folder of the cache and the number of processes.

    Returns:
        The new rows.

    Raises:
        ResourceError: if the disk is full, or if the system killed a process.
    """
    # The name of the cache file is a hash of the inputs, so equal inputs find the same file.
    fingerprint = Hasher.hash([VERSION, sorted(columns), inputs])
    path = cache_folder(config.cache_dir) / "prepared" / f"{fingerprint}.arrow"
    processes = choose_num_processes(config.num_proc, len(rows))

    # A person at a terminal sees a progress bar, if the rows are not cached yet. Without a terminal
    # a log line says at the end how long the work took.
    is_new = not any(path.parent.glob(f"{fingerprint}*"))
    has_bar = sys.stderr.isatty() and is_first_here()
    begin = time.monotonic()
    with (
        nullcontext() if is_new and has_bar else silence_datasets(),
        on_disk(path.parent),
        preserve_environment(),
    ):
        # Several processes prepare the rows, in batches.
        try:
            mapped = rows.map(
                partial(_apply_to_rows, function=function, columns=list(columns)),
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
            # These are the words of datasets when the system kills a process, for example because
            # memory runs out.
            if "abruptly died" not in str(error):
                raise
            raise ResourceError(
                "a process that prepared rows was killed by the system",
                next_step="free memory, or use fewer processes (data.num_proc)",
            ) from error
    if is_new and not has_bar and is_first_here():
        logger.info(f"{what}: {len(rows):,} rows in {time.monotonic() - begin:.1f} s")
    return mapped


@contextmanager
def preserve_environment() -> Iterator[None]:
    """Restore `os.environ` on exit: the same object, with the same variables.

    When datasets maps in several processes, it sets a variable and replaces `os.environ` by a copy.
    Libraries that hold the old object, such as rich, would not see variables that are set later.
    """
    environment = os.environ
    variables = dict(os.environ)
    try:
        yield
    finally:
        environment.clear()
        environment.update(variables)
        os.environ = environment  # noqa: B003


def _apply_to_rows(
    rows: Columns, numbers: Sequence[int], function: RowFunction, columns: Sequence[str]
) -> Columns:
    """Apply a function to each row of a batch, as `Dataset.map(batched=True)` calls it.

    Args:
        rows: the batch as columns: the values of each column, by column name.
        numbers: the number of each row in the data set.
        function: called with a row and its number; returns the rows that take its place.
        columns: the column names of the new rows.

    Returns:
        The new rows, again as columns. A row that lacks a column has None there.
    """
    # Turn the columns into rows, and apply the function.
    raw_rows = (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True))
    mapped: list[Mapping[str, Any]] = []
    for number, raw in zip(numbers, raw_rows, strict=True):
        mapped.extend(function(raw, number))

    # Turn the new rows into columns.
    mapped_columns = {}
    for name in columns:
        mapped_columns[name] = [row.get(name) for row in mapped]
    return mapped_columns


def choose_num_processes(requested: int | None, num_rows: int) -> int:
    """Choose how many processes prepare the rows of a data set.

    Args:
        requested: the number that the user set (`data.num_proc`); None to choose one.
        num_rows: the number of rows.
    """
    # There are never more processes than rows.
    if requested is not None:
        return min(requested, num_rows)

    # Use one process per core that this process may use, at most MAX_PROCESSES because each takes
    # memory. Each process gets at least MIN_ROWS_PER_PROCESS rows, so that starting it pays off.
    return max(
        1, min(len(os.sched_getaffinity(0)), MAX_PROCESSES, num_rows // MIN_ROWS_PER_PROCESS)
    )


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of `data.cache_dir`; None stands for the cache of the datasets library."""
    return Path(cache_dir or HF_DATASETS_CACHE)


def is_first_here() -> bool:
    """Return whether this is the first of the processes that a launcher started on this machine.

    Messages that would be the same in every process are logged by the first process only.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def silence_datasets() -> Iterator[None]:
    """Silence the progress bars and the log of the datasets library until the context exits.

    The bars count internal steps that mean nothing to the user. The log repeats errors that are
    also raised.
    """
    were_disabled = are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not were_disabled:
            enable_progress_bars()


def read_array(rows: Dataset, column: str) -> NDArray[np.integer]:
    """Read a column of numbers as a numpy array.

    Reading the column item by item is much slower.
    """
    return np.asarray(rows.with_format("numpy")[column][:])


def hash_of(path: Path) -> str:
    """Return a hash of a file's bytes, or an empty string if there is no such file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def hash_content(name: str) -> str:
    """Hash the content of a file or folder.

    Args:
        name: a path, or another name such as the id of a Hub data set.

    Returns:
        The hash of the file, or the hashes of all files in the folder, separated by spaces. The
        name itself if it is not the path of a file, or of a folder that has files.
    """
    path = Path(name)
    files: list[Path] = []
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    return " ".join(map(hash_of, files)) or name


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the parts of a tokenizer that decide which token ids a text becomes.

    The chat template is not part of the hash. Callers compare the text of the template.
    """
    # Leave out truncation and padding: they are set by earlier calls of the tokenizer, and would
    # change the hash of an equal tokenizer.
    rules = {
        key: value
        for key, value in parse_json(tokenizer.backend_tokenizer.to_str()).items()
        if key not in ("truncation", "padding")
    }
    return str(Hasher.hash([rules, tokenizer.special_tokens_map]))


def write_arrow(
    path: Path, columns: Mapping[str, object], batches: Iterable[Columns], header: str = ""
) -> None:
    """Write rows to an Arrow file, first under a temporary name and then under the final one.

    Args:
        path: the file.
        columns: the types of the rows' columns, by column name.
        batches: the rows in batches, each with the values of every column by its name.
        header: text that is stored with the rows; `read_header` returns it.
    """
    schema = Features(columns).arrow_schema
    if header:
        schema = schema.with_metadata({**schema.metadata, HEADER: header.encode()})

    # The file is flushed to the disk before it is moved. Even a crash of the machine then leaves no
    # incomplete file under the final name.
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
    """Return the header that `write_arrow` gave to an Arrow file; empty if it has none."""
    with pyarrow.memory_map(str(path)) as file:
        return str((pyarrow.ipc.open_stream(file).schema.metadata or {}).get(HEADER, b"").decode())


@contextmanager
def on_disk(what: Path, next_step: str = FREE_SPACE) -> Iterator[None]:
    """Convert errors of writing to the disk, such as a full disk, into a ResourceError.

    torch's file writer raises RuntimeError for such a disk, with one of TORCH_WRITER_NAMES in its
    text. Every other RuntimeError is raised unchanged.

    Args:
        what: the file or folder that is written, for the error message.
        next_step: the advice to the user in the error message.
    """
    try:
        yield
    except (OSError, SafetensorError, DatasetGenerationError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(
            name in str(error) for name in TORCH_WRITER_NAMES
        ):
            raise
        raise ResourceError(
            f"{what} could not be written ({error.__cause__ or error})", next_step=next_step
        ) from error
