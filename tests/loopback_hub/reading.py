"""Endpoints that read: accounts, listings, repositories, files; what the Hub says about them, and
who may ask for what."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import yaml

from tests.loopback_hub.store import Commit, File, Repository, git_hash, pointer

if TYPE_CHECKING:
    from tests.loopback_hub import Hub

# Whom tokens stand for: the owner of every repository, and somebody who sees what is public.
OWNER, STRANGER = "someone", "stranger"


@dataclass
class Request:
    """What was asked: `values` are the parts of the path that the route names; a large body lies in
    a file."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    route: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    body: Path | None = None

    @property
    def token(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme == "Bearer" else None

    def json(self) -> Any:
        return json.loads(self.body.read_bytes()) if self.body else {}


@dataclass
class Answer:
    """`content` is JSON if it is neither bytes nor a file."""

    content: Any = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200


class RefusedError(Exception):
    """An answer that is an error, with the headers by which the client knows it."""

    def __init__(self, status: int, message: str, code: str | None = None):
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.answer = Answer({"error": message}, headers, status)


def user_of(hub: "Hub", request: Request) -> str | None:
    if request.token is None:
        return None
    if request.token not in hub.users:
        raise RefusedError(401, "Invalid credentials in Authorization header")
    return hub.users[request.token]


def repository_of(
    hub: "Hub", request: Request, *, writes: bool = False, reads_files: bool = False
) -> Repository:
    """The repository of the path, for someone who may see it. The Hub does not say whether a
    private one exists."""
    user = user_of(hub, request)
    repository = hub.repositories.get(request.values["id"])
    if repository is None or (repository.private and user != OWNER):
        if user is None:
            raise RefusedError(401, "Invalid username or password.", "RepoNotFound")
        raise RefusedError(404, "Repository not found", "RepoNotFound")
    if writes and user is None:
        raise RefusedError(401, "Invalid username or password.")
    if writes and user != OWNER:
        raise RefusedError(403, "Forbidden: you must use a write token to access this resource")
    if reads_files and repository.gated and user not in {OWNER, *repository.members}:
        message = f"Access to model {repository.id} is restricted."
        if user is None:
            raise RefusedError(401, f"{message} Please log in.", "GatedRepo")
        raise RefusedError(
            403, f"{message} Visit {hub.address}/{repository.id} to ask for access.", "GatedRepo"
        )
    return repository


def commit_of(repository: Repository, revision: str) -> Commit:
    commit = repository.resolve(revision)
    if commit is None:
        raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def description(
    hub: "Hub",
    repository: Repository,
    commit: Commit | None = None,
    *,
    siblings: bool = False,
    blobs: bool = False,
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
        **(
            {"siblings": [sibling(path, file, blobs) for path, file in sorted(files.items())]}
            if siblings
            else {}
        ),
    }


def sibling(path: str, file: File, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    large = {
        "sha256": file.sha256,
        "size": file.size,
        "pointerSize": len(pointer(file.sha256, file.size)),
    }
    return {
        "rfilename": path,
        "size": file.size,
        "blobId": file.git,
        **({"lfs": large} if file.lfs else {}),
    }


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
    bases = (
        [card["base_model"]]
        if isinstance(card.get("base_model"), str)
        else card.get("base_model", [])
    )
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
    found = [
        {"type": "directory", "path": path, "oid": git_hash(path.encode()), "size": 0}
        for path in sorted(folders)
    ]
    return [*found, *(entry(path, file) for path, file in sorted(files.items()))]


def entry(path: str, file: File) -> dict[str, Any]:
    large = {
        "oid": file.sha256,
        "size": file.size,
        "pointerSize": len(pointer(file.sha256, file.size)),
    }
    return {
        "type": "file",
        "path": path,
        "oid": file.git,
        "size": file.size,
        **({"lfs": large} if file.lfs else {}),
        **({"xetHash": file.xet} if file.xet else {}),
    }


def whoami(hub: "Hub", request: Request) -> Answer:
    user = user_of(hub, request)
    if user is None:
        raise RefusedError(401, "Invalid username or password.")
    role = "write" if user == OWNER else "read"
    token = {"displayName": "loopback", "role": role, "createdAt": "2026-01-01T00:00:00.000Z"}
    return Answer(
        {
            "type": "user",
            "name": user,
            "fullname": user,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": token},
        }
    )


def list_models(hub: "Hub", request: Request) -> Answer:
    user, query = user_of(hub, request), request.query
    search = query.get("search", [""])[0].lower()
    found = [
        description(hub, repository)
        for repository in hub.repositories.values()
        if (user == OWNER or not repository.private)
        and search in repository.id.lower()
        and set(query.get("filter", [])) <= set(tags_of(hub, repository))
    ]
    return Answer(
        sorted(found, key=lambda one: one["downloads"], reverse=True)[: int(query["limit"][0])]
    )


def info(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    commit = commit_of(repository, request.values.get("revision", "main"))
    return Answer(
        description(hub, repository, commit, siblings=True, blobs="blobs" in request.query)
    )


def tree(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    return Answer(entries(commit_of(repository, request.values["revision"]).files))


def folder(hub: "Hub", request: Request) -> Answer:
    """What is below a path of a repository, which has no folders."""
    raise RefusedError(404, "Entry not found", "EntryNotFound")


def paths_info(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    files = commit_of(repository, request.values["revision"]).files
    asked = parse_qs(request.body.read_text(encoding="utf-8") if request.body else "").get(
        "paths", []
    )
    return Answer([one for one in entries(files) if one["path"] in asked])


def refs(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.git_tags)}
    return Answer(
        {
            kind: [
                {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit}
                for name, commit in named.items()
            ]
            for kind, (folder, named) in kinds.items()
        }
        | {"converts": [], "pullRequests": []}
    )


def commits(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    commit_of(repository, request.values["revision"])
    return Answer(
        [
            {
                "id": one.id,
                "title": one.title,
                "message": one.message,
                "authors": [{"user": OWNER}],
                "date": one.date,
            }
            for one in repository.history(request.values["revision"])
        ]
    )


def resolve(hub: "Hub", request: Request) -> Answer:
    """A file. A large one lies elsewhere: a redirection to a signed address, which takes no
    token."""
    repository = repository_of(hub, request, reads_files=True)
    commit = commit_of(repository, request.values["revision"])
    file = commit.files.get(request.values["path"])
    if file is None:
        raise RefusedError(404, "Entry not found", "EntryNotFound")
    headers = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
    if not file.lfs:
        return Answer(hub.objects.path(file.sha256), {**headers, "ETag": f'"{file.git}"'})
    headers |= {
        "X-Linked-Size": str(file.size),
        "X-Linked-ETag": f'"{file.sha256}"',
        "Location": f"{hub.storage_address}/cdn/{file.sha256}",
    }
    if file.xet:
        route = f"{hub.address}/api/models/{repository.id}/xet-read-token/{commit.id}"
        headers |= {"X-Xet-Hash": file.xet, "Link": f'<{route}>; rel="xet-auth"'}
    return Answer(b"", headers, 302)


def download(hub: "Hub", request: Request) -> Answer:
    sha256 = request.values["sha256"]
    return Answer(hub.objects.path(sha256), {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"})
