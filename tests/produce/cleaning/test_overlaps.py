"""`specdistill data` filters what overlaps, lists it in a file, and counts it in a table."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli import main
from specdistill.produce.cleaning.overlaps import cleaned
from specdistill.produce.sources import load_sources
from specdistill.recipe.sections import DataConfig
from tests.refusals import refused_key
from tests.tiny import input_keys, tiny_target_model, tiny_tokenizer

PROMPTS = [f"What is the sum of {n} and {n + 1}, if every number is counted twice and {n} is odd?" for n in (3, 5, 7)]
CHECKED = "the answer is given"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny target, twenty texts, four of which hold a prompt of suite.jsonl, and two that differ in a word of one of them."""
    tiny_target_model(num_layers=1).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    texts = [f"Text number {n} says {n * n}, and after it there is more of {n}." for n in range(14)]
    texts += [PROMPTS[0], f"Asked: {PROMPTS[1].upper()} Then {CHECKED}.", PROMPTS[1], f"{PROMPTS[2][:70]} …"]
    texts += [" ".join(map(str, range(100, 140))), " ".join(map(str, range(101, 140)))]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    (tmp_path / "suite.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS), encoding="utf-8")
    return tmp_path


def data(folder: Path, *keys: str) -> int:
    own = ["data.decontaminate=[all]", "data.max_length=128", "data.regenerate=null", f"eval.suite={folder / 'suite.jsonl'}"]
    return main(["data", "recipe=small/eagle3", *input_keys(folder), *own, *keys])


def listed(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("cache/filtered/*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def test_rows_that_overlap_what_the_draft_is_measured_on_are_filtered_and_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert data(folder) == 0
    said = capsys.readouterr()
    rows = [(row["row"], row["rule"], row["of"]) for row in listed(folder)]
    assert rows == [(row, "contaminated", f"suite: {prompt}") for row, prompt in ((14, 1), (15, 2), (16, 2), (17, 3))]
    assert "4 of 20 rows are filtered" in said.err and "listed in" in said.err
    assert any("suite: 2" in line and "2" in line.split("│")[3] for line in said.err.splitlines())
    assert "gsm8k, humaneval, mt-bench, spec-bench, speed-bench could not be fetched" in caplog.text
    counts = said.out
    assert data(folder) == 0
    assert capsys.readouterr().out == counts and "filtered: 4 contaminated" in counts
    assert data(folder, "data.decontaminate=[]") == 0
    without = capsys.readouterr()
    assert without.out != counts and "filtered" not in without.err


def test_near_duplicates_are_filtered_and_change_the_fingerprint(folder: Path) -> None:
    config = DataConfig(source=str(folder / "rows.jsonl"), cache_dir=str(folder / "cache"))
    sources, suite = load_sources(config), [str(folder / "suite.jsonl")]

    def made(suites: list[str], near_duplicates: float | None) -> tuple[int, str]:
        how = {"decontaminate": suites, "near_duplicates": near_duplicates}
        (source,), filtered = cleaned(sources, config.model_copy(update=how))
        assert filtered.total() == 20 - len(source.rows)
        return len(source.rows), source.rows._fingerprint

    found = [made(*how) for how in (([], None), (suite, None), ([], 0.8), (suite, 0.8), ([], 1.0))]
    assert [count for count, _ in found] == [20, 16, 19, 15, 20]
    assert len({fingerprint for _, fingerprint in found}) == 4  # nothing filtered changes nothing
    assert made(suite, 0.8) == found[3]


def test_a_source_that_is_all_prompts_cannot_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in PROMPTS), encoding="utf-8")
    assert data(folder) == 2 and refused_key(capsys.readouterr().err) == "data.source"
