"""The pico suites: prompts from the standard-library modules that pico was not trained on.

    python -m recipes.pico.suites

renews `eval/suites/pico*.{yaml,jsonl}`, byte for byte with the Python and the tokenizer that the YAML files name. Gates use `pico`;
`pico-dev` has other prompts, on which recipes are chosen, so that the choice does not favour a gate's verdict. `pico-edit`, whose
prompts hold the requested function, and `pico-short`, single lines, show how much a draft gains by copying from the prompt.
`pico-context` shows the cost of a long context: it has every prompt whole and cut to its end. These three may share lines with the others.
"""

import ast
import hashlib
import json
import platform
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from specdistill.pico import Module, chats, standard_library
from specdistill.project import PICO, SUITES

PROMPTS_PER_CATEGORY = 12
SHORT_TOKENS = range(40, 91)  # function and docstring prompts
LONG_TOKENS = range(300, 381)
CHAT_TOKENS = range(16, 257)
EDIT_TOKENS = range(48, 161)  # request and function of a prompt that asks for the function again
LINE_TOKENS = range(8, 33)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Candidate:
    """A possible prompt. row: of the jsonl file; place: where in the module it is from; lines: of the module in the prompt."""

    module: str
    place: str
    row: dict[str, object]
    lines: range = field(default=range(0))

    def order(self) -> bytes:
        """A key for a fixed shuffle, so that prompts are chosen from anywhere in the alphabet and in a module."""
        return hashlib.sha256(f"{self.module} {self.place}".encode()).digest()

    def overlaps(self, other: "Candidate") -> bool:
        return self.module == other.module and max(self.lines.start, other.lines.start) < min(
            self.lines.stop, other.lines.stop
        )


def function_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """Source that ends right after a function's signature, or after its docstring where it has one."""
    for node, lines in _functions(module):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        end = (node.body[0].end_lineno or 0) if documented else node.body[0].lineno - 1
        start, text = _paragraphs_up_to(lines, end, count_tokens)
        if text.endswith(('"""', ":")):
            yield Candidate(
                module.name, f"function {node.lineno}", {"prompt": text}, range(start, end)
            )


def docstring_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """Source that ends after the quotes that open a function's docstring."""
    for node, lines in _functions(module):
        first = node.body[0]
        if ast.get_docstring(node) is None or not lines[first.lineno - 1].strip().startswith('"""'):
            continue
        opening = lines[first.lineno - 1]
        opened = [*lines[: first.lineno - 1], opening[: opening.index('"""') + 3]]
        start, text = _paragraphs_up_to(opened, first.lineno, count_tokens)
        if text:
            yield Candidate(
                module.name,
                f"docstring {node.lineno}",
                {"prompt": text},
                range(start, first.lineno),
            )


def chat_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """The user's turn of a (docstring -> function) chat."""
    for user, _answer in chats([module]):
        if count_tokens(user["content"]) in CHAT_TOKENS:
            yield Candidate(module.name, f"chat {user['content']}", {"messages": [user]})


def long_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """One long stretch of a module, from a paragraph's start to a line's end, with at least as much of the module after it."""
    lines = module.text.splitlines()
    upto = [
        0,
        *accumulate(count_tokens(line + "\n") for line in lines),
    ]  # tokens before each line, to within a few
    for start, line in enumerate(lines):
        if not line.strip() or (start and lines[start - 1].strip()):
            continue
        end = bisect_left(upto, upto[start] + LONG_TOKENS.start + 10)
        if upto[-1] - upto[start] < 2 * LONG_TOKENS.start or not lines[end - 1].strip():
            continue
        text = "\n".join(lines[start:end])
        if count_tokens(text) in LONG_TOKENS:
            yield Candidate(
                module.name, f"long_context {start}", {"prompt": text}, range(start, end)
            )


def cut_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """The last lines of each of `long_prompts`, as many as a short prompt may have."""
    for whole in long_prompts(module, count_tokens):
        lines = str(whole.row["prompt"]).splitlines()
        texts = ("\n".join(lines[start:]) for start in range(len(lines)))
        cut = next(text for text in texts if count_tokens(text) < SHORT_TOKENS.stop)
        yield Candidate(whole.module, whole.place, {"prompt": cut}, whole.lines)


def edit_prompts(module: Module, count_tokens: CountTokens, kind: str) -> Iterator[Candidate]:
    """A `revision`: a request for a function, with the function under it. A `rename`: a (docstring -> function) chat, then a request for
    the same function with another name.
    """
    for chat in chats([module]):
        request, answer = (turn["content"] for turn in chat)
        if count_tokens(request) + count_tokens(answer) in EDIT_TOKENS:
            renamed = [*chat, {"role": "user", "content": request.replace("(", "_2(", 1)}]
            revised = [{"role": "user", "content": f"{request}\n\n{answer}"}]
            yield Candidate(
                module.name,
                f"{kind} {request}",
                {"messages": renamed if kind == "rename" else revised},
            )


