"""A server that generates training data: one that speaks OpenAI's completions, with its pauses when it fails."""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import requests

from specdistill.errors import ResourceError, UserError, one_line

KEY = "data.regenerate.server"
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
CONNECT_SECONDS = 10.0
PATIENCE = 600.0  # seconds that a server may fail without one answer in between, before the others go on without it
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0  # seconds before a server that failed is asked again; twice as long each time
TOKEN = "OPENAI_API_KEY"  # environment variable; servers that want none ignore it
ABOUT_THE_QUESTION = {400, 413, 422}
ABOUT_THE_SERVER = {401, 403, 404, 405, 501}


class UnavailableError(Exception):
    """A server that may answer later. seconds: when it says that itself."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class Server:
    """A server by its address (`http://host:port`). timeout: seconds that an answer may take; connections: threads that ask it. They wait
    together while it fails.
    """

    def __init__(self, address: str, timeout: float, connections: int = 10) -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(KEY, got=address, expected="addresses of running servers, as [http://127.0.0.1:8000]")
        self.address, self.timeout = address.rstrip("/").removesuffix("/v1"), timeout
        self.session = requests.Session()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=connections))
        self.session.headers["Authorization"] = f"Bearer {os.environ.get(TOKEN, 'none')}"
        self.model = ""
        self.num_answers, self._failures, self._since, self._until = 0, 0, 0.0, 0.0
        self._lock = threading.Lock()

    def find_model(self, names: Sequence[str]) -> None:
        """Ask for the model that it has by one of these names, or for its only one. Raises UserError when it has several others, and
        ResourceError when it does not say.
        """
        served = self._serves()
        found = [name for name in served if name in names] or served
        if len(found) > 1:
            got = f"{self.address}, which serves {', '.join(found)}"
            raise UserError(KEY, got=got, expected=f"servers of {' or '.join(names)}")
        (self.model,) = found

    def _serves(self) -> list[str]:
        try:
            answer = self.session.get(f"{self.address}{MODELS}", timeout=(CONNECT_SECONDS, CONNECT_SECONDS))
            answer.raise_for_status()
            return [str(model["id"]) for model in answer.json()["data"]]
        except (requests.RequestException, ValueError, LookupError, TypeError) as error:
            why = f"{self.address}{MODELS} names no models ({one_line(str(error))[:200]})"
            raise ResourceError(why, next_step="start the server, or correct data.regenerate.server") from error

    def complete(self, body: dict[str, Any]) -> dict[str, Any] | str:
        """The answer to a body, or what the server has against the question. Raises UnavailableError when it may answer later, and
        ResourceError when it never will.
        """
        url = f"{self.address}{COMPLETIONS}"
        try:
            response = self.session.post(url, json=body, timeout=(CONNECT_SECONDS, self.timeout))
            content = one_line(response.text)[:200]
            if response.status_code in ABOUT_THE_QUESTION:
                return f"{response.status_code} {content}"
            if response.status_code in ABOUT_THE_SERVER:
                why = f"{url} answered {response.status_code} ({content})"
                raise ResourceError(why, next_step=f"check the address, and {TOKEN} if it asks for one")
            if response.status_code != 200:
                after = response.headers.get("Retry-After", "")
                raise UnavailableError(f"{response.status_code} {content}", float(after) if after.isdigit() else None)
            answer: dict[str, Any] = response.json()
            answer["choices"][0]["text"]
        except requests.RequestException as error:
            raise UnavailableError(f"{type(error).__name__}: {one_line(str(error))[:200]}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"an answer that is no completion ({one_line(str(error))[:200]})") from error
        with self._lock:
            self.num_answers, self._failures = self.num_answers + 1, 0
        return answer

    def failed(self, error: UnavailableError) -> bool:
        """Take note, and say whether it is worth asking again. All of its threads fail at once: that counts once."""
        with self._lock:
            now = time.monotonic()
            if not self._failures:
                self._since = now
            if now >= self._until:
                delay = min(FIRST_DELAY * 2**self._failures, LONGEST_DELAY)
                self._failures, self._until = self._failures + 1, now + (error.seconds or delay)
            return now - self._since < PATIENCE

    def pause(self, stop: threading.Event) -> None:
        """Until it may be asked again."""
        stop.wait(max(0.0, self._until - time.monotonic()))
