"""The data source `pico`: the source text of Python's standard library, as raw modules and as chats.

Every Python installation carries it, so pico can be trained, distilled for and measured with no network. Modules are split into `train`
and `validation` by a hash of their path, so that a module's split does not depend on the others. Generated tables (`encodings`,
`pydoc_data`) and tests are excluded. Licence of the text: PSF-2.0.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from specdistill.errors import UserError, nearest

Split = Literal["train", "validation"]

EXCLUDED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "__pycache__",
    }
)
MAX_MODULE_BYTES = 200_000
VALIDATION_SHARE = 16  # one module in this many is held out
MAX_CHAT_CHARACTERS = 1_600


@dataclass(frozen=True)
class Module:
    """One standard-library module: its path relative to the library, e.g. `json/decoder.py`, and its text."""

    name: str
    text: str


def rows(split: str) -> tuple[str, Callable[[], Iterator[dict[str, Any]]]]:
    """The source `pico` of `specdistill.produce.sources`: a fingerprint of a split's text, and a function that yields its rows."""
    if split not in get_args(Split):
        raise UserError(
            "data.split",
            got=split,
            expected=" or ".join(get_args(Split)),
            nearest=nearest(split, get_args(Split)),
        )
    modules = standard_library(split)  # type: ignore[arg-type]

    def texts_and_chats() -> Iterator[dict[str, Any]]:
        for module in modules:
            yield {"text": module.text, "messages": None}
        for messages in chats(modules):
            yield {"text": None, "messages": messages}

    return hashlib.sha256(
        "\0".join(module.text for module in modules).encode()
    ).hexdigest(), texts_and_chats


def split_of(name: str) -> Split:
    """The split of a module, by its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return "validation" if int.from_bytes(digest[:4], "big") % VALIDATION_SHARE == 0 else "train"


def standard_library(split: Split) -> list[Module]:
    """The modules of one split of the running interpreter's library, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or split_of(relative.as_posix()) != split:
            continue
        raw = path.read_bytes()
        if not 0 < len(raw) <= MAX_MODULE_BYTES:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue  # a handful of modules declare another encoding; the corpus is UTF-8 only
        modules.append(Module(relative.as_posix(), text))
    return modules


def chats(modules: list[Module]) -> list[list[dict[str, str]]]:
    """(docstring -> function) conversations: the user gives a signature and a summary, the assistant the function."""
    return [
        [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        for module in modules
        for request, answer in documented_functions(module.text)
        if len(request) + len(answer) <= MAX_CHAT_CHARACTERS
    ]


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield (request, source without the docstring) for each function of a module that has a docstring and a body."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        body = lines[node.body[0].end_lineno or node.body[0].lineno : node.end_lineno]
        columns = node.col_offset
        code = "\n".join(
            line[columns:] if not line[:columns].strip() else line for line in [*head, *body]
        ).rstrip()
        yield f"Write `{node.name}({ast.unparse(node.args)})`: {summary}", code
