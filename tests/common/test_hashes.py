"""The sha256 of files, compared with hashlib; a file that has not changed is read once."""

import hashlib
from pathlib import Path

import pytest

from specdistill.common.hashes import hash_file


def test_a_file_is_hashed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert hash_file(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"another")
    assert hash_file(path) == hashlib.sha256(b"another").hexdigest()
    monkeypatch.delattr(hashlib, "file_digest")
    assert hash_file(path) == hashlib.sha256(b"another").hexdigest()


def test_a_link_into_the_hubs_cache_is_hashed_by_its_name(tmp_path: Path) -> None:
    link = tmp_path / "weights"
    link.symlink_to(tmp_path / ("a" * 64))
    assert hash_file(link) == "a" * 64
