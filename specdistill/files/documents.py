"""JSON and YAML that somebody else may have written, read strictly and within bounds.

Refused are what parsers disagree about (keys twice, NaN, integers of more than 64 bits, half of a surrogate pair, tags of YAML) and what
exhausts them (depth, size, aliases of aliases).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from specdistill.errors import UserError, one_line, refusing

DEEPEST = 100  # levels
LARGEST_JSON, LARGEST_YAML = 2**28, 2**20  # bytes
LONGEST = 2**26  # bytes of a line
MOST_EXPANDED = 2**22  # characters of a YAML document with its aliases written out
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
HEAD = re.compile(
    r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE
)  # of a Markdown file
LARGEST = 2**63 - 1  # integer: beyond it a product may be more than a float holds
MANY_DIGITS = re.compile(r"\d{19}")


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when it is imported
    def construct_yaml_int(self, node: Any) -> int:
        return checked_integer(super().construct_yaml_int(node))


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


def checked_integer(digits: str | int) -> int:
    """The integer. Raises ValueError for one of more than 64 bits."""
    if abs(number := int(digits)) > LARGEST:
        raise ValueError(f"an integer of {len(str(number))} digits, more than {LARGEST:,}")
    return number


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """The value of a JSON document. Raises ValueError. allow_nan: NaN and Infinity are read, which torch and transformers write."""
    text = decoded(text) if isinstance(text, bytes) else text
    try:
        integers = checked_integer if MANY_DIGITS.search(text) else None  # json's own is fast
        constants = None if allow_nan else _refuse
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=constants, parse_int=integers
        )
    except RecursionError as error:
        raise ValueError(f"more than {DEEPEST} levels") from error
    level = [value]
    for _ in range(DEEPEST + 1):
        if not level:
            break
        inside = (
            node.values() if isinstance(node, dict) else node
            for node in level
            if isinstance(node, dict | list)
        )
        level = [
            child for children in inside for child in children if isinstance(child, dict | list)
        ]
    if level:
        raise ValueError(f"more than {DEEPEST} levels")
    if HALF_PAIR.search(text):
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # a whole pair is one character by now; half of one cannot be encoded
    return value


def json_rows(
    stream: IO[bytes], *, allow_nan: bool = False, largest_list: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of each line, of which one is in memory. largest_list: bytes that a file may have that is one list of them.

    Raises ValueError that names the line.
    """
    for number, line in enumerate(iter(partial(stream.readline, LONGEST + 1), b""), 1):
        most = LONGEST
        if is_list := largest_list > 0 and number == 1 and line.startswith(b"["):
            most, line = largest_list, line + stream.read(largest_list + 1 - len(line))
        if len(line) > most:
            raise ValueError(f"line {number}: more than {most:,} bytes")
        if text := decoded(line.rstrip(), number):
            try:
                value = parse_json(text, allow_nan=allow_nan)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"line {number + error.lineno - 1}, column {error.colno}: {error.msg}"
                ) from error
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            for place, row in enumerate(value if is_list else [value], number):
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{'row' if is_list else 'line'} {place}: a {type(row).__name__}, which is no object"
                    )
                yield place, row


def decoded(content: bytes, first_line: int = 1) -> str:
    """The text of bytes in UTF-8. Raises ValueError that names the line."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + error.object.count(b"\n", 0, error.start)
        raise ValueError(
            f"line {line}: byte {error.object[error.start]:#04x}, which is not UTF-8"
        ) from None


def parse_yaml(text: str | bytes) -> Any:
    """The value of a YAML document. Raises ValueError."""
    text = decoded(text) if isinstance(text, bytes) else text
    check_yaml(text)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(one_line(str(error))) from error


class _Collection(NamedTuple):
    """A collection of YAML that is being read. before: characters of the document up to it. scalars: its nodes, None for other ones."""

    anchor: str | None
    before: int
    scalars: list[str | None]


def check_yaml(text: str) -> None:
    """Raises ValueError for what `parse_yaml` refuses. It reads events, which are not nested."""
    if len(text) > LARGEST_YAML:
        raise ValueError(f"{len(text):,} characters, more than {LARGEST_YAML:,}")
    total, sizes, opened = 0, {}, [_Collection(None, 0, [])]
    try:
        for event in yaml.parse(text, Loader):
            if getattr(event, "tag", None) is not None:
                raise ValueError(f"the tag {event.tag}")
            if isinstance(event, yaml.CollectionEndEvent):
                ended = opened.pop()
                sizes[ended.anchor] = total - ended.before
                if isinstance(event, yaml.MappingEndEvent):
                    _unique([(key, None) for key in ended.scalars[::2] if key is not None])
            elif isinstance(event, yaml.NodeEvent):
                scalar = event.value if isinstance(event, yaml.ScalarEvent) else None
                opened[-1].scalars.append(scalar)
                if isinstance(event, yaml.CollectionStartEvent):
                    opened.append(_Collection(event.anchor, total, []))
                elif scalar is None and event.anchor not in sizes:
                    raise ValueError(f"*{event.anchor} before the end of &{event.anchor}")
                else:
                    size = sizes[event.anchor] if scalar is None else len(scalar)
                    total, sizes[event.anchor] = total + 1 + size, size
            if len(opened) > DEEPEST + 1 or total > MOST_EXPANDED:
                raise ValueError(
                    f"more than {DEEPEST} levels, or more than {MOST_EXPANDED:,} characters with its aliases"
                )
    except yaml.YAMLError as error:
        raise ValueError(one_line(str(error))) from error


def read_json(path: Path, *, allow_nan: bool = False) -> Any:
    """The value of a JSON file. Raises OSError and ValueError."""
    return parse_json(read_text(path, LARGEST_JSON), allow_nan=allow_nan)


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises OSError and ValueError."""
    return parse_yaml(read_text(path))


def read_keys(path: Path, key: str, expected: str) -> dict[str, Any]:
    """The keys of a JSON or YAML file. Raises UserError, naming `key`, for one that does not read or holds no keys."""
    with refusing((OSError, ValueError), key, path, expected):
        keys = read_json(path, allow_nan=True) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(keys, dict):
        raise UserError(key, got=f"{path}, which holds no keys", expected=expected)
    return keys


def head_of(path: Path) -> dict[str, Any]:
    """The YAML keys that a Markdown file, such as a model card, begins with, if it does. Raises OSError and ValueError."""
    head = HEAD.match(read_text(path, LARGEST_JSON))
    keys = parse_yaml(head[1]) if head else None
    if keys is not None and not isinstance(keys, dict):
        raise ValueError("a head without keys")
    return keys or {}


def read_text(path: Path, most: int = LARGEST_YAML) -> str:
    """What a file in UTF-8 says. Raises OSError, and ValueError for more than `most` bytes."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most:,} bytes")
    return decoded(content)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]} twice")
    return keys


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant}, which is not a number")
