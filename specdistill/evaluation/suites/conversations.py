"""Convert conversations from the forms of several data sets into one, and render them as text.

A message is {role, content} as in OpenAI's API, with the roles system, user, assistant and tool. A
message of the assistant may have `tool_calls` and `reasoning_content`, and `weight` 0 if it must
not be learned. Its content is None if it only calls tools, and in a turn that is yet to be
generated. `tools` are the schemas of the tools that it may call. Three other forms are converted:
ShareGPT's {from, value} with function calls, FastChat's lists of what a user asks, and BFCL's lists
of the messages before each answer.

Chat templates differ in the name that they use for the reasoning, and in whether the arguments of a
call are an object or its JSON text. `render` finds out by trying. `check_expressed` refuses a
conversation if the template ignores a part of it: its text is then the same without that part.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from specdistill.common.documents import parse_json
from specdistill.common.errors import UserError, convert_errors, find_nearest

Message = dict[str, Any]
Tokenizer = Any  # a tokenizer of transformers, which suites do not import
Schema = Mapping[str, Any]  # the schema of a tool, as in OpenAI's API
Tools = Sequence[Schema] | None
# The errors that a chat template may raise. It is a program that somebody else wrote.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
CALLS = ("function_call", "tool_call")  # roles of ShareGPT's turns that hold a call as JSON
# The names of roles in the known data sets, each with the role of OpenAI's API.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", *CALLS), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(
        ("tool", "observation", "function", "function_response", "tool_response"), "tool"
    ),
}
PLAIN_ROLES = tuple(dict.fromkeys(ROLES.values()))
# The reasons why a row cannot be used. Skipped rows are counted by reason.
MALFORMED = "malformed conversation"
ROLE_ORDER = "order of turns"
UNREAD_CONTENT = "content that is not text"
UNLEARNED = "no turn is learned"
WITHOUT_CONTENT = "message without content"
REJECTED = "rejected by the chat template"
IGNORED = "ignored by the chat template"
ALTERED = "altered by the chat template"
UNANSWERED: Message = {"role": "assistant", "content": None}  # a turn that is yet to be generated
# The names under which a message may have its reasoning: of DeepSeek and Qwen, of vLLM, of gpt-oss.
# The first one is used here.
REASONING = ("reasoning_content", "reasoning", "thinking")
OTHER_TEMPLATE_HINT = "another template in data.chat_template, or rows without them"
SHOWN_CHARACTERS = 240  # characters of a text that an error message shows


def convert_conversation(
    turns: object, tools: object, where: str, roles: Mapping[str, str] | None = None
) -> tuple[list[Message], list[Schema] | None]:
    """Convert a conversation from one of the known forms into messages of OpenAI's API.

    In a list of texts, each text is a turn of the user that the target must answer. In a list of
    lists of messages, the target must answer after each list. A greeting before the first question
    is dropped. The order of the other turns is not checked here; the chat template decides about
    it.

    Args:
        turns: the turns in one of the known forms.
        tools: the schemas of the tools in one of the known forms.
        where: the row and file, which errors name.
        roles: `data.roles`, more names of roles, each with one of PLAIN_ROLES; None where that key
            is not read.

    Returns:
        The messages, and the schemas of the tools or None.

    Raises:
        UserError: for turns or schemas of another form, for a conversation that does not begin with
            a turn of the user, for a tool result without a call, and for a call without a schema.
    """
    # In a list of texts or of lists of messages, put a turn that is yet to be generated after each
    # item. The last one is left out, because nothing follows it.
    if isinstance(turns, list) and turns and all(isinstance(turn, str | list) for turn in turns):
        all_turns: list[Any] = []
        for turn in turns:
            questions = [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
            all_turns += [*questions, UNANSWERED]
        turns = all_turns[:-1]

    # Convert each turn to a message.
    messages = []
    for turn in check_mappings(turns, where, "a conversation"):
        messages.append(turn if turn is UNANSWERED else _convert_message(turn, where, roles))

    # Drop greetings of the assistant between the system messages and the first question.
    system_messages = list(takewhile(lambda message: message["role"] == "system", messages))
    other_messages = messages[len(system_messages) :]
    turns_from_user = list(
        dropwhile(lambda message: message["role"] == "assistant", other_messages)
    )
    if other_messages and (not turns_from_user or turns_from_user[0]["role"] != "user"):
        raise UserError(
            where,
            got=(
                f"a conversation that begins with {other_messages[0]['role']} and not with the user"
            ),
            expected="a turn of the user first",
            kind=ROLE_ORDER,
        )

    # Check that each call has a schema, and each tool result a call.
    schemas = _convert_tools(tools, where)
    _check_calls(turns_from_user, {tool["function"].get("name") for tool in schemas}, where)
    return [*system_messages, *turns_from_user], schemas or None


def _convert_message(turn: Message, where: str, roles: Mapping[str, str] | None) -> Message:
    """Convert one turn of a conversation into a message of OpenAI's API.

    Args:
        turn: the turn in one of the known forms.
        where: the row and file, which errors name.
        roles: `data.roles`, more names of roles; None where that key is not read.
    """
    # Read the role, the text and the tool calls. A turn with a role of CALLS has its calls as JSON
    # in its content.
    role = _read_role(turn, where, roles)
    content = _join_text_parts(turn.get("content", turn.get("value")), where)
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if role in CALLS:
        calls = _parse_calls(content, where)
        content = None

    # Build the message, with its calls and its reasoning. A message that only calls tools has the
    # content None.
    known_roles = {**ROLES, **(roles or {})}
    message: Message = {
        "role": known_roles[role],
        "content": check_string(content or "", where, "content"),
    }
    if calls:
        message["tool_calls"] = [
            _convert_call(call, where) for call in check_mappings(calls, where, "tool_calls")
        ]
        message["content"] = message["content"] or None
    reasoning = next((turn[name] for name in REASONING if turn.get(name)), None)
    if reasoning:
        message[REASONING[0]] = check_string(reasoning, where, "reasoning")

    # Refuse content that would be lost, rather than train without it.
    _check_unread_content(turn, bool(reasoning), where)
    if message["role"] == "user" and content is None:
        raise UserError(
            where,
            got="a turn of the user without content",
            expected="its text, or parts of text",
            kind=WITHOUT_CONTENT,
        )

    # A weight says whether a turn is learned.
    if turn.get("weight") not in (None, 0, 1):
        raise UserError(
            where,
            got=f"a turn of weight {turn['weight']!r}",
            expected="0 (not learned) or 1",
            kind="weight that is not 0 or 1",
        )
    if turn.get("weight") == 0:
        message["weight"] = 0
    return message | {name: turn[name] for name in ("name", "tool_call_id") if turn.get(name)}


def _read_role(turn: Message, where: str, roles: Mapping[str, str] | None) -> str:
    """Return the name of a turn's role, and raise UserError if it is unknown."""
    known_roles = {**ROLES, **(roles or {})}
    role = turn.get("role", turn.get("from"))
    if isinstance(role, str) and role in known_roles:
        return role

    # Suggest `data.roles` where that key is read.
    kind = f"unknown role {role!r}"
    expected = f"one of {', '.join(known_roles)}"
    if roles is not None:
        kind += f", which data.roles={{{role}: assistant}} would map"
        expected += f", or data.roles={{{role}: assistant}}"
    raise UserError(
        where,
        got=f"the role {role!r}",
        expected=expected,
        nearest=find_nearest(str(role), known_roles),
        kind=kind,
    )


