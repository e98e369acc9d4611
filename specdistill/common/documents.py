"""Read JSON and YAML files of unknown origin, strictly and within limits.

Two kinds of documents are refused. Parsers disagree about some: the same key twice, NaN, integers
of more than 64 bits, half of a surrogate pair, tags of YAML. Others would exhaust memory or the
stack: deep or large documents, and YAML aliases that refer to other aliases.
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

# The limits are far above what recipes, configs, reports and rows need, and low enough that a
# hostile document costs little memory and time.
MAX_DEPTH = 100  # the most levels of a document
MAX_JSON_BYTES = 2**28  # the most bytes of a JSON or Markdown file
MAX_YAML_BYTES = 2**20  # the most bytes of a YAML document
MAX_LINE_BYTES = 2**26  # the most bytes of a line in a file of rows
# The most characters of a YAML document with its aliases written out.
MAX_EXPANDED_CHARACTERS = 2**22
# The escape of one half of a surrogate pair in JSON, such as \ud83d. Only two halves together, such
# as \ud83d\ude00, are a character.
HALF_SURROGATE_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
# The YAML at the beginning of a Markdown file, between two lines with `---`.
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
# The largest integer, the largest of 64 bits. Products of larger ones may overflow a float.
MAX_INTEGER = 2**63 - 1
# A text without this has no integer above MAX_INTEGER, which has 19 digits.
LONG_NUMBER = re.compile(r"\d{19}")


# mypy cannot check a base class that is only chosen when the module is imported.
class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe YAML loader that refuses integers of more than 64 bits.

    It is PyYAML's loader in C, which is fast, if PyYAML was built with it.
    """

    def construct_yaml_int(self, node: yaml.Node) -> int:
        """Return the integer of a YAML node, or raise ValueError if it has more than 64 bits."""
        return parse_integer(super().construct_yaml_int(node))


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_yaml_int)


def parse_integer(digits: str | int) -> int:
    """Convert digits to an integer. Raise ValueError if the integer has more than 64 bits."""
    number = int(digits)
    if abs(number) > MAX_INTEGER:
        raise ValueError(f"an integer of {len(str(number))} digits, more than {MAX_INTEGER:,}")
    return number


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Parse a JSON document, and refuse what other parsers would read differently.

    Args:
        text: the document.
        allow_nan: accept NaN and Infinity, which torch and transformers write.

    Returns:
        The value of the document.

    Raises:
        ValueError: for text that is no JSON. Also for a document with a key that appears twice, an
            integer of more than 64 bits, half of a surrogate pair, or too many nested levels.
    """
    text = decode_text(text) if isinstance(text, bytes) else text
    try:
        # `parse_integer` refuses integers of more than 64 bits, but is slower than the parser of
        # json itself (None). So it is only used if the text has a number of at least 19 digits.
        parse_int = parse_integer if LONG_NUMBER.search(text) else None
        # json calls the three functions for each object, each NaN or Infinity, and each integer.
        value = json.loads(
            text,
            object_pairs_hook=_check_unique_keys,
            parse_constant=None if allow_nan else _refuse_constant,
            parse_int=parse_int,
        )
    except RecursionError as error:
        raise ValueError(f"more than {MAX_DEPTH} levels") from error

    if _is_too_deep(value):
        raise ValueError(f"more than {MAX_DEPTH} levels")

    # Refuse half of a surrogate pair, such as "\ud83d" alone. json has joined whole pairs to one
    # character. Half a pair cannot be encoded in UTF-8, so that encoding the value raises
    # UnicodeEncodeError, which is a ValueError.
    if HALF_SURROGATE_PAIR.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _is_too_deep(value: object) -> bool:
    """Return whether lists and mappings are nested in more than MAX_DEPTH levels.

    The loop visits one level after the other, because a recursive function would overflow the stack
    on a hostile document.
    """
    # `level` holds the lists and mappings of one level, and `next_level` the lists and mappings
    # directly inside them. The loop goes one level further than allowed: if something is left
    # there, the document is too deep.
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        if not level:
            break
        next_level: list[dict[str, object] | list[object]] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            next_level += [child for child in children if isinstance(child, dict | list)]
        level = next_level
    return bool(level)


def read_json_rows(
    stream: IO[bytes],
    *,
    allow_nan: bool = False,
    largest_list: int = 0,
    report: Callable[[int, ValueError], None] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON object of each line of a file, with the number of the line from 1.

    Only one line at a time is in memory. Instead of lines with objects, the file may also hold a
    single JSON list of objects, which is read as a whole (see `largest_list`).

    Args:
        stream: the file.
        allow_nan: accept NaN and Infinity.
        largest_list: the most bytes that a file may have if it is one list. 0 refuses lists.
        report: a function that is called for each bad line, with the number of the line and the
            error. Reading then goes on with the next line. With None the error is raised.

    Yields:
        The number of the line, or of the item in a list, and the object.

    Raises:
        ValueError: for a line that is no JSON object or is too long. The error names the line. With
            `report`, the error is raised only for a line that is too long, and for a list that is
            no JSON.
    """

    def refuse(number: int, error: ValueError) -> None:
        """Pass the error of a bad line to the caller's function `report`, or else raise it."""
        if report is None:
            raise error
        report(number, error)

    # Read line by line, until `readline` returns no bytes at the end of the file. A line that is
    # too long is read up to the first byte that is too much.
    read_line = partial(stream.readline, MAX_LINE_BYTES + 1)
    for number, line in enumerate(iter(read_line, b""), 1):
        max_bytes = MAX_LINE_BYTES

        # If the file is a single list, which begins in the first line, read the rest of it too.
        is_list = largest_list > 0 and number == 1 and line.startswith(b"[")
        if is_list:
            max_bytes = largest_list
            line = line + stream.read(largest_list + 1 - len(line))
        if len(line) > max_bytes:
            raise ValueError(f"line {number}: more than {max_bytes:,} bytes")

        # Parse the line, or the whole list. An error in a list is always raised, because the other
        # items of the list cannot be read either.
        try:
            text = decode_text(line.rstrip(), number)
            if not text:
                continue
            value = parse_json(text, allow_nan=allow_nan)
        except ValueError as error:
            error_with_line = _add_line_number(error, number)
            if is_list:
                raise error_with_line from error
            refuse(number, error_with_line)
            continue

        # Yield the object of a line, or the objects of a list.
        rows = value if is_list else [value]
        unit = "row" if is_list else "line"
        for row_number, row in enumerate(rows, number):
            if isinstance(row, dict):
                yield row_number, row
            else:
                message = f"{unit} {row_number}: a {type(row).__name__}, which is no object"
                refuse(row_number, ValueError(message))


