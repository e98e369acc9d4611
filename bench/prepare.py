"""How fast conversations become training rows: five exchanges each, by one process and by two, beside the plain way.

    python bench/prepare.py data=path/to/texts num_conversations=10_000

data: a folder with files of conversations and texts, of whose turns the conversations are made, and of which a tokenizer of 32,000 tokens
is trained. The plain way renders each turn's beginnings, one conversation after another, and looks at every token for every turn; its
loss masks have to be the same. Each way makes everything anew each time; the ways of a repetition run one after the other.

Packing is measured on each file alone: what its rows have besides tokens.

Writes bench/results/prepare.json and the tables between two marks of docs/data.md. Exits with 1 where a mask differs, two processes
tokenise fewer than eight times 136 conversations a second, or a file's rows waste more than 3 % though fewer could hold its tokens.
"""

import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.measurement.hardware import hardware, software
from specdistill.produce.make import make_rows
from specdistill.produce.sources import COLUMNS, load_rows
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.recipe.sections import DataConfig
from specdistill.report.phrases import number
from specdistill.report.text import table, write_between
from specdistill.rows.cache import mapped
from specdistill.rows.chat import Message, assistant_spans, render
from specdistill.rows.encoding import ENCODED_COLUMNS, Encoder
from specdistill.rows.packing import PADDING_DOCUMENT
from specdistill.rows.row_set import RowTarget, open_rows

RESULTS = Path(__file__).with_name("results") / "prepare.json"
PAGE = ROOT / "docs" / "data.md"
EXCHANGES, LENGTHS = 5, (512, 2048)  # of the rows, in tokens
EXPECTED, MOST_EMPTY = 8 * 136, 0.03  # conversations a second; share of slots
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN, TOKENIZED, PREPARED = "plain way", "tokenised with loss masks", "from a file to packed rows"


class Options(Section):
    data: str = option(..., "folder of jsonl and json files with conversations and texts, looked for in its subfolders, too")
    num_conversations: int = option(10_000, "conversations prepared", ge=10)
    num_plain: int = option(200, "of them, those of the plain way", ge=1)
    repeats: int = option(3, "timed repetitions, of which the median counts", ge=1)


def main(options: Options) -> ExitCode:
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(path for path in Path(options.data).rglob("*") if path.suffix in (".json", ".jsonl"))
        sets = {path.stem: load_rows(str(path), "train", cache_dir=f"{folder}/sets") for path in files}
        tokenizer = tokenizer_of([text for rows in sets.values() for text in texts_of(rows)])
        chats = conversations(list(sets.values()), options.num_conversations)
        (Path(folder) / "rows.jsonl").write_text(
            "".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8"
        )
        found = speeds(chats, tokenizer, Path(folder), options)
        packing = {path.stem: packed([str(path)], tokenizer, f"{folder}/sets") for path in files}
        packing["all of them"] = packed([str(path) for path in files], tokenizer, f"{folder}/sets")
    made = {
        "hardware": hardware(torch.device("cpu")),
        "software": software(),
        "settings": options.model_dump(exclude={"data"}),
        "conversations": found,
        "packing": packing,
    }
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    text = page(made)
    write_between(PAGE, "prepare", text)
    print(text)
    is_quick = found["per_second"][TOKENIZED]["2"] >= EXPECTED
    is_full = all(
        each["empty"] <= MOST_EMPTY or each["rows"] == each["fewest"] for of in packing.values() for each in of.values()
    )
    return ExitCode.DONE if found["same_masks"] and is_quick and is_full else ExitCode.CHECK_FAILED


def texts_of(rows: Dataset) -> list[str]:
    return [text for row in rows for text in ([row["text"]] if row["text"] else [turn["content"] for turn in row["messages"]])]


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the template of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], extra_special_tokens=SPECIAL[1:])
    fast.chat_template = TEMPLATE
    return fast


def conversations(sets: Sequence[Dataset], count: int) -> list[list[Message]]:
    """Of exchanges drawn from the sets', which are short and long in turn."""
    exchanges = [
        [row["messages"][place : place + 2] for row in rows for place in range(len(row["messages"] or ()) - 1)] for rows in sets
    ]
    pools = [[pair for pair in pairs if [turn["role"] for turn in pair] == ["user", "assistant"]] for pairs in exchanges]
    generator = random.Random(0)
    pools = [pool for pool in pools if pool]
    return [[turn for _ in range(EXCHANGES) for turn in generator.choice(generator.choice(pools))] for _ in range(count)]


