"""The data source `pico`: Python's standard library, as raw modules and as conversations.

Every Python installation carries this text. Therefore pico can be trained, distilled for and
measured with no network. Modules are divided into `train` and `validation` by a hash of their path,
so that a module's split does not depend on the others. Generated tables (`encodings`, `pydoc_data`)
and tests are excluded. The licence of the text is PSF-2.0.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specdistill.common.errors import UserError, find_nearest

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
MAX_MODULE_BYTES = 200_000  # Larger modules are left out, so that none of them dominates the text.
VALIDATION_SHARE = 16  # one module in this many is held out
# Longer functions give no conversation, so that a conversation fits a row of few hundred tokens.
MAX_CHAT_CHARACTERS = 1_600


@dataclass(frozen=True)
class Module:
    """One module of the standard library.

    Attributes:
        name: its path relative to the library, for example `json/decoder.py`.
        text: its source text.
    """

    name: str
    text: str


def load_rows(split: str) -> tuple[str, Callable[[], Iterator[dict[str, object]]]]:
    """Load a split of the built-in source `pico`: code of Python's standard library.

    Args:
        split: `train` or `validation`.

    Returns:
        A hash of the split's text; and a function that yields its rows, which are texts and
        conversations.

    Raises:
        UserError: for another split.
    """
    if split not in get_args(Split):
        raise UserError(
            "data.split",
            got=split,
            expected=" or ".join(get_args(Split)),
            nearest=find_nearest(split, get_args(Split)),
        )

    # Each module is a text. Its documented functions are conversations.
    modules = load_standard_library(split)  # type: ignore[arg-type]

    def yield_rows() -> Iterator[dict[str, object]]:
        """Yield a row for each module's text, and then a row for each conversation."""
        for module in modules:
            yield {"text": module.text, "messages": None}
        for messages in build_chats(modules):
            yield {"text": None, "messages": messages}

    all_text = "\0".join(module.text for module in modules)
    return hashlib.sha256(all_text.encode()).hexdigest(), yield_rows


def split_of(name: str) -> Split:
    """Return the split of a module: about one module in VALIDATION_SHARE is for validation.

    The split is chosen by a hash of the module's name, so it is the same on every machine.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return "validation" if int.from_bytes(digest[:4], "big") % VALIDATION_SHARE == 0 else "train"


def load_standard_library(split: Split) -> list[Module]:
    """Read the modules of Python's standard library that are in a split, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        # Skip modules in excluded folders or in the other split, and empty or very large files.
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or split_of(relative.as_posix()) != split:
            continue
        raw = path.read_bytes()
        if not 0 < len(raw) <= MAX_MODULE_BYTES:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue  # A module may declare another encoding. The corpus is UTF-8 only.
        modules.append(Module(relative.as_posix(), text))
    return modules


def build_chats(modules: list[Module]) -> list[list[dict[str, str]]]:
    """Return a conversation for each function with a docstring in some modules.

    The user asks for the function by its signature and summary, and the assistant answers with its
    code. Conversations of more than MAX_CHAT_CHARACTERS are left out.
    """
    conversations = []
    for module in modules:
        for request, answer in find_documented_functions(module.text):
            if len(request) + len(answer) <= MAX_CHAT_CHARACTERS:
                conversations.append(
                    [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
                )
    return conversations


def find_documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield (request, code) for each documented function of a module.

    The request asks for the function by its signature and the first paragraph of its docstring. The
    code is the function without its docstring. A function of only a docstring is left out.

    Args:
        source: the text of the module.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        # The docstring is the first statement of the body, so a function needs a second one.
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue

        # The first paragraph of the docstring becomes one line of the request.
        summary = " ".join(docstring.split("\n\n")[0].split())

        # Take the lines before and after the docstring, which is the first statement of the body.
        # Remove the indentation that a method has inside its class. Lines with less indentation,
        # such as those of a multi-line string, stay as they are.
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        body = lines[node.body[0].end_lineno or node.body[0].lineno : node.end_lineno]
        indent = node.col_offset
        code = "\n".join(
            line if line[:indent].strip() else line[indent:] for line in [*head, *body]
        ).rstrip()
        yield f"Write `{node.name}({ast.unparse(node.args)})`: {summary}", code
