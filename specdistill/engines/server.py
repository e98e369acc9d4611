"""A running server: one HTTP session, and completions with what the server counts of them.

Each answer counts its own drafts, whatever else is served meanwhile. That nothing else is, which would disturb the times, the tokens say
that the server's Prometheus page counts: as many as ours. The page follows an answer with a short delay.
"""

import re
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specdistill.errors import ResourceError, UserError, one_line

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 200  # of an answer that is an error
POLL_SECONDS = 0.01
MAX_DELAY_SECONDS = 10.0
MOST_IN_FLIGHT = 512  # requests to one server
GENERATED = "generation_tokens_total"
# A line of a Prometheus page: name{label="…",…} value, and when it was taken.
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Server:
    """A server by its address (`http://host:port`). key: where it was given; timeout: seconds that one answer may take, by timeout_key."""

    def __init__(self, address: str, *, key: str, timeout: float, timeout_key: str = "eval.server_timeout") -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(key, got=address, expected="the address of a running server, as http://127.0.0.1:8000")
        import httpx2  # slow to import

        self.address, self.timeout, self.timeout_key = address.rstrip("/"), timeout, timeout_key
        self.session = httpx2.Client(
            timeout=httpx2.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=MOST_IN_FLIGHT),
        )
        weakref.finalize(self, self.session.close)  # connections that are kept alive end with it

    def text(self, path: str, *, hint: str = "is it this engine's server?") -> str:
        """The page at a path. `hint`: what to do when there is none."""
        return self._request("GET", path, hint).text

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON at a path, or the answer to a JSON body sent there."""
        response = self._request("GET" if body is None else "POST", path, "look at the server's log", body)
        try:
            return response.json()
        except ValueError as error:
            raise ResourceError(f"{self.address}{path} answered no JSON", next_step="is it this engine's server?") from error

    def _request(self, method: str, path: str, hint: str, body: dict[str, Any] | None = None) -> "httpx2.Response":
        import httpx2

        url = f"{self.address}{path}"
        try:
            response = self.session.request(method, url, json=body)
        except httpx2.TimeoutException as error:
            what = f"{url} did not answer in {self.timeout:g} s"
            raise ResourceError(what, next_step=f"look at the server's log, or raise {self.timeout_key}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ResourceError(f"{url} does not answer", next_step="start the server, or look at its log") from error
        if response.status_code != 200:
            content = one_line(response.text)[:SHOWN_CHARACTERS]
            raise ResourceError(f"{url} answered {response.status_code} ({content})", next_step=hint)
        return response


@dataclass(frozen=True)
class ServerIdentity:
    """What a server says of itself. `models`: the names and the folder of what it serves, the name to ask for first.

    num_speculative_tokens: K; None for a server that does not draft. max_length: tokens of a sequence; None where it does not say.
    """

    version: str
    models: tuple[str, ...]
    max_length: int | None
    num_speculative_tokens: int | None


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


def reached(histogram: Sequence[int]) -> tuple[int, ...]:
    """Drafts whose position was accepted, of each position, from the drafts of which 0, 1, … K tokens were."""
    return tuple(sum(histogram[position:]) for position in range(1, len(histogram)))


@dataclass(frozen=True)
class Completion:
    """A completion from a server. `seconds` from the request to the whole answer; `text` as the server spells it."""

    text: str
    num_tokens: int
    seconds: float
    counts: ServerCounts


Counters = Mapping[str, float]  # of a page: sums over the server's ranks, of each position where a line has one


@dataclass(frozen=True)
class Client:
    """How the server of an engine is spoken to. Raises ResourceError when it does not answer as it should.

    prefix: of the names on its page of counters, `/metrics`; hint: how to start a server that has it.
    describe: (server, counters) -> what it says of itself.
    path, body: where a request is posted, and as which JSON.
    text_and_length: answer -> its text and number of tokens. counts: (answer, K of the server, 0 without a draft) -> what was drafted.
    gauges: server -> the engine's own averages; empty where it has none.
    """

    prefix: str
    hint: str
    describe: Callable[[Server, Counters], ServerIdentity]
    path: str
    body: Callable[[CompletionRequest], dict[str, Any]]
    text_and_length: Callable[[Any], tuple[str, int]]
    counts: Callable[[Any, int], ServerCounts]
    gauges: Callable[[Server], dict[str, float]] = lambda server: {}

    def identify(self, server: Server) -> ServerIdentity:
        counters = self.read(server)
        if GENERATED not in counters:
            missing = f"{server.address}/metrics has no {self.prefix}:{GENERATED}"
            raise ResourceError(missing, next_step=f"{self.hint}, or name the engine that serves")
        return self.describe(server, counters)

    def complete(self, server: Server, request: CompletionRequest, k: int) -> Completion:
        """A completion by a server that drafts `k` tokens per round, 0 without a draft. Several threads may ask at once."""
        body = self.body(request)
        start = time.perf_counter()
        answer = server.json(self.path, body)
        seconds = time.perf_counter() - start
        text, num_tokens = self.text_and_length(answer)
        return Completion(text, num_tokens, seconds, self.counts(answer, k))

    def read(self, server: Server) -> Counters:
        """The counters as they stand."""
        page = server.text("/metrics", hint=self.hint)
        try:
            return self.parse(page)
        except ValueError as error:
            raise ResourceError(f"{server.address}/metrics is no Prometheus page ({error})", next_step=self.hint) from error

    def parse(self, page: str) -> Counters:
        """The counters on a page, without the prefix of their names. Raises ValueError for another kind of page."""
        counters: dict[str, float] = defaultdict(float)
        for name, labels, value in samples(page):
            if name.startswith(f"{self.prefix}:"):
                counters[name.removeprefix(f"{self.prefix}:") + labels.get("position", "")] += value
        return dict(counters)

    def check_alone(self, server: Server, before: Counters, num_tokens: int) -> None:
        """Raises ResourceError unless the server generated `num_tokens` since `before`, ours, and no others."""
        deadline = time.monotonic() + MAX_DELAY_SECONDS
        while (counted := int(self.read(server)[GENERATED] - before[GENERATED])) != num_tokens:
            if counted > num_tokens:
                got = f"{server.address} served others too: it generated {counted} tokens, of which {num_tokens} are ours"
                raise ResourceError(got, next_step="measure a server that nobody else uses")
            if time.monotonic() > deadline:
                got = f"{server.address} counted {counted} tokens of answers of {num_tokens}"
                raise ResourceError(got, next_step="is a proxy in front of several servers? measure one")
            time.sleep(POLL_SECONDS)


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each line of a Prometheus page. Raises ValueError for another kind of page."""
    for line in map(str.strip, page.splitlines()):
        if line and not line.startswith("#"):
            if not (sample := SAMPLE.fullmatch(line)):
                raise ValueError(f"{line[:60]!r} is no sample")
            name, labels, value = sample.groups()
            yield name, dict(LABEL.findall(labels or "")), float(value)
