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
    """Tokenize the prompt from which the target generates the next turn of a conversation.

    The chat template ends the prompt with the tokens that open a turn of the assistant.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation. If it has turns of the assistant that are yet to be generated,
            the first of them and all messages after it are left out.
        tools: the tools that the conversation may call.
        template: additional arguments of the chat template, such as enable_thinking.

    Returns:
        The token ids of the prompt.
    """
    # The generation prompt is the opening of the assistant's turn. The template also writes the
    # special tokens, so the tokenizer adds none.
    rendered = render_chat(
        tokenizer,
        _select_known_messages(messages),
        generation_prompt=True,
        tools=tools,
        **template,
    )
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def _select_known_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the first turn that is yet to be generated."""
    return list(takewhile(lambda message: not is_unanswered(message), messages))


def list_turn_contexts(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages before each turn of the assistant that the draft learns from.

    Each yielded context is a prompt, from which the target can generate the turn anew. For example,
    [user, answer, user, answer] gives [user] and [user, answer, user].

    If the last message is not a turn of the assistant, its answer is yet to be generated. So the
    whole conversation is a prompt, too: [user, answer, user] gives [user] and [user, answer, user].

    A turn of the assistant may be empty, which means that it is yet to be generated. The first
    empty turn and the turns after it give no prompts. So [user, empty, user] gives only the whole
    conversation.
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
    """Check that the target can be prompted with a conversation.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        tools: the tools that the conversation may call.
        where: names the row in error messages.
        template: additional arguments of the chat template, such as enable_thinking.

    Raises:
        UserError: if no turn of the assistant is to be learned, or if the chat template leaves out
            a part of the conversation or rejects one of its prompts.
    """
    # The template must write the content of every message. Turns that are yet to be generated have
    # no content.
    answered = [message for message in messages if not is_unanswered(message)]
    check_expressed(tokenizer, answered, tools, where, **template)

    # There must be a prompt, and the template must accept each prompt. The prompt ends with the
    # opening of the assistant's turn (the generation prompt).
    prompts = list(list_turn_contexts(messages))
    if not prompts:
        raise UserError(
            where,
            got="a conversation in which no turn of the assistant is to be learned",
            expected="at least one turn of the assistant whose `weight` is not 0",
            kind=UNLEARNED,
        )
    for prompt in prompts:
        render_chat(
            tokenizer,
            _select_known_messages(prompt),
            generation_prompt=True,
            where=where,
            tools=tools,
            **template,
        )


def answer_documents(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools,
    where: str,
    *,
    loss_mask: str,
) -> list[tuple[str, Spans]]:
    """Render a conversation, with the answers that the data contains, as documents to train on.

    Usually that is one document. There are several if the chat template renders an earlier turn
    differently once other turns follow it (see `build_turn_documents`).

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        tools: the tools that the conversation may call.
        where: names the row in error messages.
        loss_mask: the tokens that carry loss. With `assistant`, these are the tokens of the
            assistant's turns, and documents without a turn to learn are left out. With `all`, all
            tokens carry loss, and all documents are returned.

    Returns:
        For each document its text, and the character spans [start, end) of the assistant's turns
        that are to be learned.

    Raises:
        UserError: if the content of an assistant's turn is missing, or if the chat template leaves
            out a part of the conversation. With `assistant` also if the conversation has no turn of
            the assistant, or none that is to be learned.
    """
    # Every turn of the assistant must have its content. If the loss is on the assistant's turns,
    # there must be at least one.
    by_turns = loss_mask == "assistant"
    has_answer = any(message["role"] == "assistant" for message in messages)
    if (by_turns and not has_answer) or any(map(is_unanswered, messages)):
        raise UserError(
            where,
            got=f"a prompt without an answer, {shorten_text(messages[-1]['content'] or '')!r}",
            expected="an answer in the row, or data.regenerate.num_tokens above 0, so that the"
            " target generates one (or data.loss_mask=all)",
            kind="prompt without an answer",
        )

    # Render the documents. If the loss is on turns, keep the documents that have a span to learn.
    documents = build_turn_documents(tokenizer, messages, tools, where, checks_turns=by_turns)
    if not by_turns:
        return documents
    learned = [(text, spans) for text, spans in documents if spans]
    if not learned:
        raise UserError(
            where,
            got="a conversation in which no turn of the assistant is to be learned",
            expected="at least one turn of the assistant whose `weight` is not 0 (or"
            " data.loss_mask=all)",
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
    """Render a conversation as texts to train on, and find the characters to learn in each text.

    Usually a conversation gives one text, called a document. Some chat templates render an earlier
    turn differently once other turns follow it, for example without its reasoning. The conversation
    up to that turn is then a document of its own, because the target generated the turn in the form
    that it has as the last turn.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        tools: the tools that the conversation may call.
        where: names the row in error messages.
        checks_turns: also check that the template does not change the assistant's turns.

    Returns:
        For each document its text, and the character spans [start, end) of the assistant's turns
        that are to be learned.

    Raises:
        UserError: if the template leaves out a part of the conversation; with `checks_turns` also
            if it changes a turn of the assistant.
    """
    # Raise an error if the template leaves out a part of the conversation.
    check_expressed(tokenizer, messages, tools, where)

    # Render the conversation up to each turn of the assistant. If the rendered text continues the
    # previous document, the text replaces that document and takes over its spans.
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
    conversation = render_chat(tokenizer, messages, where=where, tools=tools)
    if not documents:
        return [(conversation, [])]
    last_text, last_spans = documents[-1]
    if _has_prefix(conversation, last_text):
        documents[-1] = (conversation, last_spans)
    return documents


def find_inner_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return token ids that may occur inside an assistant's turn, such as <think> or <tool_call>.

    An answer with a special token in the middle usually is faulty. The special tokens that the chat
    template writes around reasoning and tool calls are the exception. They are found by rendering
    two example turns.
    """
    # A turn with reasoning (REASONING[0] is its key), and a turn with a tool call. `tool` has the
    # fields of a tool call and those of a tool's schema, so it serves as both.
    tool = {"type": "function", "function": {"name": "f", "arguments": {}, "parameters": {}}}
    turns: list[tuple[Message, Tools]] = [
        ({"role": "assistant", "content": "a", REASONING[0]: "b"}, None),
        ({"role": "assistant", "content": None, "tool_calls": [tool]}, [tool]),
    ]

    # Collect all tokens of the rendered turns, except the last token of each, which ends the turn.
    # Ordinary tokens among them do no harm.
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
    """Render a conversation that ends with the assistant, and find where its last turn stands.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation, whose last message is the assistant's turn.
        tools: the tools that the conversation may call.
        where: names the row in error messages.
        is_checked: check that the template does not change the turn.

    Returns:
        The rendered text, and the characters [start, end) of the last turn. Some templates render
        the earlier messages differently once the turn follows them: that of gpt-oss drops the
        reasoning before a final answer. The text is then the prompt that the target read, followed
        by the turn.

    Raises:
        UserError: with `is_checked`, for a template that changes the content of the turn.
    """
    *before, turn = messages
    rendered = render_chat(tokenizer, messages, where=where, tools=tools)
    start = 0
    if before:
        # Render the earlier messages with the opening of the assistant's turn (`prompt`, from which
        # the target generated the turn), and without it (`rendered_before`).
        prompt = render_chat(tokenizer, before, generation_prompt=True, where=where, tools=tools)
        rendered_before = render_chat(tokenizer, before, where=where, tools=tools)
        follows_before = _has_prefix(rendered, rendered_before)

        # The turn starts where the text differs from the prompt that the target read, but not
        # before the end of the earlier messages.
        start = count_common_prefix(prompt, rendered)
        if follows_before:
            start = max(start, len(rendered_before.rstrip()))

        # If the text begins neither with the prompt nor with the earlier messages, the template
        # renders those differently once the turn follows them, for example without their reasoning.
        # The document is then the whole prompt, followed by the rendered turn. MARKER shows where
        # the content of the turn begins.
        if start < len(prompt) and not follows_before:
            opening = prompt.removeprefix(rendered_before)
            marked = render_chat(tokenizer, [*before, _mark_turn(turn)], where=where, tools=tools)
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
    # Templates write white space after a turn, which is no part of it.
    return rendered, (start, max(start, len(rendered.rstrip())))


def _mark_turn(turn: Message) -> Message:
    """Return a copy of a turn in which MARKER replaces the part that chat templates render first.

    The part is the reasoning (key REASONING[0]); without reasoning, the content; without content,
    the names of the tools that the turn calls. In the rendered text, MARKER then shows where the
    turn begins.
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

    Chat templates write white space after a turn, which the target does not generate.
    """
    return longer.startswith(shorter.rstrip())


def count_common_prefix(first: str, second: str) -> int:
    """Return how many characters two strings have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
