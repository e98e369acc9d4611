import hashlib
import json
from pathlib import Path

import pytest
import yaml

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.common.project import SUITES
from specdistill.data.produce.pico import split_of
from specdistill.evaluation.suites.suite import (
    check_suite,
    count_measured,
    cut_prompts,
    load_suite,
    select_evenly,
    tokenize,
)
from specdistill.recipe.sections import SweepConfig
from tests.refusals import refused
from tests.tiny import tiny_tokenizer

QWEN3 = (Path(__file__).parents[2] / "data" / "rows" / "chat_templates" / "qwen3.jinja").read_text()


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_suite(folder, rows, **changes):
    content = write_jsonl(folder / "prompts.jsonl", rows).read_bytes()
    header = {
        "name": "mine",
        "version": "2",
        "licence": "CC0-1.0",
        "source": "made up",
        "sha256": hashlib.sha256(content).hexdigest(),
        "prompts": "prompts.jsonl",
        **changes,
    }
    path = folder / "mine.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in header.items() if value is not None})
    )
    return path


def tokenize_prompts(path, tokenizer=None, **options):
    return tokenize(
        load_suite(str(path)),
        tokenizer or tiny_tokenizer(),
        **{"max_new_tokens": 8, "max_length": 256, **options},
    )


def test_a_jsonl_file_is_a_suite_named_by_its_content(tmp_path):
    path = write_jsonl(tmp_path / "stories.jsonl", [{"prompt": "ab"}, {"prompt": "cd"}])
    suite = load_suite(str(path))
    assert suite.name == "stories"
    assert suite.version == hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    assert [(row.id, row.category) for row in suite.rows] == [("1", "default"), ("2", "default")]


def test_a_file_of_many_prompts_is_measured_in_part_and_the_log_says_so(tmp_path, caplog):
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(201))
    )
    suite = load_suite(str(tmp_path / "mine.jsonl"))
    with caplog.at_level("INFO", logger="specdistill"):
        assert count_measured(suite, None) == 200 and count_measured(suite, 201) == 201
    (message,) = caplog.messages
    assert (
        message
        == "Measuring 200 of the 201 prompts of mine.jsonl, evenly spread. To measure all of"
        " them, pass num_prompts=201."
    )
    assert count_measured(load_suite("pico"), None) is None


def test_the_suite_of_a_training_is_checked_without_a_network(tmp_path):
    for name in (None, "pico", "mt-bench"):  # the prompts of mt-bench are on the web
        check_suite(name)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"promt": "ab"}])
    changed = write_suite(tmp_path, [{"prompt": "ab"}], sha256="0" * 64)
    (tmp_path / "broken.jsonl").write_text("{")
    for name, got in (
        (tmp_path / "broken.jsonl", "broken.jsonl: line 1, column 2"),
        ("pico-shrt", "pico-shrt"),
        ("nowhere.jsonl", "nowhere.jsonl"),
        (rows, "rows.jsonl:1 with the columns promt"),
        (changed, tmp_path / "prompts.jsonl"),
    ):
        with refused("eval.suite", got):
            check_suite(str(name))


