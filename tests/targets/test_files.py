"""A target is identified by its files: in a folder, in shards, in the Hub's cache or on the Hub.

No weights are fetched from the Hub for it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.hf_api import ModelInfo

from specdistill.common import repositories
from specdistill.targets import files
from specdistill.targets.files import INDEX, SINGLE, TargetFiles, TargetIdentity
from tests.refusals import refused
from tests.tiny import tiny_target_model, write_target

COMMIT = "c" * 40


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), num_layers=2)


def read_identity(folder: Path) -> TargetIdentity:
    return TargetFiles(str(folder)).identity


def write_cache(cache: Path, source: Path, names: list[str]) -> Path:
    """Write a snapshot as the Hub's cache holds it: links to files that are named by their hash."""
    snapshot = cache / "snapshots" / COMMIT
    for folder in (snapshot, cache / "blobs"):
        folder.mkdir(parents=True)
    for name in names:
        blob = cache / "blobs" / hashlib.sha256((source / name).read_bytes()).hexdigest()
        shutil.copy(source / name, blob)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_a_copy_is_the_same_target_and_other_files_are_another(
    saved_target: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(saved_target, tmp_path / "copy")
    assert read_identity(copy).is_same(read_identity(saved_target))
    (copy / "generation_config.json").write_text('{"temperature": 0.7}')
    assert read_identity(copy).is_same(read_identity(saved_target))
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|user|>", "<|human|>"))
    assert read_identity(copy).weights == read_identity(saved_target).weights and not read_identity(
        copy
    ).is_same(read_identity(saved_target))
    tiny_target_model(num_layers=2, seed=1).save_pretrained(tmp_path / "other")
    shutil.copy(saved_target / "tokenizer.json", tmp_path / "other")
    assert read_identity(tmp_path / "other").tokenizer == read_identity(saved_target).tokenizer
    assert not read_identity(tmp_path / "other").is_same(read_identity(saved_target))


def test_a_change_in_any_shard_changes_the_identity(tmp_path: Path) -> None:
    tiny_target_model(num_layers=2).save_pretrained(tmp_path, max_shard_size="200KB")
    before, last = read_identity(tmp_path), max(tmp_path.glob("*.safetensors"))
    assert (tmp_path / INDEX).is_file() and last.name != SINGLE
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert not read_identity(tmp_path).is_same(before)


def test_pico_is_identified_by_its_name() -> None:
    identity, text = TargetFiles("pico").identity, str(TargetFiles("pico").identity)
    assert (identity.name_or_path, identity.revision, identity.adapter) == (
        "pico",
        None,
        None,
    ) and text.startswith("pico (weights ")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with refused("target.model", f"{tmp_path} without weights"):
        _ = read_identity(tmp_path)


@pytest.mark.parametrize("xet", [False, True])
def test_files_in_the_hubs_cache_are_not_read_again(
    saved_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xet: bool
) -> None:
    """With xet a second link leads from the file named by its sha256 to one named by Xet's hash."""
    expected, snapshot = (
        read_identity(saved_target),
        write_cache(tmp_path, saved_target, [SINGLE, "tokenizer.json"]),
    )
    monkeypatch.setattr(files, "fetch", lambda name, **_: snapshot)
    for number, blob in enumerate(sorted((tmp_path / "blobs").iterdir())):
        if xet:
            blob.replace(stored := tmp_path / ("e" * 63 + str(number)))
            blob.symlink_to(stored)
        blob.write_bytes(b"never read")
    cached_identity = TargetFiles("org/name").identity
    assert cached_identity.is_same(expected) and (
        cached_identity.name_or_path,
        cached_identity.revision,
    ) == ("org/name", COMMIT)


def test_the_hub_gives_the_hashes_of_weights_that_are_not_fetched(
    saved_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_calls: list[Any] = []

    class Api:
        def model_info(self, repository: str, *, revision: str, files_metadata: bool) -> Any:
            api_calls.append((repository, revision, files_metadata))
            lfs = {
                "sha256": hashlib.sha256((saved_target / SINGLE).read_bytes()).hexdigest(),
                "size": 1,
                "pointerSize": 1,
            }
            listed = [
                {"rfilename": SINGLE, "lfs": lfs, "size": 1},
                {"rfilename": "config.json", "size": 1},
            ]
            return ModelInfo(id=repository, siblings=listed)

    expected, snapshot = (
        read_identity(saved_target),
        write_cache(tmp_path, saved_target, ["tokenizer.json"]),
    )
    monkeypatch.setattr(files, "fetch", lambda name, **_: snapshot)
    monkeypatch.setattr(repositories, "HfApi", Api)
    assert TargetFiles("org/name", "main").identity.is_same(expected)
    assert api_calls == [("org/name", COMMIT, True)]


@pytest.mark.long  # a process of its own
def test_weights_are_never_held_in_memory(tmp_path: Path) -> None:
    with (tmp_path / SINGLE).open("wb") as file:
        file.truncate(2**29)  # 512 MiB that take no disk
    code = f"""
import resource, sys
from specdistill.targets.files import TargetFiles
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
TargetFiles({str(tmp_path)!r}).identity
sys.exit((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > 64 * 1024)
"""
    assert (
        subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode
        == 0
    )
