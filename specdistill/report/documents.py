"""What the documents of this package that others read are described with, and their JSON Schemas."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Length = Annotated[float, Field(ge=1)]  # an acceptance length
Reasons = Annotated[dict[str, str], Field(description="name of an absent number -> why it is absent")]
ConfidenceInterval = Annotated[list[float], Field(min_length=2, max_length=2, description="95 %, bootstrap over prompts")]


def about(description: str) -> FieldInfo:
    """What a field is, for the printed schema."""
    return Field(description=description)  # type: ignore[no-any-return]


class Document(TypedDict):
    """Nothing that is not named, and no value of another type."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]


class WithoutTitles(GenerateJsonSchema):
    """Names of fields say what titles would."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(document: Any, title: str) -> dict[str, Any]:
    return {**TypeAdapter(document).json_schema(schema_generator=WithoutTitles), "title": title}


def print_schema(document: Any, path: Path) -> None:
    """Write the JSON Schema of a document that others read."""
    text = json.dumps(json_schema(document, f"specdistill {path.name.partition('.')[0]}"), indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
