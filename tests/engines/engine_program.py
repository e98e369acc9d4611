"""A program that is started as vLLM's or SGLang's server is, and answers as they do, at once: it knows no model.

    python engine_program.py vllm MODEL [--speculative-config '{…}'] … --port PORT
    python engine_program.py sglang --model-path MODEL [--speculative-num-steps K …] … --port PORT

A step of an answer takes 4 ms. With drafts it costs a tenth more for each draft token, yields K + 1 tokens and one by turns, and takes as
many times longer as the tokens of all requests in flight outnumber 8. It starts a process that outlives it and does not heed SIGTERM.
"""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STEP_SECONDS, FREE_TOKENS = 0.004, 8
OPTIONS = {"--enable-metrics", "--disable-radix-cache", "--no-enable-prefix-caching", "--trust-remote-code", "--broken"}


def main(engine, *words):
    options, positional, words = {}, [], list(words)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            options[word] = True if word in OPTIONS else words.pop(0)
        else:
            positional.append(word)
    if "--broken" in options:
        print(
            "WARNING: beware of OSError: none\nValueError: this model has no draft\n  and never had\nRuntimeError: see above",
            file=sys.stderr,
        )
        sys.exit(1)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child, *sys.argv[1:]])
    k = json.loads(options.get("--speculative-config", "{}")).get("num_speculative_tokens", 0)
    State.k = int(options.get("--speculative-num-steps", k))
    State.engine, State.model = engine, options.get("--model-path") or positional[0]
    State.counts = "--per-request-spec-decode-metrics" in options or engine == "sglang"
    ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()


class State:
    lock, in_flight, generated = threading.Lock(), 0, 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/metrics":
            positions = "".join(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} 0\n' for k in range(State.k)
            )
            page = f"{State.engine}:generation_tokens_total {State.generated}\n{positions}"
            return self.answer(page.encode())
        drafting = {"speculative_algorithm": "EAGLE3" if State.k else None, "speculative_num_steps": State.k or None}
        pages = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": State.model, "root": State.model}]},
            "/get_server_info": {"version": "0.5.23", "model_path": State.model, **drafting},
        }
        return self.answer(json.dumps(pages[self.path]).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or body["input_ids"]
        number = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        tokens, accepted = [(sum(prompt) + 7 * index) % 1000 + 5 for index in range(number)], []
        with State.lock:
            State.in_flight += 1
        length = 0
        while length < number:
            crowded = max(1.0, State.in_flight * (State.k + 1) / FREE_TOKENS)
            time.sleep(STEP_SECONDS * crowded * (1 + 0.1 * State.k))
            accepted.append(0 if len(accepted) % 2 else State.k)
            length += accepted[-1] + 1
        with State.lock:
            State.in_flight -= 1
            State.generated += number
        self.answer(json.dumps(self.completion(tokens, accepted)).encode())

    def completion(self, tokens, accepted):
        histogram = [accepted.count(count) for count in range(State.k + 1)]
        rounds, drafted, total = len(accepted), State.k * len(accepted), sum(accepted)
        if State.engine == "sglang":
            names = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram")
            counted = dict(zip(names, (rounds, drafted, total, histogram), strict=True)) if State.k else {}
            return {"text": "", "output_ids": tokens, "meta_info": {"completion_tokens": len(tokens), **counted}}
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")
        counted = dict(zip(names, (rounds, drafted, total, histogram), strict=True)) if State.k and State.counts else None
        return {
            "choices": [{"text": "", "token_ids": tokens}],
            "usage": {"completion_tokens": len(tokens)},
            "metrics": {"speculative_decoding": counted},
        }

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    main(*sys.argv[1:])
