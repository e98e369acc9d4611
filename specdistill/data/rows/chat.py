"""Find the assistant's turns in the text that the target's chat template renders.

`specdistill.data.rows.encoding` turns the character spans that are found here into the loss mask.

A turn starts where the conversation before it, rendered with the generation prompt, ends. It ends
where the conversation up to and including it ends. Its reasoning, its tool calls and the closing
text belong to the turn, because the target has to generate them too.

Some templates render a turn differently once other turns follow it, for example without its
reasoning. The target generated the turn in the form that it has as the last one. Where the text of
a conversation does not begin with the text of the conversation up to a turn, that earlier text is a
document of its own.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdistill.common.errors import UserError
from specdistill.evaluation.suites.conversations import (
    ALTERED,
    REASONING,
    UNLEARNED,
    Message,
    Tools,
    check_expressed,
    is_learned,
    is_unanswered,
    render_chat,
    shorten_text,
)

Spans = list[tuple[int, int]]  # characters [start, end) of a text
# A content that no conversation has. Rendering it shows where a template puts the content.
MARKER = "[[specdistill-marks-this-place]]"
MASKABLE_TEMPLATE_HINT = (
    "a template that renders the content unchanged (data.chat_template), or data.loss_mask=all"
)


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools = None,
    **template: Any,
) -> list[int]:
    """Tokenize a conversation up to its first turn to generate, with the generation prompt.

    Args:
        tokenizer: the target's.
        messages: the conversation. The first unanswered turn of the assistant and the messages
            after it are left out.
        tools: the tools that the conversation may call.
        template: additional arguments of the chat template, such as enable_thinking.

    Returns:
        The token ids.
    """
    rendered = render_chat(
        tokenizer, _select_known_messages(messages), True, tools=tools, **template
    )
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def _select_known_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the first turn that is yet to be generated."""
    return list(takewhile(lambda message: not is_unanswered(message), messages))


