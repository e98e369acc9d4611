"""Write the pico suites: prompts from standard-library modules that pico was not trained on.

    python -m recipes.pico.suites

The command renews `eval/suites/pico*.{yaml,jsonl}`. The files are byte-identical if the Python and
the tokenizer are those that the YAML files name.

- Gates use `pico`. `pico-dev` has other prompts: recipes are chosen on them, so that the choice
  does not favour the verdict of a gate.
- `pico-edit` has prompts that contain the requested function, and `pico-short` has single lines.
  Together they show how much a draft gains by copying from the prompt.
- `pico-context` shows the cost of a long context: it has every prompt twice, whole and cut to its
  last tokens.

The last three suites may share lines with the others.
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

from specdistill.common.project import PICO, SUITES
from specdistill.data.produce.pico import Module, build_chats, load_standard_library

PROMPTS_PER_CATEGORY = 12
SHORT_TOKENS = range(40, 91)  # function and docstring prompts
LONG_TOKENS = range(300, 381)
CHAT_TOKENS = range(16, 257)
EDIT_TOKENS = range(48, 161)  # request and function of a prompt that asks for the function again
LINE_TOKENS = range(8, 33)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Candidate:
    """A possible prompt.

    Attributes:
        module: the name of the module.
        place: where in the module the prompt comes from.
        row: the row of the jsonl file.
        lines: the lines of the module that the prompt contains.
    """

    module: str
    place: str
    row: dict[str, object]
    lines: range = field(default=range(0))

    def order(self) -> bytes:
        """Return a sort key that shuffles candidates, always in the same way.

        So prompts are chosen from all modules and from all parts of a module.
        """
        return hashlib.sha256(f"{self.module} {self.place}".encode()).digest()

    def overlaps(self, other: "Candidate") -> bool:
        """Return whether both candidates share a line of the same module."""
        return self.module == other.module and max(self.lines.start, other.lines.start) < min(
            self.lines.stop, other.lines.stop
        )


def function_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """Yield source code that ends after a function's docstring, or after its signature."""
    for node, lines in _functions(module):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        end = (node.body[0].end_lineno or 0) if documented else node.body[0].lineno - 1
        start, text = _paragraphs_up_to(lines, end, count_tokens)
        if text.endswith(('"""', ":")):
            yield Candidate(
                module.name, f"function {node.lineno}", {"prompt": text}, range(start, end)
            )


def docstring_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """Yield source code that ends after the quotes that open a function's docstring."""
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
    """Yield the user's turn of each (docstring -> function) chat."""
    for user, _answer in build_chats([module]):
        if count_tokens(user["content"]) in CHAT_TOKENS:
            yield Candidate(module.name, f"chat {user['content']}", {"messages": [user]})


def long_prompts(module: Module, count_tokens: CountTokens) -> Iterator[Candidate]:
    """Yield long parts of a module that begin with a paragraph and end with a line.

    At least as much of the module follows each part.
    """
    lines = module.text.splitlines()
    # The tokens before each line. Lines are tokenized one by one, so the sums are off by a few.
    upto = [0, *accumulate(count_tokens(line + "\n") for line in lines)]
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
    """Yield the last lines of each of `long_prompts`, as many as a short prompt may have."""
    for whole in long_prompts(module, count_tokens):
        lines = str(whole.row["prompt"]).splitlines()
        texts = ("\n".join(lines[start:]) for start in range(len(lines)))
        cut = next(text for text in texts if count_tokens(text) < SHORT_TOKENS.stop)
        yield Candidate(whole.module, whole.place, {"prompt": cut}, whole.lines)