def plain(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> list[int]:
    """The loss mask of a conversation, looked for turn by turn."""
    whole = render(tokenizer, messages)
    offsets = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    spans = assistant_spans(lambda turns, prompt: render(tokenizer, turns, prompt), messages)
    return [int(any(left < end and start < right for start, end in spans)) for left, right in offsets]


def speeds(
    chats: Sequence[list[Message]], tokenizer: PreTrainedTokenizerFast, folder: Path, options: Options
) -> dict[str, Any]:
    """Conversations a second of each way by the number of processes, and whether its masks are those of the plain way."""
    rows = Dataset.from_dict({"text": [None] * len(chats), "messages": chats}, features=Features(COLUMNS))
    stored = rows.map(
        lambda row: row, cache_file_name=str(folder / "rows.arrow")
    )  # as a source is: on disk, and not copied to each process
    encoder, some = Encoder(tokenizer, "assistant", 10**6), chats[: options.num_plain]

    def tokenized(num_proc: int, cache_dir: str) -> Dataset:
        return mapped(stored, encoder, ENCODED_COLUMNS, "rows", what="Tokenizing", num_proc=num_proc, cache_dir=cache_dir)

    def prepared(num_proc: int, cache_dir: str) -> object:
        settings = {"max_length": LENGTHS[-1], "num_proc": num_proc, "cache_dir": cache_dir, "decontaminate": []}
        return open_rows(
            DataConfig(source=str(folder / "rows.jsonl"), **settings), RowTarget("", "", tokenizer), make=make_rows
        )

    ways = {PLAIN: lambda *_: [plain(tokenizer, chat) for chat in some], TOKENIZED: tokenized, PREPARED: prepared}
    taken: dict[tuple[str, int], list[float]] = {}
    made: dict[tuple[str, int], Any] = {}
    for repeat in range(options.repeats):
        for name, num_proc in ((PLAIN, 1), (TOKENIZED, 1), (TOKENIZED, 2), (PREPARED, 1), (PREPARED, 2)):
            start = time.perf_counter()
            made[name, num_proc] = ways[name](num_proc, str(folder / f"{repeat}-{num_proc}-{name[:4]}"))
            share = len(some) / len(chats) if name == PLAIN else 1
            taken.setdefault((name, num_proc), []).append((time.perf_counter() - start) / share)
    documents = made[TOKENIZED, 2]
    per_second: dict[str, dict[str, float]] = {}
    for (name, num_proc), seconds in taken.items():
        per_second.setdefault(name, {})[str(num_proc)] = len(chats) / statistics.median(seconds)
    masks = [row["loss_mask"] for row in documents.select(range(len(some)))]
    tokens = sum(documents["length"]) / len(chats)
    return {"per_second": per_second, "tokens_each": tokens, "same_masks": masks == made[PLAIN, 1]}


def packed(files: Sequence[str], tokenizer: PreTrainedTokenizerFast, cache_dir: str) -> dict[str, dict[str, float]]:
    """Of rows of each length: how many, the fewest that could hold the same tokens, and the share of their slots that is empty."""
    found = {}
    for max_length in LENGTHS:
        settings = {"max_length": max_length, "decontaminate": [], "validation_fraction": 0, "cache_dir": cache_dir}
        config = DataConfig(source=[{"source": path} for path in files], **settings)
        rows = open_rows(config, RowTarget("", "", tokenizer), make=make_rows)[0].with_format("numpy")
        tokens = sum(int((batch["document_ids"] != PADDING_DOCUMENT).sum()) for batch in rows.iter(batch_size=100))
        fewest = math.ceil(tokens / max_length)
        found[str(max_length)] = {"rows": len(rows), "fewest": fewest, "empty": 1 - tokens / (len(rows) * max_length)}
    return found


def page(made: dict[str, Any]) -> str:
    """What was measured, and its tables."""
    machine, versions, found = made["hardware"], made["software"], made["conversations"]
    caption = (
        f"{made['settings']['num_conversations']} conversations of {EXCHANGES} exchanges, {found['tokens_each']:.0f} tokens each; "
        f"{made['settings']['repeats']} repetitions; {machine['cpu']}, datasets {versions['datasets']}, "
        f"transformers {versions['transformers']}."
    )
    speed = [
        (name, *(number(of[count], 0) if count in of else "" for count in "12")) for name, of in found["per_second"].items()
    ]
    rows = [(name, *(share_of(of[str(length)]) for length in LENGTHS)) for name, of in made["packing"].items()]
    return "\n\n".join(
        (
            caption,
            table(("conversations a second", "one process", "two"), speed),
            table(("empty slots", *(f"rows of {length} tokens" for length in LENGTHS)), rows),
        )
    )


def share_of(rows: dict[str, float]) -> str:
    return f"{rows['empty']:.1%} of {rows['rows']} rows" + (", no fewer hold them" if rows["rows"] == rows["fewest"] else "")


if __name__ == "__main__":
    sys.exit(run(main, Options))
