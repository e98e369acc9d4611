"""How training data looks to a reader: documents in pieces, and counts of halves and sources."""

import io

import pytest
from datasets import Dataset
from rich.console import Console

from specdistill.data import show
from tests.tiny import tiny_tokenizer

NAMES = ["a.jsonl", "b.jsonl"]


def document(text: str, first_with_loss: int, source: int = 0) -> dict[str, object]:
    ids = tiny_tokenizer()(text)["input_ids"]
    mask = [int(place >= first_with_loss) for place in range(len(ids))]
    return {"input_ids": ids, "loss_mask": mask, "length": len(ids), "source": source}


DOCUMENTS = Dataset.from_list([*(document(f"hello {n}", 2) for n in range(6)), document("hi", 2, 1), document("hi you", 0, 1)])


def test_a_document_is_in_pieces_that_carry_loss_or_not() -> None:
    (first,) = show.shown(DOCUMENTS, NAMES, 1, tiny_tokenizer(), max_length=64)
    assert (first.source, first.tokens, first.loss_tokens) == ("a.jsonl", 7, 5)
    assert first.pieces == [("he", False), ("llo 0", True)]
    text = first.coloured()
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [("he", "dim"), ("llo 0", "bold green")]


def test_a_long_document_is_cut_and_says_so() -> None:
    (first,) = show.shown(DOCUMENTS, NAMES, 1, tiny_tokenizer(), max_length=3)
    assert first.pieces == [("he", False), ("l", True), (" … and 4 tokens", False)] and first.tokens == 7


def test_documents_of_every_source_are_shown_in_turn() -> None:
    shown = show.shown(DOCUMENTS, NAMES, 5, tiny_tokenizer(), max_length=64)
    said = ["".join(text for text, _ in it.pieces) for it in shown]
    assert said == ["hello 0", "hi", "hello 1", "hi you", "hello 2"]
    assert len(show.shown(DOCUMENTS, NAMES, 99, tiny_tokenizer(), max_length=64)) == 8


def test_halves_and_sources_are_counted() -> None:
    lengths = show.lengths(DOCUMENTS)
    assert show.half(4, lengths, max_length=16) == (4, 8, 50, 36, 50 / 64)
    assert show.mixture(lengths, NAMES) == [("a.jsonl", 6, 42, 30), ("b.jsonl", 2, 8, 6)]
    assert show.mixture(show.lengths(DOCUMENTS.select([6])), NAMES) == [("b.jsonl", 1, 2, 0)]


def test_tables_show_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = show.lengths(DOCUMENTS)
    console = Console(file=io.StringIO(), width=100)
    console.print(show.table_of_halves({"train": show.half(4, lengths, max_length=16)}))
    console.print(show.table_of_sources(show.mixture(lengths, NAMES)))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["train", "4", "8", "50", "36", "78.1%"] in lines
    assert ["a.jsonl", "6", "42", "84.0%", "30", "83.3%"] in lines
