"""Read JSON and YAML from others, strictly and within bounds.

This refuses what parsers disagree about (keys twice, NaN, integers of more than 64 bits, half of a
surrogate pair, tags of YAML) and what exhausts them (depth, size, aliases of aliases).
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from specdistill.common.errors import UserError, convert_errors, join_lines

MAX_DEPTH = 100  # the most levels of a document
LARGEST_JSON, LARGEST_YAML = 2**28, 2**20  # the most bytes of a document
MAX_LINE_BYTES = 2**26  # the most bytes of a line
MAX_EXPANDED_CHARACTERS = (
    2**22
)  # the most characters of a YAML document with its aliases written out
# The escape of one half of a surrogate pair.
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
# The YAML head of a Markdown file.
HEAD = re.compile(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
# The largest integer. The product of larger ones may be more than a float can hold.
MAX_INTEGER = 2**63 - 1
LONG_NUMBER = re.compile(r"\d{19}")


class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when it is imported
    """A safe YAML loader that refuses integers of more than 64 bits."""

    def construct_yaml_int(self, node: yaml.Node) -> int:
        return parse_integer(super().construct_yaml_int(node))


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_yaml_int)


def parse_integer(digits: str | int) -> int:
    """Return an integer. Raise ValueError if it has more than 64 bits."""
    number = int(digits)
    if abs(number) > MAX_INTEGER:
        raise ValueError(f"an integer of {len(str(number))} digits, more than {MAX_INTEGER:,}")
    return number


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON document.

    Args:
        text: the document.
        allow_nan: accept NaN and Infinity, which torch and transformers write.

    Raises:
        ValueError: if it is no such document.
    """
    text = decode_text(text) if isinstance(text, bytes) else text
    try:
        # The integer parser of json is fast, so the checked one is only used where it is needed.
        integers = parse_integer if LONG_NUMBER.search(text) else None
        value = json.loads(
            text,
            object_pairs_hook=_check_unique_keys,
            parse_constant=None if allow_nan else _refuse,
            parse_int=integers,
        )
    except RecursionError as error:
        raise ValueError(f"more than {MAX_DEPTH} levels") from error
    # Go down level by level, to find out whether there are more than MAX_DEPTH.
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            break
        inside = (
            node.values() if isinstance(node, dict) else node
            for node in level
            if isinstance(node, dict | list)
        )
        level = []
        for children in inside:
            for child in children:
                if isinstance(child, dict | list):
                    level.append(child)
    if level:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    if HALF_PAIR.search(text):
        # A whole pair has become one character by now. Half a pair cannot be encoded, so this
        # raises UnicodeEncodeError, a ValueError.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json_rows(
    stream: IO[bytes],
    *,
    allow_nan: bool = False,
    largest_list: int = 0,
    report: Callable[[int, ValueError], None] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON object of each line, with the number of the line from 1.

    Only one line at a time is in memory.

    Args:
        stream: the file.
        allow_nan: accept NaN and Infinity.
        largest_list: the most bytes of a file that is one list of objects. 0 refuses such files.
        report: called with the number of a line that is no JSON object, and the error. With None
            the error is raised.

    Raises:
        ValueError: naming the line, for a line that is no object. With `report` only for a line
            that is too long, and for a list that is no JSON.
    """

    # A bad row is reported if the caller collects them. Otherwise it ends the reading.
    def refuse(number: int, error: ValueError) -> None:
        if report is None:
            raise error
        report(number, error)

    for number, line in enumerate(iter(partial(stream.readline, MAX_LINE_BYTES + 1), b""), 1):
        most = MAX_LINE_BYTES

        # A file may hold a single list, as long as it is not too large to be read at once.
        is_list = largest_list > 0 and number == 1 and line.startswith(b"[")
        if is_list:
            most = largest_list
            line = line + stream.read(largest_list + 1 - len(line))
        if len(line) > most:
            raise ValueError(f"line {number}: more than {most:,} bytes")

        # Parse the line, and give each error the number of its line.
        try:
            text = decode_text(line.rstrip(), number)
            if not text:
                continue
            value = parse_json(text, allow_nan=allow_nan)
        except ValueError as error:
            wrong = error
            if isinstance(error, json.JSONDecodeError):
                wrong = ValueError(
                    f"line {number + error.lineno - 1}, column {error.colno}: {error.msg}"
                )
            elif not str(error).startswith("line "):
                wrong = ValueError(f"line {number}: {error}")
            if is_list:
                raise wrong from error
            refuse(number, wrong)
            continue

        # A list yields its items, a line its object.
        for place, row in enumerate(value if is_list else [value], number):
            if isinstance(row, dict):
                yield place, row
            else:
                refuse(
                    place,
                    ValueError(
                        f"{'row' if is_list else 'line'} {place}: a {type(row).__name__}, which is"
                        " no object"
                    ),
                )


def decode_text(content: bytes, first_line: int = 1) -> str:
    """Return the text of bytes in UTF-8. Raise ValueError, naming the line, for other bytes."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + error.object.count(b"\n", 0, error.start)
        raise ValueError(
            f"line {line}: byte {error.object[error.start]:#04x}, which is not UTF-8"
        ) from None


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML document. Raise ValueError if it is refused."""
    text = decode_text(text) if isinstance(text, bytes) else text
    check_yaml(text)
    try:
        return yaml.load(text, YamlLoader)
    except yaml.YAMLError as error:
        raise ValueError(join_lines(str(error))) from error


class _Collection(NamedTuple):
    """A YAML collection that is being read.

    Attributes:
        anchor: its anchor; None without one.
        before: characters of the expanded document before it.
        scalars: the values of its nodes; None for nodes that are no scalars.
    """

    anchor: str | None
    before: int
    scalars: list[str | None]


def check_yaml(text: str) -> None:
    """Raise ValueError for a document that `parse_yaml` refuses.

    It reads events, which are not nested, so that depth and aliases cannot exhaust it.
    """
    if len(text) > LARGEST_YAML:
        raise ValueError(f"{len(text):,} characters, more than {LARGEST_YAML:,}")

    # Follow the events of the parser, without building the document.
    total = 0
    sizes = {}
    opened = [_Collection(None, 0, [])]
    try:
        for event in yaml.parse(text, YamlLoader):
            if getattr(event, "tag", None) is not None:
                raise ValueError(f"the tag {event.tag}")
            if isinstance(event, yaml.CollectionEndEvent):
                ended = opened.pop()
                sizes[ended.anchor] = total - ended.before
                if isinstance(event, yaml.MappingEndEvent):
                    _check_unique_keys(
                        [(key, None) for key in ended.scalars[::2] if key is not None]
                    )
            elif isinstance(event, yaml.NodeEvent):
                scalar = event.value if isinstance(event, yaml.ScalarEvent) else None
                opened[-1].scalars.append(scalar)
                if isinstance(event, yaml.CollectionStartEvent):
                    opened.append(_Collection(event.anchor, total, []))
                elif scalar is None and event.anchor not in sizes:
                    raise ValueError(f"*{event.anchor} before the end of &{event.anchor}")
                else:
                    size = sizes[event.anchor] if scalar is None else len(scalar)
                    total = total + 1 + size
                    sizes[event.anchor] = size
            if len(opened) > MAX_DEPTH + 1 or total > MAX_EXPANDED_CHARACTERS:
                raise ValueError(
                    f"more than {MAX_DEPTH} levels, or more than {MAX_EXPANDED_CHARACTERS:,}"
                    f" characters with"
                    " its aliases"
                )
    except yaml.YAMLError as error:
        raise ValueError(join_lines(str(error))) from error


def read_json(path: Path, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON file. Raise OSError or ValueError if it cannot be read."""
    return parse_json(read_text(path, LARGEST_JSON), allow_nan=allow_nan)


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file. Raise OSError or ValueError if it cannot be read."""
    return parse_yaml(read_text(path))


def read_keys(path: Path, key: str, expected: str) -> dict[str, Any]:
    """Return the keys of a JSON or YAML file.

    Args:
        path: the file.
        key: the recipe key that errors name.
        expected: what errors say is expected.

    Raises:
        UserError: if the file cannot be read or holds no keys.
    """
    with convert_errors((OSError, ValueError), key, path, expected):
        keys = read_json(path, allow_nan=True) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(keys, dict):
        raise UserError(key, got=f"{path}, which holds no keys", expected=expected)
    return keys


def read_front_matter(path: Path) -> dict[str, Any]:
    """Return the YAML keys at the beginning of a Markdown file, such as a model card.

    Returns:
        The keys; empty if the file does not begin with YAML.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if its head is refused or holds no keys.
    """
    head = HEAD.match(read_text(path, LARGEST_JSON))
    keys = parse_yaml(head[1]) if head else None
    if keys is not None and not isinstance(keys, dict):
        raise ValueError("a head without keys")
    return keys or {}


def read_text(path: Path, most: int = LARGEST_YAML) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has more than `most` bytes or is not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most:,} bytes")
    return decode_text(content)


def _check_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a dictionary of pairs. Raise ValueError for a key that appears twice."""
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]} twice")
    return keys


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant}, which is not a number")


def convert_csv(path: Path) -> str:
    """Return the command line that converts a csv file to a jsonl file next to it, row by row."""
    code = (
        f"import pandas; pandas.read_csv({str(path)!r})"
        f".to_json({str(path.with_suffix('.jsonl'))!r}, orient='records', lines=True)"
    )
    return f"python -c {shlex.quote(code)}"
