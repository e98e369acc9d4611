"""The pico suites: prompts from the standard-library modules that pico was not trained on, four kinds of them.

    python -m specdistill.evaluation.pico_suite

writes `eval/suites/pico*.{yaml,jsonl}` again, byte for byte with the Python and the tokenizer that the YAML files name. `pico` is what
gates ask about; `pico-dev` holds other prompts, to choose recipes on, so that a gate's verdict is not flattered by the choosing.
"""

import ast
import hashlib
import json
import platform
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from specdistill.data.corpus import Module, chats, standard_library
from specdistill.project import PICO, SUITES

SUITE_NAMES = ("pico", "pico-dev")
PROMPTS_PER_CATEGORY = 12
SHORT_TOKENS = range(40, 91)  # function and docstring prompts
LONG_TOKENS = range(300, 381)
CHAT_TOKENS = range(16, 257)

HEADING = "# Held-out Python: function bodies, docstrings, chats and long context. Made by specdistill.evaluation.pico_suite.\n"

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Candidate:
    """A possible prompt: `row` is what the jsonl file gets, `place` says where it is from; `lines` of the module are in it."""

    module: str
    place: str
    row: dict[str, object]
    lines: range = field(default=range(0))

    def order(self) -> bytes:
        """A fixed shuffle, so that the choice follows neither the alphabet nor the order inside a module."""
        return hashlib.sha256(f"{self.module} {self.place}".encode()).digest()

    def overlaps(self, other: "Candidate") -> bool:
        return self.module == other.module and max(self.lines.start, other.lines.start) < min(self.lines.stop, other.lines.stop)


def pico_suites(modules: Sequence[Module], count_tokens: CountTokens) -> list[list[dict[str, object]]]:
    """The rows of each suite, 12 of each category, from as many different modules as there are; no line of a module is in two suites."""
    pools = {
        category: sorted((found for module in modules for found in candidates(module, count_tokens)), key=Candidate.order)
        for category, candidates in (
            ("function", function_prompts),
            ("docstring", docstring_prompts),
            ("chat", chat_prompts),
            ("long_context", long_prompts),
        )
    }
    suites = []
    for _ in SUITE_NAMES:
        rows, taken = [], []
        used: Counter[str] = Counter()
        for category, pool in pools.items():
            for number in range(PROMPTS_PER_CATEGORY):
                # The module least drawn from so far, over all categories; ties go by the fixed shuffle.
                chosen = min(pool, key=lambda candidate: used[candidate.module])
                pool.remove(chosen)
                used[chosen.module] += 1
                taken.append(chosen)
                rows.append({"id": f"{category}-{number:02}", "category": category, **chosen.row, "module": chosen.module})
        suites.append(rows)
        pools = {category: [left for left in pool if not any(map(left.overlaps, taken))] for category, pool in pools.items()}
    return suites


def function_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """Source that ends right after a function's signature, or after its docstring where it has one."""
    for node, lines in _functions(module):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        end = (node.body[0].end_lineno or 0) if documented else node.body[0].lineno - 1
        text = _paragraphs_up_to(lines, end, count_tokens)
        if text and text.endswith(('"""', ":")):
            yield Candidate(module.name, f"function {node.lineno}", {"prompt": text}, _lines_up_to(end, text))


def docstring_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """Source that ends after the quotes that open a function's docstring."""
    for node, lines in _functions(module):
        first = node.body[0]
        if ast.get_docstring(node) is None or not lines[first.lineno - 1].strip().startswith('"""'):
            continue
        opening = lines[first.lineno - 1]
        opened = [*lines[: first.lineno - 1], opening[: opening.index('"""') + 3]]
        text = _paragraphs_up_to(opened, first.lineno, count_tokens)
        if text:
            yield Candidate(module.name, f"docstring {node.lineno}", {"prompt": text}, _lines_up_to(first.lineno, text))


def chat_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """The user's turn of a (docstring -> function) chat."""
    for user, _answer in chats([module]):
        if count_tokens(user["content"]) in CHAT_TOKENS:
            yield Candidate(module.name, f"chat {user['content']}", {"messages": [user]})


def long_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """One long stretch of a module, from a paragraph's start to a line's end, with as much of the module left to write."""
    lines = module.text.splitlines()
    upto = [0, *accumulate(count_tokens(line + "\n") for line in lines)]  # tokens before each line, to within a few
    for start, line in enumerate(lines):
        if not line.strip() or (start and lines[start - 1].strip()):
            continue
        end = bisect_left(upto, upto[start] + LONG_TOKENS.start + 10)
        if upto[-1] - upto[start] < 2 * LONG_TOKENS.start or not lines[end - 1].strip():
            continue
        text = "\n".join(lines[start:end])
        if count_tokens(text) in LONG_TOKENS:
            yield Candidate(module.name, f"long_context {start}", {"prompt": text}, range(start, end))


def write_pico_suites(modules: Sequence[Module], count_tokens: CountTokens, folder: Path) -> None:
    """Write the jsonl file of each suite and the YAML file that names it by hash."""
    for name, rows in zip(SUITE_NAMES, pico_suites(modules, count_tokens), strict=True):
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
        header = {
            "name": name,
            "version": "1",
            "licence": "PSF-2.0",
            "source": f"standard library of Python {platform.python_version()}, modules held out from pico's training data",
            "sha256": hashlib.sha256(content).hexdigest(),
            "prompts": f"{name}.jsonl",
        }
        text = HEADING + yaml.safe_dump(header, sort_keys=False, width=130)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def _functions(module: Module) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
    """Functions whose body starts on a line of its own right after the signature, with the module's lines."""
    lines = module.text.splitlines()
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, ast.FunctionDef) and lines[node.body[0].lineno - 2].rstrip().endswith(":"):
            yield node, lines


def _lines_up_to(end: int, text: str) -> range:
    return range(end - text.count("\n") - 1, end)


def _paragraphs_up_to(lines: Sequence[str], end: int, count_tokens: CountTokens) -> str | None:
    """The lines before `end`, from the nearest paragraph's start that makes them long enough; None if none does in time."""
    for start in range(end - 1, -1, -1):
        text = "\n".join(lines[start:end])
        length = count_tokens(text)
        if length >= SHORT_TOKENS.stop:
            return None
        begins = lines[start].strip() and (start == 0 or not lines[start - 1].strip())
        if begins and length in SHORT_TOKENS:
            return text
    return None


if __name__ == "__main__":
    pico = AutoTokenizer.from_pretrained(PICO)
    write_pico_suites(standard_library("validation"), lambda text: len(pico(text)["input_ids"]), SUITES)
