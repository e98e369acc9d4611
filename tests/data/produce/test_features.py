"""Filling a store: whole shards stay and all others are made again, for any number of processes
and interruptions.

Servers that write vLLM's format make the same features as our own pass.
"""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specdistill.common.errors import ResourceError
from specdistill.data.produce import features as filling
from specdistill.data.produce.features import compute_by_servers, compute_by_target
from specdistill.data.rows.store import FeatureStore
from specdistill.targets.frozen import FrozenTarget
from tests.data.produce import openai_server
from tests.data.produce.hidden_states_server import serve_hidden_states
from tests.data.produce.openai_server import Behaviour
from tests.data.rows.stores import (
    CountingMaker,
    collate_batch,
    fill_store,
    make_origin,
    make_packed_rows,
)
from tests.processes import run_processes
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer

SETS = [make_packed_rows(10), make_packed_rows(3, seed=1)]
NAMES = [f"{index:06d}-of-000004.safetensors" for index in range(4)]


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in ("lock", ".part")
    }


def test_the_cost_of_a_store_is_printed_after_its_first_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_store(tmp_path / "store", SETS, make_origin())
    printed = capsys.readouterr().err
    # 4 of 13 rows are stored, and 9 are left.
    assert (
        printed.count("storing features") == 1
        and "the first 4 rows" in printed
        and " 9 " in printed
    )
    fill_store(tmp_path / "store", SETS, make_origin())
    assert "storing features" not in capsys.readouterr().err
    free = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(
        ResourceError, match=r"storing features takes about .* whose disk has 100 bytes left"
    ):
        fill_store(tmp_path / "small", SETS, make_origin())
    assert sorted(read_files(tmp_path / "small")) == NAMES[:1]
    assert fill_store(tmp_path / "small", SETS, make_origin(), force=True).num_missing == 0


def test_damaged_missing_and_foreign_shards_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fill_store(tmp_path / "whole", SETS, make_origin())
    fill_store(tmp_path / "store", SETS, make_origin())
    fill_store(tmp_path / "other", SETS, make_origin(weights="c"))
    damaged = bytearray((tmp_path / "store" / NAMES[0]).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "store" / NAMES[0]).write_bytes(damaged)
    (tmp_path / "store" / NAMES[1]).unlink()
    (tmp_path / "other" / NAMES[2]).replace(tmp_path / "store" / NAMES[2])
    (tmp_path / "store" / ".part").mkdir()
    (tmp_path / "store" / ".part" / NAMES[3]).write_bytes(b"what a killed process left")
    (tmp_path / "store" / ".part" / ".tmpAbCdEf").write_bytes(
        b"and what safetensors left, killed as it wrote"
    )
    caplog.clear()
    maker = CountingMaker(make_origin())
    store = fill_store(tmp_path / "store", SETS, make_origin(), maker)
    assert maker.num_made == 12
    assert read_files(tmp_path / "store") == read_files(tmp_path / "whole")
    log = caplog.text
    assert f"{NAMES[0]}, which is damaged (row 2)" in log
    assert f"{NAMES[2]}, which holds other features: weights c instead of aaaaaaaaaaaa" in log
    assert NAMES[1] not in log and NAMES[3] not in log
    batch, expected = collate_batch(store, SETS[0], [2, 9])  # not the old files, which were mapped
    assert batch["features"].equal(expected)


def test_shards_of_other_rows_are_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fill_store(tmp_path, [make_packed_rows(4, seed=8), *SETS], make_origin())
    maker = CountingMaker(make_origin())
    fill_store(tmp_path, SETS, make_origin(), maker)
    assert maker.num_made == 13 and sorted(read_files(tmp_path)) == NAMES
    assert "removed 5 shards that were made for other rows" in caplog.text
    fill_store(tmp_path, [make_packed_rows(10, seed=9), SETS[1]], make_origin(), maker)
    assert f"{NAMES[1]}, which holds other rows" in caplog.text
    assert (
        FeatureStore.open(
            tmp_path, [make_packed_rows(10, seed=9), SETS[1]], make_origin()
        ).num_missing
        == 0
    )


