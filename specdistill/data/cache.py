"""Rows that are prepared once: the datasets library keeps them on disk under a fingerprint of all their inputs."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from datasets import Dataset, Features, disable_progress_bars, enable_progress_bars
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from datasets.utils import are_progress_bars_disabled
from transformers import PreTrainedTokenizerBase

from specdistill.errors import ResourceError

SHOWN = 12  # digits of a hash that a person compares
VERSION = 1  # of the code that makes rows: raise it when equal inputs give other rows
Row = dict[str, Any]


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
        except DatasetGenerationError as error:  # wraps the error in `make_rows`
            raise (error.__cause__ or error) from None
        except OSError as error:
            next_step = "free disk space, or set data.cache_dir to a folder that can be written"
            raise ResourceError(f"prepared rows could not be kept on disk ({error})", next_step=next_step) from error
    return dataset.select(range(len(dataset) - 1)).remove_columns("_is_row")


def content_fingerprint(dataset: Dataset) -> str:
    """The sha256 of the rows themselves, whatever they were made from and however they are stored."""
    digest = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for batch in table.take([*range(len(table))]).combine_chunks().to_batches():  # take: no bits of other rows beside these
            digest.update(batch.serialize())
    return digest.hexdigest()[:SHOWN]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that turns text and conversations into token ids."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call with truncation or padding leaves its settings behind in the tokenizer.
    rules = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    return str(Hasher.hash([rules, tokenizer.chat_template, tokenizer.special_tokens_map]))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of the datasets library: they count rows that mean nothing to the user."""
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
