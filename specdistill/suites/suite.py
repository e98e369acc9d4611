"""Suites: the prompts a draft is measured on, named, versioned and checked by hash.

A suite is a YAML file (see `SuiteHeader`), by path or by its name under `eval/suites`, or just a jsonl file (specdistill.suites.rows
says what a row holds).
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BeforeValidator, Field

from specdistill.errors import UserError, nearest
from specdistill.project import SUITES
from specdistill.recipe import Section, SweepConfig, option, section, validate
from specdistill.suites.rows import COLUMNS, REMOTE, SuiteRow, parse, read

TEXT_PROMPT_TOKENS = 32

T = TypeVar("T")
Stated = Annotated[str, BeforeValidator(lambda value: value if value is None else str(value)), Field(min_length=1)]


class SuiteHeader(Section):
    """A suite's YAML file."""

    name: Stated = option(..., "the suite's name")
    version: Stated = option(..., "changes with the prompts")
    licence: Stated = option(..., "of the prompts")
    source: Stated = option(..., "where the prompts are from")
    prompts: Stated = option(..., "their file, beside this one, or URL")
    sha256: str | None = option(..., "the hash of the prompts' file, or null: the report states that of what was read")
    columns: dict[str, str] = option({}, "our name: the file's name, for each column")
    placeholder: str | None = option(None, "how texts begin that are not in the file")
    sweep: SweepConfig = section(SweepConfig)
    quality: Literal["python_syntax"] | None = option(None, "the metric of `eval/metrics` that scores all answers")


@dataclass(frozen=True)
class Suite:
    """sha256: of the prompts' file."""

    name: str
    version: str
    licence: str
    source: str
    sha256: str
    rows: tuple[SuiteRow, ...]
    sweep: SweepConfig = field(default_factory=SweepConfig)
    quality: str | None = None


@dataclass(frozen=True)
class Prompt:
    """One prompt as the target reads it: its tokens, and the same as text."""

    id: str
    category: str
    text: str
    token_ids: tuple[int, ...]


def load_suite(name: str) -> Suite:
    """A suite by name or path. Raises UserError for an unknown name, a wrong hash or a row without a prompt."""
    path = _find(name)
    if path.suffix == ".jsonl":
        content = read(str(path))
        digest = hashlib.sha256(content).hexdigest()
        return Suite(path.stem, digest[:12], "not stated", path.name, digest, parse(path.name, content, {}))
    header = _header(path)
    prompts = header.prompts if header.prompts.startswith(REMOTE) else str(path.parent / header.prompts)
    content = read(prompts)
    digest = hashlib.sha256(content).hexdigest()
    if header.sha256 not in (None, digest):
        expected = f"the content that {path.name} names by its sha256 {header.sha256}"
        raise UserError("eval.suite", got=f"{prompts} with sha256 {digest}", expected=expected)
    rows = parse(prompts, content, header.columns, header.placeholder)
    stated = header.name, header.version, header.licence, header.source
    return Suite(*stated, digest, rows, header.sweep, header.quality)


def tokenize(
    suite: Suite, tokenizer: Any, *, max_new_tokens: int, max_length: int, num_prompts: int | None = None
) -> list[Prompt]:
    """The suite's prompts, or `num_prompts` of them spread evenly over the categories, as the target's tokens.

    max_length: the target's context. Raises UserError for a prompt that leaves no room for `max_new_tokens`.
    """
    prompts = [_tokenize(row, tokenizer) for row in _some(suite.rows, num_prompts)]
    for prompt in prompts:
        if not prompt.token_ids:
            raise UserError("eval.suite", got=f"prompt {prompt.id} of {suite.name}, which has no tokens", expected="some text")
        length = len(prompt.token_ids)
        if length + max_new_tokens > max_length:
            got = f"prompt {prompt.id} of {suite.name} with {length} tokens, and eval.max_new_tokens={max_new_tokens}"
            raise UserError("eval.suite", got=got, expected=f"at most {max_length} tokens together, the target's context")
    return prompts


def cut_prompts(
    suite: Suite,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    max_new_tokens: int,
    max_length: int,
    num_prompts: int | None = None,
) -> dict[int, list[Prompt]]:
    """Length -> the suite's long prompts, cut to that many tokens; the same prompts at every length, so that nothing else differs.

    Long prompts have at least the longest length. A `prompt` loses its beginning, a `text` row its end, `messages` the beginning of the
    longest message, which may leave a token or two less. Raises UserError for lengths that no prompt or the target's context allows.
    """
    if not lengths:
        return {}
    longest = max(lengths)
    if longest + max_new_tokens > max_length:
        got = f"{longest} tokens, and eval.max_new_tokens={max_new_tokens}"
        raise UserError("eval.sweep.context", got=got, expected=f"at most {max_length} tokens together, the target's context")
    whole = {row.id: len(_tokenize(row, tokenizer, whole=True).token_ids) for row in suite.rows}
    rows = [row for row in suite.rows if whole[row.id] >= longest]
    if not rows:
        got = f"{longest}, where the longest prompt of {suite.name} has {max(whole.values())} tokens"
        raise UserError("eval.sweep.context", got=got, expected="lengths that some prompt has")
    return {length: [_cut(row, tokenizer, length) for row in _some(rows, num_prompts)] for length in lengths}


