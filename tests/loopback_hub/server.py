"""HTTP around the endpoints: bodies are read to disk and sent from it, by ranges, and faults on
demand meet them there."""

import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loopback_hub import reading, writing
from tests.loopback_hub.reading import Answer, RefusedError, Request

if TYPE_CHECKING:
    from tests.loopback_hub import Hub

Kind = Literal["status", "cut", "lost", "corrupt", "slow", "conflict"]


@dataclass
class Fault:
    """What the next `times` requests of a route meet, after `skip` of them went well.

    status: answered with `status`, and nothing is done. cut: the connection ends in the middle of
    the body, of the answer's, or of the request's where one is sent; nothing is done. lost: all is
    done, and the connection ends before the answer. corrupt: one byte of the body, sent or
    received, is another. slow: `call()` in the middle of the body. conflict: another commit lands
    on the branch just before.

    `route` is a name in ROUTES; `path` is in the request's path.
    """

    kind: Kind
    route: str
    times: int = 1
    skip: int = 0
    path: str = ""
    status: int = 500
    call: Callable[[], None] | None = None


class Faults:
    def __init__(self) -> None:
        self.waiting: list[Fault] = []
        self._lock = threading.Lock()

    def inject(self, fault: Fault) -> None:
        self.waiting.append(replace(fault))

    def clear(self) -> None:
        with self._lock:
            self.waiting.clear()

    def meets(self, route: str, path: str) -> Fault | None:
        """The fault that this request meets."""
        with self._lock:
            for fault in self.waiting:
                if fault.route != route or fault.path not in path:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self.waiting.remove(fault)
                return fault
        return None


def with_another_byte(content: bytes, index: int) -> bytes:
    """A letter becomes its capital, so that base64 stays base64."""
    return content[:index] + bytes([content[index] ^ 0x20]) + content[index + 1 :]


class Route(NamedTuple):
    name: str
    methods: str
    pattern: re.Pattern[str]
    answer: Callable[["Hub", Request], Answer]


def route(
    name: str, methods: str, pattern: str, answer: Callable[["Hub", Request], Answer]
) -> Route:
    """`{name}` in the pattern is a part of the path without a slash, {id} of a repository two,
    {path} as many as there are."""
    parts = {"id": r"(?P<id>[^/]+/[^/]+?)", "path": "(?P<path>.+)"}
    return Route(
        name,
        methods,
        re.compile(re.sub(r"\{(\w+)\}", lambda m: parts.get(m[1], rf"(?P<{m[1]}>[^/]+)"), pattern)),
        answer,
    )


MODEL, DATASET = "/api/models/{id}", "/api/datasets/{id}"
ROUTES = [
    route("whoami", "GET", "/api/whoami-v2", reading.whoami),
    route("create", "POST", "/api/repos/create", writing.create_repository),
    route("validate", "POST", "/api/validate-yaml", writing.validate_yaml),
    route("list", "GET", "/api/models", reading.list_models),
    route("info", "GET", MODEL, reading.info),
    route("info", "GET", MODEL + "/revision/{revision}", reading.info),
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
    # A data set is a repository like any other, under another path.
    route("dataset", "GET", DATASET, reading.info),
    route("dataset", "GET", DATASET + "/revision/{revision}", reading.info),
    route("dataset-tree", "GET", DATASET + "/tree/{revision}", reading.tree),
    route("dataset-tree", "GET", DATASET + "/tree/{revision}/{path}", reading.folder),
    route("dataset-paths", "POST", DATASET + "/paths-info/{revision}", reading.paths_info),
    route(
        "dataset-resolve", "GET HEAD", "/datasets/{id}/resolve/{revision}/{path}", reading.resolve
    ),
    route("download", "GET HEAD", "/cdn/{sha256}", reading.download),
]

BLOCK = 1 << 16


