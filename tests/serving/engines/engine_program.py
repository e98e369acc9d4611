"""A program that stands in for the server of vLLM, SGLang or llama.cpp, without a model.

    python engine_program.py vllm MODEL [--speculative-config '{…}'] … --port PORT
    python engine_program.py sglang --model-path MODEL [--speculative-num-steps K …] … --port PORT
    python engine_program.py llama.cpp -m MODEL [--spec-draft-n-max K …] … --port PORT

A step of an answer takes 4 ms. With drafts, a step takes a tenth longer for each draft token and
yields K + 1 tokens and one token in alternation. Where all requests in flight have more than 8
tokens in a step, the step takes longer in proportion. The program starts a process that outlives it
and ignores SIGTERM. With SPECDISTILL_LOOKUP_FIRST it prints the line of our plugin, unless it is
started with `--deaf`.
"""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer

# This program runs from its own folder, so the module next to it is found by this name.
from server_answers import AnswerHandler, completion, counters, pages, stream

STEP_SECONDS, FREE_TOKENS = 0.004, 8
OPTIONS = {
    "--enable-metrics",
    "--disable-radix-cache",
    "--no-enable-prefix-caching",
    "--trust-remote-code",
    "--broken",
}
OPTIONS |= {"--no-async-scheduling", "--deaf", "--metrics", "--no-spec-draft-backend-sampling"}


def main(engine, *words):
    options, positional, words = {}, [], list(words)
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            options[word] = True if word in OPTIONS else words.pop(0)
        else:
            positional.append(word)
    k = json.loads(options.get("--speculative-config", "{}")).get("num_speculative_tokens", 0)
    if "--broken" in options or options.get("--broken-with") == str(k):
        print(
            "WARNING: beware of OSError: none\nValueError: this model has no draft\n  and never"
            " had\nRuntimeError: see above",
            file=sys.stderr,
        )
        sys.exit(1)
    if "SPECDISTILL_LOOKUP_FIRST" in os.environ and "--deaf" not in options:
        print("specdistill looks up first: …", file=sys.stderr)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child, *sys.argv[1:]])
    k = options.get("--spec-ngram-simple-size-m", options.get("--spec-draft-n-max", k))
    State.k = int(options.get("--speculative-num-steps", k))
    State.engine, State.model = (
        engine,
        options.get("--model-path") or options.get("-m") or positional[0],
    )
    State.counts = "--per-request-spec-decode-metrics" in options or engine == "sglang"
    ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()


class State:
    lock, in_flight, generated = threading.Lock(), 0, 0


class Handler(AnswerHandler):
    def do_GET(self):
        if self.path == "/metrics":
            return self.answer(counters(State.engine, State.k, State.generated))
        return self.answer(pages(State.engine, State.model, State.k)[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or body["input_ids"]
        number = (
            body.get("max_tokens")
            or body.get("n_predict")
            or body["sampling_params"]["max_new_tokens"]
        )
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
        if State.engine == "llama.cpp":
            content = stream(State.k, "", tokens, accepted)
        else:
            content = completion(
                State.engine,
                State.k,
                "",
                tokens,
                accepted,
                State.k * len(accepted),
                counts=State.counts,
            )
        self.answer(content)


if __name__ == "__main__":
    main(*sys.argv[1:])
