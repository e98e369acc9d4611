"""Memory and speed of a stream of rows: `data.streaming`, in this process, over a parquet file of short texts.

    python bench/streaming.py [num_rows=10_000_000]    # writes bench/results/streaming.json, and what docs/data.md has of it

Rows are read, held out, compared with a suite, tokenised by pico's tokenizer, shuffled and packed, as training takes them; no step is
computed. What is measured is the resident memory of the process when so many rows of the source have been read.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoTokenizer

from specdistill.command import run
from specdistill.data.streaming import PackedStream
from specdistill.data.training_data import training_data
from specdistill.measurement.hardware import hardware, software
from specdistill.project import PICO, ROOT
from specdistill.recipe.fields import Section, option
from specdistill.recipe.sections import DataConfig
from specdistill.report.text import table, write_between

RESULTS = Path(__file__).with_name("results") / "streaming.json"
PAGE = ROOT / "docs" / "data.md"
WRITTEN = 50_000  # rows of the file at a time, which is what a reader holds of it


class Options(Section):
    num_rows: int = option(10_000_000, "rows of the source", ge=10)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory(prefix="specdistill-streaming-") as folder:
        points = measure(Path(folder), options.num_rows, every=options.num_rows // 10)
    made = {"hardware": hardware(torch.device("cpu")), "software": software(), "points": points}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    write_between(PAGE, "streaming", page(made))


def measure(folder: Path, num_rows: int, every: int) -> list[dict[str, Any]]:
    """At every so many rows of the source: rows read, rows for training made of them, seconds, and mebibytes resident."""
    source = folder / "rows.parquet"
    write_rows(source, num_rows)
    config = DataConfig(
        source=str(source), streaming=True, max_length=256, decontaminate=["pico"], cache_dir=str(folder / "cache")
    )
    stream, _ = training_data(config, AutoTokenizer.from_pretrained(PICO), None, fingerprint="")
    assert isinstance(stream, PackedStream)
    points: list[dict[str, Any]] = []
    begin, process = time.monotonic(), psutil.Process()
    for made, _ in enumerate(stream):  # when the next row is there
        read = stream.place["buffer"] * config.buffer_size
        if stream.place["epoch"] or read >= (len(points) + 1) * every:
            seconds, mebibytes = time.monotonic() - begin, process.memory_info().rss / 2**20
            points.append({"read": min(read, num_rows) or num_rows, "made": made, "seconds": seconds, "mebibytes": mebibytes})
        if stream.place["epoch"]:
            return points
    raise AssertionError("a stream has no end")


def write_rows(path: Path, num_rows: int) -> None:
    def texts(first: int, last: int) -> Iterator[str]:
        return (
            f"Row {number} says {number * 7919 % 1_000_003}, and then {number * 104_729 % 999_983}."
            for number in range(first, last)
        )

    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, num_rows, WRITTEN):
            rows = [*texts(first, min(first + WRITTEN, num_rows))]
            writer.write_table(pyarrow.table({"text": rows}, schema=schema))


def page(made: dict[str, Any]) -> str:
    points, device = made["points"], made["hardware"]
    last = points[-1]
    head = (
        f"{last['read']:,} rows streamed by one process of {device['name']}, {last['read'] / last['seconds']:,.0f} a second, "
        f"packed into {last['made']:,}:"
    )
    rows = [(f"{point['read']:,}", f"{point['seconds']:,.0f} s", f"{point['mebibytes']:,.0f} MiB") for point in points]
    return f"{head}\n\n{table(('rows read', 'after', 'resident memory'), rows)}"


if __name__ == "__main__":
    sys.exit(run(main, Options))
