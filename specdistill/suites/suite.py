"""Suites: the prompts a draft is measured on, named, versioned and checked by hash; from their file to the target's tokens.

A suite is a YAML file (see `SuiteHeader`), by path or by its name under `eval/suites`, or just a jsonl file. The file of its prompts is a
jsonl file (also .jsonl.gz) or a parquet file, on disk, under an https URL, or on the Hub as `hf://datasets/org/name@revision/path`. A row
holds one of

    prompt      text as it is
    messages    a conversation, and perhaps its `tools`, rendered by the target's chat template with the generation prompt
    user        what a user says, or a list of their turns, each a text or a list of messages, of which the first is used
    text        its first tokens are the prompt

and optionally `id` and `category`, and what the answer is scored by: a `reference` with the right answer, or a `test` that the
generated program must pass (with an `entry_point`, a test that defines `check`, e.g. HumanEval's). A suite's `columns` map these to the
file's own columns. A row with a `test_list` is a question to program, as MBPP has them; one with lists of messages in `question` is
BFCL's, with the schemas of its tools in `function`.

With `turns: all` each turn of the assistant is a prompt of its own: what came before it, as recorded.
"""

import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, Literal, TypeVar, cast

import pyarrow
import pyarrow.parquet
from pydantic import BeforeValidator, Field

from specdistill.errors import ResourceError, UserError, logger, nearest, one_line, refusing
from specdistill.files.documents import json_rows, parse_json, parse_yaml
from specdistill.project import SUITES
from specdistill.recipe.fields import ReadWhen, Section, option, section
from specdistill.recipe.load import validate
from specdistill.recipe.sections import SweepConfig
from specdistill.suites.conversations import (
    REASONING,
    Message,
    Tools,
    check_expressed,
    conversation,
    render,
)

KINDS = ("prompt", "messages", "user", "text")
SCORED_BY = ("reference", "test", "entry_point")
COLUMNS = (*KINDS, "tools", "id", "category", *SCORED_BY)
REMOTE = ("https://", "http://", "hf://")
FILE_PROMPTS = (
    200  # of a file of prompts, by default: enough to know an acceptance length to a few percent
)
TEXT_PROMPT_TOKENS = 32

T = TypeVar("T")
AsText = Annotated[
    str, BeforeValidator(lambda value: value if value is None else str(value)), Field(min_length=1)
]


class SuiteHeader(Section):
    """A suite's YAML file."""

    name: AsText = option(..., "the suite's name")
    version: AsText = option(..., "changes with the prompts")
    licence: AsText = option(..., "of the prompts")
    source: AsText = option(..., "where the prompts are from")
    prompts: AsText = option(..., "their file, next to this one, or URL")
    sha256: str | None = option(
        ..., "the hash of the prompts' file, or null: the report states that of what was read"
    )
    columns: dict[str, str] = option({}, "our name: the file's name, for each column")
    placeholder: str | None = option(None, "how texts begin that are not in the file")
    sweep: SweepConfig = section(SweepConfig)
    turns: Literal["last", "all"] = option(
        "last", "of `messages`: what follows them, or each turn of the assistant in them"
    )
    categories: Literal["turn", "kind"] | None = option(
        None,
        "of `turns: all`: by the turn's number, or by what it is (tool_call, reasoning, structured_output, prose); null: the row's",
        read_when=ReadWhen("with turns: all", lambda it: it.turns == "all"),
    )
    quality: Literal["python_syntax"] | None = option(None, "the metric that scores all answers")


@dataclass(frozen=True)
class SuiteRow:
    """One prompt before tokenization. `content`: the text of a `prompt` or `text` row, the list of `messages` of others."""

    id: str
    category: str
    kind: str
    content: Any
    reference: str | None = None
    test: str | None = None
    tools: Tools = None
    cluster: str | None = None  # what it is one of several prompts of (PromptRecord)


@dataclass(frozen=True)
class Suite:
    """sha256: of the prompts' file. is_file: it is a file of prompts, which no suite YAML describes."""

    name: str
    version: str
    licence: str
    source: str
    sha256: str
    rows: tuple[SuiteRow, ...]
    sweep: SweepConfig = field(default_factory=SweepConfig)
    quality: str | None = None
    is_file: bool = False


