"""`specdistill plan` against a Hub on loopback, in a process of its own: HF_ENDPOINT is read at import."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from specdistill.planning.reading import infer_method, names_target
from specdistill.project import PICO, ROOT

TARGET, COMMIT = "someone/Tiny-3.1-4M-Instruct", "0" * 40
CONFIG = (PICO / "config.json").read_bytes()
REPOSITORIES = [
    {"id": "a/EAGLE3-TINY3.1-Instruct-4M", "tags": [], "downloads": 900},
    {"id": "b/my-drafter", "tags": [f"base_model:{TARGET}", "eagle3"], "downloads": 7},
    {"id": "c/EAGLE3-Tiny-3.1-70M-Instruct", "tags": [], "downloads": 5000},
    {"id": "d/Tiny-3.1-4M-Instruct-GGUF", "tags": [f"base_model:{TARGET}"], "downloads": 9000},
]


class Hub(BaseHTTPRequestHandler):
    """The endpoints that the plan needs: the listing with `search` and `filter`, and one repository with a config.json."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if url.path == "/api/models":
            search, wanted = query.get("search", [""])[0], set(query.get("filter", []))
            found = [entry for entry in REPOSITORIES if search in entry["id"].lower() and wanted <= set(entry["tags"])]
            self._answer(found)
        elif url.path.startswith(f"/api/models/{TARGET}/tree"):
            self._answer([{"type": "file", "path": "config.json", "oid": "1", "size": len(CONFIG)}])
        elif url.path.startswith(f"/api/models/{TARGET}"):
            self._answer({"id": TARGET, "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]})
        elif url.path == f"/{TARGET}/resolve/{COMMIT}/config.json":
            self._send(CONFIG, {"X-Repo-Commit": COMMIT, "ETag": '"1"'})
        else:
            self._send(b"", {"X-Error-Code": "RepoNotFound"}, 404)

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


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def plan(cwd: Path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cwd / "home"), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "specdistill", "plan", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_drafts_are_found_by_card_and_by_name(hub: str, tmp_path: Path):
    result = plan(tmp_path, hub, f"target={TARGET}", "output=plan.json")
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert written["target"]["revision"] == COMMIT and written["target"]["parameters"] == 3_674_240
    assert written["hub"] == {
        "not_asked": None,
        "drafts": [
            {"repository": "a/EAGLE3-TINY3.1-Instruct-4M", "method": "eagle3", "found_by": "name", "downloads": 900},
            {"repository": "b/my-drafter", "method": "eagle3", "found_by": "card", "downloads": 7},
        ],
    }
    assert "a/EAGLE3-TINY3.1-Instruct-4M (eagle3, 900 downloads, by its name)" in result.stdout
    assert "model.safetensors" not in {path.name for path in (tmp_path / "home").rglob("*")}


@pytest.mark.slow
def test_a_target_that_the_hub_does_not_have(hub: str, tmp_path: Path):
    result = plan(tmp_path, hub, "target=someone/else")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.splitlines()[-1].startswith("error: target.model: someone/else is no folder here")


@pytest.mark.slow
def test_a_plan_comes_without_the_hub_and_says_so(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_bytes(CONFIG)
    result = plan(tmp_path, "http://127.0.0.1:9", "target=mine")
    assert result.returncode == 0, result.stderr
    assert "not asked: http://127.0.0.1:9 did not answer" in result.stdout
    assert "Recommended: " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("repository", "tags", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", [], "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", [], "eagle"),
        ("amazon/GPT-OSS-20B-P-EAGLE", [], "peagle"),
        ("z-lab/Qwen3-8B-DFlash-b16", ["eagle3"], "dflash"),
        ("someone/Qwen3.5-9B-MTP", [], "mtp"),
        ("someone/attempts", [], None),
        ("someone/Qwen3-8B-speculator", ["speculators", "eagle3"], "eagle3"),
    ],
)
def test_methods_are_inferred_from_names_and_tags(repository: str, tags: list[str], method: str | None):
    assert infer_method(repository, tags) == method


@pytest.mark.parametrize(
    ("repository", "target", "same"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "meta-llama/Llama-3.1-8B-Instruct", True),
        ("Tengyunw/qwen3_8b_eagle3", "Qwen/Qwen3-8B", True),
        ("someone/Qwen-8B-eagle3", "Qwen/Qwen3-8B", False),
        ("someone/EAGLE3-Qwen3-30B-A3B", "Qwen/Qwen3-8B", False),
        ("someone/EAGLE3.1-Qwen3-8B", "/models/Qwen3-8B", True),
    ],
)
def test_names_are_compared_word_by_word(repository: str, target: str, same: bool):
    assert names_target(repository, target) == same
