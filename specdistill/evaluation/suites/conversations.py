"""Convert conversations from the forms of several data sets into one, and render them as text.

A message is {role, content} as in OpenAI's API, with the roles system, user, assistant and tool. A
message of the assistant may have `tool_calls` and `reasoning_content`, and `weight` 0 if it must
not be learned. Its content is None if it only calls tools, and in a turn that is yet to be
generated. `tools` are the schemas of the tools that it may call. Three other forms are converted:
ShareGPT's {from, value} with function calls, FastChat's lists of what a user asks, and BFCL's lists
of the messages before each answer.

Chat templates differ in the name that they use for the reasoning, and in whether the arguments of a
call are an object or its JSON text. `render_chat` finds out by trying. `check_expressed` refuses a
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
OTHER_TEMPLATE_HINT = "another template in data.chat_template, or rows without such parts"
SHOWN_CHARACTERS = 240  # characters of a text that an error message shows


def convert_conversation(
    turns: object, tools: object, where: str, roles: Mapping[str, str] | None = None
) -> tuple[list[Message], list[Schema] | None]:
    """Convert a conversation of a data set into messages in the form of OpenAI's API.

    Three forms of `turns` are known: a list of messages, {role, content} or {from, value}; a list
    of texts, each a turn of the user; and a list of lists of messages. In the last two forms the
    target answers after each item. A greeting of the assistant before the first question is
    dropped.

    Args:
        turns: the conversation.
        tools: the schemas of the tools that it may call: a list, its JSON text, or None.
        where: the row and file to name in errors.
        roles: the recipe's `data.roles`, more names of roles: name -> user, assistant, system or
            tool. None for data that this key does not apply to.

    Returns:
        The messages, and the schemas of the tools or None.

    Raises:
        UserError: for turns or schemas of another form, for a conversation that does not begin with
            a turn of the user, for a tool result without a call, and for a call without a schema.
    """
    # In a list of texts or of lists of messages, put an answer that is yet to be generated
    # (UNANSWERED) after each item. The last item is the prompt, so the last answer is left out.
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
    """Convert one turn of a conversation into a message in the form of OpenAI's API.

    Args:
        turn: the turn, as {role, content, …} or, in ShareGPT's form, {from, value}.
        where: the row and file to name in errors.
        roles: the recipe's `data.roles`, more names of roles: name -> user, assistant, system or
            tool. None for data that this key does not apply to.

    Raises:
        UserError: for a turn that cannot be converted without losing a part of it.
    """
    # Read the role, the text and the tool calls. `function_call`, an older key of OpenAI's API, has
    # a single call. In ShareGPT's form, a role such as function_call (one of CALLS) says that the
    # text is the JSON of the calls.
    role = _read_role(turn, where, roles)
    content = _join_text_parts(turn.get("content", turn.get("value")), where)
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if role in CALLS:
        calls = _parse_calls(content, where)
        content = None

    # Build the message, with its calls and its reasoning. A message that only calls tools has the
    # content None. The reasoning has several names in data sets; the first of REASONING is used.
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
    """Return the role of a turn as it is written, and raise UserError if the role is unknown.

    Args:
        turn: the turn, as {role, content, …} or {from, value}.
        where: the row and file to name in errors.
        roles: the recipe's `data.roles`, names of roles that are known in addition to ROLES. None
            for data that this key does not apply to; the error then does not suggest it.
    """
    known_roles = {**ROLES, **(roles or {})}
    role = turn.get("role", turn.get("from"))
    if isinstance(role, str) and role in known_roles:
        return role

    # Suggest to add the role to `data.roles`, where this key applies. `kind` describes the fault:
    # rows that are skipped are counted by it.
    kind = f"unknown role {role!r}"
    expected = f"one of {', '.join(known_roles)}"
    if roles is not None:
        setting = f"data.roles={{{role}: assistant}}"
        kind += f", which {setting} would map"
        expected += f", or {setting}"
    raise UserError(
        where,
        got=f"the role {role!r}",
        expected=expected,
        nearest=find_nearest(str(role), known_roles),
        kind=kind,
    )


def _join_text_parts(content: object, where: str) -> Any:
    """Join the parts of a message's content, if it is a list of parts as in OpenAI's API.

    Content that is no list is returned as it is. A part that is no text, e.g. an image, raises
    UserError, because it would be lost.
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
    """Return the tool calls of a ShareGPT turn. Its content is the JSON of one call or of a list.

    Args:
        content: the content of the turn.
        where: the row and file to name in errors.
    """
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
    """Raise UserError for a turn with a key that this module ignores, so that it would be lost.

    Args:
        turn: the turn of a data set.
        has_reasoning: whether the turn's reasoning was found under a name that is read.
        where: the row and file to name in errors.
    """
    unread_names = ["refusal", "audio"]
    # The key reasoning_details has the reasoning in another form. It may be ignored only if the
    # reasoning itself was found as text, under one of the names in REASONING.
    if not has_reasoning:
        unread_names.append("reasoning_details")
    # gpt-oss writes its answers to the user in the channel `final`. Turns in other channels are
    # refused.
    if turn.get("channel") != "final":
        unread_names.append("channel")
    for name in unread_names:
        if turn.get(name):
            raise UserError(
                where,
                got=f"a turn with {name}, which specdistill does not read",
                expected="only the keys content, tool_calls and reasoning_content",
                kind=UNREAD_CONTENT,
            )


