"""Sources: every form of a row becomes a text or a conversation; what cannot be used is named."""

import bz2
import gzip
import io
import json
import lzma
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from specdistill.cli.main import main
from specdistill.common.errors import ResourceError, UserError
from specdistill.data.produce import sources
from specdistill.data.produce.pico import build_chats, load_standard_library
from specdistill.data.produce.sources import Source, normalize_row
from specdistill.recipe.data_sources import list_source_names
from specdistill.recipe.sections import DataConfig
from tests.loopback_hub import loopback_hub
from tests.memory import at_most
from tests.refusals import refused, refused_key
from tests.tiny import tiny_tokenizer

Turns = list[tuple[str, str | None]]
USER = {"role": "user", "content": "q"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "name": "f"}]}


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


# Renders whatever a message holds, as JSON
EVERYTHING = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m | tojson }}{% endfor %}"


def load_sources(source: Any, cache_dir: Path | str | None = None, **settings: Any) -> list[Source]:
    config = DataConfig(
        source=source, cache_dir=cache_dir and str(cache_dir), loss_mask="all", **settings
    )
    return sources.load_sources(config, tiny_tokenizer(EVERYTHING))


def load_rows(
    source: Any, split: str, cache_dir: Path | str | None = None, **settings: Any
) -> Dataset:
    (loaded_source,) = load_sources(source, cache_dir, split=split, **settings)
    return loaded_source.rows


def normalize_turns(row: Mapping[str, Any]) -> Turns | str:
    (normalized,) = normalize_row(row, "row 0", tiny_tokenizer())
    return normalized["text"] or [
        (message["role"], message["content"]) for message in normalized["messages"]
    ]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "abc", "meta": 1}, "abc"),
        ({"messages": [{"role": "user",
            "content": [{"type": "text", "text": "q"}, {"text": "?"}]}]}, [("user", "q?")]),
        # for the target to answer
        ({"turns": ["q", "r"]}, [("user", "q"), ("assistant", None), ("user", "r")]),
        (
            {"id": "multi_0", "question": [[{"role": "system", "content": "s"}, USER], [USER]],
                "function": [{"name": "f"}]},
            [("system", "s"), ("user", "q"), ("assistant", None), ("user", "q")],  # BFCL's, too
        ),
        ({"text": None, "messages": [{"role": "developer", "content": "s"}]}, [("system", "s")]),
        (
            {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"}]},
            [("user", "q"), ("assistant", "a")],  # the greeting answers nobody
        ),
        (
            {
                "system": "s",
                "tools": '[{"name": "f"}]',
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": null}}'},
                    {"from": "observation", "value": "7"},
                ],
            },
            [("system", "s"), ("user", "q"), ("assistant", None), ("tool", "7")],
        ),
        ({"instruction": "do", "input": "this", "output": "done"},
            [("user", "do\n\nthis"), ("assistant", "done")]),
        ({"instruction": "do", "context": "", "response": "done"},
            [("user", "do"), ("assistant", "done")]),
        (
            {
                "functions": [{"name": "f"}],  # as OpenAI's API named them first
                "messages": [
                    USER,
                    {"role": "assistant", "content": None,
                        "function_call": {"name": "f", "arguments": "{}"}},
                    {"role": "function", "name": "f", "content": "7"},
                ],
            },
            [("user", "q"), ("assistant", None), ("tool", "7")],
        ),
        ({"prompt": "p", "completion": "c"}, [("user", "p"), ("assistant", "c")]),
        # for the target to answer
        ({"instruction": "do", "input": "this"}, [("user", "do\n\nthis")]),
        (
            {"messages": [{"role": role, "content": "c"} for role in ("system", "assistant", "user",
                "assistant", "assistant")]},
            [(role, "c") for role in ("system", "user", "assistant", "assistant")],
        ),
    ],
)  # fmt: skip
def test_every_form_of_a_row_is_read(row: Mapping[str, Any], expected: Turns | str) -> None:
    assert normalize_turns(row) == expected


