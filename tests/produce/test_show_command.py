"""`specdistill data show` as a user runs it."""

import json
import subprocess
from pathlib import Path

import pytest

from recipes.pico.corpus import CHAT_TEMPLATE
from tests.scripts import specdistill
from tests.tiny import tiny_target_model, tiny_tokenizer

HOSTILE = "</div><script>window.hacked = 1</script><b>&amp;"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("show")
    tiny_target_model(num_layers=1).save_pretrained(path / "model")
    tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(path / "model")
    turns = [{"role": "user", "content": f"why {HOSTILE}?"}, {"role": "assistant", "content": "because"}]
    (path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 8), encoding="utf-8")
    texts = (json.dumps({"text": "long " * (3 + 4 * number)}) for number in range(12))
    (path / "texts.jsonl").write_text("\n".join(texts), encoding="utf-8")
    return path


def show(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    sources = f"[{{source: {folder / 'chats.jsonl'}, weight: 2}}, {{source: {folder / 'texts.jsonl'}}}]"
    keys = ["recipe=small/eagle3", f"target.model={folder / 'model'}", f"data.source={sources}", "data.max_length=128"]
    keys += [f"data.cache_dir={folder / 'cache'}", "data.validation_fraction=0.1", "data.regenerate=null", *more]
    return specdistill("data", "show", *keys)


def test_training_data_is_shown_in_the_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = show(folder, "documents=4")
    assert shown.returncode == 0, shown.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    ((_, num_chats, chat_tokens, *_),) = (row for row in rows if row[0].endswith("chats.jsonl"))
    assert int(num_chats) in (12, 14, 16)  # two of the twenty are held out, and the others of weight 2
    said = f"<|user|>\nwhy {HOSTILE}?<|end|><|assistant|>\nbecause<|end|>"
    assert int(chat_tokens.replace(",", "")) == int(num_chats) * len(tiny_tokenizer()(said)["input_ids"])
    assert shown.stdout.count("with loss)") == 4
    assert "tokens of a document: median " in shown.stdout