def _convert_call(call: Message, where: str) -> Message:
    """Convert a call of a tool to the form of OpenAI's API, and check its name and arguments.

    Args:
        call: the call, as {function: {name, arguments}} or as {name, arguments}.
        where: the row and file to name in errors.

    Returns:
        {type: "function", function: {name, arguments}}, with the call's id if it has one.
    """
    # `check_mappings` checks a list, so the function is wrapped in one, and taken out again.
    (function,) = check_mappings([call.get("function", call)], where, "a call")
    name = check_string(function.get("name"), where, "a call's name")

    # The arguments are an object or its JSON text. Check this, but keep the form: chat templates
    # differ in which form they expect, and `render_chat` tries both.
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

    Args:
        tools: a list of such objects, a list of bare functions ({name, parameters, …}), or the JSON
            text of a list. None or an empty text stands for no tools.
        where: the row and file to name in errors.
    """
    # Parse the JSON text, if `tools` is a text. None and an empty text become an empty list.
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
    """Raise UserError for a call of a tool without a schema, or a tool's result without a call.

    Args:
        messages: the conversation, in the form of OpenAI's API.
        tool_names: the names of the tools that have a schema.
        where: the row and file to name in errors.
    """
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

        # Find the call to which this result belongs: the call with the same id, or else a call
        # without an id. A result without an id may also belong to the first open call.
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
                got=f"a tool result without a call, turn {number} (from 0)",
                expected="a turn of the assistant before it that calls the tool",
                kind="tool result without a call",
            )


def is_unanswered(message: Message) -> bool:
    """Return whether a message stands for an answer that the target has yet to generate.

    Such a message of the assistant has neither content nor tool calls.
    """
    return (
        message["role"] == "assistant"
        and message["content"] is None
        and "tool_calls" not in message
    )


def is_learned(message: Message) -> bool:
    """Return whether a message is a turn of the assistant that is not excluded by `weight` 0."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def check_mappings(value: object, where: str, what: str) -> list[Message]:
    """Return a value if it is a list of JSON objects (dicts), and raise UserError if it is not.

    Args:
        value: the value, read from a data set.
        where: the row and file to name in errors.
        what: the name of the value in the error, e.g. "tool_calls".
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
        value: the value, read from a data set.
        where: the row and file to name in errors.
        what: the name of the value in the error, e.g. "a tool's name".
    """
    if not isinstance(value, str):
        raise UserError(
            where, got=f"{what} of type {type(value).__name__}", expected="a string", kind=MALFORMED
        )
    return value


