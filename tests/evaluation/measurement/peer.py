"""A small inference server for tests: the two engines' HTTP interfaces, answered by our own
decoder, with a page of counters.

It generates what the model generates and counts what was drafted, so that a client can be held to
the numbers of the decoder itself.
"""

import json
import threading
from dataclasses import dataclass
from http.server import ThreadingHTTPServer

import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.sampling import Sampling
from tests import scripts
from tests.serving.engines.server_answers import AnswerHandler, completion, counters, pages

LABELS = 'engine="0",model_name="test",'


def evaluate_pico(folder, *arguments, gate):
    """Run eval/run.py for pico, as short as possible, with a gate in YAML; return the exit code."""
    path = folder.parent / "gate.yaml"
    path.write_text(gate)
    short = ("eval.repeats=1", "eval.warmup=1", f"output_dir={folder}", f"gate={path}")
    return scripts.evaluate("target=pico", "suite=pico", *short, *arguments)


@dataclass
class Behaviour:
    """The faults of a server.

    `dies_after`, `silent_after` and `malformed_after` are numbers of answers. After as many, the
    server closes its socket, stops answering, or sends an answer without a completion.
    """

    version: str = "0.32.0"
    dies_after: int | None = None
    silent_after: int | None = None
    malformed_after: int | None = None
    counts_of_others: int = 0  # tokens counted for somebody else, with each answer
    returns_tokens: bool = True
    metrics: bool = True
    counts: bool = True  # in vLLM's answers


class PeerServer:
    """A server of `engine` that drafts `k` tokens a round with `proposer`, or nothing without it.

    It runs inside `with PeerServer(...) as peer:`, at `peer.address`.
    """

    def __init__(self, engine, target, proposer=None, k=0, *, model=None, behaviour=None):
        self.engine, self.k, self.model = engine, k, model or target.name
        self.decoder, self.target, self.behaviour = (
            Decoder(target, proposer),
            target,
            behaviour or Behaviour(),
        )
        self.num_answers, self.lock, self.closed = 0, threading.Lock(), threading.Event()
        self.generated, self.length = 0, 0.0
        peer = self

        class Handler(AnswerHandler):
            def do_GET(self):
                peer.answer_get(self)

            def do_POST(self):
                peer.answer_post(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def answer_get(self, handler):
        if handler.path == "/metrics" and self.behaviour.metrics:
            average = (
                f"sglang:spec_accept_length{{{LABELS}}} {self.length}\n"
                if self.engine == "sglang"
                else ""
            )
            return handler.answer(counters(self.engine, self.k, self.generated, LABELS) + average)
        version, length = self.behaviour.version, self.target.max_length
        served = pages(self.engine, self.model, self.k, version=version, max_length=length)
        is_served = handler.path in served
        return handler.answer(
            served[handler.path] if is_served else {"detail": "Not Found"},
            200 if is_served else 404,
        )

    def answer_post(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            behaviour, number = self.behaviour, self.num_answers
            if behaviour.dies_after == number:
                threading.Thread(target=self.close, daemon=True).start()
                return handler.connection.close()
            if behaviour.silent_after == number:
                return self.closed.wait()
            self.num_answers += 1
            if behaviour.malformed_after == number:
                return handler.answer({"choices": []})
            parameters = body if self.engine == "vllm" else body["sampling_params"]
            generated = self.decoder.generate(
                body["prompt" if self.engine == "vllm" else "input_ids"],
                max_new_tokens=parameters[
                    "max_tokens" if self.engine == "vllm" else "max_new_tokens"
                ],
                num_speculative_tokens=self.k,
                sampling=Sampling(
                    parameters["temperature"], parameters["top_p"], max(parameters["top_k"], 0)
                ),
                generator=torch.Generator().manual_seed(parameters.get("seed", 0)),
            )
            self.generated += len(generated.token_ids) + behaviour.counts_of_others
            answer = self.build_completion(generated)
        return handler.answer(answer)

    def build_completion(self, generated):
        rounds = [entry for entry in generated.rounds if entry.drafted]
        accepted, num_drafted = (
            [entry.num_accepted for entry in rounds],
            sum(len(entry.drafted) for entry in rounds),
        )
        if accepted:
            self.length = 1 + sum(accepted) / len(accepted)
        ids = generated.token_ids[:-1] if generated.stopped else generated.token_ids
        text, counts = (
            self.target.tokenizer.decode(ids, skip_special_tokens=False),
            self.behaviour.counts,
        )
        answer = completion(
            self.engine, self.k, text, [*generated.token_ids], accepted, num_drafted, counts=counts
        )
        if not self.behaviour.returns_tokens:
            del answer["choices"][0]["token_ids"]
        return answer
