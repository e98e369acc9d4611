"""The JSON Schema of report.json: what a report may hold, and so what a gate's rules may name."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from specdistill.errors import UserError

PATH = Path(__file__).parent / "report.schema.json"
SCALARS = ("number", "integer", "boolean")
ROW_IDENTITY = ("num_speculative_tokens", "temperature", "batch_size")  # numbers of a row that are its configuration


@cache
def schema() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return document


def validate(report: Mapping[str, Any], name: str = "report.json", key: str = "report") -> None:
    """Raises UserError for another schema version, and else names the first field that does not fit the schema."""
    check_instance(schema(), report, name, key)


def check_instance(document: Mapping[str, Any], instance: Any, name: str, key: str) -> None:
    """`validate` by any schema that has a `schema_version`."""
    supported = document["properties"]["schema_version"]["const"]
    version = instance.get("schema_version", supported) if isinstance(instance, Mapping) else supported
    if version != supported:
        expected = f"version {supported}: measure again with this specdistill"
        raise UserError(key, got=f"{name} of schema version {version}", expected=expected)
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(document).iter_errors(instance))
    if error is not None:
        place = ".".join(str(part) for part in error.absolute_path) or "the whole document"
        expected = f"a {document['title'].removeprefix('specdistill ')} of schema version {supported}"
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
