"""A draft and its target in one archive, for a machine that reaches no Hub: written from what was acquired, restored and verified there.

A tar file: manifest.json first, then the files as `draft/…` and `target/…`, in order. Of the same files the same bytes come out: no
times, no owners. The manifest has the repository, the commit, and every file's size and checksum: as the Hub states it, or SHA-256.
"""

import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from pydantic import AfterValidator, Field, ValidationError, model_validator
from rich.filesize import decimal

from specdistill.command import check_writable
from specdistill.cost import free_bytes
from specdistill.errors import ResourceError, UserError, one_line
from specdistill.hub.sources import Source, checksum_of, is_inside, say
from specdistill.methods.checkpoint import new_folder
from specdistill.recipe.fields import Section

MANIFEST = "manifest.json"
Role = Literal["draft", "target"]
LARGEST_MANIFEST = 16 * 2**20  # bytes


def _inside(path: str) -> str:
    if not is_inside(path):
        raise ValueError("leads out of the folder")
    return path


def _repository(name: str) -> str:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(str(error)) from error
    return name


class BundledFile(Section):
    """checksum: 64 hexadecimal digits of SHA-256, or 40 of git's SHA-1."""

    size: int = Field(ge=0)
    checksum: str = Field(pattern="^([0-9a-f]{40}|[0-9a-f]{64})$")


class BundledFolder(Section):
    """One part. repository, revision and commit are those of the Hub; all None for what was a folder."""

    name: str
    repository: Annotated[str, AfterValidator(_repository)] | None
    revision: Annotated[str, AfterValidator(_inside)] | None
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None
    files: dict[Annotated[str, AfterValidator(_inside)], BundledFile]

    @model_validator(mode="after")
    def _is_of_a_commit_or_a_folder(self) -> "BundledFolder":
        if (self.repository is None) != (self.commit is None):
            raise ValueError("a repository and its commit, or neither")
        return self


class Manifest(Section):
    format: Literal[1]
    method: str
    parts: dict[Role, BundledFolder]

    @property
    def main(self) -> Role:
        """The part that drafts; a target that comes with its own layer drafts for itself."""
        return "draft" if "draft" in self.parts else "target"


def write_bundle(path: Path, method: str, parts: Mapping[Role, tuple[Source, Sequence[str]]]) -> None:
    """Write the archive, whole or not at all; the files of every part are here and verified. Raises ResourceError when it does not fit."""
    check_writable(path.parent, "bundle")
    total, free = sum(source.files[file].size for source, files in parts.values() for file in files), free_bytes(path.parent)
    if total > free:
        what = f"bundle: {path} takes {decimal(total)}, and its disk has {decimal(free)} free"
        raise ResourceError(what, next_step="write it to another disk")
    manifest = Manifest.model_validate(
        {"format": 1, "method": method, "parts": {role: _described(*part) for role, part in parts.items()}}
    )
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
            _add(archive, MANIFEST, BytesIO(manifest.model_dump_json(indent=2).encode()))
            for role, (source, files) in sorted(parts.items()):
                for file in sorted(files):
                    with (source.folder / file).open("rb") as content:
                        _add(archive, f"{role}/{file}", content)
        partial.replace(path)
    except OSError as error:
        raise ResourceError(f"bundle: could not write {path} ({error})", next_step="check space and permissions") from error
    finally:
        partial.unlink(missing_ok=True)


def restore_bundle(path: Path, output_dir: Path | None) -> Path:
    """Put a bundle's files into the Hub's cache, or into a new folder; returns the draft's folder.

    Raises UserError for an archive that is none, holds anything but what its manifest lists, or would write elsewhere, and for files that
    are not what their checksums say; ResourceError when they do not fit. Nothing is left behind then.
    """
    cache = Path(constants.HF_HUB_CACHE)
    with _opened(path) as archive:
        manifest = _read_manifest(path, archive)
        if output_dir is None and (local := [part.name for part in manifest.parts.values() if part.commit is None]):
            got, expected = "nothing", f"a folder: the Hub's cache has no place for {', '.join(local)}, which came from none"
            raise UserError("output_dir", got=got, expected=expected)
        total, free = (
            sum(file.size for part in manifest.parts.values() for file in part.files.values()),
            free_bytes(output_dir or cache),
        )
        if total > free:
            what = f"from_bundle: {path} holds {decimal(total)}, and the disk of {output_dir or cache} has {decimal(free)} free"
            raise ResourceError(what, next_step="free disk space, or restore it elsewhere")
        if output_dir is not None:
            with new_folder(output_dir) as partial:
                _extract(path, archive, manifest, partial)
            folders = {role: output_dir / role for role in manifest.parts}
        else:
            folders = _into_cache(path, archive, manifest, cache)
    for role, part in manifest.parts.items():
        say(f"{role}: {part.name}, {len(part.files)} files verified, in {folders[role]}")
    return folders[manifest.main]


