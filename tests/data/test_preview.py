import io

from datasets import Dataset
from rich.console import Console

from specdistill.data.preview import document, summary
from tests.tiny import tiny_tokenizer

# Two documents of 5 and 2 tokens and one slot of padding; of the first, `llo` carries loss.
ROW = {
    "input_ids": tiny_tokenizer()("hellohi")["input_ids"] + [0],
    "loss_mask": [0, 0, 1, 1, 1, 0, 1, 0],
    "document_ids": [0, 0, 0, 0, 0, 1, 1, -1],
    "position_ids": [0, 1, 2, 3, 4, 0, 1, 0],
}


def test_document_is_the_first_one_with_its_loss_tokens_marked():
    text = document(ROW, tiny_tokenizer())
    assert text.plain == "hello"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [("he", "dim"), ("llo", "bold green")]


def test_summary_counts_what_is_not_padding():
    console = Console(file=io.StringIO(), width=100)
    console.print(summary({"train": Dataset.from_list([ROW, ROW])}))
    line = next(line for line in console.file.getvalue().splitlines() if "train" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]] == ["train", "2", "4", "14", "8", "87.5%"]
