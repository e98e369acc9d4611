"""Rows that are prepared once: the datasets library keeps them on disk under a fingerprint of all their inputs."""

import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, disable_progress_bars, enable_progress_bars
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from datasets.utils import are_progress_bars_disabled
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specdistill.errors import ResourceError
from specdistill.progress import progress

SHOWN = 12  # digits of a hash that a person compares
VERSION = 1  # of the code that makes rows: raise it when equal inputs give other rows
LARGE = 10_000  # rows whose preparation is worth an estimate
BATCH = 100  # rows that a function is given at a time
MOST_PROCESSES, ROWS_EACH = 16, 2000  # rows that a process is worth starting for
OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
Row = dict[str, Any]
Columns = Mapping[str, Sequence[Any]]


def cached(
    make_rows: Callable[[], Iterable[Row]], columns: dict[str, Any], inputs: object, cache_dir: str | None = None
) -> Dataset:
    """The rows of `make_rows()`, which runs only if no process has made them from equal `inputs` (plain values) before.

    They appear whole or not at all; of processes that ask for the same rows at once one makes them and the others wait. There may be none.
    """
    fingerprint = Hasher.hash([VERSION, sorted(columns), inputs])
    marked = Features({**columns, "_is_row": datasets.Value("bool")})

    def rows_and_mark() -> Iterator[Row]:
        for row in make_rows():
            yield {**row, "_is_row": True}
        yield {**dict.fromkeys(columns), "_is_row": False}  # the library cannot store a dataset without rows

    with quiet():
        try:
            dataset = Dataset.from_generator(rows_and_mark, features=marked, cache_dir=cache_dir, fingerprint=fingerprint)
        except DatasetGenerationError as error:  # wraps the error in `make_rows`, and the disk's
            cause = error.__cause__ or error
            if getattr(cause, "errno", None) in OF_A_DISK:
                raise _not_kept(cause) from error
            raise cause from None
        except OSError as error:
            raise _not_kept(error) from error
    return dataset.select(range(len(dataset) - 1)).remove_columns("_is_row")


def mapped(
    rows: Dataset,
    function: Callable[[Columns, Sequence[int]], Columns],
    columns: dict[str, Any],
    inputs: object,
    *,
    what: str,
    num_proc: int | None = None,
    cache_dir: str | None = None,
    sampled: Callable[[Columns, int, int, float], object] | None = None,
) -> Dataset:
    """What `function(rows, their numbers)` makes of each batch of rows; it runs only if no process has made it from equal `inputs` before.

    The function is one of each row alone and may make any number of rows of it. It runs in as many processes as `num_processes` says,
    which changes nothing else. They appear whole or not at all. what: is said of the work while it takes. sampled: is told
    before it what comes of the first rows, how many these are of how many, and the seconds that all would then take.
    """
    fingerprint = Hasher.hash([VERSION, sorted(columns), inputs])
    folder = Path(cache_dir or HF_DATASETS_CACHE) / "prepared"
    processes = num_processes(num_proc, len(rows))
    is_new = not any(folder.glob(f"{fingerprint}*"))
    if is_new and sampled is not None and len(rows) >= LARGE:
        begin, first = time.monotonic(), rows[:BATCH]
        made = function(first, range(BATCH))
        sampled(made, BATCH, len(rows), (time.monotonic() - begin) * len(rows) / BATCH / processes)
    by_library = processes > 1 and sys.stderr.isatty()  # how far several processes are only the library knows
    with (
        progress(what, len(rows), "rows") if is_new and not by_library else nullcontext(_nothing) as advance,
        nullcontext() if is_new and by_library else quiet(),
    ):

        def counted(batch: Columns, numbers: Sequence[int]) -> Columns:
            made = function(batch, numbers)
            advance(len(numbers))
            return made

        try:
            made = rows.map(
                function if processes > 1 else counted,
                with_indices=True,
                batched=True,
                batch_size=BATCH,
                remove_columns=rows.column_names,
                features=Features(columns),
                cache_file_name=str(folder / f"{fingerprint}.arrow"),
                load_from_cache_file=True,
                new_fingerprint=fingerprint,
                num_proc=processes if processes > 1 else None,
                desc=what,
            )
            advance(len(rows) if processes > 1 else 0)
            return made
        except OSError as error:
            raise _not_kept(error) from error
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            next_step = "free memory, or take fewer processes (data.num_proc)"
            raise ResourceError("a process that prepared rows was ended from outside", next_step=next_step) from error


def _nothing(count: int) -> None:
    pass


def array(rows: Dataset, column: str) -> NDArray[Any]:
    """A column of numbers. Read item by item, it would take a hundred times as long."""
    return np.asarray(rows.with_format("numpy")[column][:])


def num_processes(asked: int | None, num_rows: int) -> int:
    """As many as were asked for; else one for each core that this process may use, but for few rows fewer."""
    if asked is not None:
        return min(asked, num_rows)
    return max(1, min(len(os.sched_getaffinity(0)), MOST_PROCESSES, num_rows // ROWS_EACH))


def _not_kept(error: BaseException) -> ResourceError:
    next_step = "free disk space, or set data.cache_dir to a folder that can be written"
    return ResourceError(f"prepared rows could not be kept on disk ({error})", next_step=next_step)


def content_fingerprint(dataset: Dataset) -> str:
    """The sha256 of the rows themselves, whatever they were made from and however they are stored."""
    digest = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for batch in table.take([*range(len(table))]).combine_chunks().to_batches():  # take: no bits of other rows beside these
            digest.update(batch.serialize())
    return digest.hexdigest()[:SHOWN]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that turns text into token ids; the chat template, which turns conversations into text, is compared as it is."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call with truncation or padding leaves its settings behind in the tokenizer.
    rules = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    return str(Hasher.hash([rules, tokenizer.special_tokens_map]))


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
