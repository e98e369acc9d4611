"""Load suites: the prompts that a draft is measured on, from their file to the target's tokens.

A suite has a name and a version, and its prompts are checked by hash. It is a YAML file (see
`SuiteHeader`), given by its path or by its name under `eval/suites`, or just a jsonl file. The file
of its prompts is a jsonl file (also .jsonl.gz) or a parquet file, on disk, under an https URL, or
on the Hub as `hf://datasets/org/name@revision/path`. A row holds one of these keys:

    prompt      The text of the prompt.
    messages    A conversation, optionally with the `tools` that it may call. The target's chat
                template renders it with the generation prompt.
    user        What a user says, or a list of a user's turns, of which the first is used. A turn is
                a text or a list of messages.
    text        A text whose first tokens are the prompt.

The keys `id`, `category` and `reference` are optional. The reference is the right answer, with
which the target's answer is compared. A suite's `columns` map these keys to the file's own columns.
Two other forms of rows are known: a row with a `test_list` is a question to program, as in MBPP; a
row with lists of messages in `question`, and the schemas of its tools in `function`, is one of
BFCL.

With `turns: all`, each turn of the assistant is a prompt of its own, which consists of the turns
before it as they were recorded.
"""

import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, Literal, TypeVar, cast

import pyarrow
import pyarrow.parquet
from pydantic import BeforeValidator, Field

from specdistill.common.documents import convert_csv, parse_json, parse_yaml, read_json_rows
from specdistill.common.errors import (
    ResourceError,
    UserError,
    convert_errors,
    find_nearest,
    join_lines,
    logger,
)
from specdistill.common.project import SUITES
from specdistill.evaluation.suites.conversations import (
    REASONING,
    Message,
    Tokenizer,
    Tools,
    check_expressed,
    convert_conversation,
    render_chat,
)
from specdistill.recipe.data_sources import CONVERSATIONS, PROMPTS
from specdistill.recipe.fields import Condition, Section, option, section
from specdistill.recipe.load import validate_recipe
from specdistill.recipe.sections import SweepConfig

KINDS = ("prompt", "messages", "user", "text")
COLUMNS = (*KINDS, "tools", "id", "category", "reference")
REMOTE = ("https://", "http://", "hf://")
# How many prompts of a file that is no suite are measured by default. They are enough to know an
# acceptance length to a few percent.
FILE_PROMPTS = 200
# How many tokens of a `text` row are the prompt, which the target continues. A longer prompt leaves
# less context for the completion.
TEXT_PROMPT_TOKENS = 32

T = TypeVar("T")
FileRow = dict[str, Any]  # a row of a prompts' file, which may hold anything
AsText = Annotated[
    str, BeforeValidator(lambda value: value if value is None else str(value)), Field(min_length=1)
]


class SuiteHeader(Section):
    """A suite's YAML file."""

    name: AsText = option(..., "the suite's name")
    version: AsText = option(..., "version of the suite; it changes with the prompts")
    licence: AsText = option(..., "licence of the prompts")
    source: AsText = option(..., "source of the prompts, in words")
    prompts: AsText = option(..., "file of the prompts, next to this one, or its URL")
    sha256: str | None = option(
        ..., "sha256 that the prompts' file must have; null: any, and the report records the hash"
    )
    columns: dict[str, str] = option(
        {}, "name of a column in specdistill (prompt, user, …) -> its name in the prompts' file"
    )
    placeholder: str | None = option(
        None, "rows whose prompt begins with this text are left out; null: no row is left out"
    )
    sweep: SweepConfig = section(SweepConfig)
    turns: Literal["last", "all"] = option(
        "last",
        "prompts that are made of a conversation (`messages`). last: one prompt of all messages;"
        " all: for each turn of the assistant, a prompt of the messages before that turn",
    )
    categories: Literal["turn", "kind"] | None = option(
        None,
        "category of a prompt with `turns: all`; turn: the number of the turn; kind: the kind of"
        " the turn (tool_call, reasoning, structured_output, prose); null: the row's category",
        condition=Condition("with turns: all", lambda suite: suite.turns == "all"),
    )
    quality: Literal["python_syntax"] | None = option(
        None, "metric that scores the quality of the answers; null: none"
    )