def _add_line_number(error: ValueError, number: int) -> ValueError:
    """Return an error whose message begins with the number of the line in the file.

    Args:
        error: the error of parsing a part of the file. json counts the lines of this part from 1.
        number: the line of the file, from 1, in which the part begins.
    """
    if isinstance(error, json.JSONDecodeError):
        return ValueError(f"line {number + error.lineno - 1}, column {error.colno}: {error.msg}")
    # Errors of `decode_text` begin with the line already.
    if str(error).startswith("line "):
        return error
    return ValueError(f"line {number}: {error}")


def decode_text(content: bytes, first_line: int = 1) -> str:
    """Decode bytes as UTF-8. Raise ValueError, naming the line, for bytes that are not UTF-8.

    Args:
        content: the bytes, which may begin with a byte order mark.
        first_line: the number of the first line of `content` in its file, for the error.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Count the line breaks before the first byte that cannot be decoded.
        line = first_line + error.object.count(b"\n", 0, error.start)
        raise ValueError(
            f"line {line}: byte {error.object[error.start]:#04x}, which is not UTF-8"
        ) from None


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML document.

    Raises:
        ValueError: for text that is no YAML, and for a document that `check_yaml` refuses.
    """
    # Check the document before PyYAML builds its value: a small document whose aliases refer to
    # other aliases could become a value that fills the memory.
    text = decode_text(text) if isinstance(text, bytes) else text
    check_yaml(text)
    try:
        return yaml.load(text, YamlLoader)
    except yaml.YAMLError as error:
        raise ValueError(join_lines(str(error))) from error


class _Collection(NamedTuple):
    """A list or mapping of a YAML document whose end has not been read yet.

    Attributes:
        anchor: the name that the document gives to the collection (`&name`); None without one.
        before: the number of characters before the collection, with aliases written out.
        scalars: the values of the nodes in the collection so far; None for each node that is itself
            a list, a mapping or an alias. In a mapping, keys and values alternate.
    """

    anchor: str | None
    before: int
    scalars: list[str | None]


