"""Suites from jsonl, gzip and parquet files, from a web server, and from a Hub on loopback (in a
process of its own: HF_ENDPOINT is read at import)."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest

from specdistill.common.project import ROOT
from specdistill.evaluation.suites.suite import parse_suite_file
from tests.memory import at_most
from tests.refusals import refused

DATASET, COMMIT = "someone/questions", "0" * 40
QUESTIONS = [
    {"question_id": 7, "kind": "math", "turns": ["one and one", "and one more"]},
    {"question_id": 8, "kind": "rag", "turns": ["PLACEHOLDER: fetch me", "no PLACEHOLDER"]},
]
COLUMNS = {"user": "turns", "id": "question_id", "category": "kind"}


def to_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_parquet(rows):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.jsonl", to_jsonl(QUESTIONS)),
        ("q.jsonl.gz", gzip.compress(to_jsonl(QUESTIONS), mtime=0)),
        ("hf://q.parquet", to_parquet(QUESTIONS)),
    ],
)
def test_every_format_gives_the_same_rows(name, content):
    first, second = parse_suite_file(name, content, COLUMNS)
    assert (first.id, first.category, first.kind) == ("7", "math", "messages")
    assert first.content == [{"role": "user", "content": "one and one"}]
    assert (second.id, second.content[0]["content"]) == ("8", "PLACEHOLDER: fetch me")
    # A row is left out only if its prompt begins with the placeholder.
    assert parse_suite_file(name, content, COLUMNS, "fetch me") == (first, second)
    assert parse_suite_file(name, content, COLUMNS, "PLACEHOLDER") == (first,)


@pytest.mark.parametrize(
    ("name", "content", "columns", "got"),
    [
        ("q.jsonl", to_jsonl(QUESTIONS), {"user": "turn"}, "q.jsonl:1 without the column turn"),
        ("q.jsonl", to_jsonl([{"turns": []}]), {"user": "turns"}, "q.jsonl:1 with messages="),
        ("q.jsonl.gz", b"no gzip", {}, "q.jsonl.gz: "),
        ("q.jsonl.gz", gzip.compress(to_jsonl(QUESTIONS), mtime=0)[:-9], COLUMNS, "q.jsonl.gz: "),
        (
            "q.jsonl.gz",
            gzip.compress(to_jsonl(QUESTIONS), mtime=0)[:30] + bytes(9),
            COLUMNS,
            "q.jsonl.gz: ",
        ),
        (
            "q.jsonl.gz",
            gzip.compress(bytes(2**20), mtime=0) * 1024,
            {},
            "q.jsonl.gz: line 1: more than 67,108,864 bytes",
        ),
        (
            "q.jsonl",
            to_jsonl(QUESTIONS) + b'{"prompt": "\xe9"}\n',
            COLUMNS,
            "q.jsonl: line 3: byte 0xe9, which is not UTF-8",
        ),
        ("q.parquet", b"no parquet", {}, "q.parquet: "),
        ("q.parquet", b"PAR1" + bytes(50) + b"PAR1", {}, "q.parquet: "),
        (
            "q.parquet",
            to_parquet([{"prompt": "QQQQQQ"}]).replace(b"QQQQQQ", b"\xff\xfe\xfd\xfc\xfb\xfa"),
            {},
            "q.parquet: ",
        ),
        ("q.parquet", to_parquet([{"prompt": ["a"]}]), {}, "q.parquet:1 with prompt="),
        ("q.parquet", to_parquet([{"prompt": None}]), {}, "q.parquet:1 with prompt="),
        (
            "q.parquet",
            to_parquet([{"messages": {"role": "user"}}]),
            {},
            "q.parquet:1 with messages=",
        ),
        ("q.parquet", to_parquet(QUESTIONS)[:-60] + bytes(60), {}, "q.parquet: "),
        ("q.parquet", to_parquet([]), {}, "q.parquet, which is empty"),
        ("q.jsonl", to_jsonl(QUESTIONS[1:]), COLUMNS, "q.jsonl, which is empty"),
    ],
)
def test_a_file_without_readable_prompts_is_refused(name, content, columns, got):
    with at_most(3e8), refused("eval.suite", got):
        parse_suite_file(name, content, columns, "PLACEHOLDER")


def test_a_repeated_id_among_many_is_found_at_once():
    rows = [{"prompt": "p", "id": str(number)} for number in range(20_000)]
    start = time.process_time()
    with refused("eval.suite", "q.jsonl, in which several rows have the id 19999"):
        parse_suite_file("q.jsonl", to_jsonl([*rows, rows[-1]]), {})
    assert time.process_time() - start < 2


class Hub(BaseHTTPRequestHandler):
    """A Hub of one dataset with one parquet file, and a jsonl file outside its repositories."""

    def do_GET(self):
        body = to_parquet(QUESTIONS)
        if self.path.startswith(f"/api/datasets/{DATASET}/paths-info") or self.path.startswith(
            f"/api/datasets/{DATASET}/tree"
        ):
            self._send([{"type": "file", "path": "test/0.parquet", "oid": "1", "size": len(body)}])
        elif self.path.startswith(f"/api/datasets/{DATASET}"):
            self._send(
                {"id": DATASET, "sha": COMMIT, "siblings": [{"rfilename": "test/0.parquet"}]}
            )
        elif self.path.startswith(f"/datasets/{DATASET}/resolve/{COMMIT}/test/0.parquet"):
            self._send(body, {"X-Repo-Commit": COMMIT, "ETag": '"1"'})
        elif self.path == "/question.jsonl":
            self._send(to_jsonl(QUESTIONS))
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
        """Print nothing: the lines of the server would be taken for the command's."""


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