def list_turn_contexts(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages before each turn of the assistant that is to be learned.

    Turns after the first one that is yet to be generated are not considered. A conversation that
    does not end with the assistant's turn is also yielded whole, at the end, because its answer is
    yet to be generated.
    """
    for number, message in enumerate(messages):
        if is_unanswered(message):
            break
        if is_learned(message):
            yield messages[:number]
    if messages[-1]["role"] != "assistant":
        yield messages


def check_prompts(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools,
    where: str,
    **template: Any,
) -> None:
    """Check that a conversation gives a prompt, and that the chat template renders it whole.

    Args:
        tokenizer: the target's.
        messages: the conversation.
        tools: the tools that it may call.
        where: the name of the row in errors.
        template: additional arguments of the chat template, such as enable_thinking.

    Raises:
        UserError: for a conversation that gives no prompt, or that the template does not render
            whole.
    """
    # The template must write the content of every recorded message.
    answered = [message for message in messages if not is_unanswered(message)]
    check_expressed(tokenizer, answered, tools, where, **template)

    # There must be a prompt, and the template must accept each prompt.
    prompts = list(list_turn_contexts(messages))
    if not prompts:
        raise UserError(
            where,
            got="a conversation without a turn of the assistant to learn",
            expected="a turn of the assistant whose weight is not 0",
            kind=UNLEARNED,
        )
    for prompt in prompts:
        render_chat(tokenizer, _select_known_messages(prompt), True, where, tools, **template)


def answer_documents(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools,
    where: str,
    *,
    loss_mask: str,
) -> list[tuple[str, Spans]]:
    """Render a conversation with its recorded answers as documents to train on.

    Args:
        tokenizer: the target's.
        messages: the conversation.
        tools: the tools that it may call.
        where: the name of the row in errors.
        loss_mask: `assistant` returns the documents in which a turn is learned; `all` returns every
            document.

    Returns:
        The documents in the form that `build_turn_documents` returns.

    Raises:
        UserError: for a turn that is yet to be generated, and for a conversation that the template
            does not render whole. With `assistant` also for a conversation without an answer, or
            without a turn that is learned.
    """
    # Every turn of the assistant must be recorded. For a loss on turns there must be one.
    by_turns = loss_mask == "assistant"
    has_answer = any(message["role"] == "assistant" for message in messages)
    if (by_turns and not has_answer) or any(map(is_unanswered, messages)):
        raise UserError(
            where,
            got=f"a prompt without an answer, {shorten_text(messages[-1]['content'] or '')!r}",
            expected="an answer, or data.regenerate.num_tokens above 0, so that the target gives"
            " one (or data.loss_mask=all)",
            kind="prompt without an answer",
        )

    # Render the documents. For a loss on turns, keep those in which a turn is learned.
    documents = build_turn_documents(tokenizer, messages, tools, where, checks_turns=by_turns)
    if not by_turns:
        return documents
    learned = [document for document in documents if document[1]]
    if not learned:
        raise UserError(
            where,
            got="a conversation without a turn of the assistant to learn",
            expected="a turn of the assistant whose weight is not 0 (or data.loss_mask=all)",
            kind=UNLEARNED,
        )
    return learned


def build_turn_documents(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools = None,
    where: str = "data.source",
    *,
    checks_turns: bool = True,
) -> list[tuple[str, Spans]]:
    """Render a conversation as documents, and find the characters to learn in each.

    There is one document, unless the template renders earlier turns differently once other turns
    follow them. Each form in which the target generated a turn is then a document.

    Args:
        tokenizer: the target's.
        messages: the conversation.
        tools: the tools that it may call.
        where: the name of the row in errors.
        checks_turns: also check that every turn of the assistant is rendered whole.

    Returns:
        For each document its text, and the character spans [start, end) of the assistant's turns
        that are to be learned.

    Raises:
        UserError: for a conversation that the template does not render whole; with `checks_turns`
            also for such a turn.
    """
    check_expressed(tokenizer, messages, tools, where)

    # Render the conversation up to each turn of the assistant. If the text continues the previous
    # document, it replaces that document and takes over its spans.
    documents: list[tuple[str, Spans]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        rendered, span = _render_turn(tokenizer, messages[: number + 1], tools, where, checks_turns)
        spans: Spans = []
        if documents and _has_prefix(rendered, documents[-1][0]):
            _, spans = documents.pop()
        if is_learned(message):
            spans = [*spans, span]
        documents.append((rendered, spans))

    # Messages after the last turn of the assistant, and text that the template writes only at the
    # end of the conversation, extend the last document.
    conversation = render_chat(tokenizer, messages, False, where, tools)
    if not documents:
        documents.append((conversation, []))
    elif _has_prefix(conversation, documents[-1][0]):
        documents[-1] = (conversation, documents[-1][1])
    return documents


def find_inner_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens by which the target marks reasoning and tool calls inside its turns.

    They are special tokens of the chat template, but they are no sign of a faulty answer.
    """
    # One object that serves both as a tool call and as the schema of that tool.
    tool = {"type": "function", "function": {"name": "f", "arguments": {}, "parameters": {}}}
    turns: list[tuple[Message, Tools]] = [
        ({"role": "assistant", "content": "a", REASONING[0]: "b"}, None),
        ({"role": "assistant", "content": None, "tool_calls": [tool]}, [tool]),
    ]

    # Render a turn with reasoning and a turn with a tool call. All tokens of the turn, except the
    # one that ends it, are tokens that a turn may have.
    inner_token_ids: set[int] = set()
    for turn, tools in turns:
        try:
            text, spans = build_turn_documents(
                tokenizer, [{"role": "user", "content": "c"}, turn], tools, checks_turns=False
            )[-1]
        except UserError:  # The template has no reasoning, or no tools.
            continue
        start, end = spans[-1]
        inner_token_ids.update(
            tokenizer(text[start:end], add_special_tokens=False)["input_ids"][:-1]
        )
    return inner_token_ids


def _render_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools,
    where: str,
    is_checked: bool,
) -> tuple[str, tuple[int, int]]:
    """Render a conversation, and find the span of its last turn.

    Some templates render the earlier messages differently once the turn follows them. The text is
    then the prompt that the target read, followed by the turn.

    Args:
        tokenizer: the target's.
        messages: the conversation up to and including the turn.
        tools: the tools that it may call.
        where: the name of the row in errors.
        is_checked: check that the turn is rendered whole.

    Returns:
        The text, and the characters [start, end) of the turn.

    Raises:
        UserError: with `is_checked`, for a template that changes the content of the turn.
    """
    *before, turn = messages
    rendered = render_chat(tokenizer, messages, False, where, tools)
    start = 0
    if before:
        prompt = render_chat(tokenizer, before, True, where, tools)
        rendered_before = render_chat(tokenizer, before, False, where, tools)
        follows_before = _has_prefix(rendered, rendered_before)

        # The turn starts where the text differs from the prompt that the target read, but not
        # before the end of the earlier messages.
        start = count_common_prefix(prompt, rendered)
        if follows_before:
            start = max(start, len(rendered_before.rstrip()))

        # Some templates put more into the prompt (an empty thought) than they render in a finished
        # turn. The document is then the whole prompt, followed by the rendered turn. MARKER shows
        # where the content of the turn begins.
        if start < len(prompt) and not follows_before:
            opening = prompt.removeprefix(rendered_before)
            marked = render_chat(tokenizer, [*before, _mark_turn(turn)], False, where, tools)
            place = marked.partition(MARKER)[0].rfind(opening)
            turn_start = place + len(opening) if place >= 0 else len(rendered)
            rendered = prompt + rendered[turn_start:]
            start = len(prompt)

    # The turn must contain its content, its reasoning and the names of the tools that it calls.
    parts = [
        (turn["content"] or "").strip(),
        turn.get(REASONING[0], "").strip(),
        *(call["function"]["name"] for call in turn.get("tool_calls", ())),
    ]
    if is_checked and not all(part in rendered[start:] for part in parts):
        raise UserError(
            where,
            got=(
                "a chat template that changes the assistant's content in"
                f" {shorten_text(rendered)!r}"
            ),
            expected=MASKABLE_TEMPLATE_HINT,
            kind=ALTERED,
        )
    return rendered, (start, max(start, len(rendered.rstrip())))


def _mark_turn(turn: Message) -> Message:
    """Return a turn with MARKER in place of the part that templates render first.

    The first part is the reasoning, or else the content, or else the name of the called tools.
    """
    if REASONING[0] in turn:
        return {**turn, REASONING[0]: MARKER}
    if turn["content"]:
        return {**turn, "content": MARKER}
    calls = [
        {**call, "function": {**call["function"], "name": MARKER}}
        for call in turn.get("tool_calls", ())
    ]
    return {**turn, "tool_calls": calls}


def _has_prefix(longer: str, shorter: str) -> bool:
    """Return whether `longer` begins with `shorter`, ignoring white space at the end of `shorter`.

    White space after the last turn does not count, because the target does not generate it.
    """
    return longer.startswith(shorter.rstrip())


def count_common_prefix(first: str, second: str) -> int:
    """Return how many characters two strings have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