@dataclass(frozen=True)
class SuiteRow:
    """One prompt before tokenization.

    Attributes:
        id: its id, unique in the suite.
        category: its category.
        kind: `prompt`, `text` or `messages`. A `user` row has become one of `messages`.
        content: the text of a `prompt` or `text` row, or the list of messages.
        reference: the right answer; None where there is none.
        tools: the schemas of the tools that a conversation may call.
        cluster: the id of the conversation or row that several prompts come from (see
            `PromptRecord`); None for a prompt on its own.
    """

    id: str
    category: str
    kind: str
    content: Any
    reference: str | None = None
    tools: Tools = None
    cluster: str | None = None


@dataclass(frozen=True)
class Suite:
    """A suite with its prompts.

    Attributes:
        sha256: the hash of the prompts' file.
        rows: the prompts before tokenization.
        sweep: the axes that an evaluation of the suite measures by default.
        quality: the metric that scores all answers; None for none.
        is_file: whether it is just a file of prompts, which no suite YAML describes.
    """

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
    """One prompt as the target reads it.

    Attributes:
        text: the prompt as text.
        token_ids: the prompt as tokens.
        cluster: as in `SuiteRow`.
    """

    id: str
    category: str
    text: str
    token_ids: tuple[int, ...]
    cluster: str | None = None


def load_suite(name: str | None, target: str = "pico", *, key: str = "eval.suite") -> Suite:
    """Load a suite (a set of prompts to measure on), by name or path, and check its hash.

    Args:
        name: the name of a suite, or the path of a suite's YAML file or of a jsonl file of prompts.
            None stands for the suite of pico, this project's own small target model.
        target: the target's name. None as `name` is allowed only if the target is pico, because
            pico's prompts say nothing about other targets.
        key: the recipe key to name in errors.

    Raises:
        UserError: for an unknown name, for None with another target than pico, for a wrong hash,
            and for a row without a prompt.
        ResourceError: for a URL that cannot be read.
    """
    suite_name = "pico" if name is None and target == "pico" else name
    path = _find_suite_file(suite_name, key, target)

    # A plain file of prompts becomes a suite whose version is the beginning of the file's hash.
    if path.suffix == ".jsonl":
        content = read_prompts(str(path))
        digest = hashlib.sha256(content).hexdigest()
        return Suite(
            name=path.stem,
            version=digest[:12],
            licence="not stated",
            source=path.name,
            sha256=digest,
            rows=parse_suite_file(path.name, content, {}),
            is_file=True,
        )

    # A suite's YAML file names the file of its prompts, and the hash that this file must have. The
    # prompts are at a URL, or at a path that is relative to the folder of the YAML file.
    header = _read_header(path)
    is_remote = header.prompts.startswith(REMOTE)
    prompts = header.prompts if is_remote else str(path.parent / header.prompts)
    content = read_prompts(prompts, is_pinned=header.sha256 is not None)
    digest = hashlib.sha256(content).hexdigest()
    if header.sha256 not in (None, digest):
        raise UserError(
            "eval.suite",
            got=f"{prompts} with sha256 {digest}",
            expected=f"sha256 {header.sha256}, which {path.name} states: the file has changed",
        )

    # Convert the rows. With `turns: all`, a conversation becomes several prompts.
    rows = parse_suite_file(prompts, content, header.columns, header.placeholder)
    if header.turns == "all":
        rows = tuple(chain.from_iterable(_split_turns(row, header.categories) for row in rows))
    return Suite(
        name=header.name,
        version=header.version,
        licence=header.licence,
        source=header.source,
        sha256=digest,
        rows=rows,
        sweep=header.sweep,
        quality=header.quality,
    )


def check_suite(name: str | None, *, key: str = "eval.suite") -> Suite | None:
    """Check a suite without network, and load it if its prompts are on this machine.

    Of a suite whose prompts are on a server, only the YAML file is checked.

    Args:
        name: the name or path of the suite; None for no suite.
        key: the recipe key that the error for an unknown name begins with.

    Returns:
        The suite; None if `name` is None, or if the prompts are not on this machine.

    Raises:
        UserError: for an unknown name, and for a file with errors.
    """
    if name is None:
        return None
    path = _find_suite_file(name, key)
    is_here = path.suffix == ".jsonl" or not _read_header(path).prompts.startswith(REMOTE)
    return load_suite(name) if is_here else None


def count_measured(suite: Suite, num_prompts: int | None, *, logs: bool = True) -> int | None:
    """Return how many prompts of a suite to measure; None stands for all.

    A number that the user asks for is returned as it is. Without one, all prompts are measured. An
    exception is a plain jsonl file, which may be very long: of more than FILE_PROMPTS prompts, only
    FILE_PROMPTS are measured.

    Args:
        suite: the suite. `suite.is_file` says that it is a plain jsonl file.
        num_prompts: the number that the user asks for; None if the user gives none.
        logs: whether to log that only a part of the file is measured.
    """
    if not suite.is_file or num_prompts is not None or len(suite.rows) <= FILE_PROMPTS:
        return num_prompts
    total = len(suite.rows)
    if logs:
        logger.info(
            f"Measuring {FILE_PROMPTS} of the {total:,} prompts of {suite.source}, evenly spread."
            f" To measure all of them, pass num_prompts={total}."
        )
    return FILE_PROMPTS


