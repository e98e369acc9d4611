"""Strategies that make valid documents hostile.

One to three of their nodes are replaced, removed, doubled or renamed, or their bytes are damaged.
Strategies draw from short lists in which what is plain comes first, so that a failure shrinks to
one edit of one node.
"""

import copy
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

LONG = 5000
# Values that replace a node.
VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, -1e308, 5e-324, float("nan"),
    float("inf"), "", "x", " ", "é", "\0",
    "\x1b[2J", "a\r\nb", "\u202e", "\ud800", "x" * LONG, "${", "${train}", "${oc.env:HOME}", "???",
    "__proto__", "../../x", "/", "~", "*",
    "../" * 400, "a" * 300, "-1", "1e400", "nan", "http://[", "file:///etc/passwd", [], {}, [None],
    [[[]]], {"": None}, {"x": {"x": 1}},
    [0] * LONG, {str(number): number for number in range(LONG)},
]  # fmt: skip
# Texts that replace a node and that no encoder writes.
RAW = [
    "[" * 50_000, "[" * LONG + "]" * LONG, '{"a":' * LONG + "1" + "}" * LONG, "1" * LONG, "1e999",
    "-", "nul", "Infinity", "0x1F", "1_0",
    '{"a": 1, "a": 2}', '"\\ud800"', '"\\u0000"', '"\\u001b[2J"', '"\\x"', "&a [*a]", "*nowhere",
    "&a {<<: *a}", "!!binary x",
    "!!python/object/apply:os.getcwd []", "!!set {a}", "!!float x", "2024-99-99", "{? [a] : b}",
    "0o9", "190:20:30", "@", "%x", "\t",
]  # fmt: skip
PIECES = [
    b"\xff",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\x1b]0;x\x07",
    b"\n",
    b"\t",
    b"}",
    b"'",
    b"{{",
    b"---\n",
    b": ",
    b"[" * LONG,
]
NUMBERS = [struct.pack("<q", number) for number in (0, 1, -1, 2**31, 2**40, 2**63 - 1)]
Files = st.SearchStrategy[bytes]


def pick(items: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Draw one of the items by its index, so that hypothesis does not format the items."""
    return st.integers(0, len(items) - 1).map(lambda index: items[index])


def _list_places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every node; the first two and the last items stand for all of a list."""
    yield at
    names = (
        node
        if isinstance(node, dict)
        else sorted({0, 1, len(node) - 1} & {*range(len(node))})
        if isinstance(node, list)
        else ()
    )
    for name in names:
        yield from _list_places(node[name], (*at, name))


def _get_node(document: Any, at: tuple[Any, ...]) -> Any:
    for name in at:
        document = document[name]
    return document


def _shift_value(parent: Any, name: Any, value: Any) -> None:
    """Replace a node by another value of its own kind."""
    old, number = parent[name], value if isinstance(value, int | float) else -1
    parent[name] = (
        number
        if isinstance(old, int | float)
        else f"{old}{value}"[:LONG]
        if isinstance(old, str)
        else value
    )


# Each takes (parent, name of the node in it, a value). An edit that cannot be done is left out.
EDITS: list[Callable[[Any, Any, Any], object]] = [
    lambda parent, name, value: parent.__setitem__(name, value),
    lambda parent, name, value: parent.__delitem__(name),
    _shift_value,
    lambda parent, name, value: parent.insert(name, parent[name]),
    lambda parent, name, value: parent.update(
        {value if isinstance(value, str) else name.upper(): parent.pop(name)}
    ),
    lambda parent, name, value: parent.__setitem__(name, [parent[name]]),
    lambda parent, name, value: parent.__setitem__(name, {"x": parent[name]}),
]


def apply_edits(valid: Any, edits: list[Any]) -> bytes:
    whole = {"it": copy.deepcopy(valid)}
    for at, change, value in edits:
        *before, name = ("it", *at)
        try:
            change(_get_node(whole, tuple(before)), name, copy.deepcopy(value))
        except (LookupError, TypeError, AttributeError):
            # an earlier edit took it away, or it is of another kind
            continue
    text = json.dumps(whole.get("it"))
    for number, raw in enumerate(RAW):
        text = text.replace(f'"@raw{number}@"', raw)
    return text.encode("utf-8", "surrogatepass")


def _edit_document(valid: Any) -> Files:
    """Edit a document, and return it as JSON, which YAML reads as well."""
    places = list(_list_places(valid))
    other = pick(places).map(lambda at: _get_node(valid, at))
    value = pick(VALUES) | other | st.integers(0, len(RAW) - 1).map("@raw{}@".format)
    edit = st.tuples(pick(places), pick(EDITS), value)
    return st.lists(edit, min_size=1, max_size=3).map(lambda edits: apply_edits(valid, edits))


def damage_file(valid: bytes) -> Files:
    """Cut a file short, or put a piece into its midst."""
    position = st.integers(0, len(valid))
    put = st.tuples(position, pick(PIECES)).map(
        lambda insertion: valid[: insertion[0]] + insertion[1] + valid[insertion[0] :]
    )
    return position.map(lambda end: valid[:end]) | put


def _edit_or_damage(edited: Files, valid: bytes) -> Files:
    return st.integers(0, 4).flatmap(lambda kind: damage_file(valid) if kind == 4 else edited)


def edit_json_file(valid: bytes) -> Files:
    return _edit_or_damage(_edit_document(json.loads(valid)), valid)


def edit_yaml_file(valid: bytes) -> Files:
    return _edit_or_damage(_edit_document(yaml.safe_load(valid)), valid)


def edit_jsonl_file(valid: bytes) -> Files:
    """Edit one of the first lines of a JSONL file."""
    lines = valid.splitlines()
    documents = [
        _edit_document(json.loads(line)).map(
            lambda line, n=n: b"\n".join([*lines[:n], line, *lines[n + 1 :]])
        )
        for n, line in enumerate(lines[:3])
    ]
    return _edit_or_damage(st.one_of(documents), valid)


def edit_card_file(valid: bytes) -> Files:
    """Edit the YAML head of a Markdown file."""
    _, head, body = valid.split(b"---\n", 2)
    return _edit_or_damage(
        _edit_document(yaml.safe_load(head)).map(lambda head: b"---\n%s\n---\n%s" % (head, body)),
        valid,
    )


def edit_safetensors_file(valid: bytes) -> Files:
    """Edit the header of a safetensors file, or its length."""
    size = int.from_bytes(valid[:8], "little")
    header, body = valid[8 : 8 + size], valid[8 + size :]
    wrong_lengths = st.sampled_from(
        [*NUMBERS, *(struct.pack("<Q", size + more) for more in (-1, 1, 10**8))]
    ).map(lambda length: length + valid[8:])
    return _edit_or_damage(
        _edit_document(json.loads(header)).map(
            lambda header: struct.pack("<Q", len(header)) + header + body
        )
        | wrong_lengths,
        valid,
    )


def edit_binary_file(valid: bytes, head: int = 4096) -> Files:
    """Change up to three bytes, counts or lengths of a file, most of them in its head."""
    position = st.integers(0, min(head, len(valid)) - 1) | st.integers(0, len(valid) - 1)

    def change_bytes(changes: list[tuple[int, bytes]]) -> bytes:
        content = bytearray(valid)
        for at, new in changes:
            content[at : at + len(new)] = new
        return bytes(content[: len(valid)])

    change = st.tuples(position, st.sampled_from([b"\0", b"\xff", b"\x7f", *NUMBERS]))
    return _edit_or_damage(st.lists(change, min_size=1, max_size=3).map(change_bytes), valid)
