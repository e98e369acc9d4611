"""A running server: answers within a time, a size and a shape.

Requests run in one event loop: there a deadline holds at every byte of an answer, and a request can be given up from another thread.
"""

import asyncio
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from specdistill.errors import ResourceError, UserError, one_line
from specdistill.files.documents import parse_json

CONNECT_SECONDS = 10.0
MOST_MIB = 64  # of an answer, decoded
SHOWN_CHARACTERS = 200  # of an answer that is an error
SEE_LOG, NOT_THIS = "look at the server's log", "is it this engine's server?"
POLL_SECONDS = 0.01
MOST_IN_FLIGHT = 512  # requests to one server
# A line of a Prometheus page: name{label="…",…} value, and when it was taken.
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

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
        shown = one_line(self.content[: 4 * SHOWN_CHARACTERS].decode(errors="replace"))[
            :SHOWN_CHARACTERS
        ]
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

    def __init__(
        self, address: str, *, key: str, timeout: float, timeout_key: str = "eval.server_timeout"
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(
                key,
                got=address,
                expected="the address of a running server, as http://127.0.0.1:8000",
            )
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
        weakref.finalize(
            self, lambda: asyncio.run_coroutine_threadsafe(session.aclose(), loop)
        ).atexit = False

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
            raise ResourceError(
                f"{self.address}/metrics is no Prometheus page ({error})", next_step=hint
            ) from error
        return found

    def ask(self, path: str, body: dict[str, Any] | None = None, *, hint: str = "") -> Response:
        """Raises ResourceError without a whole answer in time, or with a hint for one that is an error; CancelledError once closed."""
        request = asyncio.run_coroutine_threadsafe(
            self._ask(f"{self.address}{path}", body), self._loop
        )
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
            async with (
                asyncio.timeout(self.timeout),
                self.session.stream(method, url, json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MOST_MIB * 2**20:
                        raise ResourceError(
                            f"{url} answered more than {MOST_MIB} MiB", next_step=NOT_THIS
                        )
        except TimeoutError as error:
            what = f"{url} did not answer in {self.timeout:g} s"
            raise ResourceError(
                what, next_step=f"{SEE_LOG}, or raise {self.timeout_key}"
            ) from error
        except (
            httpx2.HTTPError,
            httpx2.InvalidURL,
            ExceptionGroup,
        ) as error:  # a group: of a port that there is not
            why = one_line(f"{type(error).__name__}: {error}")[:SHOWN_CHARACTERS]
            raise ResourceError(
                f"{url} does not answer ({why})", next_step="start the server, or look at its log"
            ) from error
        return Response(
            url, response.status_code, response.headers, bytes(content), time.perf_counter() - start
        )

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
