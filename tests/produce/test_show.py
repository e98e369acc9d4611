"""How a row set looks to a reader: documents in pieces, and counts of halves and sources."""

import io
from pathlib import Path

from rich.console import Console

from specdistill.produce import show
from tests.produce.row_sets import chat, config_for, manifest_of, opened
from tests.tiny import tiny_tokenizer


def test_documents_are_in_pieces_that_carry_loss_or_not_evenly_over_all(tmp_path: Path) -> None:
    config = config_for(tmp_path, [chat(f"q{number}", f"a{number}") for number in range(40)], max_length=64)
    rows, _ = opened(config)
    lengths = show.lengths(rows)
    manifest = manifest_of(config)
    assert len(lengths.tokens) == manifest.splits["train"].documents and lengths.tokens.sum() == manifest.splits["train"].tokens
    shown = show.shown(rows, lengths, 5, tiny_tokenizer())
    assert len(shown) == 5 and len(show.shown(rows, lengths, 99, tiny_tokenizer())) == len(lengths.tokens)
    for it in shown:
        (question, asks), (answer, says) = it.pieces
        assert (asks, says) == (False, True) and answer == f"a{question[10:].partition('<')[0]}<|end|>"
        assert (it.tokens, it.loss_tokens) == tuple(
            len(tiny_tokenizer()(text)["input_ids"]) for text in (question + answer, answer)
        )
    text = shown[0].coloured()
    assert [span.style for span in text.spans] == ["dim", "bold green"]
    assert len({it.name for it in shown}) == 5


def test_tables_show_the_counts(tmp_path: Path) -> None:
    config = config_for(tmp_path, [{"text": f"hello {number}"} for number in range(20)], validation_split="sample")
    opened(config)
    manifest = manifest_of(config)
    console = Console(file=io.StringIO(), width=100)
    console.print(show.table_of_splits(manifest))
    parts = [manifest.sources[0], manifest.sources[0].model_copy(update={"source": "b", "tokens": 0, "loss_tokens": 0})]
    console.print(show.table_of_sources(parts))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    train = manifest.splits["train"]
    filled = f"{train.tokens / (32 * train.rows):.1%}"
    assert ["train", f"{train.rows}", "16", f"{train.tokens}", f"{train.tokens}", filled] in lines
    assert ["b", "16", "0", "0.0%", "0", "0.0%"] in lines
