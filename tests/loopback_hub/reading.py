"""Endpoints that read accounts, listings, repositories and files, and check who may read them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import yaml

from tests.loopback_hub.store import Commit, File, Repository, compute_git_hash, format_pointer

if TYPE_CHECKING:
    from tests.loopback_hub import Hub

# The users of the tokens: the owner of every repository, and somebody who sees public ones.
OWNER, STRANGER = "someone", "stranger"


@dataclass
class Request:
    """A request of a client.

    `values` are the parts of the path that the route names. The body is in a file.
    """

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
    """An answer to a client; `content` is JSON if it is neither bytes nor a file."""

    content: Any = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200


class RefusedError(Exception):
    """An answer that is an error, with the headers by which the client knows it."""

    def __init__(self, status: int, message: str, code: str | None = None):
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.answer = Answer({"error": message}, headers, status)


def get_user(hub: "Hub", request: Request) -> str | None:
    if request.token is None:
        return None
    if request.token not in hub.users:
        raise RefusedError(401, "Invalid credentials in Authorization header")
    return hub.users[request.token]


def get_repository(
    hub: "Hub", request: Request, *, writes: bool = False, reads_files: bool = False
) -> Repository:
    """Return the repository of the path, or refuse a user who may not see it.

    The Hub does not reveal whether a private repository exists.
    """
    user = get_user(hub, request)
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


def get_commit(repository: Repository, revision: str) -> Commit:
    commit = repository.resolve(revision)
    if commit is None:
        raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def describe_repository(
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
            {
                "siblings": [
                    describe_sibling(path, file, blobs) for path, file in sorted(files.items())
                ]
            }
            if siblings
            else {}
        ),
    }


def describe_sibling(path: str, file: File, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    large = {
        "sha256": file.sha256,
        "size": file.size,
        "pointerSize": len(format_pointer(file.sha256, file.size)),
    }
    return {
        "rfilename": path,
        "size": file.size,
        "blobId": file.git,
        **({"lfs": large} if file.lfs else {}),
    }


def card_of(hub: "Hub", commit: Commit | None) -> dict[str, Any]:
    """Return the metadata at the head of README.md."""
    file = commit.files.get("README.md") if commit else None
    return parse_metadata(hub.objects.path(file.sha256).read_text(encoding="utf-8")) if file else {}


def parse_metadata(card: str) -> dict[str, Any]:
    front_matter = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    return (yaml.safe_load(front_matter[1]) or {}) if front_matter else {}


def tags_of(hub: "Hub", repository: Repository) -> list[str]:
    """Return the repository's own tags, and those that the Hub derives from its card."""
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


def list_entries(files: Mapping[str, File]) -> list[dict[str, Any]]:
    """Return the entries of folders, and then those of files."""
    folders = {parent.as_posix() for path in files for parent in PurePosixPath(path).parents[:-1]}
    folder_entries = [
        {"type": "directory", "path": path, "oid": compute_git_hash(path.encode()), "size": 0}
        for path in sorted(folders)
    ]
    return [*folder_entries, *(describe_entry(path, file) for path, file in sorted(files.items()))]


def describe_entry(path: str, file: File) -> dict[str, Any]:
    large = {
        "oid": file.sha256,
        "size": file.size,
        "pointerSize": len(format_pointer(file.sha256, file.size)),
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
    user = get_user(hub, request)
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
    user, query = get_user(hub, request), request.query
    search = query.get("search", [""])[0].lower()
    descriptions = [
        describe_repository(hub, repository)
        for repository in hub.repositories.values()
        if (user == OWNER or not repository.private)
        and search in repository.id.lower()
        and set(query.get("filter", [])) <= set(tags_of(hub, repository))
    ]
    return Answer(
        sorted(descriptions, key=lambda description: description["downloads"], reverse=True)[
            : int(query["limit"][0])
        ]
    )


def info(hub: "Hub", request: Request) -> Answer:
    repository = get_repository(hub, request)
    commit = get_commit(repository, request.values.get("revision", "main"))
    return Answer(
        describe_repository(hub, repository, commit, siblings=True, blobs="blobs" in request.query)
    )


def tree(hub: "Hub", request: Request) -> Answer:
    repository = get_repository(hub, request)
    return Answer(list_entries(get_commit(repository, request.values["revision"]).files))


def folder(hub: "Hub", request: Request) -> Answer:
    """Refuse to list a folder of a repository, because these repositories have no folders."""
    raise RefusedError(404, "Entry not found", "EntryNotFound")


def paths_info(hub: "Hub", request: Request) -> Answer:
    repository = get_repository(hub, request)
    files = get_commit(repository, request.values["revision"]).files
    requested_paths = parse_qs(
        request.body.read_text(encoding="utf-8") if request.body else ""
    ).get("paths", [])
    return Answer([entry for entry in list_entries(files) if entry["path"] in requested_paths])


def refs(hub: "Hub", request: Request) -> Answer:
    repository = get_repository(hub, request)
    kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.git_tags)}
    return Answer(
        {
            kind: [
                {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit}
                for name, commit in references.items()
            ]
            for kind, (folder, references) in kinds.items()
        }
        | {"converts": [], "pullRequests": []}
    )


def commits(hub: "Hub", request: Request) -> Answer:
    repository = get_repository(hub, request)
    get_commit(repository, request.values["revision"])
    return Answer(
        [
            {
                "id": commit.id,
                "title": commit.title,
                "message": commit.message,
                "authors": [{"user": OWNER}],
                "date": commit.date,
            }
            for commit in repository.history(request.values["revision"])
        ]
    )


def resolve(hub: "Hub", request: Request) -> Answer:
    """Answer with a file, or with a redirection for a large file.

    The address of a large file is signed and takes no token.
    """
    repository = get_repository(hub, request, reads_files=True)
    commit = get_commit(repository, request.values["revision"])
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
