"""The Hub's endpoints, as huggingface_hub calls them."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tests.loopback_hub import reading, writing
from tests.loopback_hub.access import Answer, Request

if TYPE_CHECKING:
    from tests.loopback_hub import Hub


class Route(NamedTuple):
    name: str
    methods: str
    pattern: re.Pattern[str]
    answer: Callable[["Hub", Request], Answer]


def route(name: str, methods: str, pattern: str, answer: Callable[["Hub", Request], Answer]) -> Route:
    """`{name}` in the pattern is a part of the path without a slash, {id} of a repository two, {path} as many as there are."""
    parts = {"id": r"(?P<id>[^/]+/[^/]+?)", "path": "(?P<path>.+)"}
    return Route(
        name, methods, re.compile(re.sub(r"\{(\w+)\}", lambda m: parts.get(m[1], rf"(?P<{m[1]}>[^/]+)"), pattern)), answer
    )


MODEL = "/api/models/{id}"
ROUTES = [
    route("whoami", "GET", "/api/whoami-v2", reading.whoami),
    route("create", "POST", "/api/repos/create", writing.create_repository),
    route("validate", "POST", "/api/validate-yaml", writing.validate_yaml),
    route("list", "GET", "/api/models", reading.list_models),
    route("info", "GET", MODEL, reading.info),
    route("info", "GET", MODEL + "/revision/{revision}", reading.info),
    route("dataset", "GET", "/api/datasets/{id}", reading.info),  # a repository like any other, under another path
    route("tree", "GET", MODEL + "/tree/{revision}", reading.tree),
    route("paths", "POST", MODEL + "/paths-info/{revision}", reading.paths_info),
    route("refs", "GET", MODEL + "/refs", reading.refs),
    route("commits", "GET", MODEL + "/commits/{revision}", reading.commits),
    route("preupload", "POST", MODEL + "/preupload/{revision}", writing.preupload),
    route("batch", "POST", "/{id}.git/info/lfs/objects/batch", writing.batch),
    route("upload", "PUT", "/upload/{sha256}", writing.upload),
    route("xet-token", "GET", MODEL + "/xet-{access}-token/{revision}", writing.xet_token),
    route("commit", "POST", MODEL + "/commit/{revision}", writing.commit),
    route("tag", "POST", MODEL + "/tag/{revision}", writing.tag),
    route("resolve", "GET HEAD", "/{id}/resolve/{revision}/{path}", reading.resolve),
    route("download", "GET HEAD", "/cdn/{sha256}", reading.download),
]