def test_a_store_grows_to_its_limit_and_no_further(tmp_path: Path) -> None:
    fill_store(tmp_path / "whole", SETS, make_origin())
    sizes = [len(read_files(tmp_path / "whole")[name]) for name in NAMES]
    limit = sum(sizes[:2]) + 5000  # a shard is estimated with a header of two kilobytes
    maker = CountingMaker(make_origin())
    store = fill_store(tmp_path / "half", SETS, make_origin(), maker, limit)
    assert maker.num_made == 8 and store.num_missing == 5
    assert sum(map(len, read_files(tmp_path / "half").values())) <= limit
    assert sorted(read_files(tmp_path / "half")) == NAMES[:2]
    assert fill_store(tmp_path / "none", SETS, make_origin(), maker, 1).num_missing == 13
    assert (
        fill_store(tmp_path / "half", SETS, make_origin(), maker).num_missing == 0
        and maker.num_made == 13
    )
    assert read_files(tmp_path / "half") == read_files(tmp_path / "whole")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")]
)
def test_a_full_disk_ends_in_one_line_and_the_shards_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fill_store(tmp_path / "whole", SETS, make_origin())
    write = filling.write_shard

    def fail_at_third_shard(path: Path, *arguments: object) -> None:
        if path.name == NAMES[2]:
            (path.parent / ".part" / path.name).write_bytes(b"half")
            raise error
        write(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(filling, "write_shard", fail_at_third_shard)
    with pytest.raises(
        ResourceError, match=r"could not be written \(.*No space left.*hidden_states.max_bytes"
    ):
        fill_store(tmp_path / "store", SETS, make_origin())
    monkeypatch.setattr(filling, "write_shard", write)
    maker = CountingMaker(make_origin())
    fill_store(tmp_path / "store", SETS, make_origin(), maker)
    assert maker.num_made == 5 and read_files(tmp_path / "store") == read_files(tmp_path / "whole")


def test_a_folder_of_somebody_elses_files_is_refused_and_keeps_them(tmp_path: Path) -> None:
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "download.part",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"somebody's")
    with refused("hidden_states.path", tmp_path):
        fill_store(tmp_path, SETS, make_origin())
    assert read_files(tmp_path) == dict.fromkeys(names, b"somebody's")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused("hidden_states.path", tmp_path / "file" / "store"):
        fill_store(tmp_path / "file" / "store", SETS, make_origin())


@pytest.mark.distributed
def test_processes_share_the_shards_and_make_the_same_store(tmp_path: Path) -> None:
    fill_store(tmp_path / "whole", SETS, make_origin())

    def fill(_: int) -> None:
        maker = CountingMaker(make_origin())
        store = fill_store(tmp_path / "store", SETS, make_origin(), maker)
        print(maker.num_made, store.num_missing)

    ended = run_processes(tmp_path, fill, 0, 1)
    assert [process.out.split() for process in ended] == [["8", "0"], ["5", "0"]], ended
    assert read_files(tmp_path / "store") == read_files(tmp_path / "whole")


# ---- Servers


