"""A target told by its files: in a folder, in shards, in the Hub's cache, and on a Hub from which
no weights are fetched."""

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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), num_layers=2)


def identity(folder: Path) -> TargetIdentity:
    return TargetFiles(str(folder)).identity


def in_cache(cache: Path, source: Path, names: list[str]) -> Path:
    """A snapshot as the Hub's cache holds it: links to files that are named by their hash."""
    snapshot = cache / "snapshots" / COMMIT
    for folder in (snapshot, cache / "blobs"):
        folder.mkdir(parents=True)
    for name in names:
        blob = cache / "blobs" / hashlib.sha256((source / name).read_bytes()).hexdigest()
        shutil.copy(source / name, blob)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_a_copy_is_the_same_target_and_other_files_are_another(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "copy")
    assert identity(copy).is_same(identity(saved))
    (copy / "generation_config.json").write_text('{"temperature": 0.7}')
    assert identity(copy).is_same(identity(saved))
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|user|>", "<|human|>"))
    assert identity(copy).weights == identity(saved).weights and not identity(copy).is_same(
        identity(saved)
    )
    tiny_target_model(num_layers=2, seed=1).save_pretrained(tmp_path / "other")
    shutil.copy(saved / "tokenizer.json", tmp_path / "other")
    assert identity(tmp_path / "other").tokenizer == identity(saved).tokenizer
    assert not identity(tmp_path / "other").is_same(identity(saved))


def test_every_shard_counts(tmp_path: Path) -> None:
    tiny_target_model(num_layers=2).save_pretrained(tmp_path, max_shard_size="200KB")
    before, last = identity(tmp_path), max(tmp_path.glob("*.safetensors"))
    assert (tmp_path / INDEX).is_file() and last.name != SINGLE
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert not identity(tmp_path).is_same(before)


def test_pico_goes_by_its_name() -> None:
    named, loaded = TargetFiles("pico").identity, str(TargetFiles("pico").identity)
    assert (named.name_or_path, named.revision, named.adapter) == (
        "pico",
        None,
        None,
    ) and loaded.startswith("pico (weights ")


def test_a_folder_without_weights_is_none(tmp_path: Path) -> None:
    with refused("target.model", f"{tmp_path} without weights"):
        _ = identity(tmp_path)


@pytest.mark.parametrize("xet", [False, True])
def test_files_in_the_hubs_cache_are_not_read_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xet: bool
) -> None:
    """xet: with one more link, from the file that is named by its sha256 to one that is named by
    Xet's own hash."""
    expected, snapshot = identity(saved), in_cache(tmp_path, saved, [SINGLE, "tokenizer.json"])
    monkeypatch.setattr(files, "fetch", lambda name, **_: snapshot)
    for number, blob in enumerate(sorted((tmp_path / "blobs").iterdir())):
        if xet:
            blob.replace(stored := tmp_path / ("e" * 63 + str(number)))
            blob.symlink_to(stored)
        blob.write_bytes(b"never read")
    found = TargetFiles("org/name").identity
    assert found.is_same(expected) and (found.name_or_path, found.revision) == ("org/name", COMMIT)


def test_weights_that_were_not_fetched_are_known_by_what_the_hub_says(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Api:
        def model_info(self, repository: str, *, revision: str, files_metadata: bool) -> Any:
            asked.append((repository, revision, files_metadata))
            lfs = {
                "sha256": hashlib.sha256((saved / SINGLE).read_bytes()).hexdigest(),
                "size": 1,
                "pointerSize": 1,
            }
            listed = [
                {"rfilename": SINGLE, "lfs": lfs, "size": 1},
                {"rfilename": "config.json", "size": 1},
            ]
            return ModelInfo(id=repository, siblings=listed)

    expected, snapshot = identity(saved), in_cache(tmp_path, saved, ["tokenizer.json"])
    monkeypatch.setattr(files, "fetch", lambda name, **_: snapshot)
    monkeypatch.setattr(repositories, "HfApi", Api)
    assert TargetFiles("org/name", "main").identity.is_same(expected)
    assert asked == [("org/name", COMMIT, True)]


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