class CutError(Exception):
    """The connection ends here."""


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        request = Request(
            self.command,
            url.path,
            parse_qs(url.query),
            {name.lower(): value for name, value in self.headers.items()},
        )
        hub.requests.append(request)
        route = next(
            (
                one
                for one in ROUTES
                if self.command in one.methods and one.pattern.fullmatch(url.path)
            ),
            None,
        )
        if route and (found := route.pattern.fullmatch(url.path)):
            request.route = route.name
            request.values = {key: unquote(value) for key, value in found.groupdict().items()}
        fault = hub.faults.meets(request.route, url.path)
        try:
            self._receive(request, fault, hub.arriving)
            if fault and fault.kind == "status":
                answer = Answer({"error": "a fault that was asked for"}, {}, fault.status)
            elif not route:
                answer = Answer({"error": f"no endpoint {self.command} {url.path}"}, {}, 404)
            else:
                if fault and fault.kind == "conflict":
                    hub.commit(
                        request.values["id"],
                        {"someone-else.txt": b"was faster"},
                        "a commit from aside",
                    )
                try:
                    answer = route.answer(hub, request)
                except RefusedError as refused:
                    answer = refused.answer
            has_no_body = self.command == "HEAD" or answer.content == b""
            if fault and (fault.kind == "lost" or (fault.kind == "cut" and has_no_body)):
                _strike(fault)
            self._send(answer, fault)
        except (CutError, ConnectionError):
            self.close_connection = True
        finally:
            if request.body:
                request.body.unlink(missing_ok=True)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _receive(self, request: Request, fault: Fault | None, folder: Path) -> None:
        """The body into a file. A fault strikes here where one is sent."""
        length = int(self.headers.get("Content-Length", 0))
        if not length and "Transfer-Encoding" not in self.headers:
            return
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            request.body = Path(file.name)
            for block in self._blocks(length):
                file.write(block)
                if fault and fault.kind in ("cut", "slow") and file.tell() >= length / 2:
                    _strike(fault)
                    fault = None
        if fault and fault.kind == "corrupt":
            content = request.body.read_bytes()
            middle = len(content) // 2
            letter = re.compile(rb"[A-Za-z]").search(content, middle)
            request.body.write_bytes(
                with_another_byte(content, letter.start() if letter else middle)
            )

    def _blocks(self, length: int) -> Iterator[bytes]:
        if length:
            # At least two, so that there is a middle.
            size = min(BLOCK, max(1, length // 2))
            for start in range(0, length, size):
                yield self.rfile.read(min(size, length - start))
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        content = answer.content
        if not isinstance(content, bytes | Path):
            content, answer.headers = (
                json.dumps(content).encode(),
                {"Content-Type": "application/json", **answer.headers},
            )
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        start, end, status = 0, size, answer.status
        headers: dict[str, Any] = dict(answer.headers)
        if (asked := self.headers.get("Range")) and isinstance(content, Path):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = (
                (int(first), min(size, int(last) + 1) if last else size)
                if first
                else (size - int(last), size)
            )
            status = 206 if start < size else 416
            headers["Content-Range"] = (
                f"bytes {start}-{end - 1}/{size}" if start < size else f"bytes */{size}"
            )
            end = max(start, end) if start < size else start
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(end - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        # it has struck where the body was received
        fault = fault if self.command == "GET" else None
        middle = (start + end) // 2
        for position, block in _read(content, start, end):
            damaged = (
                fault and fault.kind == "corrupt" and position <= middle < position + len(block)
            )
            self.wfile.write(with_another_byte(block, middle - position) if damaged else block)
            if fault and fault.kind in ("cut", "slow") and position + len(block) >= middle:
                self.wfile.flush()
                _strike(fault)
                fault = None

    def log_message(self, *_: Any) -> None:
        """Quiet: what the server says would be taken for the command's."""


def _strike(fault: Fault) -> None:
    if fault.call:
        fault.call()
    if fault.kind != "slow":
        raise CutError


def _read(content: bytes | Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(position, block), at least two of them, so that there is a middle."""
    size = min(BLOCK, max(1, (end - start) // 2))
    if isinstance(content, bytes):
        yield from (
            (position, content[position : min(position + size, end)])
            for position in range(start, end, size)
        )
        return
    with content.open("rb") as file:
        file.seek(start)
        for position in range(start, end, size):
            yield position, file.read(min(size, end - position))
