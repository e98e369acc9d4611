"""Names of models, and files from the Hugging Face Hub, whose failures become the project's errors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EACCES, EDQUOT, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, get_token, snapshot_download

from specdistill.errors import ResourceError, UserError, nearest
from specdistill.project import PICO

# httpx's base class, under the name of the release that huggingface_hub stands on.
HTTP_ERROR: type[BaseException] = errors.HfHubHTTPError.__bases__[0]


def resolve(model: str, key: str = "target.model") -> str:
    """The folder of `pico`, which ships with the package; any other name unchanged. Raises UserError for a missing folder or file."""
    if model == "pico":
        return str(PICO)
    folder, file = split_gguf(model)
    if not Path(folder).is_dir() and (model.startswith((".", "/", "~")) or folder.count("/") != 1):
        close = nearest(model, ["pico"])
        raise UserError(
            key,
            got=f"{model}, which is no folder",
            expected="pico, a folder or a Hub id",
            nearest=close,
        )
    if file and Path(folder).is_dir() and not Path(model).is_file():
        raise UserError(key, got=f"{model}, which is no file", expected="a GGUF file")
    return model


def split_gguf(model: str) -> tuple[str, str | None]:
    """`folder/file.gguf` -> (folder, file.gguf), with a Hub id for a folder too; any other name has no such file."""
    folder, _, file = model.rpartition("/")
    return (folder or ".", file) if file.endswith(".gguf") else (model, None)


@contextmanager
def hub_errors(key: str, name: str, *, expected: str) -> Iterator[None]:
    """Raises ResourceError when the Hub or its cache fails while `name` is fetched, UserError naming `key` when `name` is no id."""
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
        raise _not_fetched(error, key, name, expected) from error
    except OSError as error:
        if isinstance(
            error.__cause__, errors.LocalEntryNotFoundError
        ):  # which transformers tells in words of its own
            raise _not_fetched(error.__cause__, key, name, expected) from error
        if not _is_of_cache(error):
            raise
        what = f"{key}: {name} could not be kept in the Hub's cache, {constants.HF_HUB_CACHE} ({error.strerror})"
        raise ResourceError(
            what, next_step="set HF_HOME to a folder that can be written and has room"
        ) from error


def _not_fetched(
    error: BaseException, key: str, name: str, expected: str
) -> UserError | ResourceError:
    if Path(name).is_dir():
        return UserError(key, got=f"{name}, which lacks files", expected=expected)
    reason, next_step = _reason(error, split_revision(name)[0])
    return ResourceError(f"{key}: {name} is no folder here, and {reason}", next_step=next_step)


def _reason(error: BaseException, repository: str) -> tuple[str, str]:
    """Why the Hub did not give a repository, and what to do about it: told by the error, or by the one behind it."""
    chain = [error]
    while behind := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(behind)
    login = (
        "log in (hf auth login, or HF_TOKEN)"
        if get_token() is None
        else "log in as one who may read it (hf auth whoami)"
    )
    for each in chain:
        if isinstance(each, errors.GatedRepoError):
            return (
                "it is gated",
                f"accept its terms at {constants.ENDPOINT}/{repository} and {login}",
            )
        if isinstance(each, errors.RepositoryNotFoundError):
            reason = f"{constants.ENDPOINT} has no such repository, or it is private"
            return reason, f"check the name; if it is private, {login}"
        if isinstance(each, errors.RevisionNotFoundError):
            return (
                f"could not be fetched from the Hub: {repository} has no such revision",
                "check its name",
            )
    if constants.HF_HUB_OFFLINE or any(
        isinstance(each, HTTP_ERROR) and not isinstance(each, errors.HfHubHTTPError)
        for each in chain
    ):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "offline?"
        return (
            f"{constants.ENDPOINT} cannot be reached to look it up ({why})",
            "check the network, or name a folder",
        )
    message = next(iter(str(error).splitlines()), "") or type(error).__name__
    return (
        f"could not be fetched from the Hub ({message})",
        "check the path or the id, HF_TOKEN and the network",
    )


def _is_of_cache(error: OSError) -> bool:
    """Whether a file of the Hub's cache could not be written: no permission, a full or read-only disk."""
    cache = Path(constants.HF_HUB_CACHE)
    where = Path(str(error.filename)) if error.filename else cache
    of_cache = where == cache or cache in where.parents or where in cache.parents
    return of_cache and error.errno in (EACCES, EPERM, EROFS, ENOTDIR, ENOSPC, EDQUOT)


def split_revision(entry: str) -> tuple[str, str | None]:
    """`org/name@v1.2` -> (org/name, v1.2); the name of an existing folder or file may hold an @ and has no revision."""
    name, separator, revision = entry.rpartition("@")
    if not separator or Path(entry).exists():
        return entry, None
    return name, revision


def fetch(
    name: str,
    *,
    key: str,
    expected: str,
    revision: str | None = None,
    patterns: Sequence[str] | None = None,
) -> Path:
    """The folder `name`, or the local copy of the Hub repository's files, all or those that match `patterns`."""
    if Path(name).is_dir():
        return Path(name)
    with hub_errors(key, f"{name}@{revision}" if revision else name, expected=expected):
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=None if patterns is None else list(patterns)
            )
        )


def large_file_hashes(repository: str, revision: str, *, key: str) -> dict[str, str]:
    """The sha256 of a Hub repository's large files, by name; nothing is fetched. Raises ResourceError when the Hub fails."""
    with hub_errors(key, f"{repository}@{revision}", expected="a Hub id"):
        files = (
            HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
        )
    return {file.rfilename: file.lfs.sha256 for file in files if file.lfs}
