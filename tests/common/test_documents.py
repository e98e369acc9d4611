"""Malformed and malicious documents are refused before they crash a reader or fill the memory."""

import gzip
import io
import json
import time
from pathlib import Path

import pytest

from specdistill.common.documents import (
    parse_json,
    parse_yaml,
    read_front_matter,
    read_json_rows,
    read_keys,
    read_yaml,
)
from specdistill.common.errors import UserError
from tests.memory import at_most

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 50_000, "levels"),
        ("[" * 101 + "]" * 101 + ",", "Extra data"),
        ('{"a":' * 102 + "1" + "}" * 102, "levels"),
        ('{"a": 1, "b": 2, "a": 3}', "a twice"),
        ("[NaN]", "NaN"),
        ('"\\ud800"', "surrogates"),
        (b'"\xff"', "line 1: byte 0xff, which is not UTF-8"),
        ("9" * 5000, "digits"),
    ],
    ids=["deep", "trailing", "deep-object", "twice", "nan", "surrogate", "bytes", "digits"],
)
def test_malformed_json_is_refused(text: str | bytes, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_json(text)


def test_json_is_read_as_the_library_reads_it() -> None:
    text = (
        '{"pair": "\\ud83d\\ude00", "deep": '
        + "[" * 99
        + "]" * 99
        + ', "numbers": [1, -2.5e3, 1e400], "none": null}'
    )
    assert parse_json(text) == json.loads(text)
    assert str(parse_json("[NaN]", allow_nan=True)) == "[nan]"
    assert parse_json(b"\xef\xbb\xbf{}") == {}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{}\n\n{"a": "\xe9"}\n', "line 3: byte 0xe9, which is not UTF-8"),
        (b'{}\r\n{"a": 1\r\n', "line 2, column 8: Expecting"),
        (b"{}\nnull\n", "line 2: a NoneType, which is no object"),
        (b"{}\n[]\n", "line 2: a list, which is no object"),
        (b'{}\n{"a": 1, "a": 2}', "line 2: a twice"),
        (b'[{},\n{"a": }]', "line 2, column 7: Expecting value"),
        (b'[{},\n"\xff"]', "line 2: byte 0xff, which is not UTF-8"),
        (b"[{}, 3]", "row 2: a int, which is no object"),
    ],
)
def test_the_first_line_that_is_no_row_is_named(content: bytes, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}"):
        list(read_json_rows(io.BytesIO(content), largest_list=100))


def test_rows_are_lines_or_a_list() -> None:
    rows = [(1, {"a": "\u2028"}), (2, {"b": [1]})]
    assert list(read_json_rows(io.BytesIO('{"a": "\u2028"}\n{"b": [1]}'.encode()))) == rows
    assert (
        list(read_json_rows(io.BytesIO(b'[{"a": "\\u2028"},\n{"b": [1]}]\n'), largest_list=100))
        == rows
    )
    assert list(read_json_rows(io.BytesIO(b"\xef\xbb\xbf{}\r\n\r\n{}\n"))) == [(1, {}), (3, {})]


@pytest.mark.parametrize("start", [b"", b"{}\n", b"["])
def test_a_line_without_end_is_refused_before_it_fills_the_memory(start: bytes) -> None:
    bomb = gzip.compress(start) + gzip.compress(bytes(2**20), 9, mtime=0) * 1024
    with (
        at_most(3e8),
        gzip.open(io.BytesIO(bomb)) as stream,
        pytest.raises(ValueError, match=r"line [12]: more than 67,108,864 bytes"),
    ):
        list(read_json_rows(stream, largest_list=2**26))


def test_a_byte_that_is_not_utf_8_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(ValueError, match=r"^line 2: byte 0xe9, which is not UTF-8$"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 30_000, "levels"),
        ("{a: " * 30_000, "levels"),
        (ALIASES, "aliases"),
        ("a: 1\nb: 2\na: 3", "a twice"),
        ("a: &a [*a]", "before the end"),
        ('a: !!int ""', "tag"),
        ("a: !!python/name:os.system", "tag"),
        ("a: 2024-13-45", "month"),
        ("{[a]: b}", "unhashable"),
        ("a: '" + "x" * 2**20 + "'", "characters"),
    ],
    ids=[
        "deep",
        "deep-mapping",
        "aliases",
        "twice",
        "itself",
        "tag",
        "code",
        "date",
        "key",
        "long",
    ],
)
def test_malformed_yaml_is_refused_at_once(text: str, expected: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=expected):
        parse_yaml(text)
    assert time.process_time() - start < 1


def test_yaml_is_read_with_its_aliases() -> None:
    text = (
        "base: &base {a: 1, b: [2, x]}\nother: {<<: *base, a: 3}\nsame: *base\nempty:\n'1': yes\n"
    )
    assert parse_yaml(text) == {
        "base": {"a": 1, "b": [2, "x"]},
        "other": {"a": 3, "b": [2, "x"]},
        "same": {"a": 1, "b": [2, "x"]},
        "empty": None,
        "1": True,
    }


def test_a_file_without_keys_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "provenance.json"
    for content in (b"[]", b"null", b"{", b"\xff", b'{"a": 1, "a": 1}'):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"run: got .*provenance\.json"):
            read_keys(path, "run", "a run")


def test_the_front_matter_of_a_card_is_read(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    for content, expected in (
        ("---\nlicense: mit\n---\n# A model\n---\n", {"license": "mit"}),
        ("---\r\nlicense: mit\r\n---\r\ntext", {"license": "mit"}),
        ("---\n---\n", {}),
        ("# A model\n\n---\nlicense: mit\n---\n", {}),
    ):
        card.write_bytes(content.encode())
        assert read_front_matter(card) == expected
    card.write_text("---\n- a list\n---\n", encoding="utf-8")
    with pytest.raises(ValueError, match="without keys"):
        read_front_matter(card)
