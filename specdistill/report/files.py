"""The report's folder: written whole or not at all, read, and rendered again from its JSON files.

report.schema.json says what a report may hold, and so what a gate's rules may name.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from specdistill.errors import ResourceError, UserError
from specdistill.report.html import to_html
from specdistill.report.text import to_junit, to_markdown
from specdistill.statistics.records import PromptRecord, read_records, refuse_constant, write_records

REPORT, SAMPLES = "report.json", "samples.jsonl"
SCHEMA = Path(__file__).parent / "report.schema.json"
SCALARS = ("number", "integer", "boolean")
ROW_IDENTITY = ("num_speculative_tokens", "temperature", "batch_size")  # numbers of a row that are its configuration


def write_report(folder: Path, report: Mapping[str, Any], records: Sequence[PromptRecord]) -> None:
    """Write report.json, samples.jsonl and what is rendered from them; nothing appears in `folder` before everything is ready."""
    validate(report)
    with staged(folder) as staging:
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        (staging / REPORT).write_text(f"{text}\n", encoding="utf-8")
        write_records(records, staging / SAMPLES)
        render(staging)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write files into; they move to `folder` at the end. Raises ResourceError when the disk fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as name:
            yield Path(name)
            for path in Path(name).iterdir():
                os.replace(path, folder / path.name)
    except OSError as error:
        raise ResourceError(f"could not write the report to {folder} ({error.strerror})", next_step="free the disk") from error


def previous_report(folder: Path) -> tuple[dict[str, Any], list[PromptRecord]] | None:
    """The report that a new one in this folder will replace; None without one of this schema version."""
    try:
        return read_report(folder) if (folder / REPORT).is_file() else None
    except UserError:
        return None


def read_report(path: Path, key: str = "report") -> tuple[dict[str, Any], list[PromptRecord]]:
    """report.json (or its folder) and the records beside it. Raises UserError when either is missing or invalid."""
    path = path / REPORT if path.is_dir() else path
    try:
        report = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError) as error:
        raise UserError(key, got=f"{path} ({error})", expected="a report.json") from error
    validate(report, str(path), key)
    return report, read_records(path.parent / SAMPLES, key)


def render(folder: Path) -> None:
    """report.md, report.html and junit.xml from report.json and samples.jsonl, and from nothing else."""
    report, records = read_report(folder)
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report, records), encoding="utf-8")
    (folder / "junit.xml").write_text(to_junit(report), encoding="utf-8")


@cache
def schema(path: Path = SCHEMA) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def validate(document: Any, name: str = "report.json", key: str = "report", path: Path = SCHEMA) -> None:
    """Raises UserError for another schema version, and else names the first field that does not fit the schema at `path`."""
    supported, title = schema(path)["properties"]["schema_version"]["const"], schema(path)["title"]
    version = document.get("schema_version", supported) if isinstance(document, Mapping) else supported
    if version != supported:
        expected = f"version {supported}: measure again with this specdistill"
        raise UserError(key, got=f"{name} of schema version {version}", expected=expected)
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema(path)).iter_errors(document))
    if error is not None:
        place = ".".join(map(str, error.absolute_path)) or "the whole document"
        expected = f"a {title.removeprefix('specdistill ')} of schema version {supported}"
        raise UserError(key, got=f"{name} with {place}: {error.message[:200]}", expected=expected)


@cache
def row_metrics() -> tuple[str, ...]:
    """Numbers of a result row that a rule can test."""
    fields = schema()["$defs"]["row"]["properties"]
    return tuple(name for name, field in fields.items() if field.get("type") in SCALARS and name not in ROW_IDENTITY)


@cache
def document_metrics() -> tuple[str, ...]:
    """Dotted paths of the numbers and booleans outside the result rows, as `lossless.greedy_identical`."""
    return tuple(_scalars(schema()))


def _scalars(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, field in node.get("properties", {}).items():
        field = schema()["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
        if field.get("type") in SCALARS and prefix:
            yield f"{prefix}{name}"
        elif name != "gate":
            yield from _scalars(field, f"{prefix}{name}.")
