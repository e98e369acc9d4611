"""Rows that cannot be used: each kind is skipped, counted and named by file and line, whatever the
format and the use of the rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.common.errors import ExitCode, UserError
from specdistill.data.produce.sources import load_sources
from specdistill.data.rows.row_set import BadRows
from specdistill.recipe.sections import DataConfig
from tests.refusals import refused
from tests.scripts import specdistill
from tests.tiny import tiny_target_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer(CHAT_TEMPLATE)
GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
}
NO_OBJECT = "line that is no JSON object"
# Numbers of the lines of cases/bad_rows.jsonl that cannot be used, by kind, as a person reads them
KINDS = {
    "unknown role 'orca-7b', which data.roles={orca-7b: assistant} would map": 4,
    "empty row": 20,
    "no turn is learned": 24,
    "message without content": 28,
    "content that is not text": 32,
    NO_OBJECT: 36,
}


def read_source(path: Path, cache: Path, **settings: Any) -> Any:
    config = DataConfig(source=str(path), cache_dir=str(cache), **settings)
    (source,) = load_sources(config, TOKENIZER)
    return source


def make_row(*roles_and_texts: str) -> dict[str, Any]:
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


@pytest.mark.parametrize(
    "generate", [{}, {"regenerate": {"num_tokens": 1000}}], ids=["as they are", "generated"]
)
def test_every_kind_of_bad_row_is_counted_with_its_line(
    shared_data: Path, tmp_path: Path, generate: dict[str, Any]
) -> None:
    path = shared_data / "cases" / "bad_rows.jsonl"
    source = read_source(path, tmp_path, max_bad_rows=0.2, **generate)
    assert source.num_read == 49 and len(source.rows) == 49 - len(KINDS)
    assert {kind: rows.count for kind, rows in source.bad_rows.items()} == dict.fromkeys(KINDS, 1)
    for kind, line in KINDS.items():
        assert source.bad_rows[kind].first.startswith(f"bad_rows.jsonl line {line}:")
    mapped = read_source(
        path, tmp_path, max_bad_rows=0.2, roles={"orca-7b": "assistant"}, **generate
    )
    assert len(mapped.rows) == 49 - len(KINDS) + 1
    # The empty row is listed but is no fault: 5 of 49 are faults.
    with pytest.raises(UserError, match=r"5 of 49 rows .*10.2%.* more than data.max_bad_rows=0.05"):
        read_source(path, tmp_path, **generate)
    read_source(path, tmp_path, max_bad_rows=5 / 49, **generate)
    with pytest.raises(
        UserError,
        match=(
            r"bad_rows.jsonl line 4: got the role 'orca-7b', .* or data.roles={orca-7b: assistant}"
        ),
    ):
        read_source(path, tmp_path, on_bad_row="stop", **generate)


def test_the_template_decides_which_orders_of_turns_are_conversations(
    shared_data: Path, tmp_path: Path
) -> None:
    rows = [GOOD] * 30 + [
        make_row("user", "a", "user", "b", "assistant", "c"),
        make_row("user", "a", "assistant", "b", "system", "c"),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_source(path, tmp_path).rows) == 32
    strict = tiny_tokenizer((shared_data / "cases" / "strict.jinja").read_text())
    config = DataConfig(source=str(path), cache_dir=str(tmp_path), max_bad_rows=0.1)
    (source,) = load_sources(config, strict)
    assert (len(source.rows), source.bad_rows["rejected by the chat template"].count) == (30, 2)
    assert source.bad_rows["rejected by the chat template"].first.startswith("rows.jsonl line 31:")


def test_lines_that_are_no_objects_do_not_move_the_numbers_of_the_others(tmp_path: Path) -> None:
    """Other lines are blank, `null`, another value or not UTF-8; Arrow's reader would end the
    process at some of these."""
    good = json.dumps(GOOD).encode()
    lines = [
        good,
        b"",
        b"null",
        b'{"messages": [',
        b"\xff\xfe",
        b"[1]",
        good,
        b'{"messages": [{"role": "x", "content": "c"}]}',
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([*lines, *[good] * 60]) + b"\n")
    source = read_source(path, tmp_path, max_bad_rows=0.1)
    assert (source.num_read, len(source.rows)) == (7 + 60, 2 + 60)
    assert source.bad_rows[NO_OBJECT] == BadRows(
        count=4, first="rows.jsonl line 3: a NoneType, which is no object"
    )
    (unknown,) = (rows for kind, rows in source.bad_rows.items() if "unknown role" in kind)
    assert unknown.first == "rows.jsonl line 8: the role 'x'"
    assert source.rows["place"][:3] == [
        "rows.jsonl line 1",
        "rows.jsonl line 7",
        "rows.jsonl line 9",
    ]
    part = read_source(path, tmp_path, split="train[3:]")
    assert (part.num_read, part.bad_rows, part.rows["place"][0]) == (60, {}, "rows.jsonl line 9")


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet", "folder"])
def test_rows_of_other_formats_are_numbered_from_1(name: str, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [*[GOOD] * 30, make_row("orca", "a"), GOOD]
    path = tmp_path / name
    if name == "rows.json":
        path.write_text(json.dumps(rows))
    elif name == "rows.parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.mkdir()
        for part, part_rows in (("a", rows[:20]), ("b", rows[20:])):
            (path / f"{part}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in part_rows)
            )
    (bad_rows,) = read_source(path, tmp_path / "cache").bad_rows.values()
    place = "b.jsonl line 11" if name == "folder" else f"{name} row 31"
    assert bad_rows == BadRows(count=1, first=f"{place}: the role 'orca'")


def test_one_float_does_not_spoil_the_other_rows_of_token_ids(tmp_path: Path) -> None:
    """Arrow reads the whole column as floats."""
    rows = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}] * 30 + [
        {"input_ids": [5, 6.5], "loss_mask": [1, 1]}
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = read_source(path, tmp_path)
    assert source.rows["input_ids"] == [[5, 6, 7, 8]] * 30
    assert [rows.first for rows in source.bad_rows.values()] == [
        "rows.jsonl line 31: 6.5 in input_ids"
    ]


def test_a_role_that_no_conversation_has_is_refused() -> None:
    with refused("data.roles", "orca-7b: bot"):
        DataConfig(roles={"orca-7b": "bot"})


@pytest.mark.parametrize(
    "keys",
    [("data.regenerate=null",), ("data.regenerate.num_tokens=1200",)],
    ids=["as they are", "generated"],
)
def test_the_manifest_and_the_tables_list_what_was_skipped_and_cut(
    keys: tuple[str, ...], shared_data: Path, tmp_path: Path
) -> None:
    """The random target does not end its answers, so that the length limit cuts each of them."""
    target = tiny_target_model(num_layers=2)
    target.generation_config.eos_token_id = []
    target.save_pretrained(tmp_path / "target")
    TOKENIZER.save_pretrained(tmp_path / "target")
    arguments = (
        "recipe=small/eagle3",
        f"target.model={tmp_path / 'target'}",
        f"data.source={shared_data / 'cases' / 'bad_rows.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.max_length=160",
        "data.decontaminate=[]",
        "data.max_bad_rows=0.2",
        *keys,
    )
    result = specdistill("data", "make", *arguments, "--json")
    assert result.returncode == ExitCode.DONE, result.stderr
    manifest = json.loads(result.stdout)
    (source,) = manifest["sources"]
    assert {kind: rows["count"] for kind, rows in source["bad_rows"].items()} == dict.fromkeys(
        KINDS, 1
    )
    shown = specdistill("data", "show", *arguments)
    for text in ("orca-7b", "line 4", "line 36"):
        assert text in result.stderr and text in shown.stdout
    if "data.regenerate=null" not in keys:
        generation = manifest["generation"]
        assert generation["cut_answers"] == generation["answers"] > 0
        assert (
            "were cut at data.max_length=160" in result.stderr
            and "cut at data.max_length" in shown.stdout
        )