def test_a_row_without_content_gives_nothing() -> None:
    assert [
        *normalize_row({"text": "", "messages": []}, "row 0", tiny_tokenizer()),
        *normalize_row({"prompt": "p", "response": ""}, "row 1", tiny_tokenizer()),
    ] == []


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_local_files_load_in_every_format(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path / f"rows.{ending}", [{"text": "a"}, {"text": ""}, {"text": "b"}])
    assert load_rows(path, "train", cache_dir=str(tmp_path))["text"] == ["a", "b"]
    assert load_rows(path, "train[:1]", cache_dir=str(tmp_path))["text"] == ["a"]
    with refused("data.split", "test"):
        load_rows(path, "test", cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "conversations", "first_roles"),
    [
        (
            "conversations/fastchat_dummy_conversation.json",
            500,
            ["user", "assistant", "user", "assistant"],
        ),
        (
            "conversations/glaive_toolcall_en_demo.json",
            300,
            ["user", "assistant", "user", "assistant", "tool", "assistant"],
        ),
        ("alpaca/self_instruct_seed_tasks.jsonl", 175, ["user", "assistant"]),
    ],
)
def test_public_datasets_load_as_conversations(
    shared_data: Path, tmp_path: Path, name: str, conversations: int, first_roles: Sequence[str]
) -> None:
    conversation_list = load_rows(
        str(shared_data / "train" / name), "train", cache_dir=str(tmp_path)
    )["messages"]
    assert len(conversation_list) == conversations and all(
        message["content"] or message["tool_calls"]
        for messages in conversation_list[:100]
        for message in messages
    )
    assert [message["role"] for message in conversation_list[0]][: len(first_roles)] == first_roles


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_turns_of_agents_are_read_unchanged_in_every_format(tmp_path: Path, ending: str) -> None:
    """A row gets no key that only another row has."""
    calls = [
        [{"type": "function", "function": {"name": name, "arguments": {name: None}}, "id": name}]
        for name in "fg"
    ]
    tools = [
        [{"type": "function", "function": {"name": name, "parameters": {"properties": {name: {}}}}}]
        for name in "fg"
    ]
    rows = [
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": calls[number],
                    "reasoning_content": "why",
                },
                {"role": "tool", "content": "7", "tool_call_id": "fg"[number]},
                {"role": "assistant", "content": "7"},
            ],
            "tools": tools[number],
        }
        for number in range(2)
    ]
    if ending == "parquet":  # Arrow's objects all have the same keys, but in texts
        for row in rows:
            for call in row["messages"][1]["tool_calls"]:  # type: ignore[index]
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            row["tools"] = json.dumps(row["tools"])
    dataset = load_rows(
        write_rows(tmp_path / f"rows.{ending}", rows), "train", cache_dir=str(tmp_path)
    )
    assert dataset["messages"] == [row["messages"] for row in rows] and dataset["tools"] == tools


def test_texts_next_to_parts_of_text_stay_texts(tmp_path: Path) -> None:
    """A text that reads as JSON stays a text, too."""
    answers = ["2", "null", '"q"', '{"a": 1}', "[1]"]
    question = [{"type": "text", "text": "q"}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for answer in answers
    ]
    dataset = load_rows(write_rows(tmp_path / "rows.jsonl", rows), "train", cache_dir=str(tmp_path))
    assert dataset["messages"] == [
        [USER, {"role": "assistant", "content": answer}] for answer in answers
    ]