def _join_text_parts(content: object, where: str) -> Any:
    """Join the parts of a content that is a list; all of them must be text.

    A content that is no list is returned as it is.
    """
    if not isinstance(content, list):
        return content
    parts = check_mappings(content, where, "content")
    unread_type = next((part.get("type") for part in parts if "text" not in part), None)
    if unread_type:
        raise UserError(
            where,
            got=f"content with a part {unread_type!r}",
            expected="parts of text",
            kind=UNREAD_CONTENT,
        )
    return "".join(check_string(part.get("text") or "", where, "text") for part in parts)


def _parse_calls(content: object, where: str) -> list[Any]:
    """Parse the content of a ShareGPT turn that is a tool call, or a list of calls, as JSON."""
    with convert_errors(
        ValueError,
        where,
        "a call that is no JSON",
        '{"name": …, "arguments": …}',
        kind=MALFORMED,
    ):
        calls = parse_json(check_string(content, where, "a call"))
    return calls if isinstance(calls, list) else [calls]


def _check_unread_content(turn: Message, has_reasoning: bool, where: str) -> None:
    """Raise UserError for a turn with a key whose content is not read and would be lost."""
    unread_names = ["refusal", "audio"]
    # Details of the reasoning are lost only if the reasoning itself is not there.
    if not has_reasoning:
        unread_names.append("reasoning_details")
    # Messages of gpt-oss in another channel than `final` are no answer to the user.
    if turn.get("channel") != "final":
        unread_names.append("channel")
    for name in unread_names:
        if turn.get(name):
            raise UserError(
                where,
                got=f"a turn with {name}, which is not read",
                expected="content, tool_calls, reasoning_content",
                kind=UNREAD_CONTENT,
            )


