"""A server that generates training data: one that speaks OpenAI's completions, with its pauses when it fails."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specdistill.credentials import SERVER_KEYS, server_keys
from specdistill.engines.server import Count, JsonAnswer, ServedModels, Server, at
from specdistill.errors import ResourceError, UserError

KEY = "data.regenerate.server"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_REFUSED = (
    32  # questions, without one answer, before it is no longer the questions that are wrong
)
PATIENCE = 600.0  # seconds that a server may fail without one answer in between, before the others continue without it
FIRST_DELAY, LONGEST_DELAY = (
    0.5,
    60.0,
)  # seconds before a server that failed is asked again; twice as long each time
ABOUT_THE_QUESTION = {400, 413, 422}
ABOUT_THE_SERVER = {401, 403, 404, 405, 501}


class Choice(JsonAnswer):
    """A completion. token_ids: of vLLM and SGLang; tokens: of llama.cpp; states: vLLM's file of hidden states."""

    text: str = at("choices", 0, "text")
    token_ids: list[Count] | None = at("choices", 0, "token_ids", default=None)
    tokens: list[Count] | None = at("choices", 0, "tokens", default=None)
    finish_reason: str | None = at("choices", 0, "finish_reason", default=None)
    states: str | None = at("kv_transfer_params", "hidden_states_path", default=None)


class UnavailableError(Exception):
    """A server that may answer later. seconds: when it says that itself."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class CompletionServer:
    """A server by its address (`http://host:port`). timeout: seconds that an answer may take. until: when it may be asked
    again, of a clock that counts seconds; its threads wait together while it fails. states: where the hidden states of its completions
    wait; None: they are not asked for.
    """

    def __init__(self, address: str, timeout: float, states: Path | None = None) -> None:
        address = address.rstrip("/").removesuffix("/v1")
        self.server = Server(
            address, key=KEY, timeout=timeout, timeout_key="data.regenerate.timeout"
        )
        self.address, self.model, self.states = self.server.address, "", states
        if key := server_keys().get(self.address):
            if (
                not self.address.startswith("https://")
                and urlsplit(self.address).hostname not in LOOPBACK
            ):
                raise UserError(
                    KEY,
                    got=f"{self.address}, which would be sent its key in the clear",
                    expected="https://",
                )
            if not key.isascii():
                raise UserError(
                    SERVER_KEYS,
                    got=f"a key for {self.address} with other characters",
                    expected="ASCII",
                )
            self.server.session.headers["Authorization"] = f"Bearer {key}"
        self.num_answers, self._num_refused, self._failures, self._since, self.until = (
            0,
            0,
            0,
            0.0,
            0.0,
        )
        self._lock = threading.Lock()

    def find_model(self, names: Sequence[str]) -> None:
        """Ask for the model that it has by one of these names, or for its only one. Raises UserError when it has several others, and
        ResourceError when it does not say.
        """
        served = [model.id for model in self.server.json("/v1/models", ServedModels).data]
        found = [name for name in served if name in names] or served
        if len(found) != 1:
            got = f"{self.address}, which serves {', '.join(found)}"
            raise UserError(KEY, got=got, expected=f"servers of {' or '.join(names)}")
        (self.model,) = found

    def complete(self, body: dict[str, Any]) -> Choice | str:
        """The answer to a body, or what the server has against the question. Raises UnavailableError when it may answer later, and
        ResourceError when it never will.
        """
        try:
            response = self.server.ask("/v1/completions", body)
            choice = response.json(Choice) if response.status == 200 else None
        except ResourceError as error:
            raise UnavailableError(str(error)) from error
        with self._lock:
            if choice is not None:
                self.num_answers, self._failures = self.num_answers + 1, 0
                return choice
            if response.status in ABOUT_THE_QUESTION:
                self._num_refused += 1
                if self.num_answers or self._num_refused < MOST_REFUSED:
                    return str(response)
        if response.status in ABOUT_THE_QUESTION | ABOUT_THE_SERVER:
            next_step = f"check the address, and {SERVER_KEYS} if it asks for one"
            raise ResourceError(f"{response.url} answered {response}", next_step=next_step)
        after = response.headers.get("Retry-After", "")
        raise UnavailableError(
            str(response), min(float(after), PATIENCE) if after.isdecimal() else None
        )

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