def test_token_rows_are_taken_as_they_are(tmp_path: Path) -> None:
    not_read = {"logprobs": [-0.5, -1.5], "attention_mask": [1, 1]}
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [8, 9], "loss_mask": None, **not_read},
    ]
    dataset = load_rows(write_rows(tmp_path / "rows.jsonl", rows), "train", cache_dir=str(tmp_path))
    assert dataset["input_ids"] == [[5, 6, 7], [8, 9]] and dataset["loss_mask"] == [
        [0, 1, 1],
        [1, 1],
    ]
    assert dataset["text"] == [tiny_tokenizer().decode(ids) for ids in dataset["input_ids"]]
    for bad_row, got in (
        ({"input_ids": [5, 260]}, "260 in input_ids"),
        ({"input_ids": [5], "loss_mask": [1, 1]}, "loss_mask of type list of length 2"),
        ({"input_ids": [5, 6], "loss_mask": [1, True]}, "True in loss_mask"),
        ({"input_ids": [5.5]}, "5.5 in input_ids"),
        ({"input_ids": [[5, 6]]}, "[5, 6] in input_ids"),
        ({"input_ids": 5}, "input_ids of type int"),
        (
            {"input_ids": [5, 6], "labels": [-100, 6]},
            "input_ids with a column labels, which looks like a loss mask but is not read",
        ),
        (
            {"input_ids": [5, 6], "attention_mask": [0, 1]},
            "input_ids with a column attention_mask, which looks like a loss mask but is not read",
        ),
    ):
        with refused("row 0", got):
            list(normalize_row(bad_row, "row 0", tiny_tokenizer()))


def test_pico_is_modules_and_chats_of_one_split(tmp_path: Path) -> None:
    rows = load_rows("pico", "validation", cache_dir=str(tmp_path))
    modules = load_standard_library("validation")
    assert [text for text in rows["text"] if text] == [module.text for module in modules]
    assert [messages for messages in rows["messages"] if messages] == build_chats(modules)
    with refused("data.split", "valid"):
        load_rows("pico", "valid")


