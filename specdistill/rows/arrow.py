"""Files of rows: Arrow files that appear whole or not at all, a lock for who writes them, and a disk that fails in one line."""

import fcntl
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import xxhash
from datasets import Features
from safetensors import SafetensorError

from specdistill.errors import ResourceError
from specdistill.rows.cache import Columns

FREE_SPACE = "free disk space, or set data.cache_dir to a folder that can be written; what is there is kept"
HEADER = b"specdistill"  # among an Arrow schema's own words


def hash_of(path: Path) -> str:
    """Of a file's bytes; empty where there is none."""
    if not path.is_file():
        return ""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(2**24):
            digest.update(part)
    return str(digest.hexdigest())


def write_arrow(path: Path, columns: Mapping[str, Any], batches: Iterable[Columns], header: str | None = None) -> None:
    """Write rows to an Arrow file, aside and then in place. header: what `read_header` reads."""
    schema = Features(columns).arrow_schema
    if header is not None:
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
def on_disk(folder: Path, next_step: str = FREE_SPACE) -> Iterator[None]:
    """Raises ResourceError for a disk that is full or cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"{folder} could not be written ({error})", next_step=next_step) from error


@contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Within it no other process does the same with `what`; the system ends the lock of a killed one."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{what}: another process writes it; waiting", file=sys.stderr, flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
