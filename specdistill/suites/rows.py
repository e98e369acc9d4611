"""From a suite's file, local or remote, to its prompts before tokenization.

The file is a jsonl file (also .jsonl.gz) or a parquet file, on disk, under an https URL, or on the Hub as
`hf://datasets/org/name@revision/path`. A row holds one of

    prompt      text as it is
    messages    a conversation, rendered by the target's chat template with the generation prompt
    user        what a user says, or a list of their turns, of which the first is used: a conversation of one message
    text        its first tokens are the prompt

and optionally `id` and `category`, and what the answer is scored by: a `reference` with the right answer, or a `test` that the
generated program must pass (with an `entry_point`, a test that defines `check`, as HumanEval's). A suite's `columns` map these to the
file's own columns.
"""

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from specdistill.errors import ResourceError, UserError, nearest, one_line

KINDS = ("prompt", "messages", "user", "text")
SCORED_BY = ("reference", "test", "entry_point")
COLUMNS = (*KINDS, "id", "category", *SCORED_BY)
REMOTE = ("https://", "http://", "hf://")


@dataclass(frozen=True)
class SuiteRow:
    """One prompt before tokenization. `content`: the text of a `prompt` or `text` row, the list of `messages` of others."""

    id: str
    category: str
    kind: str
    content: Any
    reference: str | None = None
    test: str | None = None


def read(place: str) -> bytes:
    """The content of a file or URL. Raises UserError for a file, ResourceError for a URL that cannot be read."""
    path = download(place) if place.startswith(REMOTE) else place
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError("eval.suite", got=f"{path} ({error.strerror})", expected="a readable file") from error


def download(url: str) -> str:
    """A URL's file in the cache of the datasets library."""
    from datasets import DownloadConfig, DownloadManager  # slow to import, and reports do not need it
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path: str = DownloadManager(download_config=DownloadConfig(disable_tqdm=True)).download(url)
    except (OSError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ResourceError(
            f"eval.suite: {url} could not be fetched ({reason})",
            next_step="check the network and HF_TOKEN, or name a copy of the file under `prompts`",
        ) from error
    return path


def parse(name: str, content: bytes, columns: Mapping[str, str], placeholder: str | None = None) -> tuple[SuiteRow, ...]:
    """The rows of a file called `name`, without those whose text begins with `placeholder`."""
    rows = []
    for number, entry in _objects(name, content):
        place = f"{PurePosixPath(name).name}:{number}"  # for error messages
        if row := _row(number, place, _renamed(place, entry, columns), placeholder):
            rows.append(row)
    if not rows:
        raise UserError("eval.suite", got=f"{name}, which is empty", expected="at least one prompt")
    ids = [row.id for row in rows]
    repeated = next((id for id in ids if ids.count(id) > 1), None)
    if repeated is not None:
        raise UserError("eval.suite", got=f"{name} with the id {repeated} twice", expected="a different id for each prompt")
    return tuple(rows)


def _objects(name: str, content: bytes) -> Iterator[tuple[int, Any]]:
    """(number, content) of each row."""
    try:
        if name.endswith(".parquet"):
            yield from enumerate(pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist(), start=1)
            return
        plain = gzip.decompress(content) if name.endswith(".gz") else content
    except (pyarrow.ArrowInvalid, gzip.BadGzipFile, EOFError) as error:
        got = f"{name}: {one_line(str(error))[:120]}"
        raise UserError("eval.suite", got=got, expected="a file as its name says") from error
    for number, line in enumerate(plain.split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UserError(
                    "eval.suite", got=f"{PurePosixPath(name).name}:{number}: {error}", expected="one JSON object a line"
                ) from error


def _renamed(place: str, entry: Any, columns: Mapping[str, str]) -> Any:
    if not isinstance(entry, dict) or not columns:
        return entry
    for column in columns.values():
        if column not in entry:
            close = nearest(column, list(entry))
            raise UserError("eval.suite", got=f"{place} without {column}", expected=f"one of {', '.join(entry)}", nearest=close)
    return {name: entry[column] for name, column in columns.items()}


def _row(number: int, place: str, entry: Any, placeholder: str | None) -> SuiteRow | None:
    """None for a row whose text begins with `placeholder`."""
    kind = next((kind for kind in KINDS if isinstance(entry, dict) and kind in entry), None)
    if kind is None:
        keys = list(entry) if isinstance(entry, dict) else []
        got, close = ", ".join(keys) or "no object", next((close for key in keys if (close := nearest(key, KINDS))), None)
        raise UserError("eval.suite", got=f"{place} with {got}", expected=f"one of {', '.join(KINDS)}", nearest=close)
    content = entry[kind]
    if kind == "user":
        first = content[0] if isinstance(content, list) and content else content
        kind, content = "messages", [{"role": "user", "content": first}]
    if kind == "messages":
        valid = isinstance(content, list) and all(isinstance(turn, dict) and "role" in turn for turn in content)
        texts = [turn.get("content") for turn in content] if valid else []
    else:
        texts = [content]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        expected = "a list of {role, content}" if kind == "messages" else "some text"
        raise UserError("eval.suite", got=f"{place} with {kind}={one_line(repr(content))[:60]}", expected=expected)
    for name in SCORED_BY:
        if (value := entry.get(name)) is not None and not (isinstance(value, str) and value.strip()):
            raise UserError("eval.suite", got=f"{place} with {name}={one_line(repr(value))[:60]}", expected="some text")
    reference, test, entry_point = map(entry.get, SCORED_BY)
    if test and entry_point:
        test = f"{test}\ncheck({entry_point})"
    row = SuiteRow(str(entry.get("id", number)), str(entry.get("category", "default")), kind, content, reference, test)
    return None if placeholder is not None and texts[0].startswith(placeholder) else row
