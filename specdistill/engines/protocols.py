"""The two engines' interfaces: who a server is, and how it continues a prompt.

vLLM (0.32): OpenAI's /v1/completions with a prompt of tokens; drafts are counted on its Prometheus page, which is read before and after
each text. SGLang (0.5): /generate; drafts are counted in the answer's `meta_info`, under names that changed between versions.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdistill.decoding.sampling import Sampling
from specdistill.engines.client import Server
from specdistill.engines.counters import read, read_after
from specdistill.errors import ResourceError
from specdistill.statistics.records import ServerCounts

# The newest name first. The histogram's entry j counts the rounds in which j drafted tokens were accepted.
SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
SGLANG_DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num")
SGLANG_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


@dataclass(frozen=True)
class Identity:
    """What a server says of itself. `models`: the names and the folder of what it serves, the name to ask for first.

    num_speculative_tokens: K; None for a server that does not draft. max_length: tokens of a text; None where it does not say.
    """

    version: str
    models: tuple[str, ...]
    max_length: int | None
    num_speculative_tokens: int | None


@dataclass(frozen=True)
class Completion:
    """A text that a server wrote. `seconds` from the request to the whole answer; `text` as the server spells it."""

    text: str
    num_tokens: int
    seconds: float
    counts: ServerCounts


class Engine(Protocol):
    """How one engine is spoken to."""

    name: str

    def identify(self, server: Server) -> Identity: ...

    def complete(
        self, server: Server, model: str, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling, seed: int
    ) -> Completion: ...


class Vllm:
    name = "vllm"

    def identify(self, server: Server) -> Identity:
        counters = read(server, self.name)
        if counters.generation_tokens is None:
            missing = f"{server.address}/metrics has no vllm:generation_tokens_total"
            raise ResourceError(missing, next_step="start vLLM without --disable-log-stats, or name the engine that serves")
        served = server.json("/v1/models")["data"][0]
        return Identity(
            version=str(server.json("/version")["version"]),
            models=tuple(filter(None, (served["id"], served.get("root")))),
            max_length=served.get("max_model_len"),
            num_speculative_tokens=len(counters.accepted_per_position) or None,
        )

    def complete(
        self, server: Server, model: str, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        before = read(server, self.name)
        body = {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": max_new_tokens,
            **_sampling(sampling),
            "seed": seed,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        start = time.perf_counter()
        answer = server.json("/v1/completions", body)
        seconds = time.perf_counter() - start
        num_tokens, choice = answer["usage"]["completion_tokens"], answer["choices"][0]
        counted = read_after(server, self.name, before, num_tokens).since(before)
        counts = ServerCounts(
            tuple(choice.get("token_ids") or ()),
            counted.num_drafts,
            counted.num_draft_tokens,
            counted.num_accepted_tokens,
            counted.accepted_per_position,
        )
        return Completion(choice["text"], num_tokens, seconds, counts)


class Sglang:
    name = "sglang"

    def identify(self, server: Server) -> Identity:
        if read(server, self.name).generation_tokens is None:
            missing = f"{server.address}/metrics has no sglang:generation_tokens_total"
            raise ResourceError(missing, next_step="start SGLang with --enable-metrics, or name the engine that serves")
        info, served = server.json("/get_server_info"), server.json("/v1/models")["data"][0]
        drafts = info.get("speculative_algorithm") is not None
        return Identity(
            version=str(info["version"]),
            models=tuple(filter(None, (served["id"], info.get("model_path")))),
            max_length=served.get("max_model_len"),
            num_speculative_tokens=int(info["speculative_num_steps"]) if drafts else None,
        )

    def complete(
        self, server: Server, model: str, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """`model` and `seed` play no part: a server has one model, and SGLang seeds its sampling when it starts."""
        before = read(server, self.name)
        parameters = {"max_new_tokens": max_new_tokens, **_sampling(sampling), "skip_special_tokens": False}
        start = time.perf_counter()
        answer = server.json("/generate", {"input_ids": list(prompt_ids), "sampling_params": parameters})
        seconds = time.perf_counter() - start
        meta = answer["meta_info"]
        num_tokens = meta["completion_tokens"]
        read_after(server, self.name, before, num_tokens)
        return Completion(answer["text"], num_tokens, seconds, sglang_counts(meta, answer.get("output_ids") or ()))


ENGINES: dict[str, Engine] = {"vllm": Vllm(), "sglang": Sglang()}


def sglang_counts(meta: dict[str, Any], token_ids: Sequence[int]) -> ServerCounts:
    """Drafts of one answer; none where it was written without. Raises ResourceError when a server does not count what it accepts."""
    rounds = meta.get("spec_verify_ct") or 0
    if not rounds:
        return ServerCounts(tuple(token_ids), 0, 0, 0, ())
    drafted, accepted, histogram = (_first(meta, names) for names in (SGLANG_DRAFTED, SGLANG_ACCEPTED, SGLANG_HISTOGRAM))
    reached = tuple(sum(histogram[position:]) for position in range(1, len(histogram)))
    return ServerCounts(tuple(token_ids), rounds, drafted, accepted, reached)


def _first(meta: dict[str, Any], names: Sequence[str]) -> Any:
    found = next((meta[name] for name in names if name in meta), None)
    if found is None:
        lacks = f"SGLang counts the rounds of its answer and has no {' or '.join(names)} beside them"
        raise ResourceError(lacks, next_step="use a version of SGLang that does")
    return found


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """In the words that both engines share; -1 keeps all tokens. Every value is given, or a model's own defaults would step in."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