def use_template(tokenizer: Tokenizer, recipe: object) -> None:
    """Replace a tokenizer's chat template by the one that a recipe names in `data.chat_template`.

    Nothing changes if the recipe has no section `data`, or if its `chat_template` is not set.

    Args:
        tokenizer: the tokenizer, which is changed.
        recipe: a recipe of any method. Methods without training have no section `data`.

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

        # Render an empty question, to find syntax errors of the template now. They become a
        # UserError, which `suppress` lets through. Any other error of the template is ignored,
        # because a template may refuse an empty question.
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
    """Render a conversation as text, with the tokenizer's chat template.

    Chat templates differ in the form of tool calls that they expect. So for a conversation with
    tool calls several forms are tried, and the first one that the template writes correctly is
    used.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        generation_prompt: whether the text ends with the beginning of the assistant's turn.
        where: the recipe key or the row to name in errors.
        tools: the schemas of the tools that the conversation may call.
        template: more arguments of the template, e.g. `enable_thinking`.

    Raises:
        UserError: for a tokenizer without a chat template, for a conversation that the template
            rejects, and for calls that the template does not write as JSON.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            where,
            got="conversations, but the target's tokenizer has no chat template",
            expected=(
                "rows of plain text, or a template in data.chat_template, e.g. that of the"
                " target's instruct model"
            ),
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

    # Without calls, render the conversation as it is. With calls, the template has written no form
    # correctly: rendering once more reports the error that the template raises, if it raises one.
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
    """Return a copy of a message that has its reasoning under all names in REASONING.

    Chat templates differ in the name that they read. In a converted message the reasoning is under
    the first name, REASONING[0]. A message without reasoning stays as it is.
    """
    return (
        message | dict.fromkeys(REASONING, message[REASONING[0]])
        if REASONING[0] in message
        else message
    )


def _list_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield copies of a conversation, one for each form of tool calls that templates may expect.

    The forms differ in the arguments of a call (as they are, an object, or the JSON text of an
    object) and in the content of a message that only calls tools (None or an empty text).
    """
    # Combine two forms of empty content with three forms of the arguments.
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

    The rendered text then has the arguments of a call in Python's notation, e.g. {'a': None}, or as
    a JSON text that is quoted once more, or it has the word None instead of empty content.

    Args:
        rendered: the text that the template made.
        messages: the conversation that was rendered.
    """
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                # A template that expects an object quotes the JSON text once more.
                wrong = json.dumps(arguments, ensure_ascii=False)
            else:
                # A template that expects a JSON text writes the object in Python's notation.
                wrong = repr(arguments)

            # Some objects, such as {}, are written alike in Python and in JSON. These are no fault.
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

    The parts are the schemas of tools, the calls, their results, the reasoning and each system
    message. The template ignores a part if the rendered text is the same without it.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        tools: the schemas of the tools that the conversation may call.
        where: the recipe key or the row to name in errors.
        template: more arguments of the template.
    """

    def render_without_part(messages: Sequence[Message], tools: Tools) -> str | None:
        """Render a conversation from which one part was removed; None if the template then fails.

        The question is whether the template ignores the part. If it fails, the answer is no.

        Args:
            messages: the conversation, without the part if the part is in messages.
            tools: the schemas of tools; None if they are the part that was removed.
        """
        try:
            return render_chat(
                tokenizer, messages, generation_prompt=False, where=where, tools=tools, **template
            )
        except UserError:
            return None

    # The parts to check: name -> (messages with the part, messages without it, the schemas of tools
    # to render the latter with). For example, the results of tools are emptied in the messages, and
    # the schemas stay. The schemas themselves are in no message, so for them the messages stay, and
    # the schemas become None.
    # Some templates drop the reasoning of all answers but the last. So reasoning is checked in a
    # conversation that ends with the last answer that has reasoning.
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

    # Render the conversation with and without each part. If the texts are equal, the template
    # ignores the part. A part that the conversation does not have is skipped. The error's `kind`
    # leaves out the number of a system message, so that it is the same for all such rows.
    for name, (with_part, without_part, remaining_tools) in parts.items():
        if (with_part, tools) == (without_part, remaining_tools):
            continue
        text = render_chat(
            tokenizer, with_part, generation_prompt=False, where=where, tools=tools, **template
        )
        if text == render_without_part(without_part, remaining_tools):
            raise UserError(
                where,
                got=f"{name} which the chat template ignores",
                expected=OTHER_TEMPLATE_HINT,
                kind=f"{name.partition(',')[0]} {IGNORED}",
            )


def _remove_key(key: str, message: Message) -> Message:
    """Return a message without a key.

    If the message had the key and its content is None, the content becomes an empty text, because
    a message with neither content nor tool calls would be invalid.
    """
    remaining = {name: value for name, value in message.items() if name != key}
    return {**remaining, "content": remaining["content"] or ""} if key in message else message


def shorten_text(text: str) -> str:
    """Return a text for an error message; the middle of a text that is too long is left out."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
