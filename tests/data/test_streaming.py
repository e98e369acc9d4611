"""Streams of rows: what they hold, who reads what, and that they go on from any place to the same rows."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from datasets.distributed import split_dataset_by_node

from specdistill.data import streaming
from specdistill.data.packing import collate
from specdistill.data.streaming import PackedStream, look_at, open_stream
from specdistill.data.training_data import training_data
from specdistill.errors import UserError
from specdistill.pico.corpus import CHAT_TEMPLATE
from specdistill.recipe.sections import DataConfig, RegenerateConfig
from tests.processes import run_processes
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer(CHAT_TEMPLATE)


def numbered(name: str, count: int) -> list[dict[str, str]]:
    return [{"text": f"{name} {number:04d}"} for number in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config_for(folder: Path, source: Any, **settings: Any) -> DataConfig:
    defaults: dict[str, Any] = {"max_length": 32, "validation_fraction": 0.2, "decontaminate": [], "buffer_size": 50}
    return DataConfig(source=source, streaming=True, cache_dir=str(folder / "cache"), **{**defaults, **settings})


def streamed(config: DataConfig) -> tuple[PackedStream, Dataset]:
    train, validation = training_data(config, TOKENIZER, None, fingerprint="")
    assert isinstance(train, PackedStream)
    return train, validation


def shares(config: DataConfig, count: int) -> list[PackedStream]:
    """The streams of so many processes."""
    rows, preparation = open_stream(config, TOKENIZER, [])
    first = look_at(streamed(config)[0])
    parts = [split_dataset_by_node(rows, rank, count) for rank in range(count)]
    return [PackedStream(part, preparation, config.buffer_size, first, "") for part in parts]


def epoch(stream: PackedStream) -> list[dict[str, Any]]:
    """The rows up to the stream's next epoch."""
    number, rows = stream.place["epoch"], []
    for row in stream:
        if stream.place["epoch"] != number:
            break
        rows.append(row)
    stream.place["taken"] -= 1  # of the row that was one too many
    return rows


def texts_in(rows: Any) -> list[str]:
    batch, found = collate(list(rows)), []
    for ids, numbers in zip(batch["input_ids"], batch["document_ids"], strict=True):
        found += [TOKENIZER.decode(ids[numbers == number]) for number in numbers[numbers >= 0].unique().tolist()]
    return [text.removesuffix("<|endoftext|>") for text in found]


def test_an_epoch_holds_every_row_that_is_not_held_out_once_in_another_order_each_time(tmp_path: Path) -> None:
    rows = numbered("row", 400)
    stream, validation = streamed(config_for(tmp_path, write(tmp_path / "rows.jsonl", rows)))
    first, second = texts_in(epoch(stream)), texts_in(epoch(stream))
    held_out = texts_in(validation)
    assert sorted([*first, *held_out]) == [row["text"] for row in rows] and 40 <= len(held_out) <= 120
    assert sorted(second) == sorted(first) != first and second != first
    begin = first[:30]
    assert begin != sorted(begin) and max(begin) <= "row 0049"  # of the first buffer
    assert set(texts_in(look_at(stream))) == set(first)
    memory = DataConfig(
        source=str(tmp_path / "rows.jsonl"),
        max_length=32,
        validation_fraction=0.2,
        decontaminate=[],
        cache_dir=str(tmp_path / "cache"),
    )
    in_memory = training_data(memory, TOKENIZER, None, fingerprint="")
    assert sorted(texts_in(in_memory[1])) == sorted(held_out)  # the side of a row is the same, however it is read


