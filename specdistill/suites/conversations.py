"""Conversations: from the forms that logs have to one, and by a chat template to text.

A message is {role, content} as in OpenAI's API, with the roles system, user, assistant and tool. The assistant's may have `tool_calls`
and `reasoning_content`, and `weight` 0 where nothing is to be learned; content is None where it only calls tools, and in a turn that is
yet to be generated. `tools` are the schemas of what it may call. ShareGPT's {from, value} with function calls, FastChat's lists of what a
user asks, and BFCL's lists of the messages before each answer are brought to this form.

Templates differ in what they take: the name of the reasoning, and whether arguments of a call are an object or its JSON text. `render`
finds out by trying; `check_expressed` refuses what comes out the same without a part of the conversation, which the template ignores.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from specdistill.errors import UserError, nearest, refusing
from specdistill.files.documents import parse_json

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
# What a chat template may raise: it is somebody's program.
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
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", *CALLS), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(
        ("tool", "observation", "function", "function_response", "tool_response"), "tool"
    ),
}
UNANSWERED: Message = {"role": "assistant", "content": None}  # a turn that is yet to be generated
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # DeepSeek's and Qwen's name, vLLM's, gpt-oss's
ANOTHER = "data.chat_template with a template that does, or rows without"
SHOWN_CHARACTERS = 240


def conversation(
    turns: Any, tools: Any, where: str
) -> tuple[list[Message], list[Mapping[str, Any]] | None]:
    """(messages, schemas of the tools) of turns in a known form; in a list of texts, which the user says, or of lists of messages each is
    for the target to answer. A greeting before the first question is dropped.

    Raises UserError for an order of roles that is no conversation's, a result without a call, and a call without a schema.
    """
    if isinstance(turns, list) and turns and all(isinstance(turn, str | list) for turn in turns):
        each = [
            [{"role": "user", "content": turn}] if isinstance(turn, str) else turn for turn in turns
        ]
        turns = [message for turn in each for message in (*turn, UNANSWERED)][:-1]
    messages = [
        turn if turn is UNANSWERED else _message(turn, where)
        for turn in mappings(turns, where, "a conversation")
    ]
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    asked = list(dropwhile(lambda message: message["role"] == "assistant", messages[len(system) :]))
    roles = [message["role"] for message in asked]
    expected = "a turn of the user first, and turns of the assistant between those of the user"
    if len(messages) > len(system) and roles[:1] != ["user"]:
        begins = messages[len(system)]["role"]
        raise UserError(
            where, got=f"turns {begins}, … that no turn of the user comes before", expected=expected
        )
    for place, pair in enumerate(pairwise(roles), len(messages) - len(asked)):
        if pair == ("user", "user"):
            raise UserError(
                where,
                got=f"two turns of the user in a row, numbers {place} and {place + 1}",
                expected=expected,
            )
    schemas = _tools(tools, where)
    _check_calls(asked, {tool["function"].get("name") for tool in schemas}, where)
    return [*system, *asked], schemas or None


def _message(turn: Mapping[str, Any], where: str) -> Message:
    named, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(named, str) or named not in ROLES:
        raise UserError(
            where,
            got=f"the role {named!r}",
            expected=", ".join(ROLES),
            nearest=nearest(str(named), ROLES),
        )
    if isinstance(content, list):
        parts = mappings(content, where, "content")
        if other := next((part.get("type") for part in parts if "text" not in part), None):
            raise UserError(where, got=f"content with a part {other!r}", expected="parts of text")
        content = "".join(string(part.get("text") or "", where, "text") for part in parts)
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if named in CALLS:
        with refusing(ValueError, where, "a call that is no JSON", '{"name": …, "arguments": …}'):
            found = parse_json(string(content, where, "a call"))
        calls, content = found if isinstance(found, list) else [found], None
    message: Message = {"role": ROLES[named], "content": string(content or "", where, "content")}
    if calls:
        message["tool_calls"] = [
            _call(call, where) for call in mappings(calls, where, "tool_calls")
        ]
        message["content"] = message["content"] or None
    if message["role"] == "user" and content is None:
        raise UserError(
            where, got="a turn of the user without content", expected="its text, or parts of text"
        )
    if reasoning := next((turn[name] for name in REASONING if turn.get(name)), None):
        message[REASONING[0]] = string(reasoning, where, "reasoning")
    unread = [
        "refusal",
        "audio",
        *["reasoning_details"] * (not reasoning),
        *["channel"] * (turn.get("channel") != "final"),
    ]
    if other := next((name for name in unread if turn.get(name)), None):
        raise UserError(
            where,
            got=f"a turn with {other}, which is not read",
            expected="content, tool_calls, reasoning_content",
        )
    if turn.get("weight") not in (None, 0, 1):
        raise UserError(
            where, got=f"a turn of weight {turn['weight']!r}", expected="0, not learned, or 1"
        )
    if turn.get("weight") == 0:
        message["weight"] = 0
    return message | {name: turn[name] for name in ("name", "tool_call_id") if turn.get(name)}


def _call(call: Mapping[str, Any], where: str) -> Message:
    (function,) = mappings([call.get("function", call)], where, "a call")
    name, arguments = (
        string(function.get("name"), where, "a call's name"),
        function.get("arguments") or {},
    )
    with refusing(
        ValueError,
        where,
        f"a call of {name} with {shortened(str(arguments))!r}",
        "arguments as a JSON object",
    ):
        if not isinstance(
            parse_json(arguments) if isinstance(arguments, str) else arguments, Mapping
        ):
            raise ValueError("no object")
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({"id": call["id"]} if call.get("id") else {})


def _tools(tools: Any, where: str) -> list[Mapping[str, Any]]:
    """Schemas as OpenAI's API has them, {type: function, function: …}, from a list of these, of bare functions, or its JSON text."""
    with refusing(ValueError, where, "tools", "a list of schemas, or its JSON text"):
        found = parse_json(tools) if isinstance(tools, str) and tools else tools or []
    each = mappings(found, where, "tools")
    made: list[Mapping[str, Any]] = [
        tool
        if isinstance(tool.get("function"), Mapping)
        else {"type": "function", "function": tool}
        for tool in each
    ]
    for tool in made:
        string(tool["function"].get("name"), where, "a tool's name")
    return made


