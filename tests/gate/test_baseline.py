"""Where a baseline comes from: files here, and a Hub on loopback, asked by a process of its own: HF_ENDPOINT is read at import."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from specdistill.errors import UserError
from specdistill.gate.decide import read_baseline
from specdistill.gate.rules import load_gate
from specdistill.hub import split_revision
from specdistill.project import ROOT
from specdistill.report.files import write_report
from tests.simulated import simulate, simulated_report

DRAFT, TAG, COMMIT = "someone/tiny-draft", "v1.2", "5" * 40
BETTER = (0.95, 0.9, 0.9, 0.9)
RULES = load_gate("release")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a release that accepted more than today's."""
    records = simulate(24, conditional=BETTER)
    folder = tmp_path_factory.mktemp("released")
    write_report(folder, simulated_report(records), records)
    return folder


def test_a_file_or_its_folder(released: Path) -> None:
    by_folder, by_file = (read_baseline(str(path), RULES) for path in (released, released / "report.json"))
    assert by_folder is not None and by_folder == by_file
    assert len(by_folder.records) == 24


def test_a_gate_that_compares_nothing_takes_no_baseline(released: Path) -> None:
    with pytest.raises(
        UserError, match=r"baseline: got .* for a gate without max_regression rules, expected the gate `release`"
    ):
        read_baseline(str(released), load_gate("default"))
    with pytest.raises(UserError, match="baseline: got none for a gate without"):
        read_baseline("none", load_gate("default"))


def test_a_first_release_has_none() -> None:
    assert read_baseline("none", RULES) is None
    assert read_baseline(None, load_gate("default")) is None


@pytest.mark.parametrize("name", ["nowhere", "./some/where", "runs/before/report", "before/report.json", "/nowhere@v1"])
def test_what_is_neither_here_nor_a_hub_id_is_not_asked_for(name: str, in_empty_folder: Path) -> None:
    with pytest.raises(UserError, match=rf"eval\.baseline: got {name}, which does not exist, expected a report\.json"):
        read_baseline(name, RULES, "eval.baseline")


def test_a_revision_is_what_follows_the_last_at(in_empty_folder: Path) -> None:
    assert split_revision("org/name@v1.2") == ("org/name", "v1.2")
    assert split_revision("org/name") == ("org/name", None)
    (in_empty_folder / "mine@home").mkdir()
    assert split_revision("mine@home") == ("mine@home", None)


# The Hub


@pytest.fixture
def hub(released: Path) -> Iterator[str]:
    """One repository with one tag: a draft's config and, under report/, the release's report."""
    files = {"config.json": b"{}", **{f"report/{path.name}": path.read_bytes() for path in released.iterdir()}}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            listed = [{"type": "file", "path": name, "oid": "1", "size": len(body)} for name, body in files.items()]
            if path == f"/api/models/{DRAFT}/revision/{TAG}":
                self._answer({"id": DRAFT, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
            elif path == f"/api/models/{DRAFT}/tree/{COMMIT}":
                self._answer(listed)
            elif path.startswith(f"/{DRAFT}/resolve/{COMMIT}/") and path.split(f"{COMMIT}/")[1] in files:
                self._send(files[path.split(f"{COMMIT}/")[1]], {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(path)}"'})
            else:
                self._send(b"", {"X-Error-Code": "RevisionNotFound" if DRAFT in path else "RepoNotFound"}, 404)

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
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def gate(cwd: Path, endpoint: str, baseline: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cwd / "home")}
    return subprocess.run(
        [sys.executable, ROOT / "eval/gate.py", "report=report", "gates=gate.yaml", f"baseline={baseline}"],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def work(tmp_path: Path) -> Path:
    records = simulate(24)
    write_report(tmp_path / "report", simulated_report(records), records)
    (tmp_path / "gate.yaml").write_text("- {metric: mean_acceptance_length, max_regression: 0.03}\n")
    return tmp_path


@pytest.mark.slow
def test_a_draft_is_judged_against_the_report_of_a_tag(hub: str, work: Path) -> None:
    result = gate(work, hub, f"{DRAFT}@{TAG}")
    assert result.returncode == 1, result.stderr
    (rule,) = json.loads((work / "report/gate/report.json").read_text())["gate"]["rules"]
    assert rule["metric"] == "mean_acceptance_length" and rule["value"] < -0.2
    fetched = {path.name for path in (work / "home").rglob(f"snapshots/{COMMIT}/**/*") if path.is_file()}
    assert fetched == {"report.json", "samples.jsonl"}


@pytest.mark.slow
def test_a_tag_that_is_not_there(hub: str, work: Path) -> None:
    result = gate(work, hub, f"{DRAFT}@v9")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith(f"error: baseline: {DRAFT}@v9 is no folder here, and could not be fetched")
