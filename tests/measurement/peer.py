"""A small inference server for tests: the two engines' HTTP interfaces, answered by our own decoder, with a page of counters.

It generates what the model generates and counts what was drafted, so that a client can be held to the numbers of the decoder itself.
"""

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.sampling import Sampling

LABELS = 'engine="0",model_name="test"'


@dataclass
class Behaviour:
    """What a server may do wrong. `dies_after`, `silent_after`: answers before it closes its socket, or answers no more."""

    version: str = "0.32.0"
    dies_after: int | None = None
    silent_after: int | None = None
    counts_of_others: int = 0  # tokens counted for somebody else, with each answer
    returns_tokens: bool = True
    metrics: bool = True
    counts: bool = True  # in vLLM's answers


class PeerServer:
    """`with PeerServer(...) as peer: peer.address`. A server of `engine` that drafts `k` tokens a round with `proposer`, or none at all."""

    def __init__(self, engine, target, proposer=None, k=0, *, model=None, behaviour=None):
        self.engine, self.k, self.model = engine, k, model or target.name
        self.decoder, self.target, self.behaviour = Decoder(target, proposer), target, behaviour or Behaviour()
        self.num_answers, self.lock, self.closed = 0, threading.Lock(), threading.Event()
        self.generated, self.length = 0, 0.0
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                peer.get(self)

            def do_POST(self):
                peer.post(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def page(self):
        lines = [f"# TYPE {self.engine}:generation_tokens_total counter"]
        lines += [f"{self.engine}:generation_tokens_total{{{LABELS}}} {float(self.generated)}"]
        if self.engine == "vllm":
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{{LABELS},position="{position}"}} 0.0' for position in range(self.k)]
        else:
            lines += [f"sglang:spec_accept_length{{{LABELS}}} {self.length}"]
        return "".join(f"{line}\n" for line in lines).encode()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def get(self, handler):
        if handler.path == "/metrics" and self.behaviour.metrics:
            return self.answer(handler, self.page())
        served = {"id": self.model, "root": self.model, "max_model_len": self.target.max_length}
        drafting = {"speculative_algorithm": "EAGLE3" if self.k else None, "speculative_num_steps": self.k or None}
        pages = {"/v1/models": {"data": [served]}, "/version": {"version": self.behaviour.version}} | (
            {"/get_server_info": {"version": self.behaviour.version, "model_path": self.model, **drafting}}
            if self.engine == "sglang"
            else {}
        )
        if handler.path in pages:
            return self.answer(handler, json.dumps(pages[handler.path]).encode())
        return self.answer(handler, b'{"detail":"Not Found"}', 404)

    def post(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            behaviour, number = self.behaviour, self.num_answers
            if behaviour.dies_after == number:
                threading.Thread(target=self.close, daemon=True).start()
                return handler.connection.close()
            if behaviour.silent_after == number:
                return self.closed.wait()
            self.num_answers += 1
            parameters = body if self.engine == "vllm" else body["sampling_params"]
            generated = self.decoder.generate(
                body["prompt" if self.engine == "vllm" else "input_ids"],
                max_new_tokens=parameters["max_tokens" if self.engine == "vllm" else "max_new_tokens"],
                num_speculative_tokens=self.k,
                sampling=Sampling(parameters["temperature"], parameters["top_p"], max(parameters["top_k"], 0)),
                generator=torch.Generator().manual_seed(parameters.get("seed", 0)),
            )
            self.generated += len(generated.token_ids) + behaviour.counts_of_others
            answer = self.vllm_answer(generated) if self.engine == "vllm" else self.sglang_answer(generated)
        return self.answer(handler, json.dumps(answer).encode())

    def vllm_answer(self, generated):
        usage = {"prompt_tokens": len(generated.prompt_ids), "completion_tokens": len(generated.token_ids)}
        tokens = {"token_ids": list(generated.token_ids)} if self.behaviour.returns_tokens else {}
        answer = {"choices": [{"text": self.text(generated), **tokens}], "usage": usage}
        if not self.k or not self.behaviour.counts:
            return answer
        drafted, accepted, histogram = self.counted(generated)
        counted = {"num_spec_steps": len(accepted), "num_draft_tokens": drafted, "num_accepted_draft_tokens": sum(accepted)}
        return answer | {"metrics": {"speculative_decoding": {**counted, "acceptance_histogram": histogram}}}

    def counted(self, generated):
        """Tokens drafted, those that each draft had accepted, and the number of drafts that had 0, 1, … K accepted."""
        rounds = [entry for entry in generated.rounds if entry.drafted]
        accepted = [entry.num_accepted for entry in rounds]
        return sum(len(entry.drafted) for entry in rounds), accepted, [accepted.count(n) for n in range(self.k + 1)]

    def sglang_answer(self, generated):
        drafted, accepted, histogram = self.counted(generated)
        meta = {"completion_tokens": len(generated.token_ids)}
        if accepted:
            names = ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram")
            meta |= {"spec_verify_ct": len(accepted), **dict(zip(names, (drafted, sum(accepted), histogram), strict=True))}
            self.length = 1 + sum(accepted) / len(accepted)
        return {"text": self.text(generated), "output_ids": list(generated.token_ids), "meta_info": meta}

    def text(self, generated):
        ids = generated.token_ids[:-1] if generated.stopped else generated.token_ids
        return self.target.tokenizer.decode(ids, skip_special_tokens=False)

    def answer(self, handler, content, status=200):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)
