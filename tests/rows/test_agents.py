"""Conversations of agents by templates in the manner of five families: tokens written by hand, and those of `apply_chat_template`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from specdistill.produce.sources import COLUMNS, normalise
from specdistill.rows.chat import inner_ids, turn_documents
from specdistill.rows.encoding import Encoder
from specdistill.suites.conversations import render
from tests.refusals import refused
from tests.tiny import tiny_tokenizer

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8").removesuffix("\n")
    for path in Path(__file__).parent.glob("chat_templates/*.jinja")
}
REASONING = {"qwen3": "reasoning_content", "harmony": "thinking", "kimi": "reasoning"}  # the key that each template reads
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}
BARE = '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}'
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
WHOLE = [USER, CALL, RESULT, ANSWER, MORE, BYE]


WORDS = ["ü", "“q”", "x < y & z", "a\nb"]
OPENED = (
    '<|start|>system<|message|>You are ChatGPT.<|end|><|start|>developer<|message|>Count.namespace functions { type add = (_: {"a": 1})'
    " => any; }<|end|><|start|>user<|message|>1+1?<|end|><|start|>assistant"
)


def thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning_content": "hm"}


# (template, messages, whether they have tools) -> documents, of which the loss is on what is between «».
BY_HAND = [
    ("hermes", [USER, ANSWER], False, ["<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«It is 2.<|im_end|>»\n"]),
    (
        "hermes",
        WHOLE,
        True,
        [
            f"<|im_start|>system\n<tools>\n{BARE}\n</tools><|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
            '«<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»\n<|im_start|>user\n<tool_response>\n2\n'
            "</tool_response><|im_end|>\n<|im_start|>assistant\n«It is 2.<|im_end|>»\n<|im_start|>user\nThanks<|im_end|>\n"
            "<|im_start|>assistant\n«Bye<|im_end|>»\n"
        ],
    ),
    (
        "qwen3",
        [USER, thinking(ANSWER), MORE, thinking(BYE)],
        False,
        [
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nIt is 2.<|im_end|>»\n",
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nIt is 2.<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n"
            "<|im_start|>assistant\n«<think>\nhm\n</think>\n\nBye<|im_end|>»\n",
        ],
    ),
    (
        "qwen3",  # until the next question the reasoning stays
        [USER, thinking(CALL), RESULT, thinking(ANSWER)],
        True,
        [
            f"<|im_start|>system\n<tools>\n{BARE}\n</tools><|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«<think>\n"
            'hm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»\n<|im_start|>user\n'
            "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nIt is 2.<|im_end|>»\n"
        ],
    ),
    (
        "harmony",
        [USER, thinking(ANSWER)],
        False,
        [
            "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>1+1?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 2.<|return|>»"
        ],
    ),
    (
        "harmony",
        [{"role": "developer", "content": "Count."}, USER, thinking(CALL), RESULT, ANSWER],
        True,
        [
            OPENED + "«<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>»<|start|>functions.add to=assistant'
            '<|channel|>commentary<|message|>"2"<|end|><|start|>assistant«<|channel|>final<|message|>It is 2.<|return|>»'
        ],
    ),
    (
        "kimi",
        [USER, thinking(CALL), RESULT, ANSWER],
        True,
        [
            f"<|im_system|>tool_declare<|im_middle|>[{BARE}]<|im_end|><|im_user|>user<|im_middle|>1+1?<|im_end|><|im_assistant|>assistant"
            "<|im_middle|>«<think>hm</think><|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>»<|im_system|>tool<|im_middle|>## Return of call\n2<|im_end|>'
            "<|im_assistant|>assistant<|im_middle|>«It is 2.<|im_end|>»"
        ],
    ),
    (
        "deepseek",
        [{"role": "system", "content": "Count."}, USER, CALL, RESULT, ANSWER, MORE, BYE],
        True,
        [
            '<｜begin▁of▁sentence｜>Count.\n\n## Tools\n### add\n{"a": 1}<｜User｜>1+1?<｜Assistant｜>'
            '«<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            "<｜end▁of▁sentence｜>»<｜tool▁output▁begin｜>2<｜tool▁output▁end｜>"
            "«It is 2.<｜end▁of▁sentence｜>»<｜User｜>Thanks<｜Assistant｜>«Bye<｜end▁of▁sentence｜>»"
        ],
    ),
]  # fmt: skip


def encoded(tokenizer: PreTrainedTokenizerBase, raw: dict[str, Any], loss_mask: str = "assistant") -> dict[str, list[Any]]:
    (row,) = normalise(raw, "row 0", tokenizer)
    documents = Encoder(tokenizer, loss_mask, 10_000)({**dict.fromkeys(COLUMNS), **row}, 0)
    return {name: [document[name] for document in documents] for name in documents[0]}


@pytest.mark.parametrize(("family", "messages", "has_tools", "documents"), BY_HAND)
def test_tokens_and_their_loss_are_what_one_writes_by_hand(
    family: str, messages: list[Any], has_tools: bool, documents: list[str]
) -> None:
    tokenizer = tiny_tokenizer(TEMPLATES[family])
    made = encoded(tokenizer, {"messages": messages, "tools": [SCHEMA] if has_tools else None})
    assert len(made["input_ids"]) == len(documents)
    for document, ids, mask in zip(documents, made["input_ids"], made["loss_mask"], strict=True):
        pieces = [(said, number % 2) for number, said in enumerate(document.replace("»", "«").split("«"))]
        assert tokenizer.decode(ids) == "".join(said for said, _ in pieces)
        assert ids.tolist() == tokenizer("".join(said for said, _ in pieces))["input_ids"]
        assert mask.tolist() == [flag for said, flag in pieces for _ in tokenizer(said)["input_ids"]]
    everything = encoded(tokenizer, {"messages": messages, "tools": [SCHEMA] if has_tools else None}, "all")
    assert all(mask.all() for mask in everything["loss_mask"])


def agent(generator: random.Random, family: str) -> dict[str, Any]:
    """A row with calls, their results and reasoning, its marks [[a…]] in what the assistant says and [[o…]] in what others do."""
    marks = iter(range(1000))

    def said(by: str) -> str:
        return f"[[{by}{next(marks)}]] {generator.choice(WORDS)}."

    turns: list[dict[str, Any]] = [{"role": "system", "content": said("o")}] if generator.random() < 0.5 else []
    for _ in range(generator.randint(1, 3)):
        turns.append({"role": "user", "content": said("o")})
        for _ in range(generator.randint(0, 2)):
            arguments: Any = {"n": said("a").replace("\n", " "), "deep": {"x": [1, None]}}
            arguments = json.dumps(arguments, ensure_ascii=False) if family == "deepseek" else arguments
            call = {"id": f"add:{next(marks)}", "type": "function", "function": {"name": "add", "arguments": arguments}}
            content = said("a") if family == "deepseek" or generator.random() < 0.3 else None
            turns.append({"role": "assistant", "content": content, "tool_calls": [call]})
            turns.append({"role": "tool", "content": said("o").replace("\n", " "), "tool_call_id": call["id"]})
        turns.append({"role": "assistant", "content": said("a")})
    for turn in turns:
        if turn["role"] == "assistant" and family in REASONING and generator.random() < 0.5:
            turn[REASONING[family]] = said("a")
    return {"messages": turns, "tools": [SCHEMA] if any("tool_calls" in turn for turn in turns) else None}


@pytest.mark.parametrize("family", TEMPLATES)
def test_tokens_are_those_of_the_target_s_own_template(family: str) -> None:
    """Of each turn of 40 conversations, which carries loss once, as it was generated: marks say whose tokens these are."""
    tokenizer, generator = tiny_tokenizer(TEMPLATES[family]), random.Random(family)
    for _ in range(40):
        row = agent(generator, family)
        made = encoded(tokenizer, row)
        texts = [str(tokenizer.decode(ids)) for ids in made["input_ids"]]
        turns = [number for number, turn in enumerate(row["messages"]) if turn["role"] == "assistant"]
        for turn in turns:
            given: dict[str, Any] = {"tools": row["tools"], "tokenize": False}
            prompt = str(tokenizer.apply_chat_template(row["messages"][:turn], add_generation_prompt=True, **given))
            done = str(tokenizer.apply_chat_template(row["messages"][: turn + 1], **given)).rstrip()
            if not done.startswith(prompt):  # a final answer, before which gpt-oss's template drops what was read
                assert family == "harmony"
                said, thought = row["messages"][turn]["content"], row["messages"][turn].get("thinking")
                analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
                done = f"{prompt}{analysis}<|channel|>final<|message|>{said}<|return|>"
            assert any(text.startswith(done) for text in texts)
        whole: Any = tokenizer.apply_chat_template(row["messages"], tools=row["tools"])
        assert family == "harmony" or made["input_ids"][-1].tolist() == whole["input_ids"]
        learned = ""
        for ids, mask in zip(made["input_ids"], made["loss_mask"], strict=True):
            learned += str(tokenizer.decode([token for token, flag in zip(ids.tolist(), mask.tolist(), strict=True) if flag]))
        own = json.dumps([turn for turn in row["messages"] if turn["role"] == "assistant"])
        assert sorted(part.split("]]")[0] for part in learned.split("[[")[1:]) == sorted(
            part.split("]]")[0] for part in own.split("[[")[1:]
        )


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}</s>{% endfor %}"
NO_RESULTS = PLAIN.replace("{% for", "{{ tools }}{% for").replace(
    "{{ m.content or '' }}", "{{ '' if m.role == 'tool' else m.content }}{{ m.tool_calls }}"
)


@pytest.mark.parametrize(
    ("template", "row", "got"),
    [
        (PLAIN, {"messages": WHOLE, "tools": [SCHEMA]}, "schemas of tools with a chat template that ignores them"),
        (PLAIN + "{{ tools | length }}", {"messages": WHOLE, "tools": [SCHEMA]}, "calls of tools with a chat template that ignores"),
        (
            PLAIN + "{{ tools | length }}{{ messages | tojson | length }}",
            {"messages": WHOLE, "tools": [SCHEMA]},
            "a chat template that changes the assistant's content",
        ),
        (PLAIN, {"messages": [USER, thinking(ANSWER)]}, "reasoning with a chat template that ignores"),
        (TEMPLATES["hermes"], {"messages": [USER, thinking(ANSWER)]}, "reasoning with a chat template that ignores"),
        (TEMPLATES["harmony"], {"messages": [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}], "tools": [SCHEMA]}, "turns user"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_express_is_refused_by_name(template: str, row: dict[str, Any], got: str) -> None:
    with refused("data.source row 0", got):
        encoded(tiny_tokenizer(template), row)


def test_tokens_around_calls_and_reasoning_are_no_sign_of_a_fault() -> None:
    """But those of headers and the end are."""
    template = (
        TEMPLATES["qwen3"]
        .replace("<|im_start|>", "<|user|>")
        .replace("<|im_end|>", "<|end|>")
        .replace("<tool_call>", "<|assistant|>")
    )
    tokenizer = tiny_tokenizer(template)
    assert inner_ids(tokenizer).intersection(tokenizer.all_special_ids) == {tokenizer.convert_tokens_to_ids("<|assistant|>")}
    assert not inner_ids(tiny_tokenizer(None))


def test_arguments_are_given_as_the_template_takes_them() -> None:
    """As an object or its text, whichever the row has; and a text stays as it is where a template takes both."""
    for family, given, written in (
        ("hermes", '{"b":2}', '"arguments": {"b": 2}'),
        ("qwen3", '{"b":2}', '"arguments": {"b":2}'),
        ("harmony", '{"b":2}', '<|message|>{"b": 2}<|call|>'),
        ("kimi", '{"b":2}', '<|tool_call_argument_begin|>{"b":2}<'),
        ("deepseek", {"b": 2}, '<｜tool▁sep｜>{"b": 2}<'),
    ):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": given}}]}
        assert written in render(tiny_tokenizer(TEMPLATES[family]), [USER, call], tools=[SCHEMA])
    printed = (
        PLAIN + "{% for m in messages %}{% for it in m.tool_calls or [] %}{{ it.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert '{"b": 2}' in render(tiny_tokenizer(printed), [USER, call])


@pytest.mark.parametrize("family", TEMPLATES)
def test_public_calls_of_tools_are_rendered_whole(shared_data: Path, family: str) -> None:
    rows = json.loads((shared_data / "train" / "conversations" / "glaive_toolcall_en_demo.json").read_text())[:40]
    tokenizer = tiny_tokenizer(TEMPLATES[family])
    for raw in rows:
        (row,) = normalise(raw, "row 0")
        documents = turn_documents(tokenizer, row["messages"], row["tools"])
        learned = "".join(text[start:end] for text, spans in documents for start, end in spans)
        for turn in row["messages"]:
            for call in turn.get("tool_calls", ()):
                assert call["function"]["name"] in learned
            assert (turn["role"] == "assistant") == ((turn["content"] or "").strip() in learned) or not turn["content"]
