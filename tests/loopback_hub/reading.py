"""Endpoints that read: accounts, listings, repositories, files."""

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from tests.loopback_hub.access import OWNER, Answer, RefusedError, Request, commit_of, repository_of, user_of
from tests.loopback_hub.descriptions import description, entries, tags_of

if TYPE_CHECKING:
    from tests.loopback_hub import Hub


def whoami(hub: "Hub", request: Request) -> Answer:
    user = user_of(hub, request)
    if user is None:
        raise RefusedError(401, "Invalid username or password.")
    role = "write" if user == OWNER else "read"
    token = {"displayName": "loopback", "role": role, "createdAt": "2026-01-01T00:00:00.000Z"}
    return Answer(
        {"type": "user", "name": user, "fullname": user, "orgs": [], "auth": {"type": "access_token", "accessToken": token}}
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
    return Answer(sorted(found, key=lambda one: one["downloads"], reverse=True)[: int(query["limit"][0])])


def info(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    commit = commit_of(repository, request.values.get("revision", "main"))
    return Answer(description(hub, repository, commit, siblings=True, blobs="blobs" in request.query))


def tree(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    return Answer(entries(commit_of(repository, request.values["revision"]).files))


def paths_info(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    files = commit_of(repository, request.values["revision"]).files
    asked = parse_qs(request.body.read_text(encoding="utf-8") if request.body else "").get("paths", [])
    return Answer([one for one in entries(files) if one["path"] in asked])


def refs(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.git_tags)}
    return Answer(
        {
            kind: [{"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit} for name, commit in named.items()]
            for kind, (folder, named) in kinds.items()
        }
        | {"converts": [], "pullRequests": []}
    )


def commits(hub: "Hub", request: Request) -> Answer:
    repository = repository_of(hub, request)
    commit_of(repository, request.values["revision"])
    return Answer(
        [
            {"id": one.id, "title": one.title, "message": one.message, "authors": [{"user": OWNER}], "date": one.date}
            for one in repository.history(request.values["revision"])
        ]
    )


def resolve(hub: "Hub", request: Request) -> Answer:
    """A file. A large one lies elsewhere: a redirection to a signed address, which takes no token."""
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
