"""How a row set looks to a reader: documents in pieces, counts of halves and sources, and
`specdistill data show` as a user runs it."""

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.data.rows import show
from tests.data.produce.row_sets import chat, config_for, opened, read_manifest
from tests.scripts import specdistill
from tests.tiny import tiny_target_model, tiny_tokenizer

HOSTILE = "</div><script>window.hacked = 1</script><b>&amp;"


def test_documents_are_drawn_evenly_and_divided_by_loss(tmp_path: Path) -> None:
    config = config_for(
        tmp_path, [chat(f"q{number}", f"a{number}") for number in range(40)], max_length=64
    )
    rows, _ = opened(config)
    lengths = show.measure_lengths(rows)
    manifest = read_manifest(config)
    assert (
        len(lengths) == manifest.splits["train"].documents
        and lengths[:, 0].sum() == manifest.splits["train"].tokens
    )
    shown = show.decode_documents(rows, lengths, 5, tiny_tokenizer())
    assert len(shown) == 5 and len(
        show.decode_documents(rows, lengths, 99, tiny_tokenizer())
    ) == len(lengths)
    for document in shown:
        (question, asks), (answer, says) = document.pieces
        assert (asks, says) == (
            False,
            True,
        ) and answer == f"a{question[10:].partition('<')[0]}<|end|>"
        assert (document.tokens, document.loss_tokens) == tuple(
            len(tiny_tokenizer()(text)["input_ids"]) for text in (question + answer, answer)
        )
    text = shown[0].format_colored()
    assert [span.style for span in text.spans] == ["dim", "bold green"]
    assert len({document.name for document in shown}) == 5


def test_tables_show_the_counts(tmp_path: Path) -> None:
    config = config_for(
        tmp_path, [{"text": f"hello {number}"} for number in range(20)], validation_split="sample"
    )
    opened(config)
    manifest = read_manifest(config)
    console = Console(file=io.StringIO(), width=100)
    console.print(show.format_splits(manifest))
    parts = [
        manifest.sources[0],
        manifest.sources[0].model_copy(update={"source": "b", "tokens": 0, "loss_tokens": 0}),
    ]
    console.print(show.format_sources(parts))
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.file.getvalue().splitlines()
    ]  # type: ignore[attr-defined]
    train = manifest.splits["train"]
    filled = f"{train.tokens / (32 * train.rows):.1%}"
    assert ["train", f"{train.rows}", "16", f"{train.tokens}", f"{train.tokens}", filled] in lines
    assert ["b", "16", "0", "0.0%", "0", "0.0%"] in lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("show")
    tiny_target_model(num_layers=1).save_pretrained(path / "model")
    tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(path / "model")
    turns = [
        {"role": "user", "content": f"why {HOSTILE}?"},
        {"role": "assistant", "content": "because"},
    ]
    (path / "chats.jsonl").write_text(
        "\n".join([json.dumps({"messages": turns})] * 8), encoding="utf-8"
    )
    texts = (json.dumps({"text": "long " * (3 + 4 * number)}) for number in range(12))
    (path / "texts.jsonl").write_text("\n".join(texts), encoding="utf-8")
    return path


def run_show(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    sources = (
        f"[{{source: {folder / 'chats.jsonl'}, weight: 2}}, {{source: {folder / 'texts.jsonl'}}}]"
    )
    keys = [
        "recipe=small/eagle3",
        f"target.model={folder / 'model'}",
        f"data.source={sources}",
        "data.max_length=128",
    ]
    keys += [
        f"data.cache_dir={folder / 'cache'}",
        "data.validation_fraction=0.1",
        "data.regenerate=null",
        *more,
    ]
    return specdistill("data", "show", *keys)


def test_training_data_is_shown_in_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run_show(folder, "documents=4")
    assert shown.returncode == 0, shown.stderr
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in shown.stdout.splitlines()
        if "│" in line
    ]
    chat_rows = [row for row in rows if row[0].endswith("chats.jsonl")]
    assert len(chat_rows) == 1, shown.stdout
    _, num_chats, chat_tokens, *_ = chat_rows[0]
    # Two of the twenty documents are held out; chats have weight 2.
    assert int(num_chats) in (12, 14, 16)
    chat_text = f"<|user|>\nwhy {HOSTILE}?<|end|><|assistant|>\nbecause<|end|>"
    assert int(chat_tokens.replace(",", "")) == int(num_chats) * len(
        tiny_tokenizer()(chat_text)["input_ids"]
    )
    assert shown.stdout.count("with loss)") == 4
    assert "tokens of a document: median " in shown.stdout
