"""A running server whose answers are limited in time and size and checked for their form.

Requests run in one event loop. There the deadline of an answer is checked at every byte, and a
request can be cancelled from another thread.
"""

import asyncio
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from specdistill.common.documents import parse_json
from specdistill.common.errors import ResourceError, UserError, join_lines

CONNECT_SECONDS = 10.0  # how long a connection may take until the server counts as unreachable
# The largest answer, decoded. The limit protects the memory if another kind of server is at the
# address.
MAX_ANSWER_MIB = 64
SHOWN_CHARACTERS = 200  # how much of an answer an error shows
SEE_LOG_HINT = "look at the server's log"
WRONG_SERVER_HINT = "check that a server of this engine runs at this address"
POLL_SECONDS = 0.01  # the pause between two readings of a server's counters
MAX_IN_FLIGHT = 512  # the most requests to one server at once; all connections are kept open
# A line of a Prometheus page: name{label="…",…} value, and optionally a timestamp.
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
# Name, labels and value of a line of a Prometheus page.
Sample = tuple[str, dict[str, str], float]


class JsonAnswer(BaseModel):
    """The parts of a JSON answer that are read; other keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


def locate_field(first: str, *remaining_path: str | int, **options: Any) -> Any:
    """Return a pydantic field whose value is read from inside nested JSON.

    For example, `locate_field("choices", 0, "text")` reads answer["choices"][0]["text"].

    Args:
        first: the outermost key.
        remaining_path: the keys and list indices that follow, from outside to inside.
        options: more arguments of pydantic's `Field`, e.g. `default`.
    """
    return Field(validation_alias=AliasPath(first, *remaining_path), **options)


class ServedModel(JsonAnswer):
    """A model that a server lists at /v1/models."""

    id: str
    root: str | None = None
    max_model_len: Positive | None = None


class ServedModels(JsonAnswer):
    """The answer of /v1/models."""

    data: list[ServedModel] = Field(min_length=1)


A = TypeVar("A", bound=JsonAnswer)


class Response(NamedTuple):
    """A server's answer, with the address of the request and how long the answer took.

    Attributes:
        url: the address of the request.
        status: the HTTP status.
        headers: the headers of the answer.
        content: the body, decoded.
        seconds: the time from the request to the whole answer.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes
    seconds: float

    def __str__(self) -> str:
        """Return the status and the beginning of the content, for error messages."""
        shown = join_lines(self.content[: 4 * SHOWN_CHARACTERS].decode(errors="replace"))[
            :SHOWN_CHARACTERS
        ]
        return f"{self.status} ({shown})"

    def json(self, answer: type[A]) -> A:
        """Parse the content of this response as JSON.

        Args:
            answer: the pydantic class that describes the expected fields.

        Raises:
            ResourceError: if the content is no JSON, or if a field is missing or wrong.
        """
        # A wrong field raises a ValidationError, and content that is no JSON another ValueError.
        try:
            return answer.model_validate(parse_json(self.content))
        except ValidationError as error:
            first = error.errors()[0]
            why = (
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not"
                f" {str(first['input'])[:SHOWN_CHARACTERS]}"
            )
        except ValueError as error:
            why = f"no JSON: {error}"
        raise ResourceError(
            f"{self.url} sent an unexpected answer ({why})", next_step=WRONG_SERVER_HINT
        )