@dataclass(frozen=True)
class Prompt:
    """One prompt as the target reads it: its tokens, and the same as text."""

    id: str
    category: str
    text: str
    token_ids: tuple[int, ...]
    cluster: str | None = None


def load_suite(name: str | None, target: str = "pico", *, key: str = "eval.suite") -> Suite:
    """A suite by name or path; None stands for pico's own prompts, which are no measure of another target.

    Raises UserError for an unknown name, which names `key`, None with another target, a wrong hash or a row without a prompt.
    """
    path = _find("pico" if name is None and target == "pico" else name, target, key)
    if path.suffix == ".jsonl":
        content = read(str(path))
        digest = hashlib.sha256(content).hexdigest()
        return Suite(
            path.stem,
            digest[:12],
            "not stated",
            path.name,
            digest,
            parse(path.name, content, {}),
            is_file=True,
        )
    header = _header(path)
    prompts = (
        header.prompts if header.prompts.startswith(REMOTE) else str(path.parent / header.prompts)
    )
    content = read(prompts, is_pinned=header.sha256 is not None)
    digest = hashlib.sha256(content).hexdigest()
    if header.sha256 not in (None, digest):
        expected = f"the content that {path.name} names by its sha256 {header.sha256}"
        raise UserError("eval.suite", got=f"{prompts} with sha256 {digest}", expected=expected)
    rows = parse(prompts, content, header.columns, header.placeholder)
    if header.turns == "all":
        rows = tuple(turn for row in rows for turn in _each_turn(row, header.categories))
    stated = header.name, header.version, header.licence, header.source
    return Suite(*stated, digest, rows, header.sweep, header.quality)


def check_suite(name: str | None, *, key: str = "eval.suite") -> None:
    """Raises UserError for a suite that `load_suite` would refuse, naming `key` without one of that name.

    None is not judged, and prompts elsewhere are not fetched: who only wants to know needs no network.
    """
    if name is not None:
        path = _find(name, key=key)
        if path.suffix == ".jsonl" or not _header(path).prompts.startswith(REMOTE):
            load_suite(name)


def num_measured(suite: Suite, num_prompts: int | None) -> int | None:
    """How many prompts are measured, where `num_prompts` are asked for; None: all. Of a file FILE_PROMPTS are by default, and says so."""
    if not suite.is_file or num_prompts is not None or len(suite.rows) <= FILE_PROMPTS:
        return num_prompts
    total = len(suite.rows)
    logger.info(
        f"Measuring {FILE_PROMPTS} of the {total:,} prompts of {suite.source}, evenly spread; num_prompts={total} measures all"
    )
    return FILE_PROMPTS


def tokenize(
    suite: Suite,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    max_length: int,
    vocab_size: int | None = None,
    num_prompts: int | None = None,
) -> list[Prompt]:
    """The suite's prompts, or `num_prompts` of them spread evenly over the categories, as the target's tokens.

    max_length: the target's context. vocab_size: of the target's embedding; None where a server holds it. Raises UserError for a prompt
    that leaves no room for `max_new_tokens`, or has a token that the target does not know.
    """
    rows = evenly(suite.rows, [row.category for row in suite.rows], num_prompts)
    if (
        suite.is_file
        and tokenizer.chat_template
        and (plain := sum(row.kind in ("prompt", "text") for row in rows))
    ):
        cut = f" and cut to {TEXT_PROMPT_TOKENS} tokens" * any(row.kind == "text" for row in rows)
        message = "%d prompts of %s are given to a chat target as plain text%s: `user` or `messages` rows go through its chat template"
        logger.warning(message, plain, suite.source, cut)
    prompts = [_tokenize(row, tokenizer) for row in rows]
    for prompt in prompts:
        if vocab_size is not None and (
            unknown := next((token for token in prompt.token_ids if token >= vocab_size), None)
        ):
            got = f"{tokenizer.convert_ids_to_tokens(unknown)!r} in prompt {prompt.id}, token {unknown} of its tokenizer"
            raise UserError(
                "target.model",
                got=got,
                expected=f"a tokenizer of the model, which has {vocab_size} tokens",
            )
        if not prompt.token_ids:
            raise UserError(
                "eval.suite",
                got=f"prompt {prompt.id} of {suite.name}, which has no tokens",
                expected="some text",
            )
        length = len(prompt.token_ids)
        if length + max_new_tokens > max_length:
            got = f"prompt {prompt.id} of {suite.name} with {length} tokens, and {max_new_tokens} to generate"
            raise UserError(
                "eval.suite",
                got=got,
                expected=f"at most {max_length} tokens together, the target's context",
            )
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
        got = f"{longest} tokens, and {max_new_tokens} to generate"
        raise UserError(
            "eval.sweep.context",
            got=got,
            expected=f"at most {max_length} tokens together, the target's context",
        )
    whole = {row.id: len(_tokenize(row, tokenizer, whole=True).token_ids) for row in suite.rows}
    rows = [row for row in suite.rows if whole[row.id] >= longest]
    if not rows:
        got = (
            f"{longest}, where the longest prompt of {suite.name} has {max(whole.values())} tokens"
        )
        raise UserError("eval.sweep.context", got=got, expected="lengths that some prompt has")
    chosen = evenly(rows, [row.category for row in rows], num_prompts)
    return {length: [_cut(row, tokenizer, length) for row in chosen] for length in lengths}