def _convert_call(call: Message, where: str) -> Message:
    """Convert a call of a tool to the form of OpenAI's API, and check its name and arguments.

    Args:
        call: the call, as {function: {name, arguments}} or as {name, arguments}.
        where: the row and file, which errors name.
    """
    (function,) = check_mappings([call.get("function", call)], where, "a call")
    name = check_string(function.get("name"), where, "a call's name")

    # The arguments are an object or its JSON text. They are kept as they are, because chat
    # templates differ in the form that they expect.
    arguments = function.get("arguments") or {}
    with convert_errors(
        ValueError,
        where,
        f"a call of {name} with {shorten_text(str(arguments))!r}",
        "arguments as a JSON object",
        kind=MALFORMED,
    ):
        parsed_arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed_arguments, Mapping):
            raise ValueError("no object")
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **({"id": call["id"]} if call.get("id") else {}),
    }


def _convert_tools(tools: object, where: str) -> list[Schema]:
    """Convert the schemas of tools to the form of OpenAI's API, {type: function, function: …}.

    The schemas are a list of such objects, a list of bare functions, or the JSON text of a list.
    """
    # Read the JSON text, if it is one.
    with convert_errors(
        ValueError, where, "tools", "a list of schemas, or its JSON text", kind=MALFORMED
    ):
        raw_tools = parse_json(tools) if isinstance(tools, str) and tools else tools or []

    # Wrap bare functions, and check that each tool has a name.
    schemas: list[Schema] = [
        tool
        if isinstance(tool.get("function"), Mapping)
        else {"type": "function", "function": tool}
        for tool in check_mappings(raw_tools, where, "tools")
    ]
    for tool in schemas:
        check_string(tool["function"].get("name"), where, "a tool's name")
    return schemas


def _check_calls(messages: Sequence[Message], tool_names: set[str], where: str) -> None:
    """Raise UserError for a call without a schema, or a tool result without a call."""
    open_calls: list[str | None] = []  # ids of calls without a result yet
    for number, message in enumerate(messages):
        # Every tool that is called needs a schema.
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if name not in tool_names:
                raise UserError(
                    where,
                    got=f"a call of {name} without its schema",
                    expected="the schema of each tool, in a column `tools`",
                    kind="tool call without a schema",
                )

        # A message of any other role ends the results of earlier calls, and may make new calls.
        if message["role"] != "tool":
            open_calls = [call.get("id") for call in message.get("tool_calls", ())]
            continue

        # A result answers the call of its id, or else a call without an id. A result without an id
        # may also answer the first open call.
        id = message.get("tool_call_id")
        if id in open_calls:
            open_calls.remove(id)
        elif None in open_calls:
            open_calls.remove(None)
        elif id is None and open_calls:
            open_calls.pop(0)
        else:
            raise UserError(
                where,
                got=f"a tool result without a call, turn {number}",
                expected="a turn of the assistant before it that calls the tool",
                kind="tool result without a call",
            )


def is_unanswered(message: Message) -> bool:
    """Return whether a message stands for a turn that is yet to be generated."""
    return (
        message["role"] == "assistant"
        and message["content"] is None
        and "tool_calls" not in message
    )


