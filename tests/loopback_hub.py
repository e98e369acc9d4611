"""A Hub on loopback: one model repository, and a listing. Processes are asked for it by HF_ENDPOINT, which is read at import."""

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from specdistill.project import ROOT

COMMIT = "5" * 40


@contextmanager
def hub_with(
    repository: str, files: Mapping[str, bytes], *, revision: str = "main", listing: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str]:
    """The address of a Hub whose repository has one revision with these files; a search finds entries of `listing`."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path, query = url.path, parse_qs(url.query)
            if path == "/api/models":
                search, tags = query.get("search", [""])[0], set(query.get("filter", []))
                self._answer([entry for entry in listing if search in entry["id"].lower() and tags <= set(entry["tags"])])
            elif path in (f"/api/models/{repository}", f"/api/models/{repository}/revision/{revision}"):
                self._answer({"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
            elif path == f"/api/models/{repository}/tree/{COMMIT}":
                self._answer([{"type": "file", "path": name, "oid": "1", "size": len(body)} for name, body in files.items()])
            elif path.startswith(f"/{repository}/resolve/{COMMIT}/") and path.split(f"{COMMIT}/")[1] in files:
                self._send(files[path.split(f"{COMMIT}/")[1]], {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(path)}"'})
            else:
                self._send(b"", {"X-Error-Code": "RevisionNotFound" if repository in path else "RepoNotFound"}, 404)

        do_HEAD = do_GET

        def _answer(self, value: Any) -> None:
            self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet: what the server says would be taken for the command's."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: str, home: Path) -> dict[str, str]:
    """Of a process that asks this Hub and keeps what it fetches in `home`."""
    return {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}


def fetched(home: Path) -> set[str]:
    return {path.name for path in home.rglob(f"snapshots/{COMMIT}/**/*") if path.is_file()}
