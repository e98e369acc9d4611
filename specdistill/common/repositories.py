"""Resolve the names of models, and fetch files from the Hugging Face Hub.

Errors of the Hub become a UserError or a ResourceError that says what to do.
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

# What to do if the Hub could not be reached. `_make_fetch_error` recognizes this case by the text.
NO_NETWORK = "check the network, or name a folder"
# The base class of the errors of the HTTP client. The client depends on the version of
# huggingface_hub (requests, httpx or httpx2), so the class is taken from the error of
# huggingface_hub that inherits from it.
HTTP_ERROR: type[BaseException] = errors.HfHubHTTPError.__bases__[0]


def resolve(
    model: str,
    key: str = "target.model",
    *,
    expected: str = "pico (built in), a folder or a Hub id",
    names: Sequence[str] = ("pico",),
) -> str:
    """Replace the model name `pico` by a folder; check any other name, and return it unchanged.

    pico is a tiny model that ships with specdistill, for trials and tests.

    Args:
        model: `pico`, a folder, a GGUF file or a Hub id.
        key: the recipe key that the error names.
        expected: the names that are allowed, for the error.
        names: known names. The error suggests the one that is most similar to `model`.

    Returns:
        The folder of pico, or `model` unchanged.

    Raises:
        UserError: for a folder or file that is missing.
    """
    if model == "pico":
        return str(PICO)

    # Refuse a name that is no folder here, unless it may be a Hub id, which has exactly one slash.
    # Whether a Hub id exists turns out later, when its files are fetched. Path("") is the working
    # directory, so an empty name needs a test of its own.
    folder, file = split_gguf(model)
    is_folder = bool(model) and Path(folder).is_dir()
    may_be_hub_id = folder.count("/") == 1 and not model.startswith((".", "/", "~"))
    if not is_folder and not may_be_hub_id:
        raise UserError(
            key,
            got=f"{model or 'an empty name'}, which is no folder",
            expected=expected,
            nearest=find_nearest(model, names),
        )
    # In a folder on this machine, the GGUF file has to exist.
    if file and is_folder and not Path(model).is_file():
        raise UserError(key, got=f"{model}, which is no file", expected="an existing GGUF file")
    return model


def split_gguf(model: str) -> tuple[str, str | None]:
    """Split `folder/file.gguf` into the folder, which may be a Hub id, and the name of the file.

    Returns:
        The folder and the name of the file. For a name that does not end with `.gguf`, the name
        itself and None.
    """
    # A name without a slash is a file in the working directory, ".".
    folder, _, file = model.rpartition("/")
    return (folder or ".", file) if file.endswith(".gguf") else (model, None)


@contextmanager
def convert_hub_errors(
    key: str, name: str, *, expected: str, patterns: Sequence[str] = ()
) -> Iterator[None]:
    """Turn errors of the Hub or of its cache in a `with` block into errors that say what to do.

    Args:
        key: the recipe key to name in errors.
        name: the Hub id that is fetched, with `@revision` if it has one, or a folder.
        expected: the names that are allowed, for the error.
        patterns: glob patterns of the files that are fetched. With them an error can name the files
            that the cache lacks.

    Raises:
        UserError: if `name` is no valid Hub id, or a folder that lacks files.
        ResourceError: if the Hub or its cache fails.
    """
    try:
        yield
    # The name is not of the form org/name.
    except errors.HFValidationError as error:
        raise UserError(key, got=name, expected=expected) from error
    # The Hub answered with an error, could not be reached, or must not be asked (HF_HUB_OFFLINE).
    except (
        HTTP_ERROR,
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        errors.RevisionResolutionError,
        errors.DryRunError,
    ) as error:
        raise _make_fetch_error(error, key, name, expected, patterns) from error
    except OSError as error:
        # transformers wraps the error for files that the cache lacks in an OSError of its own.
        if isinstance(error.__cause__, errors.LocalEntryNotFoundError):
            raise _make_fetch_error(error.__cause__, key, name, expected, patterns) from error
        # An OSError that is not about the cache is not handled here.
        if not _is_cache_error(error):
            raise
        raise ResourceError(
            f"{key}: {name} could not be kept in the Hub's cache, {constants.HF_HUB_CACHE}"
            f" ({error.strerror})",
            next_step="set HF_HOME to a folder that can be written and has room",
        ) from error


def _make_fetch_error(
    error: BaseException, key: str, name: str, expected: str, patterns: Sequence[str]
) -> UserError | ResourceError:
    """Return the error for files that could not be fetched, with what to do about it.

    Args:
        error: the error of huggingface_hub.
        key: the recipe key that the error names.
        name: the Hub id, with `@revision` if it has one, or a folder.
        expected: the names that are allowed, for the error.
        patterns: glob patterns of the files that are needed.
    """
    # Files in a folder are read without the Hub, so the error means that the folder lacks them.
    if Path(name).is_dir():
        return UserError(key, got=f"{name}, which lacks needed files", expected=expected)

    # If the Hub could not be reached, find out which of the needed files the cache lacks.
    repository, revision = split_revision(name)
    reason, next_step = _describe_hub_failure(error, repository)
    missing_files = ""
    if patterns and next_step == NO_NETWORK:
        missing_files = find_missing(repository, revision, patterns)
    if not missing_files:
        return ResourceError(f"{key}: {name} is no folder here, and {reason}", next_step=next_step)

    # Suggest the command that completes the cache. If huggingface_hub has shortened a long list of
    # files with "...", the command names no files, and so fetches the whole repository.
    files = [] if "..." in missing_files else missing_files.split(", ")
    revision_option = ["--revision", revision] if revision else []
    command = shlex.join(["hf", "download", repository, *files, *revision_option])
    return ResourceError(
        f"{key}: the Hub's cache holds {name} without {missing_files}, and {reason}",
        next_step=f"where there is a network, run: {command}",
    )


def find_missing(repository: str, revision: str | None, patterns: Sequence[str]) -> str:
    """Return the files that the Hub's cache lacks, although it has other files of the revision.

    Args:
        repository: the Hub id.
        revision: the revision; None for the default branch.
        patterns: glob patterns of the files that are needed.

    Returns:
        The names of the files, separated by commas. Empty if the cache has all of them, or if it
        has nothing of the revision at all.
    """
    # With `local_files_only` huggingface_hub looks only into its cache. If files are missing there,
    # their names are only in the text of its error: "missing (a.json, b.json). ".
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

    Args:
        error: the error of huggingface_hub. The reason may be in one of the errors that caused it.
        repository: the Hub id.
    """
    # List the error, the error that caused it, and so on: any of them may give the reason.
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)

    # What to do about missing access depends on whether the user has logged in.
    login = (
        "log in (hf auth login, or HF_TOKEN)"
        if get_token() is None
        else "log in as a user who may read it (`hf auth whoami` prints the user)"
    )

    # The first error in the chain that is known gives the reason.
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

    # For any other error, quote the first line of its message.
    lines = str(error).splitlines() or [""]
    message = lines[0] or type(error).__name__
    return (
        f"could not be fetched from the Hub ({message})",
        "check the path or the id, HF_TOKEN and the network",
    )


