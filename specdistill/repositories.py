"""Names of models, and files from the Hugging Face Hub, whose failures become the project's errors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from specdistill.errors import ResourceError, UserError, nearest
from specdistill.project import PICO

# httpx's base class, under the name of the release that huggingface_hub stands on.
HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]


def resolve(model: str, key: str = "target.model") -> str:
    """The folder of `pico`, which ships with the package; any other name unchanged. Raises UserError for a missing folder or file."""
    if model == "pico":
        return str(PICO)
    folder, file = split_gguf(model)
    if not Path(folder).is_dir() and (model.startswith((".", "/", "~")) or folder.count("/") != 1):
        close = nearest(model, ["pico"])
        raise UserError(key, got=f"{model}, which is no folder", expected="pico, a folder or a Hub id", nearest=close)
    if file and Path(folder).is_dir() and not Path(model).is_file():
        raise UserError(key, got=f"{model}, which is no file", expected="a GGUF file")
    return model


def split_gguf(model: str) -> tuple[str, str | None]:
    """`folder/file.gguf` -> (folder, file.gguf), with a Hub id for a folder too; any other name has no such file."""
    folder, _, file = model.rpartition("/")
    return (folder or ".", file) if file.endswith(".gguf") else (model, None)


@contextmanager
def hub_errors(key: str, name: str, *, expected: str) -> Iterator[None]:
    """Raises ResourceError when the Hub fails while `name` is fetched, UserError naming `key` when `name` is no id."""
    try:
        yield
    except HFValidationError as error:
        raise UserError(key, got=name, expected=expected) from error
    except (HfHubHTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if Path(name).is_dir():
            raise UserError(key, got=f"{name}, which lacks files", expected=expected) from error
        raise ResourceError(
            f"{key}: {name} is no folder here, and could not be fetched from the Hub ({str(error).splitlines()[0]})",
            next_step="check the path or the id, HF_TOKEN and the network",
        ) from error


def split_revision(entry: str) -> tuple[str, str | None]:
    """`org/name@v1.2` -> (org/name, v1.2); the name of an existing folder or file may hold an @ and has no revision."""
    name, separator, revision = entry.rpartition("@")
    if not separator or Path(entry).exists():
        return entry, None
    return name, revision


def fetch(name: str, *, key: str, expected: str, revision: str | None = None, patterns: Sequence[str] | None = None) -> Path:
    """The folder `name`, or the local copy of the Hub repository's files, all or those that match `patterns`."""
    if Path(name).is_dir():
        return Path(name)
    with hub_errors(key, f"{name}@{revision}" if revision else name, expected=expected):
        return Path(snapshot_download(name, revision=revision, allow_patterns=None if patterns is None else list(patterns)))


def large_file_hashes(repository: str, revision: str, *, key: str) -> dict[str, str]:
    """The sha256 of a Hub repository's large files, by name; nothing is fetched. Raises ResourceError when the Hub fails."""
    with hub_errors(key, f"{repository}@{revision}", expected="a Hub id"):
        files = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    return {file.rfilename: file.lfs.sha256 for file in files if file.lfs}
