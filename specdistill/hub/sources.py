"""The files of a draft or a target: a folder's, or those of one commit of a repository on the Hub, of which some, all or none are here.

What is fetched is compared with the checksums that the Hub lists: git's SHA-1 of small files, SHA-256 of large ones. huggingface_hub checks
the size of what it fetched over plain HTTP, and no more. Its cache names a file by the same checksum, so that what is in it can be compared
without the Hub.
"""

import glob
import hashlib
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from huggingface_hub import HfApi, constants, get_cached_repo_tree, get_session, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    RevisionResolutionError,
    SafetensorsParsingError,
    XetDownloadError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdistill.errors import ResourceError, UserError, one_line
from specdistill.repositories import hub_errors, resolve
from specdistill.targets.files import INDEX, SINGLE, Shards

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SAMPLE_BYTES, SAMPLE_SECONDS = 8 * 2**20, 3.0  # of a file, to time the link by; what comes first


def say(line: str) -> None:
    """To a person; stdout is the path's alone."""
    print(line, file=sys.stderr, flush=True)


class Entry(NamedTuple):
    """A file. size: in bytes. checksum: in hexadecimal, 40 digits of git's SHA-1 or 64 of SHA-256; None where none is stated."""

    size: int
    checksum: str | None


@dataclass(frozen=True)
class Source:
    """A folder, or a commit of a repository.

    key: what errors name. name: as the user gave it. folder: where the files are, or will be once they are fetched. files: all that there
    are, by path. repository, revision, commit: None for a folder; the revision is what was asked for, None for the default branch.
    """

    key: str
    name: str
    folder: Path
    files: Mapping[str, Entry]
    repository: str | None = None
    revision: str | None = None
    commit: str | None = None

    @classmethod
    def of(cls, name: str, revision: str | None, *, key: str, expected: str) -> "Source":
        """The folder `name`, or a revision of a repository, as the Hub lists it, or offline as far as the cache knows it.

        Raises UserError for what is neither and for names that lead out of the repository, ResourceError when the Hub fails.
        """
        place = resolve(name, key)
        if Path(place).is_dir():
            if revision is not None:
                raise UserError("revision", got=revision, expected=f"none with a folder, {name}")
            inside = [path for path in sorted(Path(place).iterdir()) if path.is_file()]
            return cls(key, name, Path(place), {path.name: Entry(path.stat().st_size, None) for path in inside})
        shown = f"{name}@{revision}" if revision else name
        with hub_errors(key, shown, expected=expected):
            try:
                is_offline = constants.is_offline_mode()
                commit = HfApi().resolve_revision(place, revision=revision, local_files_only=is_offline).resolved
            except RevisionResolutionError as error:
                if not is_offline:
                    raise
                raise _not_here(f"{key}: of {shown} nothing is in the Hub's cache, {constants.HF_HUB_CACHE}") from error
            repository = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=place, repo_type="model")
            folder = repository / "snapshots" / commit
            files = _cached(place, commit, folder) if is_offline else _listed(place, commit)
        if unsafe := next((path for path in files if not is_inside(path)), None):
            raise UserError(key, got=f"{shown}, which lists {unsafe!r}", expected="names of files inside the repository")
        return cls(key, shown, folder, files, place, revision, commit)

    def matching(self, *patterns: str) -> list[str]:
        """The files beside config.json whose names match; folders hold other things."""
        return [path for path in self.files if "/" not in path and any(fnmatch(path, pattern) for pattern in patterns)]

    def weights(self) -> list[str]:
        """The safetensors files that hold the weights. An index must be here. Raises UserError where there are none."""
        if INDEX in self.files:
            if not (self.folder / INDEX).is_file():  # offline: what is missing is to be named
                return self.matching("*.safetensors")
            named = Shards.open(self.folder, self.key, complete=False).files
            if lacking := next((file for file in named if file not in self.files), None):
                raise UserError(self.key, got=f"{self.name} without {lacking}", expected="every file that its index names")
            return named
        if SINGLE in self.files:
            return [SINGLE]
        if pickles := self.matching(*PICKLES):
            got = f"{self.name} with weights in a pickle alone ({', '.join(pickles[:3])}), of which nothing can be known unread"
            instead = "specdistill export reads plain tensors of one and writes safetensors"
            raise UserError(self.key, got=got, expected=f"safetensors; {instead}")
        if constants.is_offline_mode() and self.repository:
            raise self._incomplete([SINGLE])
        found = ", ".join(sorted(self.files)[:5]) or "nothing"
        raise UserError(self.key, got=f"{self.name} without weights, with {found}", expected=f"{SINGLE}, or {INDEX}")

    def missing(self, files: Iterable[str]) -> list[str]:
        return [file for file in files if not (self.folder / file).is_file()]

    def fetch(self, files: Sequence[str], *, verify: bool = False) -> Path:
        """The folder, once these files are in it and what was fetched has its checksums; with `verify`, what was there before too.

        What is damaged is fetched again, once. Raises ResourceError when that does not help, when the Hub or its cache fails, and offline
        for each file that is missing or damaged.
        """
        missing, unchecked = self.missing(files), self._unchecked()
        if missing and (self.repository is None or constants.is_offline_mode()):
            raise self._incomplete(missing)
        if missing:
            self._keep_unchecked(unchecked | set(missing))
            self._download(missing)
        damaged = self.damaged(file for file in files if verify or file in missing or file in unchecked)
        if damaged and not constants.is_offline_mode():
            say(f"{self.name}: not what the Hub lists, so fetched again: {', '.join(damaged)}")
            self._discard(damaged)
            self._download(damaged)
            damaged = self.damaged(damaged)
            self._discard(damaged)  # whoever reads the cache next would take them
        if damaged:
            what = f"{self.key}: {self.name} is damaged: {', '.join(damaged)}"
            raise ResourceError(
                what, next_step="run it again with a network, or look at what stands between this machine and the Hub"
            )
        if missing or unchecked:
            self._keep_unchecked(unchecked - set(files))
        return self.folder

    def damaged(self, files: Iterable[str]) -> list[str]:
        """Those that are not what their checksum says."""
        stated = ((file, self.files[file].checksum) for file in files)
        return [file for file, checksum in stated if checksum and checksum_of(self.folder / file, len(checksum)) != checksum]

    def begin(self, file: str, num_bytes: int) -> Iterator[bytes]:
        """The first bytes of a file on the Hub as they arrive. Raises ResourceError when it fails."""
        assert self.repository is not None
        url = hf_hub_url(self.repository, file, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes=0-{num_bytes - 1}"}
        with hub_errors(self.key, self.name, expected="a Hub id"), get_session().stream("GET", url, headers=headers) as answer:
            hf_raise_for_status(answer)
            yield from answer.iter_bytes()

    def sample(self, file: str) -> tuple[int, float]:
        """Bytes of a file and the seconds that they took, after the first of them; no bytes where all came at once."""
        received, start, now = 0, None, 0.0
        for chunk in self.begin(file, SAMPLE_BYTES):
            now = time.monotonic()
            if start is None:
                start = now
                continue
            received += len(chunk)
            if now - start > SAMPLE_SECONDS:
                break
        return received, now - (start or now)

    def _download(self, files: Sequence[str]) -> None:
        assert self.repository is not None
        try:
            with hub_errors(self.key, self.name, expected="a Hub id"):
                names = [glob.escape(file) for file in files]
                snapshot_download(self.repository, revision=self.commit, allow_patterns=names)
        except (OSError, XetDownloadError, RuntimeError) as error:  # the last is hf_xet's
            what = f"{self.key}: {self.name} was not fetched whole ({one_line(str(error))[:200]})"
            raise ResourceError(what, next_step="run it again: what is whole is kept") from error
        if missing := self.missing(files):
            raise self._incomplete(missing)

    def _discard(self, files: Iterable[str]) -> None:
        """Take files out of the cache: the links that lead to them, and what these lead to."""
        for file in files:
            path = self.folder / file
            while path.is_symlink():
                target = path.parent / path.readlink()
                path.unlink()
                path = target
            path.unlink(missing_ok=True)

    @property
    def _record(self) -> Path:
        """Names the files that a run began to fetch, until they have been compared: it may have been killed in between."""
        return self.folder.parent.parent / f".unchecked-{self.commit}"

    def _unchecked(self) -> set[str]:
        return set(self._record.read_text(encoding="utf-8").splitlines()) if self.commit and self._record.is_file() else set()

    def _keep_unchecked(self, files: Collection[str]) -> None:
        try:
            if files:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                self._record.write_text("\n".join(sorted(files)), encoding="utf-8")
            else:
                self._record.unlink(missing_ok=True)
        except OSError as error:
            what = f"{self.key}: {self.name} could not be kept in the Hub's cache, {constants.HF_HUB_CACHE} ({error.strerror})"
            raise ResourceError(what, next_step="set HF_HOME to a folder that can be written and has room") from error

    def _incomplete(self, missing: Sequence[str]) -> ResourceError:
        where = self.folder if self.repository is None else f"the Hub's cache, {constants.HF_HUB_CACHE}"
        return _not_here(f"{self.key}: of {self.name} these files are not in {where}: {', '.join(missing)}")


class Headers(Mapping[str, Tensor]):
    """The tensors of a source's weights by name, without their content.

    Of each file the header alone is read, here or on the Hub, once one of its tensors is asked for. Raises UserError for a file that is cut
    short or is none, and where files and index disagree.
    """

    def __init__(self, source: Source) -> None:
        self.source, self._read = source, dict[str, dict[str, Tensor]]()
        (first, *_) = files = source.weights()
        if INDEX in source.files:
            self._shards = Shards.open(source.folder, source.key, complete=False)
        else:
            self._shards = Shards(source.folder, dict.fromkeys(self._header(first), first), source.key)
        self.files = files

    def __getitem__(self, name: str) -> Tensor:
        return self._header(self._shards.file_of[name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards.file_of)

    def __len__(self) -> int:
        return len(self._shards.file_of)

    def _header(self, file: str) -> dict[str, Tensor]:
        if file not in self._read:
            tensors = self._local(file) if (self.source.folder / file).is_file() else self._remote(file)
            if INDEX in self.source.files:
                self._shards.check_file(file, tensors)
            self._read[file] = tensors
        return self._read[file]

    def _local(self, file: str) -> dict[str, Tensor]:
        try:
            with safe_open(self.source.folder / file, framework="pt") as weights:
                parts = ((name, weights.get_slice(name)) for name in list(weights.keys()))
                return {name: self._tensor(file, part.get_dtype(), part.get_shape()) for name, part in parts}
        except SafetensorError as error:
            raise self._broken(file, str(error)) from error

    def _remote(self, file: str) -> dict[str, Tensor]:
        source = self.source
        assert source.repository is not None
        try:
            with hub_errors(source.key, source.name, expected="a Hub id"):
                header = HfApi().parse_safetensors_file_metadata(source.repository, file, revision=source.commit)
        except (
            SafetensorsParsingError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # the others: a header of other JSON
            raise self._broken(file, str(error)) from error
        length = int.from_bytes(b"".join(source.begin(file, 8)), "little")  # a file begins with that of its header
        size = 8 + length + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
        if source.files[file].size != size:
            raise self._broken(file, f"{source.files[file].size:,} bytes, and its header is of {size:,}")
        return {name: self._tensor(file, tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}

    def _tensor(self, file: str, dtype: str, shape: Sequence[int]) -> Tensor:
        if dtype not in DTYPES:
            raise self._broken(file, f"a tensor in {dtype}")
        return torch.empty(tuple(shape), dtype=DTYPES[dtype], device="meta")

    def _broken(self, file: str, why: str) -> UserError:
        got = f"{self.source.name}, whose {file} cannot be read ({one_line(why)[:160]})"
        return UserError(self.source.key, got=got, expected="whole safetensors files")


def is_inside(path: str) -> bool:
    """Whether a name of a file stays in the folder that it is put in, on any system."""
    parts = PurePosixPath(path).parts
    return bool(parts) and "/".join(parts) == path and ".." not in parts and not re.search(r"^/|[\\:\x00-\x1f]", path)


def checksum_of(path: Path, num_digits: int) -> str:
    """A file's SHA-256 in 64 hexadecimal digits, or the SHA-1 of git's blob in 40."""
    with path.open("rb") as file:
        if num_digits == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        blob = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        while chunk := file.read(2**20):
            blob.update(chunk)
        return blob.hexdigest()


def _listed(repository: str, commit: str) -> dict[str, Entry]:
    """All files of a commit, as the Hub lists them."""
    tree = HfApi().list_repo_tree(repository, recursive=True, revision=commit)
    return {
        file.path: Entry(file.size, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in tree
        if isinstance(file, RepoFile)
    }


def _cached(repository: str, commit: str, folder: Path) -> dict[str, Entry]:
    """The files of a commit that the cache knows of; a checksum is the name of what a link leads to."""
    here = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {name: Entry(path.stat().st_size, _stored_as(path)) for name, path in here.items()}
    try:
        known = {file.path: Entry(file.size, None) for file in get_cached_repo_tree(repository, revision=commit)}
    except CachedRepoTreeNotFoundError:
        return files
    return known | files


def _stored_as(path: Path) -> str | None:
    name = path.readlink().name if path.is_symlink() else ""
    return name if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name) else None


def _not_here(what: str) -> ResourceError:
    next_step = "acquire it once with a network, or restore it with from_bundle="
    return ResourceError(what, next_step=next_step)