def find_connection_failure(error: BaseException) -> str | None:
    """Return the reason if the Hub could not be reached at all, and None if it answered.

    The Hub's own error codes, such as 404, are raised as HfHubHTTPError. Any other error of the
    HTTP client means that there was no answer.
    """
    if constants.HF_HUB_OFFLINE:
        return "cannot be reached (HF_HUB_OFFLINE is set)"
    if isinstance(error, HTTP_ERROR) and not isinstance(error, errors.HfHubHTTPError):
        return "cannot be reached (offline?)"
    return None


def _is_cache_error(error: OSError) -> bool:
    """Return whether an error says that the Hub's cache could not be written.

    The reason may be a missing permission, or a full or read-only disk.
    """
    # An error without a file name is taken to be about the cache. An error about a folder above the
    # cache counts too, because the folder of the cache may not exist yet.
    cache = Path(constants.HF_HUB_CACHE)
    path = Path(str(error.filename)) if error.filename else cache
    is_of_cache = path == cache or cache in path.parents or path in cache.parents
    return is_of_cache and error.errno in (EACCES, EPERM, EROFS, ENOTDIR, ENOSPC, EDQUOT)


def split_revision(entry: str) -> tuple[str, str | None]:
    """Split `org/name@v1.2` into name and revision.

    The path of an existing folder or file is not split, even if it contains an @.

    Returns:
        The name, and the revision; None without one.
    """
    name, separator, revision = entry.rpartition("@")
    if not separator or Path(entry).exists():
        return entry, None
    return name, revision


def find_commit(name: str, revision: str | None) -> str:
    """Return the commit that a branch or tag of a Hub repository points to.

    If the Hub cannot be reached, the result is the commit in the Hub's cache on this machine, and
    huggingface_hub logs a warning.

    Args:
        name: the Hub id.
        revision: a branch, tag or commit; None for the default branch.
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
    """Fetch the files of a Hub repository, and return the local folder with them.

    A name that is a folder on this machine is returned as it is.

    Args:
        name: a folder or a Hub id.
        key: the recipe key to name in errors.
        expected: the names that are allowed, for the error.
        revision: the revision of a Hub id; None for the default branch.
        patterns: glob patterns of the files that are fetched; None for all files.

    Raises:
        UserError: if `name` is neither a folder nor a Hub id.
        ResourceError: if the Hub or its cache fails.
    """
    if Path(name).is_dir():
        return Path(name)

    # Find out the commit first, so that all files are from the same commit even if the branch
    # changes meanwhile.
    wanted_patterns = ["*"] if patterns is None else list(patterns)
    full_name = f"{name}@{revision}" if revision else name
    with convert_hub_errors(key, full_name, expected=expected, patterns=wanted_patterns):
        commit = find_commit(name, revision)
        return Path(snapshot_download(name, revision=commit, allow_patterns=wanted_patterns))


def read_large_file_hashes(repository: str, revision: str, *, key: str) -> dict[str, str]:
    """Ask the Hub for the sha256 of a repository's large files, without fetching these files.

    Args:
        repository: the Hub id of the repository.
        revision: a branch, a tag or a commit.
        key: the recipe key to name in errors.

    Returns:
        The name of each file -> its sha256. Small files, which the Hub stores in git, are left out.

    Raises:
        ResourceError: if the Hub fails.
    """
    with convert_hub_errors(key, f"{repository}@{revision}", expected="a Hub id"):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    # `lfs` is only set for files that the Hub stores outside of git, with their sha256.
    files = info.siblings or []
    return {file.rfilename: file.lfs.sha256 for file in files if file.lfs}
