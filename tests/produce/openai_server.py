"""A server that speaks OpenAI's API for tests. Its answers depend on the prompt and the seed alone, and it fails on demand."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.tiny import tiny_tokenizer

END = 3  # <|end|>
CUT, STALL = "cut", "stall"  # in place of a status


@dataclass
class Behaviour:
    """fault: (number of the request, its body) -> a status, CUT or STALL in place of an answer; None: answer."""

    seconds: float = 0.0
    fault: Callable[[int, dict[str, Any]], int | str | None] = lambda number, body: None
    returns_tokens: bool = True
    models: tuple[str, ...] = ("tiny",)
    headers: dict[str, str] = field(default_factory=dict)  # of faults
    text: Callable[[str], str] = lambda digest: f"answer {digest}"


def completion(prompt: list[int], seed: int, temperature: float, text: Callable[[str], str]) -> tuple[list[int], str]:
    digest = hashlib.sha256(repr((prompt, seed if temperature else 0)).encode()).hexdigest()[:8]
    said = text(digest)
    return [*tiny_tokenizer()(said)["input_ids"], END], said


class OpenAIServer:
    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour, self.lock, self.num_requests = behaviour or Behaviour(), threading.Lock(), 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                outer.send(self, 200, {"data": [{"id": name} for name in outer.behaviour.models]})

            def do_POST(self) -> None:
                outer.post(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def post(self, handler: Any) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            number, self.num_requests = self.num_requests, self.num_requests + 1
        behaviour = self.behaviour
        time.sleep(behaviour.seconds)
        fault = behaviour.fault(number, body)
        if fault == STALL:
            time.sleep(3.0)
            return
        if isinstance(fault, int):
            self.send(handler, fault, {"error": "as asked"}, behaviour.headers)
            return
        ids, text = completion(body["prompt"], body["seed"], body["temperature"], behaviour.text)
        cut = len(ids) > body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        choice: dict[str, Any] = {"text": text[: len(ids)], "finish_reason": "length" if cut else "stop"}
        if behaviour.returns_tokens:
            choice["token_ids"] = ids
        if fault == CUT:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.connection.close()
            return
        self.send(handler, 200, {"model": body["model"], "choices": [choice]})

    def send(self, handler: Any, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def running(behaviour: Behaviour | None = None) -> Iterator[OpenAIServer]:
    made = OpenAIServer(behaviour)
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