@pytest.mark.parametrize("files", [1, 4])
def test_a_stream_goes_on_from_any_place_to_the_same_rows(tmp_path: Path, files: int) -> None:
    for number in range(files):
        write(tmp_path / "data" / f"train-{number}.jsonl", numbered(f"file {number}", 400 // files))
    other = write(tmp_path / "other.jsonl", numbered("other", 100))
    source = [{"source": str(tmp_path / "data"), "weight": 3}, {"source": other}]
    config = config_for(tmp_path, source)
    for stream in shares(config, 2):
        begin = stream.state_dict()
        whole = list(islice(stream, 240))  # more than an epoch
        assert stream.place["epoch"] >= 1
        for taken in (0, 1, 37, 120, 230):
            stream.load_state_dict(begin)
            assert list(islice(stream, taken)) == whole[:taken]
            stream.load_state_dict(json.loads(json.dumps(stream.state_dict())))
            assert list(islice(stream, 240 - taken)) == whole[taken:]


@pytest.mark.parametrize(("files", "processes"), [(4, 2), (1, 2), (3, 2)])
def test_processes_share_the_rows(tmp_path: Path, files: int, processes: int) -> None:
    for number in range(files):
        write(tmp_path / "data" / f"train-{number}.jsonl", numbered(f"file {number}", 240 // files))
    config = config_for(tmp_path, str(tmp_path / "data"))
    (alone,) = shares(config, 1)
    parts = [texts_in(epoch(stream)) for stream in shares(config, processes)]
    assert sorted(text for part in parts for text in part) == sorted(texts_in(epoch(alone)))
    assert all(len(part) >= 240 * 0.8 / processes / 2 for part in parts)


@pytest.mark.distributed
def test_processes_of_a_launch_read_different_rows(tmp_path: Path) -> None:
    config = config_for(tmp_path, write(tmp_path / "rows.jsonl", numbered("row", 400)), max_length=16)

    def share(_: int) -> None:
        stream, _ = streamed(config)
        rows = list(islice(stream, 80))
        assert stream.place["epoch"] == 0
        print(*(TOKENIZER.decode(row["input_ids"][:8]) for row in rows), sep=",")

    first, second = (set(process.out.strip().split(",")) for process in run_processes(tmp_path, share, 0, 1))
    assert len(first) == len(second) == 80 and not first & second


def test_weights_are_shares_of_what_is_read(tmp_path: Path) -> None:
    source = [
        {"source": write(tmp_path / f"{name}.jsonl", numbered(name, 900)), "weight": weight}
        for name, weight in (("a", 3), ("b", 1))
    ]
    stream, _ = streamed(config_for(tmp_path, source, buffer_size=500))
    counts = Counter(text[0] for text in texts_in(islice(stream, 100)))
    assert 2.5 < counts["a"] / counts["b"] < 3.6


def test_filters_suites_and_chat_templates_hold_for_a_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def chat(number: int, asked: str, language: str = "en") -> dict[str, Any]:
        said = (("user", asked), ("assistant", f"answer {number}"))
        return {"language": language, "messages": [{"role": role, "content": content} for role, content in said]}

    prompt = "How many letters does this sentence have, not counting its spaces and its one mark?"
    suite = write(tmp_path / "suite.jsonl", [{"prompt": prompt}])
    rows = [chat(number, f"question {number}", "en" if number % 2 else "de") for number in range(100)]
    rows += [chat(number, f"So: {prompt}") for number in range(100, 110)]
    source = [{"source": write(tmp_path / "rows.jsonl", rows), "where": {"language": "en"}}]
    stream, validation = streamed(config_for(tmp_path, source, decontaminate=[suite], max_length=128, buffer_size=8))
    batch = collate(epoch(stream))
    learned = TOKENIZER.decode(batch["input_ids"][batch["loss_mask"] == 1]).split("<|end|>")
    numbers = {int(answer.removeprefix("answer ")) for answer in learned if answer}
    numbers |= {int(text.split("answer ")[1].split("<")[0]) for text in texts_in(validation)}
    assert numbers == set(range(1, 100, 2))
    assert caplog.text.count("overlaps suite: 1") == 1  # said once, and not for each


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regenerate": RegenerateConfig(num_tokens=100)}, r"data.regenerate.num_tokens: got 100 with data.streaming=true"),
        ({"source": "pico"}, r"data.source: got pico with data.streaming=true"),
        (
            {"validation_fraction": 0.0},
            r"data.source: got a stream that begins with 200 documents to train on and 0 to hold out",
        ),
        ({"split": "train[:10]"}, r"which does not read as json \(Bad split: train\[:10\]"),
    ],
)
def test_what_cannot_be_streamed_is_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    source = write(tmp_path / "rows.jsonl", numbered("row", 200))
    with pytest.raises(UserError, match=message):
        streamed(config_for(tmp_path, **{"source": source, **settings}))


def test_a_line_that_does_not_read_is_named_when_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST", 10)
    monkeypatch.setattr(streaming, "VALIDATION", 2)
    bad = [*numbered("row", 900), {"text": 4}]
    for rows, message in ((bad, "row 900: got text of type int|a stream that does not read"), (numbered("row", 900), "")):
        stream, _ = streamed(config_for(tmp_path, write(tmp_path / "rows.jsonl", rows)))
        if message:
            with pytest.raises(UserError, match=message):
                epoch(stream)
        else:
            assert epoch(stream)
