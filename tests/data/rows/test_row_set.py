"""Row sets: rows are read as they were written, also from another folder, and sets that do not fit
or are not whole are refused by name."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdistill.data.produce.job import Job
from specdistill.data.rows import row_set
from specdistill.data.rows.row_set import MANIFEST, RowTarget, compute_fingerprint, read_rows
from specdistill.recipe.sections import DataConfig
from tests.data.produce.row_sets import (
    chat,
    config_for,
    make_numbered_rows,
    opened,
    replace,
    row_target,
)
from tests.data.rows.templates import CHATML
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer


def refuse_to_make_rows(*_: Any) -> None:
    raise AssertionError("rows that are there are not made")


def make_row_set(folder: Path, **settings: Any) -> tuple[DataConfig, Path]:
    """Return a configuration that names a row set outside its cache, and the set's folder."""
    config = config_for(folder, make_numbered_rows(40), **settings)
    opened(config)
    shutil.move(Job(config, row_target()).folder, folder / "set")
    return replace(config, rows=str(folder / "set")), folder / "set"


def test_rows_come_back_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, make_numbered_rows(40))
    first = opened(config)
    config, folder = make_row_set(tmp_path)
    monkeypatch.setattr("specdistill.workflows.make_data.make_blocks", refuse_to_make_rows)
    again = opened(config)
    assert [half.to_list() for half in again] == [half.to_list() for half in first]
    assert again[0].column_names == ["input_ids", "loss_mask", "document_ids", "position_ids"]
    *_, manifest = read_rows(folder)
    tokens = [
        sum(document >= 0 for row in half for document in row["document_ids"]) for half in again
    ]
    splits = manifest.splits.values()
    assert [split.tokens for split in splits] == tokens == [split.loss_tokens for split in splits]
    assert [split.rows for split in splits] == list(map(len, again)) and sum(
        split.documents for split in splits
    ) == 40
    (source,) = manifest.sources
    assert (source.rows, source.documents) == (40, manifest.splits["train"].documents)
    assert (manifest.generation, manifest.filtered) == (None, {})
    assert again[0]._fingerprint == f"{manifest.fingerprint}-train"


def test_shards_are_read_as_one_and_missing_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, whole = make_row_set(tmp_path)
    expected = [half.to_list() for half in opened(config)]
    monkeypatch.setattr(row_set, "SHARD_TOKENS", 32 * 4)
    (tmp_path / "other").mkdir()
    config, folder = make_row_set(tmp_path / "other")
    assert [half.to_list() for half in opened(config)] == expected
    names = sorted(path.name for path in folder.glob("train-*"))
    assert (
        len(names) > 3
        and names[1] == f"train-00001-of-{len(names):05d}.arrow"
        and len(list(whole.glob("train-*"))) == 1
    )
    for name in names[1:3]:
        (folder / name).unlink()
    with refused("data.rows", folder, holds=f"{names[1]}, {names[2]}"):
        opened(config)
    (folder / MANIFEST).unlink()
    with refused("data.rows", folder, holds=f"lacks {MANIFEST}"):
        opened(config)
    assert not list(folder.glob("*.part"))


def test_a_damaged_shard_a_broken_manifest_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    config, folder = make_row_set(tmp_path)
    shard = next(folder.glob("validation-*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with refused("data.rows", folder, holds=shard.name):
        opened(config)
    shard.write_bytes(whole)
    manifest = json.loads((folder / MANIFEST).read_text())
    elsewhere = [{**manifest["shards"][0], "name": "/dev/zero"}]
    for broken in (
        {**manifest, "version": 0},
        {**manifest, "fit": None},
        {**manifest, "shards": elsewhere},
        "\udcff",
    ):
        (folder / MANIFEST).write_text(
            broken if isinstance(broken, str) else json.dumps(broken), errors="surrogateescape"
        )
        with refused("data.rows", folder):
            opened(config)
    with refused("data.rows", tmp_path / "nowhere"):
        opened(replace(config, rows=str(tmp_path / "nowhere")))


def build_other_tokenizer() -> Any:
    tokenizer = tiny_tokenizer(row_target().tokenizer.chat_template)  # type: ignore[arg-type]
    tokenizer.add_tokens(["another"])
    return tokenizer


@pytest.mark.parametrize(
    ("other", "change", "holds"),
    [
        (row_target(weights="1" * 64), {}, "another target: 000000000000"),
        (row_target(template=CHATML), {}, "another chat template: "),
        (RowTarget("tiny", "0" * 64, build_other_tokenizer()), {}, "another tokenizer: "),
        (row_target(), {"max_length": 64}, "another max length: 32"),
        (row_target(), {"packing": False}, "another packing: True"),
        (row_target(), {"loss_mask": "all"}, "another loss mask: assistant"),
    ],
)
def test_rows_of_another_target_or_shape_are_refused_with_the_difference(
    tmp_path: Path, other: RowTarget, change: dict[str, Any], holds: str
) -> None:
    config, folder = make_row_set(tmp_path)
    with refused("data.rows", folder, holds=holds):
        opened(replace(config, **change), other)


# A shard is no whole set, and 300 tokens are longer than the target's context.
@pytest.mark.parametrize("change", [{"shard": "0/2"}, {"max_length": 300}])
def test_settings_that_no_training_can_use_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    ((key, value),) = change.items()
    with refused(f"data.{key}", value):
        opened(
            config_for(tmp_path, make_numbered_rows(4), **change),
            row_target(tiny_target_model(num_layers=1)),
        )


def test_the_fingerprint_of_rows_changes_with_what_they_depend_on(tmp_path: Path) -> None:
    config, target = config_for(tmp_path, make_numbered_rows(9)), row_target()
    fingerprint = compute_fingerprint(config, target, ())
    (tmp_path / "copy").mkdir()
    elsewhere = config_for(tmp_path / "copy", make_numbered_rows(9))
    assert compute_fingerprint(elsewhere, target, ()) == fingerprint
    assert (
        compute_fingerprint(
            replace(config, num_proc=2, force=True, rows="x", shard="0/2"), target, ()
        )
        == fingerprint
    )
    other_fingerprints = [
        compute_fingerprint(replace(config, **{key: value}), target, ())
        for key, value in {
            "seed": 1,
            "max_length": 64,
            "decontaminate": ["pico"],
            "packing": False,
        }.items()
    ]
    other_fingerprints += [
        compute_fingerprint(config, row_target(weights="1"), ()),
        compute_fingerprint(config, row_target(template=CHATML), ()),
    ]
    (tmp_path / "rows.jsonl").write_text('{"text": "other"}\n')
    other_fingerprints.append(compute_fingerprint(config, target, ()))
    assert len({fingerprint, *other_fingerprints}) == 1 + len(other_fingerprints)


def test_rows_that_are_not_generated_equal_those_of_version_0_1(tmp_path: Path) -> None:
    """The digests were recorded before row sets existed; weights, lengths and masks vary."""
    rows = [{"text": f"text number {number:03d} " * (number % 9 + 1)} for number in range(60)]
    rows += [
        chat(f"user {number} " * (number % 5 + 1), f"assistant {number} " * (number % 5 + 1))
        for number in range(40)
    ]  # type: ignore[misc]
    config = config_for(tmp_path, rows, max_length=64)
    halves = opened(replace(config, source=[{"source": config.source, "weight": 1.5}]))
    digests = [
        hashlib.sha256(json.dumps(half.to_list()).encode()).hexdigest()[:12] for half in halves
    ]
    assert digests == ["d06615f00da7", "10c818d18407"]
