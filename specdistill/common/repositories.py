"""Resolve names of models, and fetch files from the Hugging Face Hub.

Failures of the Hub become the project's errors.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EACCES, EDQUOT, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, get_token, snapshot_download

from specdistill.common.errors import ResourceError, UserError, find_nearest
from specdistill.common.project import PICO

NO_NETWORK = "check the network, or name a folder"
# The base class of the HTTP client's errors, taken from the release that huggingface_hub uses.
HTTP_ERROR: type[BaseException] = errors.HfHubHTTPError.__bases__[0]


def resolve(
    model: str,
    key: str = "target.model",
    *,
    expected: str = "pico, a folder or a Hub id",
    names: Sequence[str] = ("pico",),
) -> str:
    """Return the folder of `pico`, which ships with the package, or any other name unchanged.

    Args:
        model: `pico`, a folder, a GGUF file or a Hub id.
        key: the recipe key that the error names.
        expected: what the error says is expected.
        names: names of which the error suggests the nearest.

    Raises:
        UserError: for a folder or file that is missing.
    """
    if model == "pico":
        return str(PICO)
    folder, file = split_gguf(model)
    # Path("") is the working directory, so an empty name is refused by itself.
    if not (model and Path(folder).is_dir()) and (
        model.startswith((".", "/", "~")) or folder.count("/") != 1
    ):
        raise UserError(
            key,
            got=f"{model or 'an empty name'}, which is no folder",
            expected=expected,
            nearest=find_nearest(model, names),
        )
    if file and Path(folder).is_dir() and not Path(model).is_file():
        raise UserError(key, got=f"{model}, which is no file", expected="a GGUF file")
    return model


def split_gguf(model: str) -> tuple[str, str | None]:
    """Split `folder/file.gguf` into folder and file. The folder may also be a Hub id.

    Returns:
        The folder and the name of the file. For any other name, the name and None.
    """
    folder, _, file = model.rpartition("/")
    return (folder or ".", file) if file.endswith(".gguf") else (model, None)


@contextmanager
def convert_hub_errors(
    key: str, name: str, *, expected: str, patterns: Sequence[str] = ()
) -> Iterator[None]:
    """Turn errors of the Hub or of its cache into errors of this project.

    Args:
        key: the recipe key that errors name.
        name: what is fetched.
        expected: what errors say is expected.
        patterns: of the files that are fetched. With them an error can name the files that the
            cache lacks.

    Raises:
        UserError: if `name` is no Hub id, or a folder that lacks files.
        ResourceError: if the Hub or its cache fails.
    """
    try:
        yield
    except errors.HFValidationError as error:
        raise UserError(key, got=name, expected=expected) from error
    except (
        HTTP_ERROR,
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        errors.RevisionResolutionError,
        errors.DryRunError,
    ) as error:
        raise _make_fetch_error(error, key, name, expected, patterns) from error
    except OSError as error:
        # transformers raises its own OSError for files that the cache lacks.
        if isinstance(error.__cause__, errors.LocalEntryNotFoundError):
            raise _make_fetch_error(error.__cause__, key, name, expected, patterns) from error
        if not _is_of_cache(error):
            raise
        raise ResourceError(
            f"{key}: {name} could not be kept in the Hub's cache, {constants.HF_HUB_CACHE}"
            f" ({error.strerror})",
            next_step="set HF_HOME to a folder that can be written and has room",
        ) from error


def _make_fetch_error(
    error: BaseException, key: str, name: str, expected: str, patterns: Sequence[str]
) -> UserError | ResourceError:
    """Return the error for files that could not be fetched, with what to do about it."""
    if Path(name).is_dir():
        return UserError(key, got=f"{name}, which lacks files", expected=expected)
    repository, revision = split_revision(name)
    reason, next_step = _describe_hub_failure(error, repository)
    missing = (
        find_missing(repository, revision, patterns) if patterns and next_step == NO_NETWORK else ""
    )
    if not missing:
        return ResourceError(f"{key}: {name} is no folder here, and {reason}", next_step=next_step)
    files = [] if "..." in missing else missing.split(", ")
    command = shlex.join(
        ["hf", "download", repository, *files, *(["--revision", revision] if revision else [])]
    )
    return ResourceError(
        f"{key}: the Hub's cache holds {name} without {missing}, and {reason}",
        next_step=f"where there is a network, run: {command}",
    )


def find_missing(repository: str, revision: str | None, patterns: Sequence[str]) -> str:
    """Return which files of a revision the Hub's cache lacks.

    Args:
        repository: the Hub id.
        revision: None for the default.
        patterns: of the files that are needed.

    Returns:
        The names of the files, separated by commas. Empty if the cache has all of them, or nothing
        of the revision at all.
    """
    try:
        snapshot_download(
            repository, revision=revision, allow_patterns=[*patterns], local_files_only=True
        )
    except errors.LocalEntryNotFoundError as error:
        match = re.search(r"missing \((.*?)\)\. ", str(error))
        return match[1] if match else ""
    return ""


def _describe_hub_failure(error: BaseException, repository: str) -> tuple[str, str]:
    """Return why the Hub did not provide a repository, and what to do about it.

    The error says why, or one of the errors that caused it.
    """
    # The error, followed by the errors that caused it
    # Follow the chain of causes: the Hub's own error is often wrapped.
    chain = [error]
    while behind := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(behind)
    login = (
        "log in (hf auth login, or HF_TOKEN)"
        if get_token() is None
        else "log in as one who may read it (hf auth whoami)"
    )

    # The first cause that is known decides what the user is told.
    for cause in chain:
        if isinstance(cause, errors.GatedRepoError):
            return (
                "it is gated",
                f"accept its terms at {constants.ENDPOINT}/{repository} and {login}",
            )
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"{constants.ENDPOINT} has no such repository, or it is private",
                f"check the name; if it is private, {login}",
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return (
                f"could not be fetched from the Hub: {repository} has no such revision",
                "check its name",
            )
        network_fault = find_connection_failure(cause)
        if network_fault is not None:
            return f"{constants.ENDPOINT} {network_fault}", NO_NETWORK
    message = next(iter(str(error).splitlines()), "") or type(error).__name__
    return (
        f"could not be fetched from the Hub ({message})",
        "check the path or the id, HF_TOKEN and the network",
    )


def find_connection_failure(error: BaseException) -> str | None:
    """Return the reason if the Hub could not be reached at all; None for any other error."""
    if constants.HF_HUB_OFFLINE or (
        isinstance(error, HTTP_ERROR) and not isinstance(error, errors.HfHubHTTPError)
    ):
        return (
            "cannot be reached"
            f" ({'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else 'offline?'})"
        )
    return None


def _is_of_cache(error: OSError) -> bool:
    """Return whether an error says that the Hub's cache could not be written.

    The reason may be missing permission, or a full or read-only disk.
    """
    cache = Path(constants.HF_HUB_CACHE)
    where = Path(str(error.filename)) if error.filename else cache
    of_cache = where == cache or cache in where.parents or where in cache.parents
    return of_cache and error.errno in (EACCES, EPERM, EROFS, ENOTDIR, ENOSPC, EDQUOT)


def split_revision(entry: str) -> tuple[str, str | None]:
    """Split `org/name@v1.2` into name and revision.

    The name of an existing folder or file may contain an @, and has no revision.

    Returns:
        The name, and the revision or None.
    """
    name, separator, revision = entry.rpartition("@")
    if not separator or Path(entry).exists():
        return entry, None
    return name, revision


def find_commit(name: str, revision: str | None) -> str:
    """Return the commit of a revision.

    It is the commit in the cache if the Hub cannot be reached. The Hub's client then says so.
    """
    return HfApi().resolve_revision(
        name, revision=revision, local_files_only=constants.is_offline_mode()
    )


def fetch(
    name: str,
    *,
    key: str,
    expected: str,
    revision: str | None = None,
    patterns: Sequence[str] | None = None,
) -> Path:
    """Return the folder `name`, or the folder with a local copy of a Hub repository's files.

    Args:
        name: a folder or a Hub id.
        key: the recipe key that errors name.
        expected: what errors say is expected.
        revision: of a Hub id; None for the default.
        patterns: of the files that are fetched; None for all files.

    Raises:
        UserError: if `name` is neither.
        ResourceError: if the Hub or its cache fails.
    """
    if Path(name).is_dir():
        return Path(name)
    wanted_patterns = ["*"] if patterns is None else list(patterns)
    with convert_hub_errors(
        key, f"{name}@{revision}" if revision else name, expected=expected, patterns=wanted_patterns
    ):
        return Path(
            snapshot_download(
                name, revision=find_commit(name, revision), allow_patterns=wanted_patterns
            )
        )


def read_large_file_hashes(repository: str, revision: str, *, key: str) -> dict[str, str]:
    """Return the sha256 of a Hub repository's large files, by name, without fetching them.

    Raises:
        ResourceError: if the Hub fails.
    """
    with convert_hub_errors(key, f"{repository}@{revision}", expected="a Hub id"):
        files = (
            HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
        )
    return {file.rfilename: file.lfs.sha256 for file in files if file.lfs}
