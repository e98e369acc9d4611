"""A feature store beside its disk and beside training online: how fast it is read, what a token takes, what rounding costs, and kills.

    python bench/features.py            # writes bench/results/features.json and the tables of docs/data.md
    python bench/features.py only=losses max_steps=435 source=path/to/texts.jsonl

reading   batches of random rows, as a data loader asks for them, checksums included, by turns with the same files from beginning to end.
          Before each turn the system drops the files from its memory (fsync, then posix_fadvise DONTNEED), so that both come from the disk.
losses    pico's EAGLE-3 recipe: trained online, and offline from stores in each dtype.
kills     `specdistill data features`, killed (SIGKILL) at random moments and repeated, beside one that was left alone.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.produce.features import Rows, fill
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.report.text import table, write_between
from specdistill.rows.shard import Origin, Tokens
from specdistill.rows.store import FeatureStore

RESULTS, PAGE = Path(__file__).with_name("results") / "features.json", ROOT / "docs" / "data.md"
HIDDEN_SIZE, AUX_LAYERS, LENGTH, BATCH = 4096, (2, 16, 29), 2048, 4  # of an EAGLE-3 head of an 8B target
BLOCK = 1 << 24  # bytes read at a time from beginning to end
TURNS = 5
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
PARTS = ("reading", "losses", "kills")


class Options(Section):
    only: Literal["reading", "losses", "kills"] | None = option(None, "one part; null: all of them")
    gibibytes: int = option(4, "of the store that is read", ge=1)
    max_steps: int = option(200, "steps of each training", ge=2)
    num_kills: int = option(20, "moments", ge=1)
    source: str = option("pico", "what is trained on, and what features are stored of")
    seed: int = option(0, "of the moments and of the order of rows", ge=0)
    output_dir: str = option("runs/features", "folder of stores and runs, emptied first")


def main(options: Options) -> ExitCode:
    folder = Path(options.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    keys = ["recipe=pico/eagle3", "data.regenerate=null", f"data.source={options.source}", f"data.cache_dir={folder / 'cache'}"]
    if options.only in (None, "reading"):
        results["reading"] = reading(folder / "read", options.gibibytes, options.seed)
    if options.only in (None, "losses"):
        results["losses"] = losses(folder, keys, options.max_steps)
    if options.only in (None, "kills"):
        results["kills"] = kills(folder, keys, options.num_kills, random.Random(options.seed))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_between(PAGE, "features", tables(results))
    return ExitCode.DONE


def reading(folder: Path, gibibytes: int, seed: int) -> dict[str, Any]:
    """MB/s of both, medians of TURNS turns; their quotient turn by turn; bytes of a token beside (A + 1) · H · 2."""
    origin = Origin("weights", "tokenizer", "bfloat16", "bfloat16", HIDDEN_SIZE, AUX_LAYERS)
    count = (gibibytes << 30) // (LENGTH * origin.token_bytes)
    ids = torch.randint(3, 100_000, (count, LENGTH), generator=torch.Generator().manual_seed(seed)).tolist()
    plain = {"loss_mask": [1] * LENGTH, "document_ids": [0] * LENGTH, "position_ids": list(range(LENGTH))}
    rows = Dataset.from_list([{"input_ids": row, **plain} for row in ids])
    noise = torch.randn(origin.num_features, LENGTH, HIDDEN_SIZE).bfloat16()

    def make(batch: Rows) -> list[Tensor]:
        return [noise[:, : len(Tokens.of(row))] for row in batch]

    store = fill(folder, [rows], origin, make, 16 * LENGTH)
    files = sorted(folder.glob("*.safetensors"))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    turns = [(of_files(files), of_rows(files, store, rows, order)) for _ in range(TURNS)]
    num_bytes, num_tokens = sum(path.stat().st_size for path in files), count * LENGTH
    shutil.rmtree(folder)
    return {
        "gibibytes": gibibytes,
        "sequential MB/s": round(statistics.median(one for one, _ in turns)),
        "random rows MB/s": round(statistics.median(other for _, other in turns)),
        "quotient": round(statistics.median(other / one for one, other in turns), 3),
        "turns MB/s": [[round(rate) for rate in turn] for turn in turns],
        "bytes of a token": round(num_bytes / num_tokens, 1),
        "of which features": origin.token_bytes,
    }


def of_files(files: list[Path]) -> float:
    """MB/s from beginning to end."""
    drop(files)
    block, start, total = bytearray(BLOCK), time.perf_counter(), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(block):
                total += read
    return total / (time.perf_counter() - start) / 1e6


def of_rows(files: list[Path], store: FeatureStore, rows: Dataset, order: list[int]) -> float:
    """MB/s of features, in batches of random rows."""
    drop(files)
    start, total = time.perf_counter(), 0
    for first in range(0, len(order), BATCH):
        batch = store.collate([rows[index] for index in order[first : first + BATCH]])
        total += batch["features"].nbytes
    return total / (time.perf_counter() - start) / 1e6


def drop(files: list[Path]) -> None:
    """Have the system forget the files, which are on the disk by then. What a process has mapped it keeps: those maps are given back."""
    from specdistill.rows.shard import _mapped

    _mapped.cache_clear()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def losses(folder: Path, keys: list[str], max_steps: int) -> dict[str, Any]:
    """Of each training: the last held-out loss and acceptance length, and by how much any step's loss differs from training online."""
    keys = [*keys, f"train.max_steps={max_steps}", f"train.eval_steps={max_steps}", f"train.save_steps={max_steps}"]
    keys += ["train.logging_steps=1"]
    online = trained(folder / "online", keys, max_steps)
    results: dict[str, Any] = {"max_steps": max_steps, "online": ended(online)}
    for dtype in DTYPES:
        kept = [f"hidden_states.path={folder / dtype}", f"hidden_states.dtype={dtype}"]
        command("data", "features", *keys, *kept, "hidden_states.mode=hybrid")
        offline = trained(folder / f"offline-{dtype}", [*keys, *kept, "hidden_states.mode=offline"], max_steps)
        pairs = [(one["loss"], other["loss"]) for one, other in zip(online, offline, strict=True) if "loss" in one]
        largest = max(abs(other / one - 1) for one, other in pairs)
        results[dtype] = {**ended(offline), "largest difference of a step's loss": float(f"{largest:.2g}")}
        shutil.rmtree(folder / dtype)
    return results


