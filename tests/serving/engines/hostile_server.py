"""A server that answers as an engine does, except at some paths.

There it sends other bytes, drips, floods or stays silent.
"""

import gzip
import itertools
import threading
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer

from tests.serving.engines.server_answers import AnswerHandler, completion, counters, pages

DRIP, DRIP_HEAD, SILENCE, FLOOD, BOMB = "drip", "drip of headers", "silence", "flood", "bomb"
MANY = 2**27  # bytes, twice the limit of an answer
BOMBS = gzip.compress(bytes(MANY), 1)
K = 3


class Handler(AnswerHandler):
    def do_GET(self):
        self.reply(self.server.pages[self.path])

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.num_asked += 1
        self.reply(completion(self.server.engine, K, "ab", [66, 67], [1], K))

    def reply(self, right):
        wrong = self.server.wrong.get(self.path, right)
        if wrong not in (DRIP, DRIP_HEAD, SILENCE, FLOOD, BOMB):
            self.answer(wrong)
        elif wrong == SILENCE:
            self.server.ended.wait()
        else:
            head = b"Content-Encoding: gzip\r\n" if wrong == BOMB else b""
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\n" + head + (b"X-Drip: " if wrong == DRIP_HEAD else b"\r\n")
            )
            with suppress(OSError):
                for part in {FLOOD: [b" " * 2**20] * (MANY >> 20), BOMB: [BOMBS]}.get(
                    wrong, itertools.repeat(b" ")
                ):
                    self.wfile.write(part)
                    if wrong in (DRIP, DRIP_HEAD) and self.server.ended.wait(0.05):
                        break
        self.close_connection = True


@contextmanager
def hostile(wrong, *, engine="vllm", model="pico"):
    """Run the server and yield it.

    wrong: The answer at each path: bytes, JSON, or one of the words above.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.engine, server.wrong, server.lock, server.ended = (
            engine,
            wrong,
            threading.Lock(),
            threading.Event(),
        )
        server.pages = {**pages(engine, model, K), "/metrics": counters(engine, K, 0)}
        server.num_asked, server.address = 0, f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
