"""Compute the sha256 of files. Each file is read once per process."""

import hashlib
import re
from functools import lru_cache
from pathlib import Path


def hash_file(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    # In the cache of huggingface_hub, a large file is a link such as model.safetensors -> SHA256:
    # the linked file is named by the sha256 of its content, so nothing needs to be hashed. The
    # linked file may be a link too, to a file that is named by another kind of hash (Xet). So read
    # where the first link points to (`readlink`), not where all links end (`resolve`).
    if path.is_symlink():
        linked_name = path.readlink().name
        if re.fullmatch("[0-9a-f]{64}", linked_name):
            return linked_name
    stat = path.stat()
    return _hash_content(path.absolute(), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_content(path: Path, inode: int, size: int, mtime_ns: int) -> str:
    """Return the sha256 of a file, computed once for each path, inode, size and time of change.

    The arguments besides `path` are only part of the key of the cache, so that a changed file is
    hashed again.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
