"""The storage of Xet on this machine: hf_xet chunks and deduplicates files into a folder.

The client that uploads does so in its own process.
"""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import hf_xet

# A shard (https://huggingface.co/docs/xet/shard): a header of 48 bytes, then for each file a record
# of 48 bytes, its segments, and by its flags as many verification records and one with the sha256,
# all of the same size; hashes are four little-endian words.
RECORD = 48
VERIFIED, WITH_SHA256 = 1 << 31, 1 << 30


class Storage:
    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"local://{folder.resolve()}"

    def add(self, path: Path) -> str:
        """Keep a file, and return the hash by which it is fetched."""
        with hf_xet.XetSession().new_upload_commit(endpoint=self.address) as commit:
            upload = commit.start_upload_file(str(path), sha256=hf_xet.COMPUTE_SHA256)
        return upload.result().xet_info.hash

    def list_hashes(self) -> dict[str, tuple[str, int]]:
        """Return the hash and the size in bytes of each uploaded file, by its sha256."""
        return {
            sha256: (name, size)
            for shard in self.folder.rglob("shards/*.mdb")
            for sha256, name, size in _iterate_files(shard.read_bytes())
        }

    def fetch(self, name: str, size: int, path: Path) -> str:
        """Write an uploaded file to `path`, and return the sha256 of its bytes."""
        digest = hashlib.sha256()
        group = hf_xet.XetSession().new_download_stream_group(endpoint=self.address)
        with path.open("wb") as file:
            for chunk in group.download_stream(hf_xet.XetFileInfo(name, size)):
                file.write(chunk)
                digest.update(chunk)
        return digest.hexdigest()


def _iterate_files(shard: bytes) -> Iterator[tuple[str, str, int]]:
    """Yield the sha256, the hash and the size of each file in a shard."""
    offset = RECORD
    while shard[offset : offset + 32] != b"\xff" * 32:
        name, flags, segments = (
            shard[offset : offset + 32],
            *struct.unpack_from("<II", shard, offset + 32),
        )
        sizes = [
            struct.unpack_from("<I", shard, offset + RECORD * (1 + index) + 36)[0]
            for index in range(segments)
        ]
        offset += RECORD * (1 + segments * (2 if flags & VERIFIED else 1))
        if flags & WITH_SHA256:
            yield _format_hash(shard[offset : offset + 32]), _format_hash(name), sum(sizes)
            offset += RECORD


def _format_hash(value: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", value))
