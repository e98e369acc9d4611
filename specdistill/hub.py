"""Files from the Hugging Face Hub, and what can go wrong with it in the project's own errors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from specdistill.errors import ResourceError, UserError


@contextmanager
def hub_errors(key: str, name: str, *, expected: str) -> Iterator[None]:
    """Raises ResourceError when the Hub fails while `name` is fetched, UserError naming `key` when `name` is no id."""
    try:
        yield
    except HFValidationError as error:
        raise UserError(key, got=name, expected=expected) from error
    except (HfHubHTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise ResourceError(
            f"{key}: {name} is no folder here, and could not be fetched from the Hub ({str(error).splitlines()[0]})",
            next_step="check the path or the id, HF_TOKEN and the network",
        ) from error


def split_revision(entry: str) -> tuple[str, str | None]:
    """`org/name@v1.2` -> (org/name, v1.2); what names a folder or file here is one name, also with an @ in it."""
    name, separator, revision = entry.rpartition("@")
    if not separator or Path(entry).exists():
        return entry, None
    return name, revision


def fetch(name: str, *, key: str, expected: str, revision: str | None = None, patterns: Sequence[str] | None = None) -> Path:
    """The folder `name`, or the Hub repository's files in the local cache: those that match `patterns`, or all."""
    if Path(name).is_dir():
        return Path(name)
    with hub_errors(key, f"{name}@{revision}" if revision else name, expected=expected):
        return Path(snapshot_download(name, revision=revision, allow_patterns=None if patterns is None else list(patterns)))
