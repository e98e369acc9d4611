"""`specdistill data show` as a user runs it: in the terminal and as a page, which is opened in a real browser."""

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.errors import ExitCode
from specdistill.report import charts
from tests.browser import look
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.tiny import tiny_target_model, tiny_tokenizer

HOSTILE = "</div><script>window.hacked = 1</script><b>&amp;"
SEEN = """
const count = chosen => document.querySelectorAll(chosen).length;
const [conversation] = [...document.querySelectorAll(".text")].filter(text => text.textContent.includes("hacked"));
found({
  hacked: window.hacked || 0,
  texts: count(".text"),
  loss: [...conversation.querySelectorAll(".loss")].map(piece => piece.textContent),
  whole: conversation.textContent,
  plots: count("svg"),
  colours: new Set([".loss", ".text"].map(one => getComputedStyle(document.querySelector(one)).color)).size,
});
"""


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


@pytest.mark.long  # Chromium
@pytest.mark.browser
def test_training_data_is_shown_in_the_terminal_and_on_a_page(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = show(folder, f"output={tmp_path / 'page.html'}", "documents=4")
    assert shown.returncode == 0, shown.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    ((_, num_chats, chat_tokens, *_),) = (row for row in rows if row[0].endswith("chats.jsonl"))
    assert int(num_chats) in (12, 14, 16)  # two of the twenty are held out, and the others of weight 2
    said = f"<|user|>\nwhy {HOSTILE}?<|end|><|assistant|>\nbecause<|end|>"
    assert int(chat_tokens.replace(",", "")) == int(num_chats) * len(tiny_tokenizer()(said)["input_ids"])
    assert shown.stdout.count("with loss)") == 4 and f"page: {tmp_path / 'page.html'}" in shown.stdout
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    papers = set()
    for width, dark in ((1000, False), (1000, True), (360, False)):
        found = look(page, SEEN, tmp_path, width=width, dark=dark)
        papers.add(found.pop("paper"))
        assert found == {
            "overflow": False,
            "clipped": [],
            "hacked": 0,
            "texts": 4,
            "loss": ["because<|end|>"],
            "whole": said,
            "plots": 2,
            "colours": 2,
        }
    assert len(papers) == 2


def test_a_page_that_cannot_be_written_is_one_line_at_once(folder: Path) -> None:
    refused = show(folder, "output=/proc/page.html")
    assert (refused.returncode, refused_key(refused.stderr)) == (ExitCode.USER_ERROR, "output")


def test_lengths_are_counted_on_a_scale_that_doubles() -> None:
    plot = charts.lengths([3, 4, 4, 5, 8, 8, 0], "tokens", limit=8)
    svg = ElementTree.fromstring(str(plot))
    bars, (dashed,) = list(svg.iter("rect")), [line for line in svg.iter("line") if line.get("stroke-dasharray")]
    assert [bar.findtext("title") for bar in bars] == [
        "3 to 4: 3 documents", "5 to 5: 1 documents", "6 to 8: 2 documents",
    ]  # fmt: skip
    assert float(bars[0].attrib["height"]) == pytest.approx(3 * float(bars[1].attrib["height"]), rel=0.02)
    assert "3 to 4: 3 documents" in svg.findtext("desc", "")
    for limit, tokens in ((8, [8, 8, 3]), (200, [200, 40])):  # no document is drawn beyond the limit
        svg = ElementTree.fromstring(str(charts.lengths(tokens, "tokens", limit=limit)))
        ends = [float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in svg.iter("rect")]
        (dashed,) = [float(line.attrib["x1"]) for line in svg.iter("line") if line.get("stroke-dasharray")]
        assert max(ends) <= dashed
    assert charts.lengths([0], "tokens") is None
    assert "stroke-dasharray" not in str(charts.lengths([4, 5], "tokens", limit=4096))