def check_yaml(text: str) -> None:
    """Raise ValueError for a YAML document that is too large, too deep or ambiguous.

    The check reads a flat sequence of events from the parser, such as the beginning and the end of
    a list. An alias is one event, whatever it refers to. So a hostile document cannot use up the
    memory or the stack of this check.

    Args:
        text: the document.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{len(text):,} characters, more than {MAX_YAML_BYTES:,}")

    # Add up in `total` the characters that the document would have if each alias (`*name`) were
    # replaced by the node that it names (`&name`). `size_by_name` has the size of each named node.
    # `opened` holds the lists and mappings around the current event, from the outside in; the first
    # item stands for the document itself.
    total = 0
    size_by_name: dict[str, int] = {}
    opened = [_Collection(anchor=None, before=0, scalars=[])]
    try:
        for event in yaml.parse(text, YamlLoader):
            # A tag, such as `!!python/object`, asks for a type that JSON does not have.
            if getattr(event, "tag", None) is not None:
                raise ValueError(f"the tag {event.tag}")

            # At the end of a list or mapping its size is known: what was added to `total` since it
            # began. A mapping must not repeat a key. Its keys are every second entry of `scalars`,
            # with None for a key that is no scalar.
            if isinstance(event, yaml.CollectionEndEvent):
                collection = opened.pop()
                if collection.anchor is not None:
                    size_by_name[collection.anchor] = total - collection.before
                if isinstance(event, yaml.MappingEndEvent):
                    keys = [key for key in collection.scalars[::2] if key is not None]
                    _check_unique_keys([(key, None) for key in keys])

            # A node is the beginning of a collection, a scalar or an alias. An alias inside the
            # collection that it names would make the document endless.
            elif isinstance(event, yaml.NodeEvent):
                scalar = event.value if isinstance(event, yaml.ScalarEvent) else None
                opened[-1].scalars.append(scalar)
                if isinstance(event, yaml.CollectionStartEvent):
                    opened.append(_Collection(event.anchor, before=total, scalars=[]))
                elif scalar is None and event.anchor not in size_by_name:
                    raise ValueError(f"*{event.anchor} before the end of &{event.anchor}")
                else:
                    # An alias is as large as the node that it names. In the total each node counts
                    # one character more, for what separates it from the next node.
                    size = size_by_name[event.anchor] if scalar is None else len(scalar)
                    total = total + 1 + size
                    if event.anchor is not None:
                        size_by_name[event.anchor] = size

            # Stop as soon as the document exceeds a limit.
            if len(opened) > MAX_DEPTH + 1 or total > MAX_EXPANDED_CHARACTERS:
                raise ValueError(
                    f"more than {MAX_DEPTH} levels, or more than {MAX_EXPANDED_CHARACTERS:,}"
                    " characters with its aliases written out"
                )
    except yaml.YAMLError as error:
        raise ValueError(join_lines(str(error))) from error


def read_json(path: Path, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON file. Raise OSError or ValueError if it cannot be read."""
    return parse_json(read_text(path, MAX_JSON_BYTES), allow_nan=allow_nan)


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file. Raise OSError or ValueError if it cannot be read."""
    return parse_yaml(read_text(path))


def read_keys(path: Path, key: str, expected: str) -> dict[str, Any]:
    """Read the mapping in a JSON or YAML file.

    Args:
        path: the file.
        key: the recipe key to name in errors.
        expected: a description of the files that are allowed, for the error.

    Raises:
        UserError: if the file cannot be read or holds no mapping.
    """
    with convert_errors((OSError, ValueError), key, path, expected):
        keys = read_json(path, allow_nan=True) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(keys, dict):
        raise UserError(key, got=f"{path}, which holds no keys", expected=expected)
    return keys


def read_front_matter(path: Path) -> dict[str, Any]:
    """Return the YAML keys at the beginning of a Markdown file, such as a model card.

    Returns:
        The keys and their values; empty if the file does not begin with YAML.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is too long, or if its YAML is refused or holds no keys.
    """
    # The Markdown after the YAML may be long, so the larger limit of JSON files applies.
    match = FRONT_MATTER.match(read_text(path, MAX_JSON_BYTES))
    keys = parse_yaml(match[1]) if match else None
    if keys is not None and not isinstance(keys, dict):
        raise ValueError("YAML without keys at the beginning")
    return keys or {}


def read_text(path: Path, max_bytes: int = MAX_YAML_BYTES) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file has more than `max_bytes` bytes or is not UTF-8.
    """
    # Read one byte more than allowed: if this byte exists, the file is too large. So a huge file is
    # never read as a whole.
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    return decode_text(content)


def _check_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a dictionary of (key, value) pairs. Raise ValueError for a key that appears twice."""
    # A dictionary keeps each key once, so it has fewer entries than `pairs` if a key is repeated.
    keys = dict(pairs)
    if len(keys) < len(pairs):
        repeated_key = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{repeated_key} twice")
    return keys


def _refuse_constant(constant: str) -> None:
    """Raise ValueError for a constant that is no JSON, such as NaN."""
    raise ValueError(f"{constant}, which is not a number")


def convert_csv(path: Path) -> str:
    """Return a shell command that converts a csv file to a jsonl file with the same name.

    Messages suggest this command for a csv file, because specdistill does not read csv files.
    """
    code = (
        f"import pandas; pandas.read_csv({str(path)!r})"
        f".to_json({str(path.with_suffix('.jsonl'))!r}, orient='records', lines=True)"
    )
    return f"python -c {shlex.quote(code)}"