def _check_calls(messages: Sequence[Message], known: set[Any], where: str) -> None:
    open_calls: list[Any] = []  # ids of calls without a result yet
    for number, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if (name := call["function"]["name"]) not in known:
                expected = "the schema of each tool, in a column `tools`"
                raise UserError(
                    where, got=f"a call of {name} without its schema", expected=expected
                )
        if message["role"] != "tool":
            open_calls = [call.get("id") for call in message.get("tool_calls", ())]
            continue
        id = message.get("tool_call_id")
        own = id if id in open_calls else None
        if own not in open_calls and (id is not None or not open_calls):
            expected = "after the turn of the assistant that calls the tool"
            raise UserError(
                where, got=f"a tool result without a call, turn {number}", expected=expected
            )
        open_calls.remove(own if own in open_calls else open_calls[0])


def is_unanswered(message: Message) -> bool:
    """Whether it stands for a turn that is yet to be generated."""
    return (
        message["role"] == "assistant"
        and message["content"] is None
        and "tool_calls" not in message
    )


def is_learned(message: Message) -> bool:
    """Whether it is a turn of the assistant, and none that its row excludes by `weight` 0."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def mappings(value: Any, where: str, what: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise UserError(
            where, got=f"{what} of type {type(value).__name__}", expected="a list of objects"
        )
    for item in value:
        if not isinstance(item, Mapping):
            raise UserError(
                where,
                got=f"{what} with an item of type {type(item).__name__}",
                expected="a list of objects",
            )
    return value


def string(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(where, got=f"{what} of type {type(value).__name__}", expected="a string")
    return value


def use_template(tokenizer: Any, recipe: Any) -> None:
    """Replace a tokenizer's chat template by that of `data.chat_template`, if the recipe has data and names one."""
    if (path := getattr(getattr(recipe, "data", None), "chat_template", None)) is not None:
        with refusing(
            (OSError, UnicodeDecodeError), "data.chat_template", path, "a file with a chat template"
        ):
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        with (
            suppress(*TEMPLATE_ERRORS),
            refusing(TemplateSyntaxError, "data.chat_template", path, "a template of Jinja"),
        ):
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    generation_prompt: bool = False,
    where: str = "data.source",
    tools: Tools = None,
    **template: Any,
) -> str:
    """The conversation by the tokenizer's chat template. template: more of its arguments, e.g. enable_thinking."""
    if tokenizer.chat_template is None:
        got = "conversations for a target whose tokenizer has no chat template"
        raise UserError(
            where,
            got=got,
            expected="text rows, or data.chat_template, e.g. the template of its instruct model",
        )
    options: Any = {
        "tokenize": False,
        "add_generation_prompt": generation_prompt,
        "tools": tools or None,
        **template,
    }
    called = any(message.get("tool_calls") for message in messages)
    for form in _forms(messages) if called else ():
        with suppress(*TEMPLATE_ERRORS):  # raised below, if no form is taken
            rendered = str(tokenizer.apply_chat_template(form, **options))
            if not _is_miswritten(rendered, form):
                return rendered
    turns = f"turns {shortened(', '.join(message['role'] for message in messages))}"
    with refusing(
        TEMPLATE_ERRORS, where, turns, "a conversation that the target's chat template takes"
    ):
        rendered = str(
            tokenizer.apply_chat_template([_named(message) for message in messages], **options)
        )
    if called:
        raise UserError(
            where,
            got="calls of tools with a chat template that writes them as Python does",
            expected=ANOTHER,
        )
    return rendered