def _described(source: Source, files: Sequence[str]) -> dict[str, Any]:
    listed = {}
    for file in sorted(files):
        path = source.folder / file
        listed[file] = {"size": path.stat().st_size, "checksum": source.files[file].checksum or checksum_of(path, 64)}
    return {
        "name": source.name,
        "repository": source.repository,
        "revision": source.revision,
        "commit": source.commit,
        "files": listed,
    }


def _add(archive: tarfile.TarFile, name: str, content: BinaryIO) -> None:
    info = tarfile.TarInfo(name)
    info.size = content.seek(0, os.SEEK_END)
    content.seek(0)
    archive.addfile(info, content)


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """The archive; raises UserError for one that is none, or cut short, when it is opened or read."""
    if not path.is_file():
        raise UserError("from_bundle", got=f"{path}, which is no file", expected="an archive that bundle= wrote")
    try:
        with tarfile.open(path, "r:") as archive:
            yield archive
    except tarfile.TarError as error:
        got = f"{path} ({one_line(str(error))})"
        raise UserError("from_bundle", got=got, expected="an archive that bundle= wrote, whole") from error


def _read_manifest(path: Path, archive: tarfile.TarFile) -> Manifest:
    """The manifest, and that the archive holds each of its files once, as a plain file of that size, and nothing else."""
    expected = "an archive that bundle= wrote"
    first = archive.next()
    if first is None or first.name != MANIFEST or not first.isreg() or first.size > LARGEST_MANIFEST:
        raise UserError("from_bundle", got=f"{path}, which does not begin with {MANIFEST}", expected=expected)
    content = archive.extractfile(first)
    assert content is not None
    try:
        manifest = Manifest.model_validate_json(content.read())
    except ValidationError as error:
        first_error = error.errors()[0]
        where = ".".join(map(str, first_error["loc"]))
        raise UserError("from_bundle", got=f"{path} with {where}: {first_error['msg']}", expected=expected) from error
    listed = {f"{role}/{file}": entry.size for role, part in manifest.parts.items() for file, entry in part.files.items()}
    if not listed:
        raise UserError("from_bundle", got=f"{path}, which holds no files", expected=expected)
    seen = set[str]()
    for member in archive:
        if member.name == MANIFEST and not seen and member.offset == first.offset:
            continue
        if not member.isreg() or member.name not in listed or member.name in seen or member.size != listed[member.name]:
            kind = "a link or a special file" if not member.isreg() else "no file that its manifest lists so"
            raise UserError("from_bundle", got=f"{path} with {member.name!r}, {kind}", expected=expected)
        seen.add(member.name)
    if lacking := sorted(listed.keys() - seen):
        raise UserError("from_bundle", got=f"{path} without {', '.join(lacking[:3])}", expected="a whole archive")
    return manifest


def _extract(path: Path, archive: tarfile.TarFile, manifest: Manifest, folder: Path) -> None:
    """Write the files below a folder that is empty, and compare each with its checksum."""
    archive.extractall(folder, filter="data")
    for role, part in manifest.parts.items():
        for file, entry in part.files.items():
            if checksum_of(folder / role / file, len(entry.checksum)) != entry.checksum:
                got = f"{path}, whose {role}/{file} is not what its checksum says"
                raise UserError("from_bundle", got=got, expected="an archive that nothing has changed")


def _into_cache(path: Path, archive: tarfile.TarFile, manifest: Manifest, cache: Path) -> dict[Role, Path]:
    """Lay the files out as huggingface_hub does: each under its checksum, links to them by commit, the commit by the name asked for."""
    folders: dict[Role, Path] = {}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            _extract(path, archive, manifest, Path(temporary))
            for role, part in manifest.parts.items():
                assert part.repository is not None and part.commit is not None
                repository = cache / repo_folder_name(repo_id=part.repository, repo_type="model")
                folders[role] = repository / "snapshots" / part.commit
                for file, entry in part.files.items():
                    blob, link = repository / "blobs" / entry.checksum, folders[role] / file
                    for place in (blob, link):
                        place.parent.mkdir(parents=True, exist_ok=True)
                    (Path(temporary) / role / file).replace(blob)
                    link.unlink(missing_ok=True)
                    link.symlink_to(os.path.relpath(blob, link.parent))
                ref = repository / "refs" / (part.revision or constants.DEFAULT_REVISION)
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(part.commit, encoding="utf-8")
    except OSError as error:
        what = f"from_bundle: could not write to the Hub's cache, {cache} ({error.strerror})"
        raise ResourceError(what, next_step="set HF_HOME to a folder that can be written, or give output_dir=") from error
    return folders