def test_a_list_of_names_loads_every_source(tmp_path: Path) -> None:
    first, second = (write_rows(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in "ab")
    loaded = load_sources([first, {"source": second, "weight": 2}], tmp_path)
    assert [(source.rows["text"][0], source.entry.weight, source.key) for source in loaded] == [
        ("a", 1.0, "data.source[0]"),
        ("b", 2.0, "data.source[1].source"),
    ]
    assert list_source_names([first, {"source": second, "weight": 2}]) == [first, second]


def test_a_list_of_sources_keeps_their_weights(tmp_path: Path) -> None:
    first, second = (write_rows(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in "ab")
    loaded = load_sources([{"source": first, "weight": 2}, {"source": second}], tmp_path)
    assert [(source.rows["text"][0], source.entry.weight, source.key) for source in loaded] == [
        ("a", 2.0, "data.source[0].source"),
        ("b", 1.0, "data.source[1].source"),
    ]


def test_an_entry_takes_the_rows_that_it_asks_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def row(language: str, score: int, questions: int) -> dict[str, Any]:
        turns = [
            {"role": role, "content": f"{language} {score}"} for role in ("user", "assistant")
        ] * questions
        return {"language": language, "score": score, "messages": turns}

    rows = [
        row("en", 1, 1),
        row("de", 1, 2),
        row("fr", 1, 2),
        row("de", 2, 2),
        row("de", 1, 3),
        row("en", 1, 2),
    ]
    entry = {"source": write_rows(tmp_path / "rows.jsonl", rows)}

    def take_rows(**conditions: Any) -> list[str]:
        (source,) = load_sources([{**entry, **conditions}], tmp_path)
        return [
            f"{messages[0]['content']} {len(messages) // 2}" for messages in source.rows["messages"]
        ]

    everything = ["en 1 1", "de 1 2", "fr 1 2", "de 2 2", "de 1 3", "en 1 2"]
    assert take_rows() == everything
    assert take_rows(where={"language": ["en", "de"], "score": 1}) == [
        "en 1 1",
        "de 1 2",
        "de 1 3",
        "en 1 2",
    ]
    assert take_rows(min_turns=2) == everything[1:]
    assert take_rows(where={"language": "de"}, min_turns=3) == ["de 1 3"]
    message = "left out 5 of 6 rows of .*, which do not match data.source.0..where and min_turns"
    assert re.search(message, caplog.text)
    assert take_rows() == everything  # each choice of rows has its own cache
    for conditions, key, got in (
        ({"where": {"lang": "de"}}, "where", "lang, which is no column of "),
        (
            {"where": {"language": "es"}},
            "source",
            f"{entry['source']}, where no row matches `where` and `min_turns`",
        ),
        (
            {"source": "pico", "min_turns": 2},
            "source",
            "columns, where or min_turns for the built-in source pico",
        ),
    ):
        with refused(f"data.source[0].{key}", got):
            take_rows(**conditions)


@pytest.mark.parametrize(
    ("source", "key", "got"),
    [
        ("???", "", "nothing"),  # a recipe that waits for one
        (3, "", "3"),
        ([], "", "[]"),
        ([3], "[0]", "3"),
        (["missing/but/named"], "[0]", "missing/but/named"),
        ([{"source": "pico", "wieght": 2}], "[0].wieght", "an unknown key"),
        ([{"source": "pico", "weight": 0}], "[0].weight", "0"),
        ([{"source": "pico", "weight": math.inf}], "[0].weight", "inf"),
    ],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_sources_that_are_named_wrongly_are_refused(source: Any, key: str, got: str) -> None:
    with refused(f"data.source{key}", got):
        load_sources(source)


def test_the_error_of_a_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match=f"chat.jsonl, which does not exist, .*did you mean {path}"):
        load_rows(str(tmp_path / "chat.jsonl"), "train")


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        ("jsonl", b"", "which holds no rows"),
        ("json", b"[]", "which holds no rows"),
        (
            "jsonl",
            b'{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n',
            r"rows.jsonl line 3: got column 13: Expecting ',' delimiter",
        ),
        ("jsonl", b'{"text": "a"}\n["b"]\n', "rows.jsonl line 2: got a list, which is no object"),
        (
            "jsonl",
            b'null\n{"text": "a"}\n',
            "rows.jsonl line 1: got a NoneType, which is no object",
        ),
        ("json", b'[null, {"text": "a"}]', "rows.json row 1: got a NoneType, which is no object"),
        (
            "jsonl",
            b'{"text": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
            "rows.jsonl line 1: got more than 100 levels",
        ),
        (
            "jsonl",
            gzip.compress(b'{"text": "a"}', mtime=0),
            "rows.jsonl line 1: got byte 0x8b, which is not UTF-8",
        ),
        (
            "parquet",
            b"PAR1" + bytes(50) + b"PAR1",
            "rows.parquet, whose split train cannot be read as parquet",
        ),
        (
            "parquet",
            _parquet({"text": ["QQQQQQ"]}).replace(b"QQQQQQ", b"\xff\xfe\xfd\xfc\xfb\xfa"),
            "rows.parquet, which is not UTF-8",
        ),
        ("parquet", _parquet({"text": [["a"]]}), "rows.parquet row 1: got text of type list"),
        ("parquet", _parquet({"text": [None, None]}), "rows.parquet, whose rows are all empty"),
        (
            "parquet",
            _parquet({"text": []}),
            "rows.parquet, whose split train cannot be read as parquet",
        ),
        (
            "parquet",
            _parquet({"messages": [{"role": "user"}]}),
            "rows.parquet row 1: got a conversation of type dict",
        ),
        (
            "jsonl",
            b'{"instruction": "a", "instances": [3]}',
            "rows.jsonl line 1: got instances with an item of type int, expected a list of",
        ),
        (
            "jsonl",
            b'{"instruction": "a", "instances": [{"output": "b"}, {"output": "c"}]}',
            "rows.jsonl line 1: got 2 entries in `instances`, expected one",
        ),
        ("json", b'[{"text": "a"},\n{"text": }]', "rows.json, line 2, column 10: Expecting value"),
        (
            "jsonl",
            b'{"text": "a"}\n{"text": "caf\xe9"}\n',
            "rows.jsonl line 2: got byte 0xe9, which is not UTF-8",
        ),
        ("json", b'[{"text":\n\n"\xe9"}]', "rows.json, line 3: byte 0xe9, which is not UTF-8"),
        ("parquet", b"text", "cannot be read as parquet"),
        (
            "jsonl",
            b'{"txt": "a", "id": 1}\n',
            "columns txt, id, expected text, messages, .*; did you mean text",
        ),
        ("jsonl", b'{"text": ""}\n', "whose rows are all empty"),
        ("jsonl", b'{"text": "a"}\n{"text": 4}\n', "rows.jsonl line 2: got text of type int"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, ending: str, content: bytes, message: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_rows(str(path), "train", cache_dir=str(tmp_path / "cache"), on_bad_row="stop")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b'null\n{"text": "a"}\n', "train.jsonl line 1: got a NoneType"),
        ("train.jsonl", b"\n", "train.jsonl, which holds no rows"),
        (
            "train.jsonl.gz",
            gzip.compress(bytes(2**20), 9, mtime=0) * 1024,
            "train.jsonl.gz, line 1: more than 67,108,864 bytes",
        ),
        ("train.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-9], "train.jsonl.gz, "),
        ("train.jsonl.xz", b"\xfd7zXZ\0" + bytes(50), "train.jsonl.xz, "),
        (
            "train.parquet",
            b"PAR1" + bytes(50) + b"PAR1",
            ", whose split train cannot be read as a data set",
        ),
        ("README.md", b"---\n: [\n---\n", ", whose split train cannot be read as a data set"),
    ],
)
def test_folders_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / name).write_bytes(content)
    with at_most(3e8), pytest.raises(UserError, match=message):
        load_rows(
            str(tmp_path / "rows"), "train", cache_dir=str(tmp_path / "cache"), on_bad_row="stop"
        )