class Server:
    """A server at an address.

    Args:
        address: `http://host:port` or `https://…`.
        key: the key that gave the address; errors name it.
        timeout: the most seconds that one answer may take.
        timeout_key: the key that sets the timeout.
    """

    def __init__(
        self, address: str, *, key: str, timeout: float, timeout_key: str = "eval.server_timeout"
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(
                key,
                got=address,
                expected="the address of a running server, e.g. http://127.0.0.1:8000",
            )
        import httpx2  # It is imported here because it is slow to import.

        # The session keeps connections open. `_ask` limits the time of a whole answer, because
        # httpx only limits the time between two pieces of an answer.
        self.address = address.rstrip("/")
        self.timeout = timeout
        self.timeout_key = timeout_key
        self.session = session = httpx2.AsyncClient(
            verify=_load_certificates(),
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=MAX_IN_FLIGHT),
        )
        self._loop = loop = _start_event_loop()
        self._in_flight: set[Future[Response]] = set()
        self.is_closed = False

        # Close the connections when this object is collected. At the end of the process the system
        # closes them, and the event loop no longer runs (`atexit = False`).
        weakref.finalize(
            self, lambda: asyncio.run_coroutine_threadsafe(session.aclose(), loop)
        ).atexit = False

    def json(self, path: str, answer: type[A], body: Mapping[str, object] | None = None) -> A:
        """Send a request and return its parsed JSON answer.

        Args:
            path: the path below the server's address, e.g. /v1/models.
            answer: the pydantic class that describes the expected fields of the answer.
            body: a JSON body to post. None sends a GET request.

        Raises:
            ResourceError: if the server does not answer, or answers something else.
        """
        return self.ask(path, body, hint=SEE_LOG_HINT).json(answer)

    def read_samples(self, hint: str) -> list[Sample]:
        """Read the server's page of counters, /metrics, which is in Prometheus format.

        Args:
            hint: what the user can do if there is no such page, for the error.

        Returns:
            (name, labels, value) for each line of the page, e.g. `http_requests{code="200"} 3`.

        Raises:
            ResourceError: if the server does not answer, and for a page in another format.
        """
        page = self.ask("/metrics", hint=hint).content.decode(errors="replace")

        # Lines that begin with # are comments.
        samples: list[Sample] = []
        try:
            for line in map(str.strip, page.splitlines()):
                if line and not line.startswith("#"):
                    sample = SAMPLE.fullmatch(line)
                    if not sample:
                        raise ValueError(f"{line[:60]!r} is no sample")
                    name, labels, value = sample.groups()
                    samples.append((name, dict(LABEL.findall(labels or "")), float(value)))
        except ValueError as error:
            raise ResourceError(
                f"{self.address}/metrics is no Prometheus page ({error})", next_step=hint
            ) from error
        return samples

    def ask(
        self, path: str, body: Mapping[str, object] | None = None, *, hint: str = ""
    ) -> Response:
        """Send a request and wait for its answer. Several threads may call this at once.

        Args:
            path: the path below the server's address.
            body: a JSON body to post. None sends a GET request.
            hint: what the user can do if the HTTP status is not 200. With a hint, such a status is
                raised as an error. With an empty one, responses with any status are returned.

        Raises:
            ResourceError: if no whole answer arrives in time; with a hint, also if the HTTP status
                is not 200.
            CancelledError: once this object is closed.
        """
        # Run the request in the event loop, and wait for its result in this thread. `close`, which
        # another thread may call, cancels the requests in `_in_flight`.
        request = asyncio.run_coroutine_threadsafe(
            self._ask(f"{self.address}{path}", body), self._loop
        )
        self._in_flight.add(request)
        try:
            if self.is_closed:
                request.cancel()
            response = request.result()
        finally:
            request.cancel()  # Ends the request if this thread was interrupted while waiting.
            self._in_flight.discard(request)

        # Report an answer that is an error.
        if hint and response.status != 200:
            raise ResourceError(f"{response.url} answered {response}", next_step=hint)
        return response

    async def _ask(self, url: str, body: Mapping[str, object] | None) -> Response:
        """Send one request and read its answer. This coroutine runs in the event loop's thread.

        Args:
            url: the address of the request.
            body: a JSON body to post. None sends a GET request.

        Raises:
            ResourceError: if no whole answer arrives within the timeout, and for an answer of more
                than MAX_ANSWER_MIB.
        """
        import httpx2

        method = "GET" if body is None else "POST"
        content = bytearray()
        start = time.perf_counter()

        # Read the answer piece by piece, and stop once it is too large to hold in memory.
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.session.stream(method, url, json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_MIB * 2**20:
                        raise ResourceError(
                            f"{url} sent an answer of more than {MAX_ANSWER_MIB} MiB",
                            next_step=WRONG_SERVER_HINT,
                        )
        except TimeoutError as error:
            raise ResourceError(
                f"{url} did not answer in {self.timeout:g} s",
                next_step=f"{SEE_LOG_HINT}, or raise {self.timeout_key}",
            ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, ExceptionGroup) as error:
            # An ExceptionGroup is raised for a port that does not exist.
            why = join_lines(f"{type(error).__name__}: {error}")[:SHOWN_CHARACTERS]
            raise ResourceError(
                f"{url} does not answer ({why})", next_step="start the server, or look at its log"
            ) from error

        # The time ends with the last byte.
        return Response(
            url, response.status_code, response.headers, bytes(content), time.perf_counter() - start
        )

    def close(self) -> None:
        """Cancel the requests in flight, and make all later requests fail with a CancelledError."""
        self.is_closed = True
        for request in list(self._in_flight):
            request.cancel()


@cache
def _load_certificates() -> ssl.SSLContext:
    """Return the TLS certificates of this machine, to connect to https:// addresses.

    The decorator `cache` keeps the result, which all servers share, so that the certificates are
    loaded only once.
    """
    import httpx2

    return httpx2.create_ssl_context()


@cache
def _start_event_loop() -> asyncio.AbstractEventLoop:
    """Return the asyncio event loop in which all requests run; start it on the first call.

    The decorator `cache` makes later calls return the same loop. It runs in a thread of its own, so
    that threads without a loop can send requests, too.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


# A forked process needs a loop of its own: the thread of the parent's loop runs in the parent only.
os.register_at_fork(after_in_child=_start_event_loop.cache_clear)


@contextmanager
def start_request_threads(number: int, *servers: Server) -> Iterator[ThreadPoolExecutor]:
    """Provide a pool of threads that send requests to servers, for a `with` block.

    If an exception leaves the block, the threads end at once: waiting requests are dropped, and
    requests in flight are cancelled.

    Args:
        number: the number of threads.
        servers: the servers to which the threads send requests.
    """
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    except BaseException:
        # The threads are blocked until their answers arrive. Cancelling the requests wakes them.
        for server in servers:
            server.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