def test_plain_prompts_texts_and_conversations_are_tokenized(tmp_path):
    rows = [
        {"prompt": "plain"},
        {"text": "x" * 100},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    plain, text, chat = tokenize_prompts(write_jsonl(tmp_path / "s.jsonl", rows), tokenizer)
    assert plain.token_ids == tuple(tokenizer("plain")["input_ids"])
    assert (len(text.token_ids), text.text) == (32, "x" * 32)
    assert chat.text == tokenizer.apply_chat_template(
        rows[2]["messages"], tokenize=False, add_generation_prompt=True
    )
    assert chat.text.endswith("<|assistant|>\n")
    assert tokenizer.decode(chat.token_ids) == chat.text
    with refused("eval.suite", "prompt 3, a conversation"):
        tokenize_prompts(tmp_path / "s.jsonl")  # with a tokenizer that has no chat template


def test_rows_of_training_data_are_read_as_prompts(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"turns": [{"role": "user", "content": "hi"}]},
        {"instruction": "Translate.", "input": "chat", "output": "cat"},
        {"question": "2 + 2?", "answer": "4"},
        {"turns": ["hi", "and then?"], "reference": ["hello", ""], "category": "writing"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    suite_rows = load_suite(str(path)).rows
    assert {row.kind for row in suite_rows} == {"messages"}
    user_texts = ["hi", "hi", "Translate.\n\nchat", "2 + 2?", "hi"]
    assert [row.content for row in suite_rows] == [
        [{"role": "user", "content": text}] for text in user_texts
    ]
    assert suite_rows[-1].reference == "hello"


@pytest.mark.parametrize("file", ["mt_bench/question.jsonl", "spec_bench/question.jsonl"])
def test_files_of_published_suites_are_read_as_they_are(file, shared_data):
    path = shared_data / "prompts" / file
    questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row.content[-1]["content"] for row in load_suite(str(path)).rows] == [
        question["turns"][0] for question in questions
    ]


def test_every_turn_of_an_agent_is_a_prompt_from_its_recorded_prefix(tmp_path):
    """The prompts are those of the chat template with the tools; categories say what a turn is."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2.", "reasoning": "hm"},
        {"role": "user", "content": "As JSON?"},
        {"role": "assistant", "content": '{"is": 2}'},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye"},
    ]
    row = {
        "id": "a",
        "category": "maths",
        "messages": messages,
        "tools": [{"name": "add", "parameters": {}}],
    }
    tokenizer = tiny_tokenizer(QWEN3)
    expected = [
        tokenizer.apply_chat_template(
            messages[:turn],
            tools=[{"type": "function", "function": row["tools"][0]}],
            add_generation_prompt=True,
        )["input_ids"]
        for turn in (2, 4, 6, 8)
    ]
    expected_categories = {
        None: ["maths"] * 4,
        "kind": ["tool_call", "reasoning", "structured_output", "prose"],
        "turn": ["turn_1", "turn_2_to_3", "turn_2_to_3", "turn_4_to_7"],
    }
    for categories, names in expected_categories.items():
        path = write_suite(tmp_path, [row], turns="all", categories=categories)
        tokenized = tokenize_prompts(path, tokenizer, max_length=1000)
        assert [list(prompt.token_ids) for prompt in tokenized] == expected and [
            prompt.category for prompt in tokenized
        ] == names
    assert [(prompt.id, prompt.cluster) for prompt in tokenized] == [
        ("a/1", "a"),
        ("a/2", "a"),
        ("a/3", "a"),
        ("a/4", "a"),
    ]
    with refused("eval.suite prompt a/1", "schemas of tools which the chat template ignores"):
        tokenize_prompts(path, tiny_tokenizer(CHAT_TEMPLATE), max_length=1000)
    with refused("turns", "all, although prompt 1 has no turns"):
        tokenize_prompts(write_suite(tmp_path, [{"user": ["a", "b"]}], turns="all"), tokenizer)


def test_prompts_with_tools_are_read_in_their_published_forms(tmp_path):
    """The forms are ShareGPT's and BFCL's, whose first turn is measured; its columns may have their
    own names or ours."""
    tools = [
        {
            "name": "area",
            "description": "Of a circle.",
            "parameters": {"type": "dict", "properties": {"r": {"type": "float"}}},
        }
    ]
    first = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Of radius 2?"}]
    turns = [{"from": "system", "value": "Brief."}, {"from": "human", "value": "Of radius 2?"}]
    rows = [
        {"id": "live_simple_0-0-0", "question": [first], "function": tools},
        {
            "id": "multi_0",
            "question": [first, [{"role": "user", "content": "And of 3?"}]],
            "function": tools,
        },
        {"messages": turns, "tools": json.dumps(tools)},
    ]
    tokenizer = tiny_tokenizer(QWEN3)
    schemas = [{"type": "function", "function": tools[0]}]
    expected = tokenizer.apply_chat_template(
        first, tools=schemas, tokenize=False, add_generation_prompt=True
    )
    tokenized = tokenize_prompts(
        write_jsonl(tmp_path / "BFCL_v3.jsonl", rows), tokenizer, max_length=1000
    )
    assert [(prompt.id, prompt.text) for prompt in tokenized] == [
        (name, expected) for name in ("live_simple_0-0-0", "multi_0", "3")
    ]
    mapped = write_suite(tmp_path, rows[:2], columns={"user": "question", "tools": "function"})
    assert {prompt.text for prompt in tokenize_prompts(mapped, tokenizer, max_length=1000)} == {
        expected
    }
    with refused("eval.suite", "s.jsonl:1 with messages="):
        load_suite(str(write_jsonl(tmp_path / "s.jsonl", [{"question": [[{"content": "q"}]]}])))


def test_plain_text_for_a_chat_target_gives_a_warning(tmp_path, caplog):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"text": "a b c " * 20}, {"user": "a"}])
    tokenize_prompts(path, tiny_tokenizer(CHAT_TEMPLATE))
    (message,) = caplog.messages
    assert message.startswith(
        "1 prompts of mine.jsonl are plain text and cut to 32 tokens, although"
    )


def test_a_programming_question_shows_its_tests(tmp_path):
    row = {
        "task_id": 2,
        "text": "Add one.",
        "code": "…",
        "test_setup_code": "import os",
        "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
    }
    (suite_row,) = load_suite(str(write_jsonl(tmp_path / "mbpp.jsonl", [row]))).rows
    (message,) = suite_row.content
    assert (
        suite_row.id == "2"
        and message["content"].startswith("Add one.")
        and "assert f(1) == 2" in message["content"]
    )


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "s.jsonl", [{"prompt": "x" * 200}])
    assert len(tokenize_prompts(path, max_new_tokens=56)) == 1
    with refused("eval.suite", "prompt 1 of s with 200 tokens, and 57"):
        tokenize_prompts(path, max_new_tokens=57)


def test_a_template_that_fails_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "s.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    for template in (
        "{{ raise_exception('no') }}",
        "{{ -messages }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ):
        with refused("eval.suite prompt 1", "turns user: "):
            tokenize_prompts(path, tiny_tokenizer(template))


def test_a_prompt_with_a_token_that_the_target_does_not_know_is_refused(tmp_path):
    """The tokenizer was given one token more than its model has."""
    path = write_jsonl(tmp_path / "s.jsonl", [{"prompt": "a b"}])
    tokenizer = tiny_tokenizer()
    num_known = len(tokenizer)
    tokenizer.add_tokens([" "])
    with refused("target.model", f"a tokenizer whose token ' ' in prompt 1 has the id {num_known}"):
        tokenize_prompts(path, tokenizer, vocab_size=num_known)
    assert len(tokenize_prompts(path, tokenizer, vocab_size=num_known + 1)) == 1


def cut_suite_prompts(path, lengths, tokenizer=None, **options):
    room = {"max_new_tokens": 8, "max_length": 256, **options}
    return cut_prompts(load_suite(str(path)), tokenizer or tiny_tokenizer(), lengths, **room)


def test_long_prompts_are_cut_to_every_length(tmp_path):
    long = "".join(chr(97 + n % 26) for n in range(130))
    chat = [
        {"role": "user", "content": "short"},
        {"role": "assistant", "content": long},
        {"role": "user", "content": "why"},
    ]
    rows = [{"prompt": long}, {"text": long}, {"messages": chat}, {"prompt": "x" * 99}]
    prompts_by_length = cut_suite_prompts(
        write_jsonl(tmp_path / "s.jsonl", rows),
        [100, 64],
        tokenizer := tiny_tokenizer(CHAT_TEMPLATE),
    )
    for length, prompts in prompts_by_length.items():
        assert [prompt.id for prompt in prompts] == ["1", "2", "3"]
        plain, text, messages = prompts
        assert (plain.text, text.text) == (long[-length:], long[:length])
        assert len(messages.token_ids) == length
        assert messages.text.startswith("<|user|>\nshort<|end|><|assistant|>\n")
        assert messages.text.endswith(long[-20:] + "<|end|><|user|>\nwhy<|end|><|assistant|>\n")
    assert tokenizer.decode(prompts_by_length[64][2].token_ids) == prompts_by_length[64][2].text
    assert [
        prompt.id
        for prompt in cut_suite_prompts(tmp_path / "s.jsonl", [64], tokenizer, num_prompts=2)[64]
    ] == ["1", "3"]


def test_a_cut_prompt_keeps_the_first_token_of_a_text(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    tokenizer.add_bos_token = True
    path = write_jsonl(tmp_path / "s.jsonl", [{"prompt": "abc" * 40}])
    if tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
        pytest.fail("the tokenizer adds no first token, so this test would say nothing")
    ((prompt,),) = cut_suite_prompts(path, [32], tokenizer).values()
    assert (prompt.token_ids[0], len(prompt.token_ids)) == (tokenizer.bos_token_id, 32)


def test_a_context_longer_than_every_prompt_or_than_the_target_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "s.jsonl", [{"prompt": "x" * 100}])
    assert cut_suite_prompts(path, []) == {}
    assert [len(prompt.token_ids) for prompt in cut_suite_prompts(path, [100])[100]] == [100]
    with refused("eval.sweep.context", "128 tokens, but the longest prompt of s has 100"):
        cut_suite_prompts(path, [64, 128])
    assert cut_suite_prompts(write_jsonl(tmp_path / "l.jsonl", [{"prompt": "x" * 248}]), [248])[248]
    with refused("eval.sweep.context", "249 tokens of context, and 8"):
        cut_suite_prompts(path, [249])
    chat = write_jsonl(
        tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "x" * 50}]}]
    )
    with refused("eval.sweep.context", "2 tokens, but prompt 1"):
        cut_suite_prompts(chat, [2, 40], tiny_tokenizer(CHAT_TEMPLATE))


def test_a_suite_may_name_its_sweep(tmp_path):
    rows = [{"prompt": "ab"}]
    assert load_suite(str(write_suite(tmp_path, rows))).sweep == SweepConfig()
    sweep = load_suite(
        str(write_suite(tmp_path, rows, sweep={"temperature": [0, 1], "context": [64]}))
    ).sweep
    assert (sweep.num_speculative_tokens, sweep.temperature, sweep.context) == (
        [],
        [0.0, 1.0],
        [64],
    )
    for wrong, key, got in (
        ({"temperature": [-1]}, ".temperature[0]", "-1"),
        ({"tree": [{"bugdet": 4}]}, ".tree[0].bugdet", "an unknown key"),
        ([1], "", "[1]"),
    ):
        with refused(f"mine.yaml: sweep{key}", got):
            load_suite(str(write_suite(tmp_path, rows, sweep=wrong)))


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        ([], ", which is empty"),
        ([{"promt": "a"}], ":1 with the columns promt"),
        ([{"prompt": "a"}, {"prompt": ""}], ":2 with prompt=''"),
        ([{"messages": [{"content": "a"}]}], ":1 with messages="),
        ([["a"]], ": line 1: a list, which is no object"),
        ([{"prompt": "a", "category": "all"}], ":1 with category=all"),
        (
            [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}],
            ", in which several rows have the id x",
        ),
    ],
)
def test_a_row_without_a_prompt_is_refused(tmp_path, rows, got):
    with refused("eval.suite", f"s.jsonl{got}"):
        load_suite(str(write_jsonl(tmp_path / "s.jsonl", rows)))


@pytest.mark.parametrize(
    ("changes", "key", "got"),
    [
        ({"columns": {"usr": "prompt"}}, "mine.yaml: columns.usr", "an unknown key"),
        ({"columns": "prompt"}, "mine.yaml: columns", "'prompt'"),
        ({"licence": None}, "mine.yaml: licence", "nothing"),
        ({"prompts": "gone.jsonl"}, "eval.suite", ""),
    ],
)
def test_a_wrong_header_is_refused(tmp_path, changes, key, got):
    with refused(key, got):
        load_suite(str(write_suite(tmp_path, [{"prompt": "a"}], **changes)))


def test_prompts_are_chosen_evenly_over_categories(tmp_path):
    rows = [
        {"prompt": "a", "category": category, "id": f"{category}{n}"}
        for category in "abc"
        for n in range(10)
    ]
    path = write_jsonl(tmp_path / "s.jsonl", rows)
    assert [prompt.id for prompt in tokenize_prompts(path, num_prompts=6)] == [
        "a0",
        "a5",
        "b0",
        "b5",
        "c0",
        "c5",
    ]
    assert len(tokenize_prompts(path, num_prompts=7)) == 7
    assert len(tokenize_prompts(path, num_prompts=500)) == 30
    assert select_evenly([1, 2, 3, 4], ["a", "b", "b", "b"], 3) == [1, 2, 3]
    assert select_evenly([1, 2, 3, 4, 5], ["b", "a", "b", "b", "b"], 3) == [
        1,
        2,
        4,
    ]  # in the order of the items


def read_header(path):
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("name", "copy", "num_rows", "categories", "first"),
    [
        (
            "mt-bench",
            "mt_bench/question.jsonl",
            80,
            8,
            ("81", "writing", "Compose an engaging travel blog post"),
        ),
        (
            "spec-bench",
            "spec_bench/question.jsonl",
            480,
            13,
            ("81", "writing", "Compose an engaging travel blog post"),
        ),
        (
            "humaneval",
            "human_eval/HumanEval.jsonl.gz",
            164,
            1,
            ("HumanEval/0", "default", "from typing import List"),
        ),
        (
            "gsm8k",
            "gsm8k/test.jsonl",
            1319,
            1,
            ("1", "default", "Janet\u2019s ducks lay 16 eggs per day."),
        ),
    ],
)
def test_the_suites_for_real_targets_match_their_hashes(
    shared_data, tmp_path, name, copy, num_rows, categories, first
):
    """The shipped suite is read from a local copy of its file, which must have the shipped hash."""
    header = read_header(SUITES / f"{name}.yaml")
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**header, "prompts": str(shared_data / "prompts" / copy)}))
    suite = load_suite(str(path))
    assert (suite.name, suite.sha256, len(suite.rows)) == (name, header["sha256"], num_rows)
    assert len({row.category for row in suite.rows}) == categories
    row = suite.rows[0]
    assert (row.id, row.category, row.kind, row.content[0]["role"], len(row.content)) == (
        *first[:2],
        "messages",
        "user",
        1,
    )
    assert row.content[0]["content"].startswith(first[2])
    chat = tokenize(
        suite, tiny_tokenizer(CHAT_TEMPLATE), max_new_tokens=1, max_length=100_000, num_prompts=3
    )[0]
    assert chat.text == f"<|user|>\n{row.content[0]['content']}<|end|><|assistant|>\n"


def test_the_pico_suite_is_held_out_and_balanced():
    rows = [json.loads(line) for line in (SUITES / "pico.jsonl").read_text().splitlines()]
    assert [row["category"] for row in rows] == [
        name for name in ("function", "docstring", "chat", "long_context") for _ in range(12)
    ]
    assert all(split_of(row["module"]) == "validation" for row in rows)
    assert len({row["module"] for row in rows}) >= 24
    assert all(row["prompt"].endswith('"""') for row in rows if row["category"] == "docstring")
    assert all(
        row["prompt"].endswith((":", '"""')) for row in rows if row["category"] == "function"
    )
