"""Conversations of agents in templates like those of five families, compared with tokens written by
hand and with `apply_chat_template`."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from specdistill.data.produce.sources import COLUMNS, normalize_row
from specdistill.data.rows.chat import build_turn_documents, find_inner_ids
from specdistill.data.rows.encoding import Encoder
from specdistill.evaluation.suites.conversations import render_chat, use_template
from tests.refusals import refused
from tests.tiny import tiny_tokenizer

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8").removesuffix("\n")
    for path in Path(__file__).parent.glob("chat_templates/*.jinja")
}
# the key that each template reads
REASONING = {"qwen3": "reasoning_content", "harmony": "thinking", "kimi": "reasoning"}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}
USER, MORE = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "Thanks"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT, ANSWER, BYE = (
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "assistant", "content": "Bye"},
)
WHOLE: list[dict[str, Any]] = [USER, CALL, RESULT, ANSWER, MORE, BYE]
SYSTEM, DEVELOPER = (
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Count."},
)
THREE = [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}]
WORDS = ["ü", "“q”", "x < y & z", "a\nb"]


def add_reasoning(message: dict[str, Any], thought: str = "hm") -> dict[str, Any]:
    return {**message, "reasoning_content": thought}


def make_call(arguments: Any, content: str | None = None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
    }


FIND = {"type": "function", "function": {"name": "find", "parameters": {}}}
BOTH = [
    {"id": "add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
    {"id": "find:1", "type": "function", "function": {"name": "find", "arguments": {"x": "y"}}},
]
IN_ANOTHER_ORDER = [
    {"role": "tool", "content": "one", "tool_call_id": "find:1"},
    {"role": "tool", "content": "2", "tool_call_id": "add:0"},
]
QUOTED: list[dict[str, Any]] = [
    {"role": "user", "content": 'Add “1” in 日本語, "please".'},
    make_call({"q": '“ü” "日本"\n</x> & é\\'}),
    {"role": "tool", "content": '{"r": "é \\"2\\""}'},
    {"role": "assistant", "content": '“é”\n"2"'},
]
NESTED = {"a": [1, None, -0.5, True], "b": {"c": {}, "d": "", "e": [[]]}}
# Conversations with the schemas of their tools; by_hand/FAMILY.txt has a dozen of them as that
# family's template renders them.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "an answer": ([USER, ANSWER], None),
    "a system message": ([SYSTEM, USER, ANSWER, MORE, BYE], None),
    "messages of the system and of a developer": ([SYSTEM, DEVELOPER, USER, ANSWER], None),
    "a developer's message": ([DEVELOPER, USER, add_reasoning(CALL), RESULT, ANSWER], [SCHEMA]),
    "a question at the end": ([USER, ANSWER, MORE], None),
    "tools that nobody calls": ([SYSTEM, USER, ANSWER], [SCHEMA]),
    "a call and another question": (WHOLE, [SCHEMA]),
    "a call at the end": ([USER, CALL], [SCHEMA]),
    "a call after a result": ([USER, CALL, RESULT, make_call({"a": 2}), *THREE], [SCHEMA]),
    "words before a call": ([USER, make_call({"a": 1}, "Let me add."), RESULT, ANSWER], [SCHEMA]),
    "a call without arguments, and no result": (
        [USER, make_call({}, ""), {**RESULT, "content": ""}, ANSWER],
        [SCHEMA],
    ),
    "nested arguments": ([USER, make_call(NESTED), RESULT, ANSWER], [SCHEMA]),
    "quotes and other alphabets": (QUOTED, [SCHEMA]),
    "two calls, and their results in another order": (
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": BOTH},
            *IN_ANOTHER_ORDER,
            ANSWER,
        ],
        [SCHEMA, FIND],
    ),
    "reasoning": ([USER, add_reasoning(ANSWER)], None),
    "reasoning in two exchanges": (
        [USER, add_reasoning(ANSWER), MORE, add_reasoning(BYE, "well")],
        None,
    ),
    "reasoning after each result": (
        [
            USER,
            add_reasoning(CALL),
            RESULT,
            add_reasoning(make_call({"a": 2}), "well"),
            THREE[0],
            add_reasoning(THREE[1], "so"),
        ],
        [SCHEMA],
    ),
    "reasoning and words before a call": (
        [USER, add_reasoning(make_call({"a": 1}, "Let me add.")), RESULT, ANSWER],
        [SCHEMA],
    ),
}


def read_hand_written(family: str) -> dict[str, list[str]]:
    """Return the documents of each conversation by its name; the loss is on text between «»."""
    text = (Path(__file__).parent / "by_hand" / f"{family}.txt").read_text(encoding="utf-8")
    _, *parts = re.split(r"^== (.*)\n", text, flags=re.MULTILINE)
    return {
        name: body.removesuffix("\n").split("\n--\n")
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


BY_HAND = [
    (family, name, documents)
    for family in TEMPLATES
    for name, documents in read_hand_written(family).items()
]


def encode_row(
    tokenizer: PreTrainedTokenizerBase, raw: dict[str, Any], loss_mask: str = "assistant"
) -> dict[str, list[Any]]:
    (row,) = normalize_row(raw, "row 0", tokenizer)
    documents = Encoder(tokenizer, loss_mask, 10_000)({**dict.fromkeys(COLUMNS), **row}, 0)
    return {name: [document[name] for document in documents] for name in documents[0]}


@pytest.mark.parametrize(("family", "name", "documents"), BY_HAND)
def test_tokens_and_their_loss_equal_hand_written_ones(
    family: str, name: str, documents: list[str]
) -> None:
    tokenizer, (messages, tools) = tiny_tokenizer(TEMPLATES[family]), CONVERSATIONS[name]
    encoded_row = encode_row(tokenizer, {"messages": messages, "tools": tools})
    assert len(encoded_row["input_ids"]) == len(documents)
    for document, ids, mask in zip(
        documents, encoded_row["input_ids"], encoded_row["loss_mask"], strict=True
    ):
        pieces = [
            (piece, number % 2)
            for number, piece in enumerate(document.replace("»", "«").split("«"))
        ]
        assert tokenizer.decode(ids) == "".join(piece for piece, _ in pieces)
        assert ids.tolist() == tokenizer("".join(piece for piece, _ in pieces))["input_ids"]
        assert mask.tolist() == [
            flag for piece, flag in pieces for _ in tokenizer(piece)["input_ids"]
        ]
    everything = encode_row(tokenizer, {"messages": messages, "tools": tools}, "all")
    assert all(mask.all() for mask in everything["loss_mask"])


def make_agent_row(generator: random.Random, family: str) -> dict[str, Any]:
    """Return a row with calls, their results and reasoning. The assistant's texts are marked [[a…]]
    and those of others [[o…]]."""
    marks = iter(range(1000))

    def make_text(by: str) -> str:
        return f"[[{by}{next(marks)}]] {generator.choice(WORDS)}."

    turns: list[dict[str, Any]] = (
        [{"role": "system", "content": make_text("o")}] if generator.random() < 0.5 else []
    )
    for _ in range(generator.randint(1, 3)):
        turns.append({"role": "user", "content": make_text("o")})
        for _ in range(generator.randint(0, 2)):
            arguments: Any = {"n": make_text("a").replace("\n", " "), "deep": {"x": [1, None]}}
            arguments = (
                json.dumps(arguments, ensure_ascii=False) if family == "deepseek" else arguments
            )
            call = {
                "id": f"add:{next(marks)}",
                "type": "function",
                "function": {"name": "add", "arguments": arguments},
            }
            content = make_text("a") if family == "deepseek" or generator.random() < 0.3 else None
            turns.append({"role": "assistant", "content": content, "tool_calls": [call]})
            turns.append(
                {
                    "role": "tool",
                    "content": make_text("o").replace("\n", " "),
                    "tool_call_id": call["id"],
                }
            )
        turns.append({"role": "assistant", "content": make_text("a")})
    for turn in turns:
        if turn["role"] == "assistant" and family in REASONING and generator.random() < 0.5:
            turn[REASONING[family]] = make_text("a")
    return {
        "messages": turns,
        "tools": [SCHEMA] if any("tool_calls" in turn for turn in turns) else None,
    }


@pytest.mark.parametrize("family", TEMPLATES)
def test_each_turn_has_the_tokens_of_the_template_and_carries_loss_once(family: str) -> None:
    """The marks in the texts show that exactly the assistant's texts carry loss, in each of 40
    conversations."""
    tokenizer, generator = tiny_tokenizer(TEMPLATES[family]), random.Random(family)
    for _ in range(40):
        row = make_agent_row(generator, family)
        encoded_row = encode_row(tokenizer, row)
        texts = [str(tokenizer.decode(ids)) for ids in encoded_row["input_ids"]]
        turns = [
            number for number, turn in enumerate(row["messages"]) if turn["role"] == "assistant"
        ]
        for turn in turns:
            options: dict[str, Any] = {"tools": row["tools"], "tokenize": False}
            prompt = str(
                tokenizer.apply_chat_template(
                    row["messages"][:turn], add_generation_prompt=True, **options
                )
            )
            done = str(
                tokenizer.apply_chat_template(row["messages"][: turn + 1], **options)
            ).rstrip()
            # a final answer, before which gpt-oss's template drops what was read
            if not done.startswith(prompt):
                assert family == "harmony"
                content, thought = (
                    row["messages"][turn]["content"],
                    row["messages"][turn].get("thinking"),
                )
                analysis = (
                    f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
                    if thought
                    else ""
                )
                done = f"{prompt}{analysis}<|channel|>final<|message|>{content}<|return|>"
            assert any(text.startswith(done) for text in texts)
        whole: Any = tokenizer.apply_chat_template(row["messages"], tools=row["tools"])
        assert family == "harmony" or encoded_row["input_ids"][-1].tolist() == whole["input_ids"]
        learned = ""
        for ids, mask in zip(encoded_row["input_ids"], encoded_row["loss_mask"], strict=True):
            learned += str(
                tokenizer.decode(
                    [token for token, flag in zip(ids.tolist(), mask.tolist(), strict=True) if flag]
                )
            )
        assistant_json = json.dumps(
            [turn for turn in row["messages"] if turn["role"] == "assistant"]
        )
        assert sorted(part.split("]]")[0] for part in learned.split("[[")[1:]) == sorted(
            part.split("]]")[0] for part in assistant_json.split("[[")[1:]
        )


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "row", "got"),
    [
        (PLAIN, {"messages": WHOLE, "tools": [SCHEMA]},
            "schemas of tools which the chat template ignores"),
        (PLAIN + "{{ tools | length }}", {"messages": WHOLE, "tools": [SCHEMA]},
            "calls of tools which the chat template ignores"),
        (
            PLAIN + "{{ tools | length }}{{ messages | tojson | length }}",
            {"messages": WHOLE, "tools": [SCHEMA]},
            "a chat template that changes the assistant's content",
        ),
        (PLAIN, {"messages": [USER, add_reasoning(ANSWER)]},
            "reasoning which the chat template ignores"),
        (TEMPLATES["hermes"], {"messages": [USER, add_reasoning(ANSWER)]},
            "reasoning which the chat template ignores"),
        (TEMPLATES["hermes"], {"messages": [SYSTEM, DEVELOPER, USER, ANSWER]},
            "messages of the system, e.g. number 1, which the chat template ignores"),
        (TEMPLATES["harmony"],
            {"messages": [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}], "tools": [SCHEMA]},
                "turns user"),
    ],
)  # fmt: skip
def test_a_row_that_the_template_cannot_express_is_refused_by_name(
    template: str, row: dict[str, Any], got: str
) -> None:
    with refused("data.source row 1", got):
        encode_row(tiny_tokenizer(template), row)


def test_a_file_that_is_no_template_is_refused_before_any_row(tmp_path: Path) -> None:
    for content in (b"{% for m in messages %}{{ m.content }", b"\xff"):
        (tmp_path / "mine.jinja").write_bytes(content)
        with refused("data.chat_template", tmp_path / "mine.jinja"):
            use_template(
                tiny_tokenizer(),
                SimpleNamespace(data=SimpleNamespace(chat_template=str(tmp_path / "mine.jinja"))),
            )


def test_tokens_around_calls_and_reasoning_are_no_sign_of_a_fault() -> None:
    """Tokens of headers and of the end of a turn remain a sign of a fault."""
    template = (
        TEMPLATES["qwen3"]
        .replace("<|im_start|>", "<|user|>")
        .replace("<|im_end|>", "<|end|>")
        .replace("<tool_call>", "<|assistant|>")
    )
    tokenizer = tiny_tokenizer(template)
    assert find_inner_ids(tokenizer).intersection(tokenizer.all_special_ids) == {
        tokenizer.convert_tokens_to_ids("<|assistant|>")
    }
    assert not find_inner_ids(tiny_tokenizer(None))


def test_arguments_are_given_as_the_template_takes_them() -> None:
    """A template gets an object or its text, whichever the row has; a text stays as it is if the
    template takes both."""
    for family, arguments, rendered in (
        ("hermes", '{"b":2}', '"arguments": {"b": 2}'),
        ("qwen3", '{"b":2}', '"arguments": {"b":2}'),
        ("harmony", '{"b":2}', '<|message|>{"b": 2}<|call|>'),
        ("kimi", '{"b":2}', '<|tool_call_argument_begin|>{"b":2}<'),
        ("deepseek", {"b": 2}, '<｜tool▁sep｜>{"b": 2}<'),
    ):
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
        }
        assert rendered in render_chat(
            tiny_tokenizer(TEMPLATES[family]), [USER, call], tools=[SCHEMA]
        )
    printed = (
        PLAIN
        + "{% for m in messages %}{% for it in m.tool_calls or [] %}{{ it.function.arguments }}{%"
        " endfor %}{% endfor %}"
    )
    assert '{"b": 2}' in render_chat(tiny_tokenizer(printed), [USER, call])


@pytest.mark.parametrize("family", TEMPLATES)
def test_public_calls_of_tools_are_rendered_whole(shared_data: Path, family: str) -> None:
    rows = json.loads(
        (shared_data / "train" / "conversations" / "glaive_toolcall_en_demo.json").read_text()
    )[:40]
    tokenizer = tiny_tokenizer(TEMPLATES[family])
    for raw in rows:
        (row,) = normalize_row(raw, "row 0", tokenizer)
        documents = build_turn_documents(tokenizer, row["messages"], row["tools"])
        learned = "".join(text[start:end] for text, spans in documents for start, end in spans)
        for turn in row["messages"]:
            for call in turn.get("tool_calls", ()):
                assert call["function"]["name"] in learned
            assert (turn["role"] == "assistant") == (
                (turn["content"] or "").strip() in learned
            ) or not turn["content"]
