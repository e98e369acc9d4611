"""A server that generates training data: one that speaks OpenAI's completions, with its pauses when it fails."""

import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2

from specdistill.credentials import SERVER_KEYS, server_keys
from specdistill.engines.server import SHOWN_CHARACTERS, Server
from specdistill.errors import ResourceError, UserError, one_line

KEY = "data.regenerate.server"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_REFUSED = 32  # questions, without one answer, before it is no longer the questions that are wrong
PATIENCE = 600.0  # seconds that a server may fail without one answer in between, before the others continue without it
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0  # seconds before a server that failed is asked again; twice as long each time
ABOUT_THE_QUESTION = {400, 413, 422}
ABOUT_THE_SERVER = {401, 403, 404, 405, 501}


class UnavailableError(Exception):
    """A server that may answer later. seconds: when it says that itself."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class CompletionServer:
    """A server by its address (`http://host:port`). timeout: seconds that an answer may take. until: when it may be asked
    again, of a clock that counts seconds; its threads wait together while it fails.
    """

    def __init__(self, address: str, timeout: float) -> None:
        address = address.rstrip("/").removesuffix("/v1")
        self.server = Server(address, key=KEY, timeout=timeout, timeout_key="data.regenerate.timeout")
        self.address, self.model = self.server.address, ""
        if key := server_keys().get(self.address):
            if not self.address.startswith("https://") and urlsplit(self.address).hostname not in LOOPBACK:
                raise UserError(KEY, got=f"{self.address}, which would be sent its key in the clear", expected="https://")
            self.server.session.headers["Authorization"] = f"Bearer {key}"
        self.num_answers, self._num_refused, self._failures, self._since, self.until = 0, 0, 0, 0.0, 0.0
        self._lock = threading.Lock()

    def find_model(self, names: Sequence[str]) -> None:
        """Ask for the model that it has by one of these names, or for its only one. Raises UserError when it has several others, and
        ResourceError when it does not say.
        """
        try:
            served = [str(model["id"]) for model in self.server.json("/v1/models")["data"]]
        except (LookupError, TypeError) as error:
            why = f"{self.address}/v1/models names no models"
            raise ResourceError(why, next_step=f"is it a server of OpenAI's API? correct {KEY}") from error
        found = [name for name in served if name in names] or served
        if len(found) != 1:
            got = f"{self.address}, which serves {', '.join(found) or 'nothing'}"
            raise UserError(KEY, got=got, expected=f"servers of {' or '.join(names)}")
        (self.model,) = found

    def complete(self, body: dict[str, Any]) -> dict[str, Any] | str:
        """The answer to a body, or what the server has against the question. Raises UnavailableError when it may answer later, and
        ResourceError when it never will.
        """
        url = f"{self.address}/v1/completions"
        try:
            response = self.server.session.post(url, json=body)
            content = one_line(response.text)[:SHOWN_CHARACTERS]
            if response.status_code in ABOUT_THE_QUESTION:
                with self._lock:
                    self._num_refused += 1
                    hopeless = not self.num_answers and self._num_refused >= MOST_REFUSED
                if not hopeless:
                    return f"{response.status_code} {content}"
            if response.status_code in ABOUT_THE_QUESTION | ABOUT_THE_SERVER:
                why = f"{url} answered {response.status_code} ({content})"
                raise ResourceError(why, next_step=f"check the address, and {SERVER_KEYS} if it asks for one")
            if response.status_code != 200:
                after = response.headers.get("Retry-After", "")
                raise UnavailableError(f"{response.status_code} {content}", float(after) if after.isdigit() else None)
            answer: dict[str, Any] = response.json()
            answer["choices"][0]["text"]
        except httpx2.HTTPError as error:
            raise UnavailableError(f"{type(error).__name__}: {one_line(str(error))[:SHOWN_CHARACTERS]}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"an answer that is no completion ({one_line(str(error))[:SHOWN_CHARACTERS]})") from error
        with self._lock:
            self.num_answers, self._failures = self.num_answers + 1, 0
        return answer

    def failed(self, error: UnavailableError) -> bool:
        """Take note, and say whether it is worth asking again. All of its threads fail at once: that counts once."""
        with self._lock:
            now = time.monotonic()
            if not self._failures:
                self._since = now
            if now >= self.until:
                delay = min(FIRST_DELAY * 2**self._failures, LONGEST_DELAY)
                self._failures, self.until = self._failures + 1, now + (error.seconds or delay)
            return now - self._since < PATIENCE
