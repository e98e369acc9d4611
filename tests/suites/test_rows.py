"""Suites from jsonl, gzip and parquet files, from a web server, and from a Hub on loopback (in a process of its own: HF_ENDPOINT is
read at import)."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest

from specdistill.errors import UserError
from specdistill.project import ROOT
from specdistill.suites.suite import parse

DATASET, COMMIT = "someone/questions", "0" * 40
QUESTIONS = [
    {"question_id": 7, "kind": "math", "turns": ["one and one", "and one more"]},
    {"question_id": 8, "kind": "rag", "turns": ["PLACEHOLDER: fetch me"]},
]
COLUMNS = {"user": "turns", "id": "question_id", "category": "kind"}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [("q.jsonl", jsonl(QUESTIONS)), ("q.jsonl.gz", gzip.compress(jsonl(QUESTIONS))), ("hf://q.parquet", parquet(QUESTIONS))],
)
def test_the_same_rows_in_every_format(name, content):
    first, second = parse(name, content, COLUMNS)
    assert (first.id, first.category, first.kind) == ("7", "math", "messages")
    assert first.content == [{"role": "user", "content": "one and one"}]
    assert second.id == "8"
    assert parse(name, content, COLUMNS, "PLACEHOLDER") == (first,)


def test_what_a_user_says_may_be_a_text_of_its_own():
    (row,) = parse("q.jsonl", jsonl([{"user": "hi"}]), {})
    assert row.content == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        (
            "q.jsonl",
            jsonl(QUESTIONS),
            {"user": "turn"},
            r"q\.jsonl:1 without turn, expected one of question_id.*did you mean turns",
        ),
        ("q.jsonl", jsonl([{"turns": []}]), {"user": "turns"}, "a list of {role, content}"),
        ("q.jsonl.gz", b"no gzip", {}, r"q\.jsonl\.gz: .*expected a file as its name says"),
        ("q.parquet", b"no parquet", {}, r"q\.parquet: .*expected a file as its name says"),
        ("q.jsonl", jsonl(QUESTIONS[1:]), COLUMNS, "empty"),
    ],
)
def test_files_that_hold_no_prompts(name, content, columns, message):
    with pytest.raises(UserError, match=message):
        parse(name, content, columns, "PLACEHOLDER")


class Hub(BaseHTTPRequestHandler):
    """One dataset with one parquet file, and one jsonl file that is no repository's."""

    def do_GET(self):
        body = parquet(QUESTIONS)
        if self.path.startswith(f"/api/datasets/{DATASET}/paths-info") or self.path.startswith(f"/api/datasets/{DATASET}/tree"):
            self._send([{"type": "file", "path": "test/0.parquet", "oid": "1", "size": len(body)}])
        elif self.path.startswith(f"/api/datasets/{DATASET}"):
            self._send({"id": DATASET, "sha": COMMIT, "siblings": [{"rfilename": "test/0.parquet"}]})
        elif self.path.startswith(f"/datasets/{DATASET}/resolve/{COMMIT}/test/0.parquet"):
            self._send(body, {"X-Repo-Commit": COMMIT, "ETag": '"1"'})
        elif self.path == "/question.jsonl":
            self._send(jsonl(QUESTIONS))
        else:
            self._send(b"", {"X-Error-Code": "EntryNotFound"}, 404)

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    do_HEAD = do_GET

    def _send(self, body, headers=None, status=200):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        """Quiet: what the server says would be taken for the command's."""


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


LOAD = """
import sys
from specdistill.errors import ResourceError, UserError
from specdistill.suites.suite import load_suite
for path in sys.argv[1:]:
    try:
        suite = load_suite(path)
        print(len(suite.rows), suite.sha256, suite.rows[0].id)
    except (ResourceError, UserError) as error:
        print(type(error).__name__, error)
"""


def test_suites_on_the_hub_and_on_the_web(hub, tmp_path):
    """With the right hash, with none, with a wrong one, and where nothing is."""
    digest = hashlib.sha256(parquet(QUESTIONS)).hexdigest()
    places = {
        "pinned": (f"hf://datasets/{DATASET}@{COMMIT}/test/0.parquet", digest),
        "open": (f"hf://datasets/{DATASET}@{COMMIT}/test/0.parquet", None),
        "changed": (f"hf://datasets/{DATASET}@{COMMIT}/test/0.parquet", "0" * 64),
        "web": (f"{hub}/question.jsonl", hashlib.sha256(jsonl(QUESTIONS)).hexdigest()),
        "gone": (f"{hub}/nothing.jsonl", None),
        "gone-too": ("hf://datasets/nobody/nothing@main/0.parquet", None),
    }
    for name, (prompts, sha256) in places.items():
        header = {"name": name, "version": "1", "licence": "CC0-1.0", "source": "made up", "columns": COLUMNS}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**header, "prompts": prompts, "sha256": sha256}))
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.run(
        [sys.executable, "-c", LOAD, *(str(tmp_path / f"{name}.yaml") for name in places)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    pinned, opened, changed, web, gone, gone_too = process.stdout.splitlines()
    assert pinned == opened == f"2 {digest} 7"
    assert changed.startswith("UserError eval.suite: got hf://") and f"with sha256 {digest}" in changed
    assert web == f"2 {hashlib.sha256(jsonl(QUESTIONS)).hexdigest()} 7"
    assert gone.startswith("ResourceError eval.suite: ") and "nothing.jsonl could not be fetched" in gone
    assert (
        gone_too.startswith("ResourceError eval.suite: ") and "nobody/nothing@main/0.parquet could not be fetched" in gone_too
    )
