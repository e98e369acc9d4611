"""A running server: answers within a time, a size and a shape, and completions with what the server counts of them.

Requests run in one event loop: there a deadline holds at every byte of an answer, and a request can be given up from another thread.

Each answer counts its own drafts, whatever else is served meanwhile. That nothing else is, which would disturb the times, the tokens say
that the server's Prometheus page counts: as many as ours. The page follows an answer with a short delay.
"""

import asyncio
import math
import os
import re
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from specdistill.errors import ResourceError, UserError, one_line
from specdistill.files.documents import parse_json

CONNECT_SECONDS = 10.0
MOST_MIB = 64  # of an answer, decoded
SHOWN_CHARACTERS = 200  # of an answer that is an error
SEE_LOG, NOT_THIS = "look at the server's log", "is it this engine's server?"
POLL_SECONDS = 0.01
MAX_DELAY_SECONDS = 10.0
MOST_IN_FLIGHT = 512  # requests to one server
# A line of a Prometheus page: name{label="…",…} value, and when it was taken.
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Counters that vLLM and llama.cpp share: of drafts, draft tokens and accepted tokens, and of these one for each position.
SPEC_DECODE = tuple(f"spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens"))
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"

Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Sample = tuple[str, dict[str, str], float]  # name, labels and value of a line of a Prometheus page


class JsonAnswer(BaseModel):
    """What is read of a JSON answer; other keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


def at(first: str, *others: str | int, **options: Any) -> Any:
    """A field of an answer that is deeper in it."""
    return Field(validation_alias=AliasPath(first, *others), **options)


class ServedModel(JsonAnswer):
    id: str
    root: str | None = None
    max_model_len: Positive | None = None


class ServedModels(JsonAnswer):
    data: list[ServedModel] = Field(min_length=1)


A = TypeVar("A", bound=JsonAnswer)


class Response(NamedTuple):
    """What was answered at an address, and in how long."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes
    seconds: float

    def __str__(self) -> str:
        shown = one_line(self.content[: 4 * SHOWN_CHARACTERS].decode(errors="replace"))[:SHOWN_CHARACTERS]
        return f"{self.status} ({shown})"

    def json(self, answer: type[A]) -> A:
        """Raises ResourceError, naming the field, for what is no such answer."""
        try:
            return answer.model_validate(parse_json(self.content))
        except ValidationError as error:
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {str(first['input'])[:SHOWN_CHARACTERS]}"
        except ValueError as error:
            why = f"no JSON: {error}"
        raise ResourceError(f"{self.url} answered what it should not ({why})", next_step=NOT_THIS)


