"""The JSON Schema of comparison.json."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from specdistill.report.schema import check_instance, validate

PATH = Path(__file__).parent / "comparison.schema.json"


@cache
def comparison_schema() -> dict[str, Any]:
    """Of comparison.json; the reports in it are to the report's own."""
    document: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return document


def validate_comparison(comparison: Mapping[str, Any], name: str = "comparison.json", key: str = "comparison") -> None:
    """Raises UserError that names the first field that does not fit, in the comparison or in one of its reports."""
    check_instance(comparison_schema(), comparison, name, key)
    for candidate in comparison["candidates"]:
        validate(candidate["report"], f"{name} ({candidate['name']})", key)