def _some(rows: Sequence[SuiteRow], count: int | None) -> Sequence[SuiteRow]:
    return rows if count is None else evenly(rows, [row.category for row in rows], count)


def evenly(items: Sequence[T], groups: Sequence[Hashable], count: int) -> list[T]:
    """`count` of the items in their order, distributed evenly over the groups and over each group's items."""
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    turns = sorted((turn, order) for order, indices in enumerate(members.values()) for turn in range(len(indices)))
    quota = Counter(order for _, order in turns[:count])
    chosen: list[int] = []
    for order, indices in enumerate(members.values()):
        chosen += [indices[position * len(indices) // quota[order]] for position in range(quota[order])]
    return [items[index] for index in sorted(chosen)]


def _find(name: str) -> Path:
    for candidate in (Path(name), SUITES / f"{name}.yaml"):
        if candidate.suffix in (".yaml", ".yml", ".jsonl") and candidate.is_file():
            return candidate
    known = sorted(path.stem for path in SUITES.glob("*.yaml"))
    expected = f"one of {', '.join(known)}, a suite YAML or a jsonl file"
    raise UserError("eval.suite", got=name, expected=expected, nearest=nearest(name, known))


def _header(path: Path) -> SuiteHeader:
    try:
        header = validate(SuiteHeader, yaml.safe_load(read(str(path))), f"{path.name}: ")
    except yaml.YAMLError as error:
        raise UserError("eval.suite", got=f"{path}: {error}", expected="a readable YAML file") from error
    for name in header.columns:
        if name not in COLUMNS:
            expected, key = f"one of {', '.join(COLUMNS)}", f"{path.name}: columns.{name}"
            raise UserError(key, got="an unknown key", expected=expected, nearest=nearest(name, COLUMNS))
    return header


def _cut(row: SuiteRow, tokenizer: Any, length: int) -> Prompt:
    """The row's prompt with at most `length` tokens."""
    prompt = _tokenize(row, tokenizer, whole=True)
    if row.kind == "messages":
        return _cut_messages(row, tokenizer, length, prompt)
    if row.kind == "text":
        ids = prompt.token_ids[:length]
    else:
        starts = prompt.token_ids[:1] == (tokenizer.bos_token_id,)  # a BOS token stays at the beginning
        ids = prompt.token_ids[:starts] + prompt.token_ids[-length + starts :]
    return Prompt(row.id, row.category, tokenizer.decode(ids, skip_special_tokens=True), ids)


def _cut_messages(row: SuiteRow, tokenizer: Any, length: int, prompt: Prompt) -> Prompt:
    longest = max(range(len(row.content)), key=lambda index: len(row.content[index]["content"]))
    kept = tokenizer(row.content[longest]["content"], add_special_tokens=False)["input_ids"]
    while (excess := len(prompt.token_ids) - length) > 0:
        kept = kept[excess:]
        if not kept:
            got = f"{length}, which prompt {row.id} does not fit into by cutting its longest message"
            raise UserError("eval.sweep.context", got=got, expected="more tokens")
        messages = [*row.content]
        messages[longest] = {**messages[longest], "content": tokenizer.decode(kept)}
        prompt = _tokenize(replace(row, content=messages), tokenizer)
    return prompt


def _tokenize(row: SuiteRow, tokenizer: Any, whole: bool = False) -> Prompt:
    """The row's prompt; of a `text` row the first tokens, or all if `whole`."""
    if row.kind == "messages":
        if not tokenizer.chat_template:
            expected = "plain prompts: the target has no chat template"
            raise UserError("eval.suite", got=f"messages (prompt {row.id})", expected=expected)
        text = tokenizer.apply_chat_template(row.content, tokenize=False, add_generation_prompt=True)
        return Prompt(row.id, row.category, text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    ids = tokenizer(row.content)["input_ids"]
    if row.kind == "text":
        ids = ids if whole else ids[:TEXT_PROMPT_TOKENS]
        return Prompt(row.id, row.category, tokenizer.decode(ids, skip_special_tokens=True), tuple(ids))
    return Prompt(row.id, row.category, row.content, tuple(ids))