def evenly(items: Sequence[T], groups: Sequence[Hashable], count: int | None) -> list[T]:
    """`count` of the items in their order, or all, distributed evenly over the groups and over each group's items."""
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    turns = sorted(
        (turn, order)
        for order, indices in enumerate(members.values())
        for turn in range(len(indices))
    )
    quota = Counter(order for _, order in turns[:count])
    chosen: list[int] = []
    for order, indices in enumerate(members.values()):
        chosen += [
            indices[position * len(indices) // quota[order]] for position in range(quota[order])
        ]
    return [items[index] for index in sorted(chosen)]


def _find(name: str | None, target: str = "pico", key: str = "eval.suite") -> Path:
    for candidate in (Path(name), SUITES / f"{name}.yaml") if name else ():
        if candidate.suffix in (".yaml", ".yml", ".jsonl") and candidate.is_file():
            return candidate
    known = sorted(path.stem for path in SUITES.glob("*.yaml"))
    expected = f"one of {', '.join(known)}, a suite YAML or a jsonl file"
    if not name:
        raise UserError(
            key, got=f"nothing with target {target}", expected=f"its prompts: {expected}"
        )
    raise UserError(key, got=name, expected=expected, nearest=nearest(name, known))


def _header(path: Path) -> SuiteHeader:
    with refusing(ValueError, "eval.suite", path, "a readable YAML file"):
        header = validate(SuiteHeader, parse_yaml(read(str(path))), f"{path.name}: ")
    if unknown := next((name for name in header.columns if name not in COLUMNS), None):
        expected, key = f"one of {', '.join(COLUMNS)}", f"{path.name}: columns.{unknown}"
        raise UserError(
            key, got="an unknown key", expected=expected, nearest=nearest(unknown, COLUMNS)
        )
    return header


def _cut(row: SuiteRow, tokenizer: Any, length: int) -> Prompt:
    """The row's prompt with at most `length` tokens."""
    prompt = _tokenize(row, tokenizer, whole=True)
    if row.kind == "messages":
        return _cut_messages(row, tokenizer, length, prompt)
    if row.kind == "text":
        ids = prompt.token_ids[:length]
    else:
        starts = prompt.token_ids[:1] == (
            tokenizer.bos_token_id,
        )  # a BOS token stays at the beginning
        ids = prompt.token_ids[:starts] + prompt.token_ids[-length + starts :]
    return Prompt(
        row.id, row.category, tokenizer.decode(ids, skip_special_tokens=True), ids, row.cluster
    )


def _cut_messages(row: SuiteRow, tokenizer: Any, length: int, prompt: Prompt) -> Prompt:
    longest = max(
        range(len(row.content)), key=lambda index: len(row.content[index]["content"] or "")
    )
    kept = tokenizer(row.content[longest]["content"], add_special_tokens=False)["input_ids"]
    while (excess := len(prompt.token_ids) - length) > 0:
        kept = kept[excess:]
        if not kept:
            got = (
                f"{length}, which prompt {row.id} does not fit into by cutting its longest message"
            )
            raise UserError("eval.sweep.context", got=got, expected="more tokens")
        messages = [*row.content]
        messages[longest] = {**messages[longest], "content": tokenizer.decode(kept)}
        prompt = _tokenize(replace(row, content=messages), tokenizer)
    return prompt


def _each_turn(row: SuiteRow, categories: str | None) -> Iterator[SuiteRow]:
    """What came before each turn of the assistant, with its number after the id."""
    if row.kind != "messages" or all(message["role"] != "assistant" for message in row.content):
        raise UserError(
            "turns",
            got=f"all for prompt {row.id}, without turns of the assistant",
            expected="messages with some, or last",
        )
    turns = [number for number, message in enumerate(row.content) if message["role"] == "assistant"]
    for number, place in enumerate(turns, 1):
        first = 2 ** (number.bit_length() - 1)  # 1, 2 to 3, 4 to 7, …
        names = {
            "turn": f"turn_{first}" + f"_to_{2 * first - 1}" * (first > 1),
            "kind": _kind(row.content[place]),
        }
        category = names[categories] if categories else row.category
        yield SuiteRow(
            f"{row.id}/{number}",
            category,
            row.kind,
            row.content[:place],
            tools=row.tools,
            cluster=row.id,
        )


def _kind(message: Message) -> str:
    if "tool_calls" in message or REASONING[0] in message:
        return "tool_call" if "tool_calls" in message else "reasoning"
    try:
        return (
            "structured_output"
            if isinstance(parse_json(message["content"]), dict | list)
            else "prose"
        )
    except ValueError:
        return "prose"


def _said(turn: Mapping[str, Any]) -> Any:
    return turn.get("content", turn.get("value")) or ("calls" if turn.get("tool_calls") else None)


def _programming(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A row as MBPP has them, a question with assertions that a program must pass, which the question shows."""
    question, tests = entry.get("prompt", entry.get("text")), entry["test_list"]
    if (
        not question
        or not isinstance(tests, list)
        or not all(isinstance(test, str) for test in tests)
    ):
        raise UserError(
            "eval.suite",
            got=f"{place} with test_list",
            expected="a question as prompt or text, and a list of assertions",
        )
    imports = entry.get("test_imports") or [entry.get("test_setup_code") or ""]
    shown = "\n".join(tests)
    kept = {key: entry[key] for key in ("id", "task_id", "category") if key in entry}
    asked = f"{question}\n\nThe Python code has to pass these tests:\n\n{shown}"
    return {**kept, "user": asked, "test": "\n".join(filter(None, [*imports, shown]))}


def _tokenize(row: SuiteRow, tokenizer: Any, whole: bool = False) -> Prompt:
    """The row's prompt; of a `text` row the first tokens, or all if `whole`."""
    if row.kind == "messages":
        if not tokenizer.chat_template:
            expected = "plain prompts: the target has no chat template"
            raise UserError("eval.suite", got=f"messages (prompt {row.id})", expected=expected)
        where = f"eval.suite prompt {row.id}"
        check_expressed(tokenizer, row.content, row.tools, where)
        text = render(tokenizer, row.content, True, where, row.tools)
        return Prompt(
            row.id,
            row.category,
            text,
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"]),
            row.cluster,
        )
    ids = tokenizer(row.content, verbose=False)["input_ids"]
    if row.kind == "text":
        ids = ids if whole else ids[:TEXT_PROMPT_TOKENS]
        return Prompt(
            row.id,
            row.category,
            tokenizer.decode(ids, skip_special_tokens=True),
            tuple(ids),
            row.cluster,
        )
    return Prompt(row.id, row.category, row.content, tuple(ids), row.cluster)


def read(place: str, *, is_pinned: bool = False) -> bytes:
    """The content of a file, or of a URL, which is kept in the cache of the datasets library.

    is_pinned: its content is known, so that a URL is asked for once and needs no network later. Raises UserError for a file, ResourceError
    for a URL that cannot be read.
    """
    if not place.startswith(REMOTE):
        with refusing(OSError, "eval.suite", place, "a readable file"):
            return Path(place).read_bytes()
    from datasets import (
        DownloadConfig,
        DownloadManager,
    )  # slow to import, and reports do not need it

    from specdistill.repositories import HTTP_ERROR

    try:
        config = DownloadConfig(disable_tqdm=True, use_etag=not is_pinned)
        return Path(DownloadManager(download_config=config).download(place)).read_bytes()
    except (OSError, HTTP_ERROR) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ResourceError(
            f"eval.suite: {place} could not be fetched ({reason})",
            next_step="check the network and HF_TOKEN, or name a copy of the file under `prompts`",
        ) from error


def parse(
    name: str, content: bytes, columns: Mapping[str, str], placeholder: str | None = None
) -> tuple[SuiteRow, ...]:
    """The rows of a file called `name`, without those whose text begins with `placeholder`."""
    rows = []
    for number, entry in _objects(name, content):
        place = f"{PurePosixPath(name).name}:{number}"  # for error messages
        if lacking := next((column for column in columns.values() if column not in entry), None):
            expected, close = f"one of {', '.join(entry)}", nearest(lacking, list(entry))
            raise UserError(
                "eval.suite", got=f"{place} without {lacking}", expected=expected, nearest=close
            )
        named = {ours: entry[column] for ours, column in columns.items()}
        if row := _row(number, place, named or entry, placeholder):
            rows.append(row)
    if not rows:
        raise UserError("eval.suite", got=f"{name}, which is empty", expected="at least one prompt")
    repeated = next(
        (id for id, times in Counter(row.id for row in rows).items() if times > 1), None
    )
    if repeated is not None:
        raise UserError(
            "eval.suite",
            got=f"{name} with the id {repeated} twice",
            expected="a different id for each prompt",
        )
    return tuple(rows)


def _objects(name: str, content: bytes) -> Iterator[tuple[int, Any]]:
    """(number, content) of each row."""
    stream: IO[bytes] = io.BytesIO(content)
    unreadable = pyarrow.ArrowException, OSError, EOFError, ValueError, zlib.error
    expected = "rows of Parquet, or a JSON object a line, as its name says"
    with refusing(unreadable, "eval.suite", PurePosixPath(name).name, expected):
        if name.endswith(".parquet"):
            batches = pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=1000)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
        else:
            yield from json_rows(
                cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if name.endswith(".gz") else stream
            )


def _row(number: int, place: str, entry: Any, placeholder: str | None) -> SuiteRow | None:
    """None for a row whose text begins with `placeholder`."""
    if "test_list" in entry:
        entry = _programming(entry, place)
    if isinstance(entry.get("question"), list):
        entry = {**entry, "user": entry["question"], "tools": entry.get("function")}
    kind = next((kind for kind in KINDS if kind in entry), None)
    if kind is None:
        got, close = (
            ", ".join(entry) or "no keys",
            next((close for key in entry if (close := nearest(key, KINDS))), None),
        )
        expected = f"one of {', '.join(KINDS)}; a suite's YAML names other columns, e.g. columns: {{user: turns}}"
        raise UserError("eval.suite", got=f"{place} with {got}", expected=expected, nearest=close)
    content, texts = entry[kind], list[Any]()
    if kind == "user":
        first = content[0] if isinstance(content, list) and content else content
        kind, content = (
            "messages",
            first if isinstance(first, list) else [{"role": "user", "content": first}],
        )
    if kind == "messages":
        valid = isinstance(content, list) and all(
            isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in content
        )
        texts = [_said(turn) for turn in content] if valid else []
    else:
        texts = [content]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        expected = "a list of {role, content}" if kind == "messages" else "some text"
        raise UserError(
            "eval.suite",
            got=f"{place} with {kind}={one_line(repr(content))[:60]}",
            expected=expected,
        )
    for name in SCORED_BY:
        if (value := entry.get(name)) is not None and not (
            isinstance(value, str) and value.strip()
        ):
            raise UserError(
                "eval.suite",
                got=f"{place} with {name}={one_line(repr(value))[:60]}",
                expected="some text",
            )
    tools = None
    if kind == "messages":
        content, tools = conversation(content, entry.get("tools"), f"eval.suite {place}")
    reference, test, entry_point = map(entry.get, SCORED_BY)
    if test and entry_point:
        test = f"{test}\ncheck({entry_point})"
    id, category = (
        str(entry.get("id", entry.get("task_id", number))),
        str(entry.get("category", "default")),
    )
    row = SuiteRow(id, category, kind, content, reference, test, tools)
    if row.category == "all":
        raise UserError(
            "eval.suite",
            got=f"{place} with category=all",
            expected="another, as `all` stands for the whole suite",
        )
    return None if placeholder is not None and texts[0].startswith(placeholder) else row