@pytest.mark.parametrize("compressed", [bz2.compress, gzip.compress, lzma.compress])
def test_a_folder_may_hold_compressed_files(
    tmp_path: Path, compressed: Callable[[bytes], bytes]
) -> None:
    ending = compressed.__module__.replace("gzip", "gz").replace("lzma", "xz")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / f"train.jsonl.{ending}").write_bytes(compressed(b'{"text": "a"}\n'))
    assert load_rows(str(tmp_path / "rows"), "train", cache_dir=str(tmp_path / "cache"))[
        "text"
    ] == ["a"]


def test_a_broken_source_ends_a_command_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "a"}\nnull\n')
    keys = [
        "data.regenerate=null",
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    assert main(["data", "show", "recipe=pico/eagle3", *keys]) == 2
    assert refused_key(capsys.readouterr().err) == "data.source"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "a conversation of type str"),
        ([{"role": "usr", "content": "c"}], "the role 'usr'"),
        ([{"role": ["user"], "content": "c"}], "the role ['user']"),
        ([{"role": "user", "content": ["c"]}], "content with an item of type str"),
        ([{"role": "user", "parts": [{"text": "c"}]}], "a turn of the user without content"),
        (
            [USER, {"role": "assistant", "content": None, "refusal": "no"}],
            "a turn with refusal, which specdistill does not read",
        ),
        (
            [USER, {"role": "assistant", "content": "hm", "channel": "analysis"}],
            "a turn with channel",
        ),
        (
            [USER, {"role": "assistant", "content": "a", "reasoning_details": [{"text": "hm"}]}],
            "a turn with reasoning_details",
        ),
        ([USER, {"role": "assistant", "content": "a", "weight": 0.5}], "a turn of weight 0.5"),
        ([{"role": "user", "content": [{"text": 3}]}], "text of type int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content with a part 'image'"),
        (["user", "assistant", "tool"], "a tool result without a call, turn 2"),
        (
            [USER, CALLING, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
            "a tool result without a call, turn 3",
        ),
        (
            [USER, CALLING, {"role": "tool", "content": "1", "tool_call_id": "other"}],
            "a tool result without a call, turn 2",
        ),
        ([USER, {**CALLING, "tool_calls": [{"name": "g"}]}], "a call of g without its schema"),
        (
            [USER, {**CALLING, "tool_calls": [{"name": "f", "arguments": "{]"}]}],
            "a call of f with '{]'",
        ),
        (
            [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f()"}],
            "a call that is no JSON",
        ),
        (["system", "tool", "user"], "a conversation that begins with tool and not with the user"),
    ],
)
def test_conversations_that_cannot_be_used_are_refused(messages: Any, message: str) -> None:
    turns = [{"role": turn, "content": "c"} if isinstance(turn, str) else turn for turn in messages]
    with refused("row 0", message):
        normalize_turns(
            {"messages": messages if isinstance(messages, str) else turns, "tools": [{"name": "f"}]}
        )


