"""A request, an answer, an error, and who may ask for what."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.loopback_hub.store import Commit, Repository

if TYPE_CHECKING:
    from tests.loopback_hub import Hub

# Whom tokens stand for: the owner of every repository, and somebody who sees what is public.
OWNER, STRANGER = "someone", "stranger"


@dataclass
class Request:
    """What was asked: `values` are the parts of the path that the route names; a large body lies in a file."""

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


def repository_of(hub: "Hub", request: Request, *, writes: bool = False, reads_files: bool = False) -> Repository:
    """The repository of the path, for someone who may see it. The Hub does not say whether a private one exists."""
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
        raise RefusedError(403, f"{message} Visit {hub.address}/{repository.id} to ask for access.", "GatedRepo")
    return repository


def commit_of(repository: Repository, revision: str) -> Commit:
    commit = repository.resolve(revision)
    if commit is None:
        raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit
