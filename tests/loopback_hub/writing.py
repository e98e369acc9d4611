"""Endpoints that write: repositories, large files, commits and tags."""

import base64
import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

from tests.loopback_hub.reading import (
    OWNER,
    Answer,
    RefusedError,
    Request,
    get_commit,
    get_repository,
    get_user,
    parse_metadata,
)
from tests.loopback_hub.store import File, is_large

if TYPE_CHECKING:
    from tests.loopback_hub import Hub

# Some of the licences that the Hub knows by name; a card with another one is refused.
LICENSES = {
    *(
        "apache-2.0",
        "mit",
        "gpl-3.0",
        "cc0-1.0",
        "cc-by-4.0",
        "cc-by-nc-4.0",
        "cc-by-nc-nd-4.0",
        "unknown",
        "other",
    ),
    *("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4", "gemma"),
}


def create_repository(hub: "Hub", request: Request) -> Answer:
    user, body = get_user(hub, request), request.json()
    name = f"{body.get('organization') or user}/{body['name']}"
    if user is None:
        raise RefusedError(401, "Invalid username or password.")
    if user != OWNER:
        raise RefusedError(
            403,
            "You don't have the rights to create a model under the namespace"
            f' "{name.split("/")[0]}"',
        )
    url = f"{hub.address}/{name}"
    if name in hub.repositories:
        return Answer({"error": "You already created this model repo", "url": url}, status=409)
    hub.create(
        name,
        {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"},
        private=body.get("visibility") == "private",
    )
    return Answer({"url": url, "name": name, "id": name})


def preupload(hub: "Hub", request: Request) -> Answer:
    files = get_commit(get_repository(hub, request, writes=True), request.values["revision"]).files
    answer = []
    for requested in request.json()["files"]:
        large = is_large(
            requested["path"], requested["size"], base64.b64decode(requested["sample"])
        )
        known = files.get(requested["path"])
        oid = None if known is None or known.lfs != large else known.sha256 if large else known.git
        answer.append(
            {
                "path": requested["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
                "oid": oid,
            }
        )
    return Answer({"files": answer})


def batch(hub: "Hub", request: Request) -> Answer:
    """Answer with the addresses for objects that the Hub does not have yet."""
    get_repository(hub, request, writes=True)

    def get_actions(oid: str) -> dict[str, Any]:
        upload = {"href": f"{hub.storage_address}/upload/{oid}", "header": {}}
        return {} if oid in hub.objects else {"actions": {"upload": upload}}

    return Answer(
        {
            "transfer": "basic",
            "objects": [
                requested | get_actions(requested["oid"]) for requested in request.json()["objects"]
            ],
        }
    )


def upload(hub: "Hub", request: Request) -> Answer:
    """Keep the body only if its sha256 is the one that was announced."""
    assert request.body
    with request.body.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != request.values["sha256"]:
            raise RefusedError(
                400, "The SHA256 you specified did not match the calculated checksum."
            )
    request.body.replace(hub.objects.path(request.values["sha256"]))
    return Answer()


def xet_token(hub: "Hub", request: Request) -> Answer:
    """Answer with the place where Xet keeps its chunks.

    A real Hub gives an address on the network; hf_xet accepts a folder as well.
    """
    writes = request.values["access"] == "write"
    get_repository(hub, request, writes=writes, reads_files=not writes)
    assert hub.cas
    expires = int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": hub.cas.address,
        "X-Xet-Access-Token": hub.xet_token,
        "X-Xet-Token-Expiration": str(expires),
    }
    return Answer(
        {"casUrl": hub.cas.address, "accessToken": hub.xet_token, "exp": expires}, headers
    )


def commit(hub: "Hub", request: Request) -> Answer:
    """Commit all changes or none of them, on top of the parent that the request names."""
    repository = get_repository(hub, request, writes=True)
    branch = request.values["revision"]
    assert request.body
    try:
        lines = [json.loads(line) for line in request.body.read_bytes().splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
    except (ValueError, LookupError, StopIteration) as error:
        raise RefusedError(400, f"not the lines of a commit: {error}") from error
    with repository.lock:
        head = get_commit(repository, branch)
        if branch not in repository.branches:
            raise RefusedError(400, f"{branch} is not a branch")
        if header.get("parentCommit") not in (None, head.id):
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        changed: dict[str, File | None] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = hub.objects.add(
                    value["path"], base64.b64decode(value["content"])
                )
            elif line["key"] == "lfsFile":
                changed[value["path"]] = hub.find_upload(value["path"], value["oid"])
            elif line["key"] == "deletedFile":
                if value["path"] not in head.files:
                    raise RefusedError(404, "A file with this name doesn't exist", "EntryNotFound")
                changed[value["path"]] = None
        new_commit = repository.commit(
            changed, header["summary"], header.get("description", ""), branch
        )
    return Answer(
        {
            "commitOid": new_commit.id,
            "commitUrl": f"{hub.address}/{repository.id}/commit/{new_commit.id}",
        }
    )


def validate_yaml(hub: "Hub", request: Request) -> Answer:
    """Answer with an error for a card whose licence is not in LICENSES."""
    allowed = parse_metadata(request.json()["content"]).get("license", "other") in LICENSES
    errors = (
        []
        if allowed
        else [{"message": f'"license" must be one of [{", ".join(sorted(LICENSES))}]'}]
    )
    return Answer({"errors": errors, "warnings": []}, status=200 if allowed else 400)


def tag(hub: "Hub", request: Request) -> Answer:
    repository, body = get_repository(hub, request, writes=True), request.json()
    target = get_commit(repository, request.values["revision"])
    with repository.lock:
        if body["tag"] in repository.git_tags:
            raise RefusedError(409, "Tag reference exists already")
        repository.git_tags[body["tag"]] = target.id
        repository.tag_messages[body["tag"]] = body.get("message", "")
    return Answer({})
