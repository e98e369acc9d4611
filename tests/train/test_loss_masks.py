"""`specdistill train` with every method, on token rows that teach a draft little or nothing."""

import json
import random
from pathlib import Path

import pytest

from specdistill.common.documents import parse_json
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.tiny import SMALL, write_target

METHODS = {
    "eagle3": ("draft.ttt_steps=4",),
    "eagle": ("draft.ttt_steps=4",),
    "mtp": ("draft.ttt_steps=4", "draft.init=scratch"),
    "dflash": ("draft.num_layers=1", "draft.block_size=5"),
    "dspark": ("draft.num_layers=1", "draft.block_size=4", "draft.markov_rank=8"),
    "draft_model": ("draft.init=layers", "draft.num_layers=2"),
    "pard": ("draft.init=layers", "draft.num_layers=2", "draft.parallel_tokens=4"),
    "early_exit": ("draft.intermediate_size=32",),
}
# Rows whose tokens with loss a draft cannot learn: none; the first token of a row; the first tokens
# of the pieces of 32 into which a long row is cut.
NOTHING = {"none": (20, []), "the first": (20, [0]), "at the cuts": (96, [0, 32, 64])}
# Heads read two tokens before they predict a third.
BY_HEADS = {"the second": (20, [1])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, and a file of 24 rows of each kind of loss mask."""
    path = tmp_path_factory.mktemp("masks")
    write_target(path / "model", num_layers=4)
    generator = random.Random(0)

    def write(name: str, *kinds: tuple[int, list[int]]) -> None:
        lines = []
        for length, loss in kinds * 24:
            ids = [generator.randrange(4, 260) for _ in range(length)]
            lines.append(
                json.dumps(
                    {"input_ids": ids, "loss_mask": [int(place in loss) for place in range(length)]}
                )
            )
        (path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")

    short = (20, [18, 19])
    for name, kind in (NOTHING | BY_HEADS).items():
        write(name, kind)
    write("short", short)
    write("mixed", *NOTHING.values(), short)
    return path


def train(folder: Path, rows: str, output: Path, method: str, *keys: str) -> tuple[int, str]:
    """Train for two steps with an evaluation each; return the exit code and the stderr."""
    ended = specdistill(
        "train",
        f"method={method}",
        *data_keys(folder, rows, output),
        *METHODS[method],
        *SMALL,
        "train.eval_steps=1",
        "train.save_steps=1",
        "eval.num_speculative_tokens=4",
        f"train.output_dir={output / 'run'}",
        *keys,
    )
    return ended.returncode, ended.stderr


def data_keys(folder: Path, rows: str, output: Path) -> list[str]:
    return [
        f"target.model={folder / 'model'}",
        f"data.source={folder / rows}.jsonl",
        f"data.cache_dir={output / 'cache'}",
        "data.max_length=32",
        "data.decontaminate=[]",
    ]


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        ("draft_model", "none"),
        ("eagle3", "the first"),
        # Each of these reads the rows and sets up a training.
        *(
            pytest.param("eagle3", rows, marks=pytest.mark.long)
            for rows in NOTHING | BY_HEADS
            if rows != "the first"
        ),
        *(
            pytest.param(name, "none", marks=pytest.mark.long)
            for name in METHODS
            if name not in ("draft_model", "eagle3")
        ),
    ],
)
def test_rows_that_teach_nothing_are_refused_before_the_first_step(
    folder: Path, tmp_path: Path, method: str, rows: str
) -> None:
    code, stderr = train(folder, rows, tmp_path, method)
    assert (code, refused_key(stderr)) == (2, "data.source") and f"{rows}.jsonl" in stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.long  # trains and evaluates
@pytest.mark.parametrize("method", METHODS)
def test_positions_that_no_answer_reaches_are_not_measured(
    folder: Path, tmp_path: Path, method: str
) -> None:
    code, stderr = train(folder, "short", tmp_path, method)
    assert code == 0 and "nan" not in stderr
    assert stderr.count("drafted positions 3 to 4") == 1
    for path in (tmp_path / "run").rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=fail)
    history = parse_json((tmp_path / "run" / "run" / "history.json").read_text(encoding="utf-8"))
    lengths = {
        entry["step"]: entry["eval_acceptance_length"]
        for entry in history["log"]
        if "eval_acceptance_length" in entry
    }
    lengths.pop(0, None)  # before the first step
    assert len(lengths) == 2 and history["best_step"] == max(lengths, key=lengths.__getitem__)
    assert not [
        name
        for entry in history["log"]
        for name in entry
        if name.startswith("eval_cumulative_acceptance_3")
    ]


def fail(constant: str) -> None:
    """Fail the test for a number that JSON does not have."""
    pytest.fail(constant)


def test_rows_that_teach_nothing_among_others_are_counted(folder: Path, tmp_path: Path) -> None:
    """There are four kinds of rows, and those of three kinds are left out."""
    keys = data_keys(folder, "mixed", tmp_path)
    shown = specdistill("data", "show", "method=eagle3", *keys)
    assert shown.returncode == 0 and "filtered: 72 without_loss\n" in shown.stdout
    assert "Left out 72 of 96 documents, which are without a loss token" in shown.stderr
    (manifest,) = (tmp_path / "cache" / "rows").glob("*/manifest.json")
    splits = parse_json(manifest.read_text(encoding="utf-8"))["splits"].values()
    assert (
        sum(split["documents"] for split in splits) == 24
        and sum(split["loss_tokens"] for split in splits) == 48
    )
    refused = specdistill("data", "make", "method=eagle3", *data_keys(folder, "none", tmp_path))
    assert (refused.returncode, refused_key(refused.stderr)) == (2, "data.source")