def edit_prompts(module: Module, count_tokens: CountTokens, kind: str) -> Iterator[Candidate]:
    """Yield chats that ask for a function that they contain.

    Args:
        module: the module.
        count_tokens: counts the tokens of a text.
        kind: `revision` is a request for a function, with the function below it. `rename` is a
            (docstring -> function) chat, then a request for the same function with another name.
    """
    for chat in build_chats([module]):
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
    """Yield the first line of each class or function.

    Args:
        module: the module.
        count_tokens: counts the tokens of a text.
        opens: the syntax node whose lines are wanted.
    """
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
# For each suite: what it contains, in words, and the functions that find its prompts by category.
PICO_SUITES: dict[str, tuple[str, dict[str, FindPrompts]]] = {
    "pico": ("function bodies, docstrings, chats and long context", PLAIN),
    "pico-dev": ("function bodies, docstrings, chats and long context", PLAIN),
    "pico-edit": (
        "chats that ask for a function that the chat contains",
        {"revision": revision_prompts, "rename": rename_prompts},
    ),
    "pico-short": ("single lines", {"class": class_prompts, "signature": signature_prompts}),
    "pico-context": (
        "long parts of modules, both whole and cut to their last tokens",
        {"end": cut_prompts, "whole": long_prompts},
    ),
}


def pico_suites(
    modules: Sequence[Module], count_tokens: CountTokens
) -> dict[str, list[dict[str, object]]]:
    """Return the rows of each suite, 12 of each category, from as many modules as possible.

    No line of a module is in both `pico` and `pico-dev`.
    """

    @cache
    def candidates(find: FindPrompts) -> list[Candidate]:
        return sorted(
            (prompt for module in modules for prompt in find(module, count_tokens)),
            key=Candidate.order,
        )

    suites: dict[str, list[dict[str, object]]] = {name: [] for name in PICO_SUITES}
    gate_prompts: list[Candidate] = []  # the prompts of `pico`
    for name, (_, categories) in PICO_SUITES.items():
        used: Counter[str] = Counter()
        for category, find in categories.items():
            pool = list(candidates(find))
            if name == "pico-dev":
                pool = [
                    prompt
                    for prompt in pool
                    if not any(
                        prompt is gate_prompt or prompt.overlaps(gate_prompt)
                        for gate_prompt in gate_prompts
                    )
                ]
            if name == "pico-context":
                # Both categories choose from pools in the same order, so they get the same places.
                used.clear()
            for number in range(PROMPTS_PER_CATEGORY):
                # The module used least so far, over all categories. The fixed shuffle breaks ties.
                chosen = min(pool, key=lambda candidate: used[candidate.module])
                pool.remove(chosen)
                used[chosen.module] += 1
                if name == "pico":
                    gate_prompts.append(chosen)
                row = {
                    "id": f"{category}-{number:02}",
                    "category": category,
                    **chosen.row,
                    "module": chosen.module,
                }
                suites[name].append(row)
    return suites


def write_pico_suites(modules: Sequence[Module], count_tokens: CountTokens, folder: Path) -> None:
    """Write each suite: a jsonl file, and a YAML file that states its hash."""
    for name, rows in pico_suites(modules, count_tokens).items():
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
        header = {
            "name": name,
            "version": "1",
            "licence": "PSF-2.0",
            "source": (
                f"standard library of Python {platform.python_version()}, modules held out from"
                " pico's training data"
            ),
            "sha256": hashlib.sha256(content).hexdigest(),
            "prompts": f"{name}.jsonl",
            "quality": "python_syntax",
        }
        heading = f"# Held-out Python: {PICO_SUITES[name][0]}. Made by recipes/pico/suites.py.\n"
        text = heading + yaml.safe_dump(header, sort_keys=False, width=130)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def _functions(module: Module) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
    """Yield the functions whose body starts on the line after the signature.

    Yields:
        The function, and the lines of its module.
    """
    lines = module.text.splitlines()
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, ast.FunctionDef) and lines[node.body[0].lineno - 2].rstrip().endswith(
            ":"
        ):
            yield node, lines


def _paragraphs_up_to(lines: Sequence[str], end: int, count_tokens: CountTokens) -> tuple[int, str]:
    """Return the lines before `end`, from the nearest paragraph that makes them long enough.

    Returns:
        The number of the first line, and the text; an empty text if it would be too long.
    """
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
        load_standard_library("validation"), lambda text: len(pico(text)["input_ids"]), SUITES
    )
