"""A server that answers as vLLM 0.32 does with ExampleHiddenStatesConnector, with the hidden states of a target in this process."""

import fcntl
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdistill.targets.frozen import FrozenTarget

ONE_PASS = threading.Lock()  # servers may share a target, whose hooks serve one pass at a time


@contextmanager
def running(target: FrozenTarget, layers: Sequence[int], folder: Path | None, *, dtype: Any = None) -> Iterator[str]:
    """Its address. folder: where hidden states go; None: a server without the connector. dtype: that it computes in."""
    count = 0

    def write(ids: list[int]) -> dict[str, str]:
        nonlocal count
        with ONE_PASS:
            count += 1
            number = count
            aux = target.features(torch.tensor([ids]), layers).aux
        hidden = torch.stack([feature[0] for feature in aux], dim=1)
        path = Path(str(folder)) / f"cmpl-{number}.safetensors"
        held = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX)

        def later() -> None:
            time.sleep(0.02)
            save_file({"hidden_states": hidden.to(dtype or hidden.dtype), "token_ids": torch.tensor(ids)}, path)
            held.close()

        threading.Thread(target=later).start()
        return {"hidden_states_path": str(path)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "served" and body["max_tokens"] == 1
            extra = {} if folder is None else {"kv_transfer_params": write(body["prompt"])}
            self.answer({"choices": [{"text": "x"}], **extra})

        def answer(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
