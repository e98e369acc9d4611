"""The store of a Hub: objects by their sha256 on disk, and repositories with commits and tags."""

import hashlib
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

# Suffixes of models that .gitattributes of a new repository sends to large-file storage. Files
# above 10 MiB go there, too.
LARGE = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".onnx",
    ".npz",
    ".parquet",
    ".tar",
    ".zip",
)
LARGE_BYTES = 10 * 1024**2


@dataclass(frozen=True)
class File:
    """A file of a commit, whose bytes are the object with that sha256.

    Xet fetches it by the hash `xet`.
    """

    sha256: str
    size: int
    git: str  # of the blob, or of the pointer that stands for a large file
    lfs: bool
    xet: str | None = None


@dataclass(frozen=True)
class Commit:
    id: str
    parent: str | None
    title: str
    message: str
    date: str
    files: Mapping[str, File]


@dataclass
class Repository:
    id: str
    private: bool = False
    gated: bool = False
    tags: tuple[str, ...] = ()  # in addition to those of its card
    downloads: int = 0
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    git_tags: dict[str, str] = field(default_factory=dict)
    tag_messages: dict[str, str] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)  # who may read it although it is gated
    lock: threading.RLock = field(default_factory=threading.RLock)

    def commit(
        self, files: Mapping[str, File | None], title: str, message: str = "", branch: str = "main"
    ) -> Commit:
        """Commit changed files on top of the branch; a file that is None is deleted."""
        with self.lock:
            parent = self.branches.get(branch)
            before = self.commits[parent].files if parent else {}
            after = {path: file for path, file in {**before, **files}.items() if file}
            # An hour apart, so that the order of commits can be told from their dates.
            date = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=len(self.commits))
            content = repr(
                (self.id, parent, title, message, sorted(after.items()), len(self.commits))
            )
            commit = Commit(
                hashlib.sha1(content.encode()).hexdigest(),
                parent,
                title,
                message,
                date.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
                after,
            )
            self.commits[commit.id] = commit
            self.branches[branch] = commit.id
            return commit

    def resolve(self, revision: str) -> Commit | None:
        """Return the commit of a branch, a tag or a whole commit id."""
        commit_id = self.branches.get(revision) or self.git_tags.get(revision) or revision
        return self.commits.get(commit_id)

    def history(self, revision: str) -> list[Commit]:
        """Return the commits that lead to a revision, the last one first."""
        commits = []
        commit = self.resolve(revision)
        while commit:
            commits.append(commit)
            commit = self.commits[commit.parent] if commit.parent else None
        return commits


class Objects:
    """A folder of objects, which are named by their sha256."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        return self.folder / sha256

    def __contains__(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def add(self, name: str, content: bytes | Path) -> File:
        """Keep the content of a file, and return its description."""
        if isinstance(content, Path):
            with content.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            shutil.copyfile(content, self.path(sha256))
        else:
            sha256 = hashlib.sha256(content).hexdigest()
            self.path(sha256).write_bytes(content)
        return self.describe(name, sha256)

    def describe(self, name: str, sha256: str, *, lfs: bool | None = None) -> File:
        """Return the File of an object in the folder."""
        path = self.path(sha256)
        size = path.stat().st_size
        lfs = is_large(name, size) if lfs is None else lfs
        return File(
            sha256,
            size,
            compute_git_hash(format_pointer(sha256, size) if lfs else path.read_bytes()),
            lfs,
        )


def is_large(name: str, size: int, sample: bytes = b"") -> bool:
    return size > 0 and (name.endswith(LARGE) or size > LARGE_BYTES or b"\0" in sample)


def format_pointer(sha256: str, size: int) -> bytes:
    """Return the text that git keeps for a large file."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


def compute_git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
