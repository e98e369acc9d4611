"""Completions from an engine's server, with what it counts of them.

Each answer counts its own drafts, whatever else is served meanwhile. That nothing else is, which would disturb the times, the tokens say
that the server's Prometheus page counts: as many as ours. The page follows an answer with a short delay.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.engines.server import (
    POLL_SECONDS,
    SEE_LOG,
    Count,
    JsonAnswer,
    Positive,
    Response,
    Server,
)
from specdistill.errors import ResourceError, one_line

MAX_DELAY_SECONDS = 10.0
# Counters that vLLM and llama.cpp share: of drafts, draft tokens and accepted tokens, and of these one for each position.
SPEC_DECODE = tuple(
    f"spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")
)
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
# Of a page: sums over the server's ranks, of each position where a line has one; the largest of gauges.
Counters = Mapping[str, float]


@dataclass(frozen=True)
class ServerIdentity:
    """What a server says of itself. `models`: the names and the folder of what it serves, the name to ask for first.

    num_speculative_tokens: K; None for a server that does not draft, or does not say how far (hides_k).
    max_length: tokens of a sequence; None where it does not say.
    """

    version: str
    models: tuple[str, ...]
    max_length: int | None
    num_speculative_tokens: int | None
    hides_k: bool = False


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt to complete. temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    model: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True)
class ServerCounts:
    """What a server counted for one completion: it shows no rounds. `token_ids`: of the completion, empty where it does not say.

    accepted_per_position [K]: drafts whose position k was accepted.
    """

    token_ids: tuple[int, ...]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """A completion from a server. `seconds` from the request to the whole answer; `text` as the server spells it."""

    text: str
    num_tokens: int
    seconds: float
    counts: ServerCounts


class CompletionAnswer(JsonAnswer):
    """Of an engine's own, each field says where it is. histogram: drafts of which 0, 1, … K tokens were accepted."""

    text: str
    num_tokens: Positive
    token_ids: list[Count] | None
    num_drafts: Count | None
    num_draft_tokens: Count | None
    num_accepted_tokens: Count | None
    histogram: list[Count] | None

    def counts(self, k: int) -> ServerCounts | None:
        """What was drafted by a server that drafts `k` tokens per round; None where it does not say, or says what cannot be."""
        ids, histogram = tuple(self.token_ids or ()), self.histogram or []
        drafts, drafted, accepted = self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens
        if not k or drafts == 0:
            return ServerCounts(ids, 0, 0, 0, ())
        if drafts is None or drafted is None or accepted is None or not 0 < len(histogram) <= k + 1:
            return None
        reached = tuple(sum(histogram[position:]) for position in range(1, len(histogram)))
        is_possible = max(reached, default=0) <= drafts <= self.num_tokens and accepted <= drafted
        return ServerCounts(ids, drafts, drafted, accepted, reached) if is_possible else None