def trained(folder: Path, keys: list[str], max_steps: int) -> list[dict[str, float]]:
    command("train", *keys, f"train.output_dir={folder}")
    state = json.loads((folder / f"checkpoint-{max_steps}" / "trainer_state.json").read_text(encoding="utf-8"))
    history: list[dict[str, float]] = state["log_history"]
    return history


def ended(history: list[dict[str, float]]) -> dict[str, float]:
    last = next(entry for entry in reversed(history) if "eval_loss" in entry)
    return {"held-out loss": round(last["eval_loss"], 4), "acceptance length": round(last["eval_acceptance_length"], 4)}


def kills(folder: Path, keys: list[str], num_kills: int, moments: random.Random) -> dict[str, Any]:
    """A store killed at so many moments, spread over the time that one takes, and whether it ends the same."""
    line = ["data", "features", *keys, "hidden_states.mode=hybrid", "hidden_states.shard_tokens=4096"]
    start = time.monotonic()
    command(*line, f"hidden_states.path={folder / 'whole'}")
    seconds, total = time.monotonic() - start, len(files_of(folder / "whole"))
    again, kept, same, killed, in_shard, runs = 0, 0, 0, 0, 0, 0
    while killed < num_kills:
        place, runs = folder / f"killed-{runs}", runs + 1
        while killed < num_kills:
            before = files_of(place)
            process = subprocess.Popen(
                words(*line, f"hidden_states.path={place}"), env=surroundings(), stderr=subprocess.DEVNULL
            )
            try:
                process.wait(moments.uniform(0, seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed += 1
            after = files_of(place)
            in_shard += any(place.glob("*.part"))
            kept, again = kept + len(before), again + sum(after.get(name) != when for name, when in before.items())
            if len(after) == total:
                break
        command(*line, f"hidden_states.path={place}")
        same += contents(place) == contents(folder / "whole")
    return {
        "kills": killed,
        "while a file was written": in_shard,
        "runs": runs,
        "same bytes": same,
        "files that were there": kept,
        "of these made again": again,
    }


def files_of(folder: Path) -> dict[str, int]:
    """Name and time of each shard."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def command(*arguments: str) -> None:
    subprocess.run(words(*arguments), env=surroundings(), check=True)


def words(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "specdistill", *arguments]


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def tables(results: dict[str, Any]) -> str:
    """For docs/data.md."""
    read, learnt, killed = (results.get(part) for part in PARTS)
    lines = []
    if learnt:
        header = ["features", "held-out loss", "acceptance length", "largest difference of a step's loss"]
        rows = [[name, *map(str, values.values())] for name, values in learnt.items() if isinstance(values, dict)]
        rows = [[*row, "–"] if len(row) == 3 else row for row in rows]
        lines += [f"pico's EAGLE-3 head after {learnt['max_steps']} steps, the target in float32:", "", table(header, rows), ""]
    if read:
        lines += [
            f"Random rows are read at {read['random rows MB/s']:,} MB/s, {read['quotient']:.0%} of the disk's rate from beginning to",
            f"end ({read['sequential MB/s']:,} MB/s; the same {read['gibibytes']} GiB by turns, dropped from memory before each). A",
            f"token of an EAGLE-3 head of an 8B target takes {read['bytes of a token']:,.0f} bytes, {read['of which features']:,} of",
            "them features.",
        ]
    if killed:
        lines += [
            f"Killed at {killed['kills']} random moments, {killed['same bytes']} of {killed['runs']} stores ended with the same bytes;",
            f"of {killed['files that were there']:,} files that were there, {killed['of these made again']} were made again.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(main, Options))