def is_learned(message: Message) -> bool:
    """Return whether a message is a turn of the assistant that is not excluded by `weight` 0."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def check_mappings(value: object, where: str, what: str) -> list[Message]:
    """Return a value if it is a list of objects, and raise UserError if it is not.

    Args:
        value: the value.
        where: the row and file, which the error names.
        what: what the value should be, in words, for the error.
    """
    if not isinstance(value, list):
        raise UserError(
            where,
            got=f"{what} of type {type(value).__name__}",
            expected="a list of objects",
            kind=MALFORMED,
        )
    for item in value:
        if not isinstance(item, Mapping):
            raise UserError(
                where,
                got=f"{what} with an item of type {type(item).__name__}",
                expected="a list of objects",
                kind=MALFORMED,
            )
    return value


def check_string(value: object, where: str, what: str) -> str:
    """Return a value if it is a string, and raise UserError if it is not.

    Args:
        value: the value.
        where: the row and file, which the error names.
        what: what the value should be, in words, for the error.
    """
    if not isinstance(value, str):
        raise UserError(
            where, got=f"{what} of type {type(value).__name__}", expected="a string", kind=MALFORMED
        )
    return value


def use_template(tokenizer: Tokenizer, recipe: object) -> None:
    """Replace a tokenizer's chat template by the one that a recipe names in `data.chat_template`.

    Nothing changes for a recipe without data or without that key.

    Raises:
        UserError: for a file that cannot be read, or that is no Jinja template.
    """
    path = getattr(getattr(recipe, "data", None), "chat_template", None)
    if path is not None:
        # Read the template.
        with convert_errors(
            (OSError, UnicodeDecodeError), "data.chat_template", path, "a file with a chat template"
        ):
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")

        # Try it once, to find errors of syntax now. An empty question may be refused for other
        # reasons, which say nothing about the template.
        with (
            suppress(*TEMPLATE_ERRORS),
            convert_errors(TemplateSyntaxError, "data.chat_template", path, "a Jinja template"),
        ):
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    generation_prompt: bool = False,
    where: str = "data.source",
    tools: Tools = None,
    **template: object,
) -> str:
    """Render a conversation with the tokenizer's chat template.

    If the conversation calls tools, several forms of the calls are tried (see `_list_forms`), and
    the first one that the template writes correctly is used.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        generation_prompt: whether the text ends with the beginning of the assistant's turn.
        where: the recipe key or the row, which errors name.
        tools: the schemas of the tools.
        template: more arguments of the template, e.g. `enable_thinking`.

    Raises:
        UserError: for a tokenizer without a chat template, for a conversation that the template
            rejects, and for calls that it does not write as JSON.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            where,
            got="conversations, but the target's tokenizer has no chat template",
            expected="text rows, or data.chat_template, e.g. the template of its instruct model",
        )
    options: dict[str, object] = {
        "tokenize": False,
        "add_generation_prompt": generation_prompt,
        "tools": tools or None,
        **template,
    }

    # Templates differ in the form of calls that they expect. Try each form until one is written
    # correctly.
    has_calls = any(message.get("tool_calls") for message in messages)
    for form in _list_forms(messages) if has_calls else ():
        with suppress(*TEMPLATE_ERRORS):  # raised below if the template takes none of the forms
            rendered = str(tokenizer.apply_chat_template(form, **options))
            if not _is_miswritten(rendered, form):
                return rendered

    # Without calls, render the conversation as it is. With calls of which no form is written
    # correctly, this reports the error of the template, if it has one.
    turns = f"turns {shorten_text(', '.join(message['role'] for message in messages))}"
    with convert_errors(
        TEMPLATE_ERRORS,
        where,
        turns,
        "a conversation that the target's chat template accepts",
        kind=REJECTED,
    ):
        rendered = str(
            tokenizer.apply_chat_template(
                [_add_reasoning_names(message) for message in messages], **options
            )
        )
    if has_calls:
        raise UserError(
            where,
            got="tool calls, which the chat template writes as Python objects, not as JSON",
            expected=OTHER_TEMPLATE_HINT,
            kind=ALTERED,
        )
    return rendered


def _add_reasoning_names(message: Message) -> Message:
    """Return a message with its reasoning under each of the names that chat templates read."""
    return (
        message | dict.fromkeys(REASONING, message[REASONING[0]])
        if REASONING[0] in message
        else message
    )


