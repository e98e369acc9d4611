"""Which target a draft was made for, told by the sha256 of its files: the same wherever they lie, and never the weights in memory.

The Hub's cache names a large file by its sha256, so that what came from there is not read again; files in a folder are read once.
"""

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SHOWN = 8  # digits of a hash that errors show


@dataclass(frozen=True)
class TargetIdentity:
    """name_or_path: pico, a folder or a Hub id. revision: the commit of a Hub id. adapter: merged into the weights, folder or Hub id.

    weights, tokenizer: sha256 in hexadecimal, of the files' sha256; the adapter's are among the weights.
    """

    name_or_path: str
    revision: str | None
    adapter: str | None
    weights: str
    tokenizer: str

    def is_same(self, other: "TargetIdentity") -> bool:
        """Whether both have the same weights and tokenizer, whatever they are called."""
        return (self.weights, self.tokenizer) == (other.weights, other.tokenizer)

    def __str__(self) -> str:
        revision = f"@{self.revision[:SHOWN]}" if self.revision else ""
        adapter = f" + {self.adapter}" if self.adapter else ""
        hashes = f"weights {self.weights[:SHOWN]}, tokenizer {self.tokenizer[:SHOWN]}"
        return f"{self.name_or_path}{revision}{adapter} ({hashes})"


def file_hashes(paths: Iterable[Path]) -> list[str]:
    """The sha256 of files, several read at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_file_hash, paths))


def combined(hashes: Iterable[str]) -> str:
    """One hash of several, whatever their order."""
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def content_hash(paths: Iterable[Path]) -> str:
    """sha256 of the names and contents of files, wherever they lie."""
    files = list(paths)
    # Resolved, so that each is read: a link's name says nothing about what it leads to.
    hashes = file_hashes(path.resolve() for path in files)
    return combined(f"{sha256} {path.name}" for sha256, path in zip(hashes, files, strict=True))


def _file_hash(path: Path) -> str:
    # In the Hub's cache. The link itself says it: what it leads to may be a link too, to a file that is named by another hash (Xet).
    if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", stored := path.readlink().name):
        return stored
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