def line_prompts(
    module: Module, count_tokens: CountTokens, opens: type[ast.ClassDef | ast.FunctionDef]
) -> Iterator[Candidate]:
    """The line that opens a class, or a function."""
    lines = module.text.splitlines()
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, opens):
            text = lines[node.lineno - 1].strip()
            if text.endswith(":") and count_tokens(text) in LINE_TOKENS:
                yield Candidate(
                    module.name,
                    f"line {node.lineno}",
                    {"prompt": text},
                    range(node.lineno - 1, node.lineno),
                )


class_prompts, signature_prompts = (
    partial(line_prompts, opens=kind) for kind in (ast.ClassDef, ast.FunctionDef)
)
revision_prompts, rename_prompts = (
    partial(edit_prompts, kind=kind) for kind in ("revision", "rename")
)

FindPrompts = Callable[[Module, CountTokens], Iterator[Candidate]]
PLAIN: dict[str, FindPrompts] = {
    "function": function_prompts,
    "docstring": docstring_prompts,
    "chat": chat_prompts,
    "long_context": long_prompts,
}
# What each suite holds, in words, and what finds the prompts of each of its categories.
PICO_SUITES: dict[str, tuple[str, dict[str, FindPrompts]]] = {
    "pico": ("function bodies, docstrings, chats and long context", PLAIN),
    "pico-dev": ("function bodies, docstrings, chats and long context", PLAIN),
    "pico-edit": (
        "chats that ask for a function that they hold",
        {"revision": revision_prompts, "rename": rename_prompts},
    ),
    "pico-short": ("single lines", {"class": class_prompts, "signature": signature_prompts}),
    "pico-context": (
        "long stretches of modules, cut to their ends and whole",
        {"end": cut_prompts, "whole": long_prompts},
    ),
}


def pico_suites(
    modules: Sequence[Module], count_tokens: CountTokens
) -> dict[str, list[dict[str, object]]]:
    """The rows of each suite, 12 of each category, from as many different modules as there are.

    No line of a module is in both `pico` and `pico-dev`.
    """

    @cache
    def candidates(find: FindPrompts) -> list[Candidate]:
        return sorted(
            (prompt for module in modules for prompt in find(module, count_tokens)),
            key=Candidate.order,
        )

    suites: dict[str, list[dict[str, object]]] = {name: [] for name in PICO_SUITES}
    judging: list[Candidate] = []  # those in `pico`
    for name, (_, categories) in PICO_SUITES.items():
        used: Counter[str] = Counter()
        for category, find in categories.items():
            pool = list(candidates(find))
            if name == "pico-dev":
                pool = [
                    prompt
                    for prompt in pool
                    if not any(prompt is other or prompt.overlaps(other) for other in judging)
                ]
            if (
                name == "pico-context"
            ):  # each category by itself: their pools have one order, so that the same places are chosen
                used.clear()
            for number in range(PROMPTS_PER_CATEGORY):
                # The module used least so far, over all categories; ties go by the fixed shuffle.
                chosen = min(pool, key=lambda candidate: used[candidate.module])
                pool.remove(chosen)
                used[chosen.module] += 1
                judging += [chosen] * (name == "pico")
                row = {
                    "id": f"{category}-{number:02}",
                    "category": category,
                    **chosen.row,
                    "module": chosen.module,
                }
                suites[name].append(row)
    return suites


def write_pico_suites(modules: Sequence[Module], count_tokens: CountTokens, folder: Path) -> None:
    """Write the jsonl file of each suite and the YAML file that names it by hash."""
    for name, rows in pico_suites(modules, count_tokens).items():
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
        header = {
            "name": name,
            "version": "1",
            "licence": "PSF-2.0",
            "source": f"standard library of Python {platform.python_version()}, modules held out from pico's training data",
            "sha256": hashlib.sha256(content).hexdigest(),
            "prompts": f"{name}.jsonl",
            "quality": "python_syntax",
        }
        heading = f"# Held-out Python: {PICO_SUITES[name][0]}. Made by recipes/pico/suites.py.\n"
        text = heading + yaml.safe_dump(header, sort_keys=False, width=130)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def _functions(module: Module) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
    """Functions whose body starts on the line after the signature, with the module's lines."""
    lines = module.text.splitlines()
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, ast.FunctionDef) and lines[node.body[0].lineno - 2].rstrip().endswith(
            ":"
        ):
            yield node, lines


def _paragraphs_up_to(lines: Sequence[str], end: int, count_tokens: CountTokens) -> tuple[int, str]:
    """The lines before `end`, from the nearest paragraph's start that makes them long enough; empty if they get too long."""
    for start in range(end - 1, -1, -1):
        text = "\n".join(lines[start:end])
        length = count_tokens(text)
        if length >= SHORT_TOKENS.stop:
            break
        if (
            length in SHORT_TOKENS
            and lines[start].strip()
            and (start == 0 or not lines[start - 1].strip())
        ):
            return start, text
    return end, ""


if __name__ == "__main__":
    pico = AutoTokenizer.from_pretrained(PICO)
    write_pico_suites(
        standard_library("validation"), lambda text: len(pico(text)["input_ids"]), SUITES
    )