def tokenize(
    suite: Suite,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    max_length: int,
    vocab_size: int | None = None,
    num_prompts: int | None = None,
    logs: bool = True,
) -> list[Prompt]:
    """Tokenize the prompts of a suite for a target.

    Args:
        suite: the suite.
        tokenizer: the target's tokenizer.
        max_new_tokens: the most tokens that are generated after a prompt.
        max_length: the target's context, in tokens.
        vocab_size: the number of tokens in the target's embedding; None if a server runs the
            target, so that the embedding is not known here.
        num_prompts: how many prompts are chosen, evenly spread over the categories; None for all.
        logs: whether to warn of prompts that a chat target gets as plain text.

    Raises:
        UserError: for a prompt that has no tokens, that leaves no room for `max_new_tokens`, or
            that has a token which is not in the target's embedding.
    """
    # Choose the prompts, evenly over the categories.
    rows = select_evenly(suite.rows, [row.category for row in suite.rows], num_prompts)
    if logs and suite.is_file and tokenizer.chat_template:
        _warn_of_plain_text(rows, suite.source)

    # Tokenize the chosen prompts, and refuse a prompt that the target cannot read.
    prompts = [_tokenize_row(row, tokenizer) for row in rows]
    for prompt in prompts:
        if vocab_size is not None:
            _check_known_tokens(prompt, tokenizer, vocab_size)
        if not prompt.token_ids:
            raise UserError(
                "eval.suite",
                got=f"prompt {prompt.id} of {suite.name}, which has no tokens",
                expected="some text",
            )
        length = len(prompt.token_ids)
        if length + max_new_tokens > max_length:
            raise UserError(
                "eval.suite",
                got=(
                    f"prompt {prompt.id} of {suite.name} with {length} tokens, and"
                    f" {max_new_tokens} tokens to generate"
                ),
                expected=f"at most {max_length} tokens together, the target's context",
            )
    return prompts


def _warn_of_plain_text(rows: Sequence[SuiteRow], source: str) -> None:
    """Log a warning if any of the prompts are plain text, for a target with a chat template.

    Args:
        rows: the prompts. Rows of kind `prompt` or `text` are plain text, others are conversations.
            Of a `text`, only the first TEXT_PROMPT_TOKENS tokens are the prompt.
        source: the name of the prompts' file.
    """
    num_plain = sum(row.kind in ("prompt", "text") for row in rows)
    if not num_plain:
        return
    has_cut_texts = any(row.kind == "text" for row in rows)
    cut = f" and cut to {TEXT_PROMPT_TOKENS} tokens" if has_cut_texts else ""
    logger.warning(
        "%d prompts of %s are plain text%s, although the target has a chat template."
        " To use the template, name the column `user` or `messages` instead",
        num_plain,
        source,
        cut,
    )