ROWS = list(make_packed_rows(4))
# seconds for an answer: on a machine whose cores are all busy a pass takes many times as long
TIMEOUT = 300.0


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize("aux_layers", [(3, 1), (), (2, 4)])
def test_servers_make_what_the_target_does(
    target: FrozenTarget, tmp_path: Path, aux_layers: tuple[int, ...]
) -> None:
    """Two servers share the documents."""
    layers, folders = sorted({*aux_layers, 4}), [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with (
        serve_hidden_states(target, layers, folders[0]) as one,
        serve_hidden_states(target, layers, folders[1]) as other,
    ):
        features_of_servers = compute_by_servers(target, aux_layers, [one, other], TIMEOUT)(ROWS)
    expected = compute_by_target(target, aux_layers, None)(ROWS)
    for features, expected_row in zip(features_of_servers, expected, strict=True):
        assert features.shape == expected_row.shape and torch.allclose(
            features, expected_row, atol=1e-5
        )
    assert not list(tmp_path.rglob("*.*"))


def test_a_server_of_other_hidden_states_is_refused_in_one_line(
    target: FrozenTarget, tmp_path: Path
) -> None:
    with (
        serve_hidden_states(target, [1, 2, 4], tmp_path) as more,
        serve_hidden_states(target, [1, 4], tmp_path, dtype=torch.bfloat16) as other,
    ):
        for address, description in (
            (more, "3, 64] and dtype torch.float32 "),
            (other, "2, 64] and dtype torch.bfloat16 "),
        ):
            with refused("hidden_states.server", f"{address}, which writes ", holds=description):
                compute_by_servers(target, (1,), [address], TIMEOUT)(ROWS[:1])
    somebodys = tmp_path / "model.safetensors"
    save_file({"hidden_states": torch.zeros(1), "token_ids": torch.tensor([1])}, somebodys)
    lock = tmp_path / "model.safetensors.lock"
    lock.touch()
    naming = Behaviour(
        models=("served",),
        more=lambda _: {"kv_transfer_params": {"hidden_states_path": str(somebodys)}},
    )
    with (
        openai_server.running(naming) as server,
        pytest.raises(ResourceError, match="the hidden states of another prompt"),
    ):
        compute_by_servers(target, (1,), [server.address], TIMEOUT)(ROWS[:1])
    assert somebodys.exists() and lock.exists()
    lock.unlink()
    os.mkfifo(lock)
    with (
        openai_server.running(naming) as server,
        pytest.raises(ResourceError, match="is not a regular file"),
    ):
        compute_by_servers(target, (1,), [server.address], TIMEOUT)(ROWS[:1])
    with (
        serve_hidden_states(target, [4], None) as plain,
        pytest.raises(ResourceError, match="start the server with ExampleHiddenStatesConnector"),
    ):
        compute_by_servers(target, (), [plain], TIMEOUT)(ROWS[:1])
    with pytest.raises(ResourceError, match="does not answer"):
        compute_by_servers(target, (), [plain], TIMEOUT)


@pytest.mark.parametrize("path", [None, 3, "", "a\0b", "a" * 5000, ["a"]])
def test_an_answer_that_names_no_file_is_refused_in_one_line(
    path: Any, target: FrozenTarget
) -> None:
    naming = Behaviour(
        models=("served",), more=lambda _: {"kv_transfer_params": {"hidden_states_path": path}}
    )
    with (
        openai_server.running(naming) as server,
        pytest.raises(ResourceError, match=server.address),
    ):
        compute_by_servers(target, (1,), [server.address], TIMEOUT)(ROWS[:1])


def test_an_incomplete_or_short_file_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    locks: list[IO[str]] = []

    def write_states(body: dict[str, Any]) -> dict[str, Any]:
        path, ids = tmp_path / f"{len(locks)}.safetensors", body["prompt"]
        save_file(
            {"hidden_states": torch.zeros(len(ids) - 1, 2, 64), "token_ids": torch.tensor(ids)},
            path,
        )
        locks.append(path.with_name(f"{path.name}.lock").open("w"))
        fcntl.flock(locks[-1], fcntl.LOCK_EX)
        if is_whole:
            locks[-1].close()
        return {"kv_transfer_params": {"hidden_states_path": str(path)}}

    with openai_server.running(Behaviour(models=("served",), more=write_states)) as server:
        is_whole = False
        with pytest.raises(
            ResourceError, match=r"did not complete .* in 0.5 s; .* hidden_states\.timeout"
        ):
            compute_by_servers(target, (1,), [server.address], 0.5)(ROWS[:1])
        is_whole = True
        with refused("hidden_states.server", holds=", 2, 64] and dtype torch.float32 for "):
            compute_by_servers(target, (1,), [server.address], TIMEOUT)(ROWS[:1])
    for lock in locks:
        lock.close()
