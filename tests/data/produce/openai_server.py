"""A server that speaks OpenAI's API for tests. Its answers depend on the prompt and the seed alone,
and it fails on demand."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.tiny import tiny_tokenizer

END = 3  # <|end|>
CUT, STALL = "cut", "stall"  # faults that are no status


@dataclass
class Behaviour:
    """How the server answers.

    Attributes:
        fault: called with the number and the body of a request. Returns a status, CUT or STALL to
            send in place of an answer, or None to answer.
        more: called with the body of a request. Returns what an answer has besides its choice.
    """

    seconds: float = 0.0
    fault: Callable[[int, dict[str, Any]], int | str | None] = lambda number, body: None
    returns_tokens: bool = True
    models: tuple[str, ...] = ("tiny",)
    headers: dict[str, str] = field(default_factory=dict)  # sent with a fault
    text: Callable[[str], str] = lambda digest: f"answer {digest}"
    more: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {}


def completion(
    prompt: list[int], seed: int, temperature: float, text: Callable[[str], str]
) -> tuple[list[int], str]:
    digest = hashlib.sha256(repr((prompt, seed if temperature else 0)).encode()).hexdigest()[:8]
    answer = text(digest)
    return [*tiny_tokenizer()(answer)["input_ids"], END], answer


class OpenAIServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour, self.lock, self.num_requests = behaviour, threading.Lock(), 0
        self.authorization: str | None = None  # the header of the last request
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": name} for name in self.server.behaviour.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.authorization = self.headers.get("Authorization")
        with self.server.lock:
            number, self.server.num_requests = (
                self.server.num_requests,
                self.server.num_requests + 1,
            )
        behaviour = self.server.behaviour
        time.sleep(behaviour.seconds)
        fault = behaviour.fault(number, body)
        if fault == STALL:
            time.sleep(3.0)
        elif fault == CUT:
            self.send(200, {"choices": []}, {"Content-Length": "1000"})
            self.connection.close()
        elif isinstance(fault, int):
            self.send(fault, {"error": "as asked"}, behaviour.headers)
        else:
            ids, text = completion(
                body["prompt"], body.get("seed", 0), body["temperature"], behaviour.text
            )
            cut = len(ids) > body["max_tokens"]
            ids = ids[: body["max_tokens"]]
            choice: dict[str, Any] = {
                "text": text[: len(ids)],
                "finish_reason": "length" if cut else "stop",
            }
            if behaviour.returns_tokens:
                choice["token_ids"] = ids
            self.send(200, {"model": body["model"], "choices": [choice], **behaviour.more(body)})

    def send(self, status: int, content: dict[str, Any], headers: Mapping[str, str] = {}) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def running(behaviour: Behaviour | None = None) -> Iterator[OpenAIServer]:
    """Run a server in a thread of this process, and yield it."""
    with OpenAIServer(behaviour or Behaviour()) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
