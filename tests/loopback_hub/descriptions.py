"""What the Hub says about a repository and its files, from its commits and its card."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from tests.loopback_hub.store import Commit, File, Repository, git_hash, pointer

if TYPE_CHECKING:
    from tests.loopback_hub import Hub


def description(
    hub: "Hub", repository: Repository, commit: Commit | None = None, *, siblings: bool = False, blobs: bool = False
) -> dict[str, Any]:
    commit = commit or repository.resolve("main")
    files = commit.files if commit else {}
    return {
        "id": repository.id,
        "sha": commit.id if commit else None,
        "private": repository.private,
        "gated": "manual" if repository.gated else False,
        "downloads": repository.downloads,
        "tags": tags_of(hub, repository),
        "cardData": card_of(hub, commit),
        **({"siblings": [sibling(path, file, blobs) for path, file in sorted(files.items())]} if siblings else {}),
    }


def sibling(path: str, file: File, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    large = {"sha256": file.sha256, "size": file.size, "pointerSize": len(pointer(file.sha256, file.size))}
    return {"rfilename": path, "size": file.size, "blobId": file.git, **({"lfs": large} if file.lfs else {})}


def card_of(hub: "Hub", commit: Commit | None) -> dict[str, Any]:
    """The metadata at the head of README.md."""
    file = commit.files.get("README.md") if commit else None
    return metadata(hub.objects.path(file.sha256).read_text(encoding="utf-8")) if file else {}


def metadata(card: str) -> dict[str, Any]:
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    return (yaml.safe_load(found[1]) or {}) if found else {}


def tags_of(hub: "Hub", repository: Repository) -> list[str]:
    """Those given, and what the Hub derives from the card."""
    card = card_of(hub, repository.resolve("main"))
    bases = [card["base_model"]] if isinstance(card.get("base_model"), str) else card.get("base_model", [])
    relation = card.get("base_model_relation", "finetune")
    derived = [
        *card.get("tags", []),
        *([card["library_name"]] if "library_name" in card else []),
        *(f"base_model:{base}" for base in bases),
        *(f"base_model:{relation}:{base}" for base in bases),
        *([f"license:{card['license']}"] if "license" in card else []),
    ]
    return list(dict.fromkeys([*repository.tags, *derived]))


def entries(files: Mapping[str, File]) -> list[dict[str, Any]]:
    """Folders, then files."""
    folders = {parent.as_posix() for path in files for parent in PurePosixPath(path).parents[:-1]}
    found = [{"type": "directory", "path": path, "oid": git_hash(path.encode()), "size": 0} for path in sorted(folders)]
    return [*found, *(entry(path, file) for path, file in sorted(files.items()))]


def entry(path: str, file: File) -> dict[str, Any]:
    large = {"oid": file.sha256, "size": file.size, "pointerSize": len(pointer(file.sha256, file.size))}
    return {
        "type": "file",
        "path": path,
        "oid": file.git,
        "size": file.size,
        **({"lfs": large} if file.lfs else {}),
        **({"xetHash": file.xet} if file.xet else {}),
    }