@dataclass(frozen=True)
class Client:
    """How the server of an engine is spoken to. Raises ResourceError when it does not answer as it should.

    prefix: of the names on its page of counters, `/metrics`; hint: how to start a server that has it.
    describe: (server, counters) -> what it says of itself.
    path, body: where a request is posted, as which JSON; parse: (response, K) -> what came back.
    counts_hint: how to start a server that counts in it. name_option: of the server, by which its model has another name.
    generated: the counter of generated tokens, which is true to a share `rounding` of itself.
    drafting, drafted_by: names on the page; (how far each grew, or where a gauge stands) -> drafts, draft tokens, accepted tokens.
    latency: the histogram of a request's seconds, where drafts are counted while it runs; empty where they are once it has ended.
    """

    prefix: str
    hint: str
    describe: Callable[[Server, Counters], ServerIdentity]
    path: str
    body: Callable[[CompletionRequest], dict[str, Any]]
    parse: Callable[[Response, int], CompletionAnswer]
    counts_hint: str
    name_option: str = "--served-model-name"
    generated: str = "generation_tokens_total"
    rounding: float = 0.0
    drafting: tuple[str, ...] = SPEC_DECODE
    latency: str = ""
    drafted_by: Callable[..., tuple[float, float, float]] = lambda drafts, drafted, accepted: (
        drafts,
        drafted,
        accepted,
    )

    def identify(self, server: Server) -> ServerIdentity:
        return self.describe(server, self.read(server))

    def complete(self, server: Server, request: CompletionRequest, k: int) -> Completion:
        """A completion by a server that drafts `k` tokens per round, 0 without a draft. Several threads may ask at once."""
        response = server.ask(self.path, self.body(request), hint=SEE_LOG)
        answer = self.parse(response, k)
        if (counts := answer.counts(k)) is None:
            what = f"{response.url} does not say what it accepted, or what cannot be ({one_line(repr(answer))[-400:]})"
            raise ResourceError(what, next_step=self.counts_hint)
        return Completion(answer.text, answer.num_tokens, response.seconds, counts)

    def counters(self, server: Server) -> Counters:
        """The page of counters as it stands, without the prefix of their names."""
        counters: dict[str, float] = defaultdict(float)
        for name, labels, value in server.samples(self.hint):
            if name.startswith(f"{self.prefix}:"):
                key = name.removeprefix(f"{self.prefix}:") + labels.get("position", "")
                is_sum = name.endswith(("_total", "_sum", "_count"))
                counters[key] = counters[key] + value if is_sum else max(counters[key], value)
        return dict(counters)

    def read(self, server: Server) -> Counters:
        """The counters of a server that counts what it generates."""
        counters = self.counters(server)
        if not 0 <= counters.get(self.generated, math.nan) < math.inf:
            missing = f"{server.address}/metrics has no {self.prefix}:{self.generated}"
            raise ResourceError(missing, next_step=f"{self.hint}, or name the engine that serves")
        return counters

    def drafted(self, before: Counters, after: Counters) -> dict[str, Any]:
        """num_drafts, num_draft_tokens, num_accepted_tokens and accepted_per_position [K] between two pages of a server, the first of which
        may be empty: since it started. No positions where the engine does not count them.

        Raises ResourceError for a page that lacks a counter, and for counters that went back.
        """
        positions = sorted(
            {name for name in (*before, *after) if PER_POSITION in name},
            key=lambda name: (len(name), name),
        )
        if missing := [name for name in self.drafting if name not in after]:
            what = f"the server's /metrics has no {self.prefix}:{missing[0]}"
            raise ResourceError(
                what,
                next_step="start it with a draft; SGLang counts from the end of the first request on",
            )
        pairs = {
            name: (before.get(name, 0.0), after.get(name, 0.0))
            for name in (*self.drafting, *positions)
        }
        grown = {
            name: now - then if "_total" in name else max(then, now)
            for name, (then, now) in pairs.items()
        }
        for name, growth in grown.items():
            if not 0 <= growth < math.inf:
                what = "{}:{} went from {:g} to {:g}".format(self.prefix, name, *pairs[name])
                next_step = (
                    "has the server restarted, or are there several behind its address? start again"
                )
                raise ResourceError(what, next_step=next_step)
        drafts, drafted, accepted = self.drafted_by(*(grown[name] for name in self.drafting))
        reached = [int(grown[name]) for name in positions]
        counts = {
            "num_drafts": drafts,
            "num_draft_tokens": drafted,
            "num_accepted_tokens": sum(reached) if reached else accepted,
        }
        return {
            **{name: int(count) for name, count in counts.items()},
            "accepted_per_position": reached,
        }

    def check_alone(self, server: Server, before: Counters, num_tokens: int) -> None:
        """Raises ResourceError unless the server generated `num_tokens` since `before`, ours, and no others."""
        deadline = time.monotonic() + MAX_DELAY_SECONDS
        while True:
            after = self.read(server)[self.generated]
            counted, unknown = int(after - before[self.generated]), int(self.rounding * after)
            if abs(counted - num_tokens) <= unknown:
                return
            if counted > num_tokens:
                got = f"{server.address} served others too: it generated {counted} tokens, of which {num_tokens} are ours"
                raise ResourceError(got, next_step="measure a server that nobody else uses")
            if time.monotonic() > deadline:
                got = f"{server.address} counted {counted} tokens of answers of {num_tokens}"
                raise ResourceError(
                    got, next_step="is a proxy in front of several servers? measure one"
                )
            time.sleep(POLL_SECONDS)
