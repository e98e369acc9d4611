"""Compute the sha256 of files. Each file is read once per process."""

import hashlib
import re
from functools import lru_cache
from pathlib import Path


def hash_file(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    # In the Hub's cache a link to a large file names its sha256. Only the first link counts: it may
    # lead to another link, to a file that is named by another hash (Xet).
    if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", stored := path.readlink().name):
        return stored
    stat = path.stat()
    return _hash_content(path.absolute(), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_content(path: Path, inode: int, size: int, mtime_ns: int) -> str:
    """Hash a file. The other arguments tell it from a later file at the same path."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