def test_columns_map_the_names_of_a_source_to_ours(tmp_path: Path) -> None:
    """Only the mapped columns are read; conditions use the source's own names."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write_rows(
        tmp_path / "rows.jsonl", [{"talk": turns, "text": "no", "kind": kind} for kind in "ab"]
    )
    cache = str(tmp_path / "cache")
    entry = {"source": path, "columns": {"messages": "talk"}, "where": {"kind": "b"}}
    rows = load_rows([entry], "train", cache_dir=cache)
    assert rows.to_list() == [
        dict.fromkeys(rows.column_names) | {"messages": turns, "place": "rows.jsonl line 2"}
    ]
    assert load_rows(path, "train", cache_dir=cache)["text"] == ["no", "no"]
    both = [{"source": path, "columns": {"text": "kind"}}, {"source": path}]
    first, second = load_sources(both, cache, columns={"messages": "talk"})
    assert first.rows["text"] == ["a", "b"] and second.rows["messages"] == [turns, turns]
    for columns, key, got in (
        ({"messages": "tlak"}, "data.columns", "tlak, which is no column of "),
        ({"mesages": "talk"}, "data.columns", "mesages"),
        ({"answer": "talk"}, "data.source", f"{path} with columns answer"),
    ):
        with refused(key, got):
            load_rows(path, "train", columns=columns, cache_dir=cache)
    with refused("data.source[0].columns", "b, which is no column"):
        load_sources([{"source": path, "columns": {"text": "b"}}], cache)


def test_a_data_set_that_the_hub_lacks_is_an_outside_failure(tmp_path: Path) -> None:
    with pytest.raises(
        ResourceError, match=r"nobody/nothing could not be loaded from the Hub .*; check the id"
    ):
        load_rows("nobody/nothing", "train", cache_dir=str(tmp_path))


def test_a_data_set_of_the_hub_is_read_at_its_revision_and_a_file_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):
        for name, value in (("HF_ENDPOINT", hub.address), ("HF_HUB_OFFLINE", False)):
            monkeypatch.setattr(f"datasets.config.{name}", value)
        hub.create("org/name", {"train.jsonl": b'{"text": "a"}\n'})
        hub.tag("org/name", "v1.2")
        hub.commit("org/name", {"train.jsonl": b'{"text": "b"}\n'})
        entries = [{"source": "org/name", "revision": "v1.2"}, {"source": "org/name"}]
        assert [source.rows["text"] for source in load_sources(entries, tmp_path)] == [["a"], ["b"]]
        hub.create("org/broken", {"train.jsonl": b"null\n"})
        # Arrow's reader would end the process at this row.
        with refused("data.source train.jsonl line 1", "a NoneType"):
            load_rows("org/broken", "train", cache_dir=str(tmp_path / "cache"), on_bad_row="stop")
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    with refused("data.source[0].revision", "v1.2"):
        load_sources([{"source": str(path), "revision": "v1.2"}])


def test_a_folder_loads_like_a_dataset_of_the_hub(tmp_path: Path) -> None:
    with refused("data.source", tmp_path):
        load_rows(str(tmp_path), "train", cache_dir=str(tmp_path / "cache"))
    write_rows(tmp_path / "data" / "train.jsonl", [{"text": "a"}])
    write_rows(tmp_path / "data" / "test.jsonl", [{"text": "b"}])
    assert load_rows(str(tmp_path / "data"), "test", cache_dir=str(tmp_path / "cache"))["text"] == [
        "b"
    ]
    with refused("data.source", holds="split tst"):
        load_rows(str(tmp_path / "data"), "tst", cache_dir=str(tmp_path / "cache"))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(path))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_source_names_tell_splits_and_conditions_apart() -> None:
    assert list_source_names("pico") == ["pico"]
    entries = [
        {"source": "a.jsonl", "weight": 2, "split": "test"},
        {"source": "a.jsonl", "where": {"language": "French"}},
    ]
    assert list_source_names(entries) == ["a.jsonl test", "a.jsonl {'language': 'French'}"]
