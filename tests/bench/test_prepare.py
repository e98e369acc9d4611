"""bench/prepare.py on a few rows: all ways are timed, masks compared, and a table says what is left empty."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.templates import conversations
from tests.scripts import load_script

bench: Any = load_script("bench/prepare.py")


@pytest.mark.long  # processes that prepare rows
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_every_way_is_timed_and_the_masks_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page, data = tmp_path / "prepare.json", tmp_path / "data.md", tmp_path / "texts"
    page.write_text("<!-- prepare -->\n<!-- /prepare -->\n")
    data.mkdir()
    chats = [[turn for turn in chat if turn["role"] != "tool"] for chat in conversations(60)]
    (data / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    monkeypatch.setattr(bench, "RESULTS", results)
    monkeypatch.setattr(bench, "PAGE", page)
    options = bench.Options(data=str(data), num_conversations=20, num_plain=10, repeats=1)
    bench.main(options)
    made = json.loads(results.read_text())
    assert made["conversations"]["same_masks"]
    assert {name: sorted(of) for name, of in made["conversations"]["per_second"].items()} == {
        bench.PLAIN: ["1"],
        bench.TOKENIZED: ["1", "2"],
        bench.PREPARED: ["1", "2"],
    }
    for each in made["packing"]["chats"].values():
        assert each["fewest"] <= each["rows"] and 0 <= each["empty"] < 1
    assert page.read_text().count("| chats |") == 1 and bench.PLAIN in page.read_text()
    monkeypatch.setattr(bench, "plain", lambda tokenizer, messages: [1])
    bench.main(options)
    assert not json.loads(results.read_text())["conversations"]["same_masks"]