class Server:
    """A server by its address (`http://host:port`). key: where it was given; timeout: seconds that one answer may take, by timeout_key."""

    def __init__(self, address: str, *, key: str, timeout: float, timeout_key: str = "eval.server_timeout") -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(key, got=address, expected="the address of a running server, as http://127.0.0.1:8000")
        import httpx2  # slow to import

        self.address, self.timeout, self.timeout_key = address.rstrip("/"), timeout, timeout_key
        self.session = session = httpx2.AsyncClient(
            verify=_certificates(),
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=MOST_IN_FLIGHT),
        )
        self._loop = loop = _event_loop()
        self._in_flight: set[Future[Response]] = set()
        self.is_closed = False
        # Connections that are kept alive end with it, or with the process.
        weakref.finalize(self, lambda: asyncio.run_coroutine_threadsafe(session.aclose(), loop)).atexit = False

    def json(self, path: str, answer: type[A], body: dict[str, Any] | None = None) -> A:
        """The JSON at a path, or the answer to a JSON body sent there."""
        return self.ask(path, body, hint=SEE_LOG).json(answer)

    def samples(self, hint: str) -> list[Sample]:
        """The lines of its page of counters. `hint`: what to do when there is none."""
        page = self.ask("/metrics", hint=hint).content.decode(errors="replace")
        found: list[Sample] = []
        try:
            for line in map(str.strip, page.splitlines()):
                if line and not line.startswith("#"):
                    if not (sample := SAMPLE.fullmatch(line)):
                        raise ValueError(f"{line[:60]!r} is no sample")
                    name, labels, value = sample.groups()
                    found.append((name, dict(LABEL.findall(labels or "")), float(value)))
        except ValueError as error:
            raise ResourceError(f"{self.address}/metrics is no Prometheus page ({error})", next_step=hint) from error
        return found

    def ask(self, path: str, body: dict[str, Any] | None = None, *, hint: str = "") -> Response:
        """Raises ResourceError without a whole answer in time, or with a hint for one that is an error; CancelledError once closed."""
        request = asyncio.run_coroutine_threadsafe(self._ask(f"{self.address}{path}", body), self._loop)
        self._in_flight.add(request)
        try:
            if self.is_closed:
                request.cancel()
            response = request.result()
        finally:
            request.cancel()  # where this thread was interrupted
            self._in_flight.discard(request)
        if hint and response.status != 200:
            raise ResourceError(f"{response.url} answered {response}", next_step=hint)
        return response

    async def _ask(self, url: str, body: dict[str, Any] | None) -> Response:
        import httpx2

        method, content, start = "GET" if body is None else "POST", bytearray(), time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout), self.session.stream(method, url, json=body) as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MOST_MIB * 2**20:
                        raise ResourceError(f"{url} answered more than {MOST_MIB} MiB", next_step=NOT_THIS)
        except TimeoutError as error:
            what = f"{url} did not answer in {self.timeout:g} s"
            raise ResourceError(what, next_step=f"{SEE_LOG}, or raise {self.timeout_key}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, ExceptionGroup) as error:  # a group: of a port that there is not
            why = one_line(f"{type(error).__name__}: {error}")[:SHOWN_CHARACTERS]
            raise ResourceError(f"{url} does not answer ({why})", next_step="start the server, or look at its log") from error
        return Response(url, response.status_code, response.headers, bytes(content), time.perf_counter() - start)

    def close(self) -> None:
        """Give up what is in flight, and ask no more."""
        self.is_closed = True
        for request in list(self._in_flight):
            request.cancel()


@cache
def _certificates() -> Any:
    """Those of this machine, which take as long to read as a server takes to answer."""
    import httpx2

    return httpx2.create_ssl_context()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_event_loop.cache_clear)  # its thread is the parent's


@contextmanager
def asking(number: int, *servers: Server) -> Iterator[ThreadPoolExecutor]:
    """Threads that ask servers. Left by an exception they end at once: what waits is dropped, and what is in flight given up."""
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    except BaseException:
        for server in servers:
            server.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


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


# Sampling from the model's own distribution, in the words that vLLM and SGLang share; -1 keeps all tokens. What a request leaves out a
# server takes from the model's generation_config.json, greedy requests included, which a penalty changes too.
PLAIN_SAMPLING: Mapping[str, float] = MappingProxyType(
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
)


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


# Of a page: sums over the server's ranks, of each position where a line has one; the largest of gauges.
Counters = Mapping[str, float]


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
    drafted_by: Callable[..., tuple[float, float, float]] = lambda drafts, drafted, accepted: (drafts, drafted, accepted)

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
        positions = sorted({name for name in (*before, *after) if PER_POSITION in name}, key=lambda name: (len(name), name))
        if missing := [name for name in self.drafting if name not in after]:
            what = f"the server's /metrics has no {self.prefix}:{missing[0]}"
            raise ResourceError(what, next_step="start it with a draft; SGLang counts from the end of the first request on")
        pairs = {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in (*self.drafting, *positions)}
        grown = {name: now - then if "_total" in name else max(then, now) for name, (then, now) in pairs.items()}
        for name, growth in grown.items():
            if not 0 <= growth < math.inf:
                what = "{}:{} went from {:g} to {:g}".format(self.prefix, name, *pairs[name])
                raise ResourceError(
                    what, next_step="has the server restarted, or are there several behind its address? start again"
                )
        drafts, drafted, accepted = self.drafted_by(*(grown[name] for name in self.drafting))
        reached = [int(grown[name]) for name in positions]
        counts = {
            "num_drafts": drafts,
            "num_draft_tokens": drafted,
            "num_accepted_tokens": sum(reached) if reached else accepted,
        }
        return {**{name: int(count) for name, count in counts.items()}, "accepted_per_position": reached}

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
                raise ResourceError(got, next_step="is a proxy in front of several servers? measure one")
            time.sleep(POLL_SECONDS)
