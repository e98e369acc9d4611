"""Sources: every form of a row becomes a text or a conversation; what cannot be used is named."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from specdistill.data.sources import load_rows, load_sources, normalise, source_names
from specdistill.errors import ResourceError, UserError
from specdistill.pico.corpus import chats, standard_library

Turns = list[tuple[str, str]]


def turns_of(row: Mapping[str, Any]) -> Turns | str:
    (made,) = normalise(row, "row 0")
    return made["text"] or [(message["role"], message["content"]) for message in made["messages"]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "abc", "meta": 1}, "abc"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [("user", "q"), ("assistant", "a")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image"}]}]}, [("user", "q")]),
        ({"text": None, "messages": [{"role": "developer", "content": "s"}]}, [("system", "s")]),
        (
            {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [("user", "q"), ("assistant", "a")],  # the greeting answers nobody
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f()"}]},
            [("system", "s"), ("user", "q"), ("assistant", "f()")],
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "observation", "value": "7"}]}, [("user", "q"), ("tool", "7")]),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
            [("user", "q"), ("assistant", '[{"name": "f"}]')],
        ),
        ({"instruction": "do", "input": "this", "output": "done"}, [("user", "do\n\nthis"), ("assistant", "done")]),
        ({"instruction": "do", "context": "", "response": "done"}, [("user", "do"), ("assistant", "done")]),
        ({"prompt": "p", "completion": "c"}, [("user", "p"), ("assistant", "c")]),
        ({"question": "p", "answer": "c"}, [("user", "p"), ("assistant", "c")]),
    ],
)  # fmt: skip
def test_forms_of_a_row(row: Mapping[str, Any], expected: Turns | str) -> None:
    assert turns_of(row) == expected


def test_one_instruction_with_several_instances_is_several_conversations() -> None:
    row = {"instruction": "do", "instances": [{"input": "", "output": "a"}, {"input": "x", "output": "b"}]}
    contents = [[message["content"] for message in made["messages"]] for made in normalise(row, "row 0")]
    assert contents == [["do", "a"], ["do\n\nx", "b"]]
    assert list(normalise({"text": "", "messages": []}, "row 0")) == []


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_local_files(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"rows.{ending}", [{"text": "a"}, {"text": ""}, {"text": "b"}])
    assert load_rows(path, "train", cache_dir=str(tmp_path))["text"] == ["a", "b"]
    assert load_rows(path, "train[:1]", cache_dir=str(tmp_path))["text"] == ["a"]
    with pytest.raises(UserError, match=f"data.split: got test, expected train, the only split of the file rows.{ending}"):
        load_rows(path, "test", cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "conversations", "first_roles"),
    [
        ("conversations/fastchat_dummy_conversation.json", 500, ["user", "assistant", "user", "assistant"]),
        ("conversations/glaive_toolcall_en_demo.json", 300, ["user", "assistant", "user", "assistant", "tool", "assistant"]),
        ("conversations/modelopt_synthetic_conversations_1k.jsonl", 1000, ["user", "assistant"]),
        ("alpaca/self_instruct_seed_tasks.jsonl", 175, ["user", "assistant"]),
        ("gsm8k/test.jsonl", 1319, ["user", "assistant"]),
        ("tinystories/tinystories_val_slice.jsonl", 0, []),
    ],
)
def test_public_datasets(shared_data: Path, tmp_path: Path, name: str, conversations: int, first_roles: Sequence[str]) -> None:
    folder = shared_data / ("prompts" if name.startswith("gsm8k") else "train")
    rows = load_rows(str(folder / name), "train", cache_dir=str(tmp_path))
    found = [messages for messages in rows["messages"] if messages is not None]
    assert len(found) == conversations and len(rows) == (conversations or 1910)
    if found:
        assert [message["role"] for message in found[0]][: len(first_roles)] == first_roles
        assert all(message["content"] for messages in found[:100] for message in messages)


@pytest.mark.slow
def test_pico_is_modules_and_chats_of_one_split(tmp_path: Path) -> None:
    rows = load_rows("pico", "validation", cache_dir=str(tmp_path))
    modules = standard_library("validation")
    assert [text for text in rows["text"] if text] == [module.text for module in modules]
    assert [messages for messages in rows["messages"] if messages] == chats(modules)
    with pytest.raises(UserError, match=r"data\.split: got valid, expected train or validation; did you mean validation"):
        load_rows("pico", "valid")


def test_a_list_of_sources_with_weights(tmp_path: Path) -> None:
    first, second = (written(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in "ab")
    sources = load_sources([{"source": first, "weight": 2}, {"source": second}], "train", str(tmp_path))
    assert [(source.rows["text"][0], source.weight, source.key) for source in sources] == [
        ("a", 2.0, "data.source[0].source"),
        ("b", 1.0, "data.source[1].source"),
    ]


def test_an_entry_takes_the_rows_that_it_asks_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def row(language: str, score: int, questions: int) -> dict[str, Any]:
        turns = [{"role": role, "content": f"{language} {score}"} for role in ("user", "assistant")] * questions
        return {"language": language, "score": score, "messages": turns}

    rows = [row("en", 1, 1), row("de", 1, 2), row("fr", 1, 2), row("de", 2, 2), row("de", 1, 3), row("en", 1, 2)]
    entry = {"source": written(tmp_path / "rows.jsonl", rows)}

    def taken(**conditions: Any) -> list[str]:
        (source,) = load_sources([{**entry, **conditions}], "train", str(tmp_path))
        return [f"{messages[0]['content']} {len(messages) // 2}" for messages in source.rows["messages"]]

    everything = ["en 1 1", "de 1 2", "fr 1 2", "de 2 2", "de 1 3", "en 1 2"]
    assert taken() == everything
    assert taken(where={"language": ["en", "de"], "score": 1}) == ["en 1 1", "de 1 2", "de 1 3", "en 1 2"]
    assert taken(min_turns=2) == everything[1:]
    assert taken(where={"language": "de"}, min_turns=3) == ["de 1 3"]
    said = "5 of 6 rows of .* are not asked for by data.source.0..where and min_turns and are left out"
    assert re.search(said, caplog.text)
    assert taken() == everything  # each choice is kept on its own
    for conditions, message in (
        ({"where": {"lang": "de"}}, r"data.source\[0\].where: got lang, which is no column of .*; did you mean language"),
        ({"where": {"language": "es"}}, r"data.source\[0\].source: got .*, of which where and min_turns leave no row"),
        ({"source": "pico", "min_turns": 2}, r"data.source\[0\].source: got pico with where or min_turns"),
    ):
        with pytest.raises(UserError, match=message):
            taken(**conditions)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("???", r"data.source: got \?\?\?, expected pico, a jsonl"),  # a recipe that waits for one
        ("pioc", r"data.source: got pioc, expected pico, .*; did you mean pico\?"),
        (3, "data.source: got 3, expected pico, a file"),
        ([], "data.source: got \\[\\], expected"),
        (["pico"], r"data.source\[0\]: got 'pico', expected \{source, weight, split\}"),
        (
            [{"source": "pico", "wieght": 2}],
            r"data.source\[0\].wieght: got an unknown key, .*; did you mean data.source.0..weight\?",
        ),
        ([{"source": "pico", "weight": 0}], r"data.source\[0\].weight: got 0, expected float, above 0"),
        ([{"source": "pico", "weight": math.inf}], r"data.source\[0\].weight: got inf, expected float, above 0, finite"),
        ([{"source": "pico", "weight": math.nan}], r"data.source\[0\].weight: got nan, expected float, above 0, finite"),
        ([{"source": "missing.json"}], r"data.source\[0\].source: got missing.json, which does not exist"),
    ],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_sources_that_are_named_wrongly(source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_sources(source, "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "which is empty"),
        ("rows.json", "[]", "which holds no rows"),
        ("rows.jsonl", '{"text": "a"}\n{"text": \n', "which does not read as json"),
        ("rows.parquet", "text", "which does not read as parquet"),
        ("rows.jsonl", '{"txt": "a", "id": 1}\n', "columns txt, id, expected text, messages, .*; did you mean text"),
        ("rows.jsonl", '{"prompt": "a"}\n', "columns prompt, expected text, .*; did you mean prompt"),
        ("rows.jsonl", '{"text": ""}\n', "whose rows are all empty"),
        ("rows.jsonl", '{"text": "a"}\n{"text": 4}\n', "does not read as json|row 1: got text of type int"),
        ("rows.jsonl", '{"messages": [{"role": "usr", "content": "q"}]}\n', "row 0: got the role 'usr', .*; did you mean user"),
        ("rows.jsonl", '{"messages": "hello"}\n', "row 0: got a conversation of type str, expected a list of turns"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_rows(str(tmp_path / name), "train", cache_dir=str(tmp_path / "cache"))


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    path = written(tmp_path / "chats.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match=f"did you mean {path}"):
        load_rows(str(tmp_path / "chat.jsonl"), "train")


def test_what_the_hub_does_not_give_is_an_outside_failure(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"nobody/nothing could not be loaded from the Hub .*; check the id"):
        load_rows("nobody/nothing", "train", cache_dir=str(tmp_path))


def test_a_folder_without_data_is_the_user_s_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source: got .*expected a folder with data files"):
        load_rows(str(tmp_path), "train", cache_dir=str(tmp_path / "cache"))


def test_a_folder_loads_like_a_dataset_of_the_hub(tmp_path: Path) -> None:
    written(tmp_path / "data" / "train.jsonl", [{"text": "a"}])
    written(tmp_path / "data" / "test.jsonl", [{"text": "b"}])
    assert load_rows(str(tmp_path / "data"), "test", cache_dir=str(tmp_path / "cache"))["text"] == ["b"]
    with pytest.raises(UserError, match=r"split tst.*expected a split"):
        load_rows(str(tmp_path / "data"), "tst", cache_dir=str(tmp_path / "cache"))


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(path))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sources_are_told_apart_by_what_is_taken_of_them() -> None:
    assert source_names("pico") == ["pico"]
    entries = [{"source": "a.jsonl", "weight": 2, "split": "test"}, {"source": "a.jsonl", "where": {"language": "French"}}]
    assert source_names(entries) == ["a.jsonl test", "a.jsonl {'language': 'French'}"]