def _check_known_tokens(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise UserError for a token of a prompt that is not in the target's embedding.

    This happens if the tokenizer does not belong to the model.

    Args:
        prompt: the tokenized prompt.
        tokenizer: the tokenizer.
        vocab_size: the number of tokens in the target's embedding.
    """
    for token in prompt.token_ids:
        if token >= vocab_size:
            raise UserError(
                "target.model",
                got=(
                    f"a tokenizer whose token {tokenizer.convert_ids_to_tokens(token)!r} in prompt"
                    f" {prompt.id} has the id {token}"
                ),
                expected=f"the model's own tokenizer: the model has only {vocab_size} tokens",
            )


def cut_prompts(
    suite: Suite,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    *,
    max_new_tokens: int,
    max_length: int,
    num_prompts: int | None = None,
) -> dict[int, list[Prompt]]:
    """Cut the suite's long prompts to several lengths, to measure how the context length matters.

    Only prompts with at least the longest length are used, so that the prompts are the same at
    every length. Of these prompts `num_prompts` are chosen, evenly spread over the categories; None
    stands for all. A row of kind `prompt` is cut at its beginning, one of kind `text` at its end,
    and a conversation at the beginning of its longest message.

    Returns:
        Length in tokens -> the prompts cut to that length. The prompt of a conversation may be a
        token or two shorter.

    Raises:
        UserError: for a length that no prompt reaches, or that exceeds the target's context.
    """
    if not lengths:
        return {}
    longest = max(lengths)
    if longest + max_new_tokens > max_length:
        raise UserError(
            "eval.sweep.context",
            got=f"{longest} tokens of context, and {max_new_tokens} tokens to generate",
            expected=f"at most {max_length} tokens together, the target's context",
        )

    # Select the prompts that are long enough to be cut to every length.
    num_tokens = {
        row.id: len(_tokenize_row(row, tokenizer, is_whole=True).token_ids) for row in suite.rows
    }
    rows = [row for row in suite.rows if num_tokens[row.id] >= longest]
    if not rows:
        raise UserError(
            "eval.sweep.context",
            got=(
                f"{longest} tokens, but the longest prompt of {suite.name} has"
                f" {max(num_tokens.values())}"
                " tokens"
            ),
            expected="lengths that at least one prompt reaches",
        )

    # Cut the same prompts to each length.
    chosen = select_evenly(rows, [row.category for row in rows], num_prompts)
    prompts_by_length = {}
    for length in lengths:
        prompts_by_length[length] = [_cut_prompt(row, tokenizer, length) for row in chosen]
    return prompts_by_length


def select_evenly(items: Sequence[T], groups: Sequence[Hashable], count: int | None) -> list[T]:
    """Choose `count` of the items, evenly spread over groups, and over the items of each group.

    Args:
        items: the items.
        groups: the group of each item, e.g. the category of a prompt.
        count: how many items to choose; None for all.

    Returns:
        The chosen items, in the order of `items`.
    """
    # Collect the indices of the items of each group.
    indices_by_group: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        indices_by_group.setdefault(group, []).append(index)

    # Find how many items to take from each group (its quota). As in dealing cards: take one item
    # from each group, then a second one from each group, and so on, until there are `count` items.
    # For example, 6 items from groups of 5 and 2 items: 4 from the first group, 2 from the second.
    # `turns` lists all items in this order, as pairs (number in its group, group).
    turns = []
    for group_number, indices in enumerate(indices_by_group.values()):
        turns += [(turn, group_number) for turn in range(len(indices))]
    turns.sort()
    quotas = Counter(group_number for _, group_number in turns[:count])

    # Take the items of a group at even distances.
    chosen: list[int] = []
    for group_number, indices in enumerate(indices_by_group.values()):
        quota = quotas[group_number]
        chosen += [indices[position * len(indices) // quota] for position in range(quota)]
    return [items[index] for index in sorted(chosen)]


def _find_suite_file(name: str | None, key: str, target: str = "pico") -> Path:
    """Find the YAML or jsonl file of a suite, by its path or name.

    Args:
        name: the path of the file, or the name of a suite under `eval/suites`. None or empty: there
            is no suite, which is an error.
        key: the recipe key to name in errors.
        target: the name of the target, for the error that there is no suite.

    Raises:
        UserError: if there is no suite, or no such file.
    """
    # Try `name` as a path first, then as the name of a suite.
    for candidate in (Path(name), SUITES / f"{name}.yaml") if name else ():
        if candidate.suffix in (".yaml", ".yml", ".jsonl") and candidate.is_file():
            return candidate

    # There is no such file. Say which suites there are. Without a name, say for which target one is
    # required. For a CSV file, say how to convert it.
    known_suites = sorted(path.stem for path in SUITES.glob("*.yaml"))
    expected = f"one of {', '.join(known_suites)}, a suite YAML or a jsonl file"
    if not name:
        raise UserError(key, got=f"nothing with target {target}", expected=expected)
    if Path(name).suffix == ".csv" and Path(name).is_file():
        expected = f"a suite YAML or a jsonl file; to convert it: {convert_csv(Path(name))}"
    raise UserError(key, got=name, expected=expected, nearest=find_nearest(name, known_suites))


def _read_header(path: Path) -> SuiteHeader:
    """Read a suite's YAML file, which describes its prompts, and check its keys.

    Raises:
        UserError: for a file that is no YAML, and for unknown keys or invalid values.
    """
    with convert_errors(ValueError, "eval.suite", path, "a readable YAML file"):
        header = validate_recipe(SuiteHeader, parse_yaml(read_prompts(str(path))), f"{path.name}: ")

    # `columns` maps names of this project to columns of the prompts' file. Refuse a name that this
    # project does not know, because it would be ignored.
    unknown_names = [name for name in header.columns if name not in COLUMNS]
    if unknown_names:
        raise UserError(
            f"{path.name}: columns.{unknown_names[0]}",
            got="an unknown key",
            expected=f"one of {', '.join(COLUMNS)}",
            nearest=find_nearest(unknown_names[0], COLUMNS),
        )
    return header


def _cut_prompt(row: SuiteRow, tokenizer: Tokenizer, length: int) -> Prompt:
    """Return the prompt of a row, cut to at most `length` tokens.

    A conversation is cut inside its longest message. A `text` loses its end. A `prompt` loses its
    beginning, because its end is what the target answers.
    """
    # `is_whole`: take all tokens of a `text`. Otherwise it would be cut to TEXT_PROMPT_TOKENS here.
    prompt = _tokenize_row(row, tokenizer, is_whole=True)
    if row.kind == "messages":
        return _cut_messages(row, tokenizer, length, prompt)
    if row.kind == "text":
        ids = prompt.token_ids[:length]
    else:
        # Keep the last tokens, but leave a BOS token at the beginning.
        num_bos = int(prompt.token_ids[:1] == (tokenizer.bos_token_id,))
        ids = prompt.token_ids[:num_bos] + prompt.token_ids[-length + num_bos :]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Prompt(row.id, row.category, text, ids, row.cluster)


def _cut_messages(row: SuiteRow, tokenizer: Tokenizer, length: int, prompt: Prompt) -> Prompt:
    """Cut a conversation's longest message until the prompt has at most `length` tokens.

    The message loses its beginning. A shortened text may have another number of tokens than
    expected when it is tokenized again, so the cut is repeated until the prompt is short enough.

    Args:
        row: the row with the whole conversation.
        tokenizer: the target's tokenizer.
        length: the most tokens of the prompt.
        prompt: the prompt of the whole conversation.
    """
    # Find the longest message, in characters. A message that only calls tools has the content None.
    # The other messages stay as they are.
    longest = max(
        range(len(row.content)), key=lambda index: len(row.content[index]["content"] or "")
    )
    kept_ids = tokenizer(row.content[longest]["content"], add_special_tokens=False)["input_ids"]

    # Remove as many tokens from the beginning of this message as the prompt is too long, and
    # tokenize the conversation again.
    while (excess := len(prompt.token_ids) - length) > 0:
        kept_ids = kept_ids[excess:]
        if not kept_ids:
            raise UserError(
                "eval.sweep.context",
                got=(
                    f"{length} tokens, but prompt {row.id} cannot be cut to this length: only its"
                    " longest message is cut, and the rest is longer"
                ),
                expected="a longer context",
            )
        messages = [*row.content]
        messages[longest] = {**messages[longest], "content": tokenizer.decode(kept_ids)}
        prompt = _tokenize_row(replace(row, content=messages), tokenizer)
    return prompt


def _split_turns(row: SuiteRow, categories: str | None) -> Iterator[SuiteRow]:
    """Yield a prompt for each turn of the assistant: the messages before that turn.

    The target then writes a turn of its own in place of the recorded one. The id of a prompt ends
    with the number of the turn, from 1.

    Args:
        row: the conversation.
        categories: how to set the category of a prompt. `turn`: by the number of the turn. `kind`:
            by what the assistant's turn is, e.g. a tool call. None: the category of the row.

    Raises:
        UserError: for a row that is no conversation, or has no turn of the assistant.
    """
    if row.kind != "messages" or all(message["role"] != "assistant" for message in row.content):
        raise UserError(
            "turns",
            got=f"all, although prompt {row.id} has no turns of the assistant",
            expected="messages with turns of the assistant, or turns: last",
        )

    # Make a prompt of the messages before each turn of the assistant.
    turn_indices = [
        index for index, message in enumerate(row.content) if message["role"] == "assistant"
    ]
    for number, index in enumerate(turn_indices, 1):
        # Later turns are rarer, so a category by number covers twice as many turns as the category
        # before it: turn 1, turns 2 to 3, turns 4 to 7, …
        first = 2 ** (number.bit_length() - 1)
        range_name = "turn_1" if first == 1 else f"turn_{first}_to_{2 * first - 1}"
        category_names = {"turn": range_name, "kind": _find_kind(row.content[index])}
        yield SuiteRow(
            id=f"{row.id}/{number}",
            category=category_names[categories] if categories else row.category,
            kind=row.kind,
            content=row.content[:index],
            tools=row.tools,
            cluster=row.id,
        )


def _find_kind(message: Message) -> str:
    """Return the kind of an assistant's turn, which becomes the category of its prompt.

    The kinds are tool_call, reasoning, structured_output (the content is a JSON object or list) and
    prose. The first kind that applies counts.
    """
    # A converted message has its reasoning under the first of the names in REASONING.
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


def _read_turn_text(turn: Message) -> object:
    """Return the content of a turn, and None for an empty turn.

    A turn without content that calls tools is not empty, so the text "calls" stands for it.
    """
    return turn.get("content", turn.get("value")) or ("calls" if turn.get("tool_calls") else None)


def _convert_programming_row(entry: FileRow, place: str) -> FileRow:
    """Convert a row of MBPP, a benchmark of small Python tasks, into a row with the column `user`.

    A row of MBPP has a question and a list of assertions that the program must pass. The text in
    `user` is the question followed by the assertions.

    Args:
        entry: the row.
        place: the file and row number to name in errors.

    Raises:
        UserError: for a row without a question or without assertions.
    """
    # Check that the question and the assertions are there.
    question = entry.get("prompt", entry.get("text"))
    tests = entry["test_list"]
    if (
        not question
        or not isinstance(tests, list)
        or not all(isinstance(test, str) for test in tests)
    ):
        raise UserError(
            "eval.suite",
            got=f"{place}, whose question or test_list cannot be used",
            expected="a question in prompt or text, and a list of assertions in test_list",
        )

    # Keep the id and the category. The assertions follow the question.
    assertions = "\n".join(tests)
    converted: FileRow = {key: entry[key] for key in ("id", "task_id", "category") if key in entry}
    return {
        **converted,
        "user": f"{question}\n\nThe Python code has to pass these tests:\n\n{assertions}",
    }


def _tokenize_row(row: SuiteRow, tokenizer: Tokenizer, is_whole: bool = False) -> Prompt:
    """Tokenize the prompt of a row.

    Args:
        row: the row. `row.kind` says whether it is a conversation (`messages`), a `prompt`, or a
            `text`, of which only the first TEXT_PROMPT_TOKENS tokens are the prompt.
        tokenizer: the target's tokenizer.
        is_whole: whether all tokens of a `text` are the prompt.
    """
    # Messages are rendered with the chat template, which must not ignore a part of them. The
    # template writes the special tokens itself, so the tokenizer adds none.
    if row.kind == "messages":
        if not tokenizer.chat_template:
            raise UserError(
                "eval.suite",
                got=f"prompt {row.id}, a conversation, but the target has no chat template",
                expected="a suite of plain prompts",
            )
        where = f"eval.suite prompt {row.id}"
        check_expressed(tokenizer, row.content, row.tools, where)
        text = render_chat(
            tokenizer, row.content, generation_prompt=True, where=where, tools=row.tools
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(row.id, row.category, text, tuple(ids), row.cluster)

    # Cut a `text` to its beginning, and use a `prompt` as it is. `verbose=False` silences the
    # warning of transformers about long inputs, because `tokenize` checks the length later.
    ids = tokenizer(row.content, verbose=False)["input_ids"]
    if row.kind == "text":
        ids = ids if is_whole else ids[:TEXT_PROMPT_TOKENS]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return Prompt(row.id, row.category, text, tuple(ids), row.cluster)
    return Prompt(row.id, row.category, row.content, tuple(ids), row.cluster)


def read_prompts(place: str, *, is_pinned: bool = False) -> bytes:
    """Return the content of a suite's file, from a path or URL.

    The datasets library downloads a URL and keeps the file in its cache.

    Args:
        place: the path or URL.
        is_pinned: whether the caller knows the hash of the content. Then a file in the cache is
            used without asking the server for a newer one.

    Raises:
        UserError: for a file that cannot be read.
        ResourceError: for a URL that cannot be read.
    """
    if not place.startswith(REMOTE):
        with convert_errors(OSError, "eval.suite", place, "a readable file"):
            return Path(place).read_bytes()

    # The library is imported here because that is slow, and reports do not need it.
    from datasets import DownloadConfig, DownloadManager

    from specdistill.common.repositories import HTTP_ERROR

    # The library asks the server for the file's ETag, to recognize a newer file. With
    # `use_etag=False`, it takes a file that is in the cache without asking.
    try:
        config = DownloadConfig(disable_tqdm=True, use_etag=not is_pinned)
        return Path(DownloadManager(download_config=config).download(place)).read_bytes()
    except (OSError, HTTP_ERROR) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ResourceError(
            f"eval.suite: {place} could not be fetched ({reason})",
            next_step=(
                "check the network and HF_TOKEN, or give the path of a copy in the suite's key"
                " `prompts`"
            ),
        ) from error


def parse_suite_file(
    name: str, content: bytes, columns: Mapping[str, str], placeholder: str | None = None
) -> tuple[SuiteRow, ...]:
    """Parse the file that holds the prompts of a suite, one row each.

    Args:
        name: the name of the file. Its ending (.jsonl, .jsonl.gz, .parquet) says the format.
        content: the content of the file.
        columns: this project's name of a column (e.g. `prompt`) -> its name in the file. Empty: the
            file has this project's names.
        placeholder: a text; rows whose prompt begins with it are left out. None: no row is left
            out.

    Raises:
        UserError: for a file without prompts, for a row without a prompt or without one of the
            columns, and for an id that two rows have.
    """
    # Convert each row to a prompt, after its columns are renamed.
    rows = []
    for number, entry in _read_objects(name, content):
        place = f"{PurePosixPath(name).name}:{number}"  # for error messages
        missing_columns = [column for column in columns.values() if column not in entry]
        if missing_columns:
            raise UserError(
                "eval.suite",
                got=f"{place} without the column {missing_columns[0]}, which `columns` names",
                expected=f"one of the file's columns {', '.join(entry)}",
                nearest=find_nearest(missing_columns[0], list(entry)),
            )
        # Without `columns` the row is used as it is (`renamed or entry`).
        renamed = {ours: entry[column] for ours, column in columns.items()}
        row = _convert_row(number, place, renamed or entry, placeholder)
        if row:
            rows.append(row)

    # A suite needs prompts, and each prompt must have an id of its own.
    if not rows:
        raise UserError("eval.suite", got=f"{name}, which is empty", expected="at least one prompt")
    counts = Counter(row.id for row in rows)
    repeated_ids = [id for id, count in counts.items() if count > 1]
    if repeated_ids:
        raise UserError(
            "eval.suite",
            got=f"{name}, in which several rows have the id {repeated_ids[0]}",
            expected="a different id for each prompt",
        )
    return tuple(rows)


def _read_objects(name: str, content: bytes) -> Iterator[tuple[int, FileRow]]:
    """Yield (row number from 1, row) for each row of a Parquet, .jsonl or .jsonl.gz file.

    Args:
        name: the name of the file, whose ending says the format.
        content: the content of the file.

    Raises:
        UserError: for content that is not in this format.
    """
    stream: IO[bytes] = io.BytesIO(content)
    # The errors that pyarrow, gzip and the parser of JSON raise for content of another format.
    unreadable = pyarrow.ArrowException, OSError, EOFError, ValueError, zlib.error
    with convert_errors(
        unreadable,
        "eval.suite",
        PurePosixPath(name).name,
        "Parquet rows, or one JSON object per line, as the name of the file says",
    ):
        if name.endswith(".parquet"):
            # Convert 1,000 rows at a time to Python objects, which need much more memory.
            batches = pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=1000)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from enumerate(rows, start=1)
        else:
            yield from read_json_rows(
                cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if name.endswith(".gz") else stream
            )


def _from_training_columns(entry: FileRow) -> FileRow:
    """Add the column `messages` or `user` to a row that has the columns of training data instead.

    Thanks to this, a file of training data can be used as a suite. If a conversation ends with a
    turn of the assistant, this turn is left out, because the target is to write it. If a row has
    only the user's turns, the first turn is the prompt, and the column `reference` becomes the
    first reference (right answer) of this turn.
    """
    # Some rows have a conversation, in one of the columns that training data have.
    conversation_columns = [name for name in CONVERSATIONS if name in entry]
    if conversation_columns:
        messages = entry[conversation_columns[0]]
        if isinstance(messages, list) and all(isinstance(turn, str) for turn in messages):
            # The column holds only the user's turns, as in MT-bench. `reference` has an entry for
            # each turn, which may be a list, too. So the loop takes first items until one is no
            # list: [["a", "b"], ["c"]] gives "a".
            reference = entry.get("reference")
            while isinstance(reference, list):
                reference = reference[0] if reference else None
            return {**entry, "user": messages, "reference": reference or None}
        if isinstance(messages, list) and messages and _is_answer(messages[-1]):
            messages = messages[:-1]
        return {**entry, "messages": messages}

    # Other rows have a question, and in some data sets an input or a context, which is appended.
    question_columns = [name for name in PROMPTS if name in entry]
    if not question_columns:
        return entry
    parts = [entry[question_columns[0]], entry.get("input") or entry.get("context")]
    return {**entry, "user": "\n\n".join(str(part) for part in parts if part)}


def _is_answer(turn: object) -> bool:
    """Return whether a recorded turn is one of the assistant, which the target should write."""
    return isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in ("assistant", "gpt")


def _convert_row(
    number: int, place: str, entry: FileRow, placeholder: str | None
) -> SuiteRow | None:
    """Convert one row of a file into a prompt.

    Args:
        number: the number of the row, from 1. It is the id of a row without an id.
        place: the name of the file and the number of the row, for errors.
        entry: the row, with this project's names of columns.
        placeholder: a text; a row whose prompt begins with it is left out. None: no row is left
            out.

    Returns:
        The prompt; None for a row that is left out.

    Raises:
        UserError: for a row whose prompt, reference or category cannot be used.
    """
    # Find the column with the prompt. `kind` is its name: prompt, text, user or messages.
    entry, kind = _find_prompt_column(entry, place)
    content = entry[kind]

    # The column `user` has a question, or a list of several questions, of which the first is used.
    # Convert this question to a conversation, unless it is a list of messages already.
    if kind == "user":
        kind = "messages"
        question = content[0] if isinstance(content, list) and content else content
        if isinstance(question, list):
            content = question
        else:
            content = [{"role": "user", "content": question}]

    # Check that the prompt and the reference are not empty.
    texts = _list_texts(kind, content)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise UserError(
            "eval.suite",
            got=f"{place} with {kind}={join_lines(repr(content))[:60]}",
            expected="a list of {role, content}" if kind == "messages" else "some text",
        )
    reference = entry.get("reference")
    if reference is not None and not (isinstance(reference, str) and reference.strip()):
        raise UserError(
            "eval.suite",
            got=f"{place} with reference={join_lines(repr(reference))[:60]}",
            expected="some text",
        )

    # Convert messages to the form of OpenAI's API, with the schemas of their tools.
    tools = None
    if kind == "messages":
        content, tools = convert_conversation(content, entry.get("tools"), f"eval.suite {place}")
    row = SuiteRow(
        id=str(entry.get("id", entry.get("task_id", number))),
        category=str(entry.get("category", "default")),
        kind=kind,
        content=content,
        reference=reference,
        tools=tools,
    )

    # In reports, the category `all` stands for the whole suite, so no prompt may have it.
    if row.category == "all":
        raise UserError(
            "eval.suite",
            got=f"{place} with category=all",
            expected="another category: `all` stands for the whole suite in reports",
        )
    return None if placeholder is not None and texts[0].startswith(placeholder) else row


def _find_prompt_column(entry: FileRow, place: str) -> tuple[FileRow, str]:
    """Return a row with one of the columns prompt, messages, user or text, and the column's name.

    Rows of other known forms are converted first: MBPP, BFCL and training data.

    Args:
        entry: the row.
        place: the file and row number to name in errors.

    Raises:
        UserError: for a row without a prompt.
    """
    # A row of MBPP (Python tasks) has a list of tests. A row of BFCL (tool calls) has a list of
    # lists of messages as question, and the schemas of its tools as function.
    if "test_list" in entry:
        entry = _convert_programming_row(entry, place)
    if isinstance(entry.get("question"), list):
        entry = {**entry, "user": entry["question"], "tools": entry.get("function")}

    # Otherwise the row may have the columns of training data.
    if not any(kind in entry for kind in KINDS):
        entry = _from_training_columns(entry)
    for kind in KINDS:
        if kind in entry:
            return entry, kind

    # No column holds a prompt. Suggest a valid name that is close to one of the row's columns.
    close_names = [find_nearest(column, KINDS) for column in entry]
    raise UserError(
        "eval.suite",
        got=f"{place} with the columns {', '.join(entry) or '(none)'}",
        expected=(
            f"one of the columns {', '.join(KINDS)}; to use a column of another name, map it in the"
            " suite's YAML file, e.g. columns: {user: turns}"
        ),
        nearest=next((name for name in close_names if name), None),
    )


def _list_texts(kind: str, content: Any) -> list[Any]:
    """Return the text of each message of a conversation, or the prompt itself as the only text.

    The list is empty for a conversation that is not a list of {role, content} or {from, value}.

    Args:
        kind: `messages` for a conversation; anything else for a plain prompt.
        content: the conversation or the prompt.
    """
    if kind != "messages":
        return [content]
    if not isinstance(content, list):
        return []
    for turn in content:
        if not isinstance(turn, dict) or not {"role", "from"} & turn.keys():
            return []
    return [_read_turn_text(turn) for turn in content]