LOAD = """
import sys
from specdistill.common.errors import ResourceError, UserError
from specdistill.evaluation.suites.suite import load_suite
for path in sys.argv[1:]:
    try:
        suite = load_suite(path)
        print(len(suite.rows), suite.sha256, suite.rows[0].id)
    except UserError as error:
        print(error.key, error.got)
    except ResourceError as error:
        print(error)
"""


@pytest.mark.long  # a process of its own
def test_a_suite_loads_from_the_hub_and_from_the_web(hub, tmp_path):
    """The right hash and no hash load the prompts; a wrong hash and a missing file are refused."""
    digest, web_digest = (
        hashlib.sha256(kind(QUESTIONS)).hexdigest() for kind in (to_parquet, to_jsonl)
    )
    hub_path = f"hf://datasets/{DATASET}@{COMMIT}/test/0.parquet"
    places = {
        "pinned": (hub_path, digest),
        "open": (hub_path, None),
        "changed": (hub_path, "0" * 64),
        "web": (f"{hub}/question.jsonl", web_digest),
        "gone": (f"{hub}/nothing.jsonl", None),
        "gone-too": ("hf://datasets/nobody/nothing@main/0.parquet", None),
    }
    for name, (prompts, sha256) in places.items():
        header = {
            "name": name,
            "version": "1",
            "licence": "CC0-1.0",
            "source": "made up",
            "columns": COLUMNS,
        }
        (tmp_path / f"{name}.yaml").write_text(
            json.dumps({**header, "prompts": prompts, "sha256": sha256})
        )
    settings = {
        "HF_ENDPOINT": hub,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.run(
        [sys.executable, "-c", LOAD, *(str(tmp_path / f"{name}.yaml") for name in places)],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    assert process.returncode == 0, process.stderr
    pinned, opened, changed, web, *gone = process.stdout.splitlines()
    assert pinned == opened == f"2 {digest} 7"
    assert changed == f"eval.suite {hub_path} with sha256 {digest}"
    assert web == f"2 {web_digest} 7"
    for message, name in zip(gone, ("gone", "gone-too"), strict=True):
        assert message.startswith(f"eval.suite: {places[name][0]} ")