def _list_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield copies of a conversation, one for each form of tool calls that templates may expect.

    The arguments of calls are as they are, or objects, or JSON texts. In messages that only call
    tools, content is None, or "".
    """
    # Two forms of empty content, times three forms of the arguments.
    for empty_content in (None, ""):
        for convert_arguments in (
            lambda arguments: arguments,
            lambda arguments: parse_json(arguments) if isinstance(arguments, str) else arguments,
            _format_arguments,
        ):
            form = copy.deepcopy([_add_reasoning_names(message) for message in messages])
            for message in form:
                for call in message.get("tool_calls", ()):
                    function = call["function"]
                    function["arguments"] = convert_arguments(function["arguments"])
                    message["content"] = message["content"] or empty_content
            yield form


def _format_arguments(arguments: object) -> str:
    """Return the arguments of a call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _is_miswritten(rendered: str, messages: Sequence[Message]) -> bool:
    """Return whether a chat template wrote tool calls wrongly, because it expects another form.

    The text then holds an object or None as Python writes it, or a JSON text in quotes.
    """
    for message in messages:
        for call in message.get("tool_calls", ()):
            # Look for the arguments as a template of the other form writes them: a text encoded as
            # JSON again, or an object in Python's notation.
            arguments = call["function"]["arguments"]
            wrong = (
                json.dumps(arguments, ensure_ascii=False)
                if isinstance(arguments, str)
                else repr(arguments)
            )
            if wrong in rendered and wrong != _format_arguments(arguments):
                return True

        # A missing content must not become the word None.
        if message["content"] is None and "None" in rendered:
            return True
    return False


def check_expressed(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools,
    where: str = "data.source",
    **template: object,
) -> None:
    """Raise UserError if the chat template ignores a part of a conversation.

    A part is ignored if the text is the same without it. The error names the part. System messages
    are checked one by one, because some templates render only the first.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        tools: the schemas of the tools.
        where: the recipe key or the row, which errors name.
        template: more arguments of the template.
    """

    def render_or_none(messages: Sequence[Message], tools: Tools) -> str | None:
        """Render messages from which a part was removed; None if the template then fails."""
        try:
            return render_chat(tokenizer, messages, False, where, tools, **template)
        except UserError:  # The template requires the part that was removed, so it reads it.
            return None

    # The parts to check: name -> the messages with the part, the messages without it, and the
    # schemas without it. Some templates drop the reasoning of all answers but the last, so it is
    # checked in a conversation that ends with it.
    last = max(
        (number for number, message in enumerate(messages) if REASONING[0] in message), default=-1
    )
    to_reasoning = messages[: last + 1]
    parts: dict[str, tuple[Sequence[Message], Sequence[Message], Tools]] = {
        "schemas of tools": (messages, messages, None),
        "calls of tools": (
            messages,
            [_remove_key("tool_calls", message) for message in messages],
            tools,
        ),
        "results of tools": (
            messages,
            [
                {**message, "content": ""} if message["role"] == "tool" else message
                for message in messages
            ],
            tools,
        ),
        "reasoning": (
            to_reasoning,
            [_remove_key(REASONING[0], message) for message in to_reasoning],
            tools,
        ),
    }

    # Each system message is a part of its own, because some templates render only the first one.
    for number, message in enumerate(messages):
        if message["role"] == "system" and message["content"].strip():
            without_it = [*messages[:number], {**message, "content": ""}, *messages[number + 1 :]]
            parts[f"messages of the system, e.g. number {number},"] = (messages, without_it, tools)

    # Render the conversation with and without each part that it has. If the texts are equal, the
    # template ignores the part.
    for name, (with_part, without_part, remaining_tools) in parts.items():
        if (with_part, tools) == (without_part, remaining_tools):
            continue
        text = render_chat(tokenizer, with_part, False, where, tools, **template)
        if text == render_or_none(without_part, remaining_tools):
            raise UserError(
                where,
                got=f"{name} with a chat template that ignores them",
                expected=OTHER_TEMPLATE_HINT,
                kind=f"{name.partition(',')[0]} {IGNORED}",
            )


def _remove_key(key: str, message: Message) -> Message:
    """Return a message without a key. If the message had it, a content of None becomes ""."""
    remaining = {name: value for name, value in message.items() if name != key}
    return {**remaining, "content": remaining["content"] or ""} if key in message else message


def shorten_text(text: str) -> str:
    """Return a text, without its middle if it is too long for an error message."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