def _named(message: Message) -> Message:
    """With its reasoning by every name that templates read."""
    return (
        message | dict.fromkeys(REASONING, message[REASONING[0]])
        if REASONING[0] in message
        else message
    )


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """As they are; with the arguments of calls as objects, and as texts; each with None, and with "", for no content."""
    for blank in (None, ""):
        for as_arguments in (
            lambda it: it,
            lambda it: parse_json(it) if isinstance(it, str) else it,
            _as_text,
        ):
            form = copy.deepcopy([_named(message) for message in messages])
            for message in form:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = as_arguments(call["function"]["arguments"])
                    message["content"] = message["content"] or blank
            yield form


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _is_miswritten(rendered: str, messages: Sequence[Message]) -> bool:
    """Whether it holds Python's words for an object or for None, or a JSON text in quotes: a form that the template does not expect."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            wrong = (
                json.dumps(arguments, ensure_ascii=False)
                if isinstance(arguments, str)
                else repr(arguments)
            )
            if wrong in rendered and wrong != _as_text(arguments):
                return True
        if message["content"] is None and "None" in rendered:
            return True
    return False


def check_expressed(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools,
    where: str = "data.source",
    **template: Any,
) -> None:
    """Raises UserError naming what of a conversation the chat template ignores: it renders the same without.

    Messages of the system one by one: some templates render the first alone.
    """

    def rendered(messages: Sequence[Message], tools: Tools) -> str | None:
        try:
            return render(tokenizer, messages, False, where, tools, **template)
        except UserError:  # of a template that insists on what was taken out
            return None

    last = max(
        (number for number, message in enumerate(messages) if REASONING[0] in message), default=-1
    )
    parts: dict[str, tuple[Sequence[Message], Sequence[Message], Tools]] = {
        "schemas of tools": (messages, messages, None),
        "calls of tools": (
            messages,
            [_without("tool_calls", message) for message in messages],
            tools,
        ),
        "results of tools": (
            messages,
            [{**it, "content": ""} if it["role"] == "tool" else it for it in messages],
            tools,
        ),
        "reasoning": (
            messages[: last + 1],
            [_without(REASONING[0], message) for message in messages[: last + 1]],
            tools,
        ),
    }
    for number, message in enumerate(messages):
        if message["role"] == "system" and message["content"].strip():
            rest = [*messages[:number], {**message, "content": ""}, *messages[number + 1 :]]
            parts[f"messages of the system, e.g. number {number},"] = (messages, rest, tools)
    for what, (with_it, without, kept) in parts.items():
        if (with_it, tools) != (without, kept) and render(
            tokenizer, with_it, False, where, tools, **template
        ) == rendered(without, kept):
            raise UserError(
                where, got=f"{what} with a chat template that ignores them", expected=ANOTHER
            )


def _without(key: str, message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name != key}
    return {**kept, "content": kept["content"] or ""} if key in message else message


def shortened(text: str) -> str:
    """The beginning and the end of a text too long for an error message."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
