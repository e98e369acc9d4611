"""HTTP around the endpoints: bodies go to and from disk, and faults are injected on the way."""

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
    """A fault of the next `times` requests of a route, after `skip` requests without one.

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

    def find_fault(self, route: str, path: str) -> Fault | None:
        """Return the fault of this request, and count it as used."""
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


def change_byte(content: bytes, index: int) -> bytes:
    """Change the case of a letter, so that base64 stays base64."""
    return content[:index] + bytes([content[index] ^ 0x20]) + content[index + 1 :]


class Route(NamedTuple):
    name: str
    methods: str
    pattern: re.Pattern[str]
    answer: Callable[["Hub", Request], Answer]


def make_route(
    name: str, methods: str, pattern: str, answer: Callable[["Hub", Request], Answer]
) -> Route:
    """Return a route for a pattern with names in braces.

    `{name}` is a part of the path without a slash, `{id}` has one slash, and `{path}` any number.
    """
    parts = {"id": r"(?P<id>[^/]+/[^/]+?)", "path": "(?P<path>.+)"}
    return Route(
        name,
        methods,
        re.compile(re.sub(r"\{(\w+)\}", lambda m: parts.get(m[1], rf"(?P<{m[1]}>[^/]+)"), pattern)),
        answer,
    )


MODEL, DATASET = "/api/models/{id}", "/api/datasets/{id}"
ROUTES = [
    make_route("whoami", "GET", "/api/whoami-v2", reading.whoami),
    make_route("create", "POST", "/api/repos/create", writing.create_repository),
    make_route("validate", "POST", "/api/validate-yaml", writing.validate_yaml),
    make_route("list", "GET", "/api/models", reading.list_models),
    make_route("info", "GET", MODEL, reading.info),
    make_route("info", "GET", MODEL + "/revision/{revision}", reading.info),
    make_route("tree", "GET", MODEL + "/tree/{revision}", reading.tree),
    make_route("paths", "POST", MODEL + "/paths-info/{revision}", reading.paths_info),
    make_route("refs", "GET", MODEL + "/refs", reading.refs),
    make_route("commits", "GET", MODEL + "/commits/{revision}", reading.commits),
    make_route("preupload", "POST", MODEL + "/preupload/{revision}", writing.preupload),
    make_route("batch", "POST", "/{id}.git/info/lfs/objects/batch", writing.batch),
    make_route("upload", "PUT", "/upload/{sha256}", writing.upload),
    make_route("xet-token", "GET", MODEL + "/xet-{access}-token/{revision}", writing.xet_token),
    make_route("commit", "POST", MODEL + "/commit/{revision}", writing.commit),
    make_route("tag", "POST", MODEL + "/tag/{revision}", writing.tag),
    make_route("resolve", "GET HEAD", "/{id}/resolve/{revision}/{path}", reading.resolve),
    # A data set is a repository like any other, under another path.
    make_route("dataset", "GET", DATASET, reading.info),
    make_route("dataset", "GET", DATASET + "/revision/{revision}", reading.info),
    make_route("dataset-tree", "GET", DATASET + "/tree/{revision}", reading.tree),
    make_route("dataset-tree", "GET", DATASET + "/tree/{revision}/{path}", reading.folder),
    make_route("dataset-paths", "POST", DATASET + "/paths-info/{revision}", reading.paths_info),
    make_route(
        "dataset-resolve", "GET HEAD", "/datasets/{id}/resolve/{revision}/{path}", reading.resolve
    ),
    make_route("download", "GET HEAD", "/cdn/{sha256}", reading.download),
]

BLOCK = 1 << 16


class CutError(Exception):
    """The end of a connection."""


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
                candidate
                for candidate in ROUTES
                if self.command in candidate.methods and candidate.pattern.fullmatch(url.path)
            ),
            None,
        )
        if route and (match := route.pattern.fullmatch(url.path)):
            request.route = route.name
            request.values = {key: unquote(value) for key, value in match.groupdict().items()}
        fault = hub.faults.find_fault(request.route, url.path)
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
                _apply_fault(fault)
            self._send(answer, fault)
        except (CutError, ConnectionError):
            self.close_connection = True
        finally:
            if request.body:
                request.body.unlink(missing_ok=True)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _receive(self, request: Request, fault: Fault | None, folder: Path) -> None:
        """Write the body to a file; a fault of a request with a body is applied here."""
        length = int(self.headers.get("Content-Length", 0))
        if not length and "Transfer-Encoding" not in self.headers:
            return
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            request.body = Path(file.name)
            for block in self._read_body(length):
                file.write(block)
                if fault and fault.kind in ("cut", "slow") and file.tell() >= length / 2:
                    _apply_fault(fault)
                    fault = None
        if fault and fault.kind == "corrupt":
            content = request.body.read_bytes()
            middle = len(content) // 2
            letter = re.compile(rb"[A-Za-z]").search(content, middle)
            request.body.write_bytes(change_byte(content, letter.start() if letter else middle))

    def _read_body(self, length: int) -> Iterator[bytes]:
        if length:
            # There are at least two blocks, so that there is a middle.
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
        if (byte_range := self.headers.get("Range")) and isinstance(content, Path):
            first, _, last = byte_range.removeprefix("bytes=").partition("-")
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
        # a fault of another method was applied when the body was received
        fault = fault if self.command == "GET" else None
        middle = (start + end) // 2
        for position, block in _read_blocks(content, start, end):
            damaged = (
                fault and fault.kind == "corrupt" and position <= middle < position + len(block)
            )
            self.wfile.write(change_byte(block, middle - position) if damaged else block)
            if fault and fault.kind in ("cut", "slow") and position + len(block) >= middle:
                self.wfile.flush()
                _apply_fault(fault)
                fault = None

    def log_message(self, *_: Any) -> None:
        """Print nothing, because the output would be taken for that of the command."""


def _apply_fault(fault: Fault) -> None:
    if fault.call:
        fault.call()
    if fault.kind != "slow":
        raise CutError


def _read_blocks(content: bytes | Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield at least two blocks with their positions, so that there is a middle."""
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
