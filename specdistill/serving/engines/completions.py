"""A server that generates training data, with pauses when it fails.

The server speaks OpenAI's completions.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from specdistill.common.credentials import SERVER_KEYS, read_server_keys
from specdistill.common.errors import ResourceError, UserError
from specdistill.serving.engines.server import Count, JsonAnswer, ServedModels, Server, locate_field

KEY = "data.regenerate.server"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# A server that has refused so many questions, without one answer, is taken to be wrong itself: the
# fault is no longer with the questions.
MAX_REFUSED_PROMPTS = 32
# Seconds that a server may fail, without one answer in between, before the other servers continue
# without it.
RETRY_TIMEOUT_S = 600.0
# Seconds before a server that failed is asked again. The delay doubles with each failure.
FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
# HTTP statuses that say that the question is wrong, and those that say that the server cannot be
# used.
REQUEST_ERROR_CODES = {400, 413, 422}
SERVER_ERROR_CODES = {401, 403, 404, 405, 501}


class Choice(JsonAnswer):
    """A completion.

    Attributes:
        text: of the completion.
        token_ids: of vLLM and SGLang.
        tokens: the token ids of llama.cpp.
        finish_reason: why the completion ended.
        states: vLLM's file of hidden states.
    """

    text: str = locate_field("choices", 0, "text")
    token_ids: list[Count] | None = locate_field("choices", 0, "token_ids", default=None)
    tokens: list[Count] | None = locate_field("choices", 0, "tokens", default=None)
    finish_reason: str | None = locate_field("choices", 0, "finish_reason", default=None)
    states: str | None = locate_field("kv_transfer_params", "hidden_states_path", default=None)


class UnavailableError(Exception):
    """An error of a server that may answer later.

    Attributes:
        seconds: until then; None if the server does not say.
    """

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class CompletionServer:
    """A server of completions at an address.

    Attributes:
        model: the name of its model, once `find_model` has asked for it.
        num_answers: how many completions it has answered.
        until: when the server may be asked again, by `time.monotonic`. While it fails, all of its
            threads wait together.
        states: the folder in which the hidden states of its completions wait. None: they are not
            asked for.

    Args:
        address: `http://host:port`.
        timeout: seconds that an answer may take.
        states: see above.
    """

    def __init__(self, address: str, timeout: float, states: Path | None = None) -> None:
        address = address.rstrip("/").removesuffix("/v1")
        self.server = Server(
            address, key=KEY, timeout=timeout, timeout_key="data.regenerate.timeout"
        )
        self.address = self.server.address
        self.model = ""
        self.states = states

        # A key is sent only encrypted, or to this machine.
        key = read_server_keys().get(self.address)
        if key:
            if (
                not self.address.startswith("https://")
                and urlsplit(self.address).hostname not in LOOPBACK
            ):
                raise UserError(
                    KEY,
                    got=f"{self.address}, to which the key would be sent unencrypted",
                    expected="an https:// address",
                )
            if not key.isascii():
                raise UserError(
                    SERVER_KEYS,
                    got=f"a key for {self.address} with other characters",
                    expected="ASCII",
                )
            self.server.session.headers["Authorization"] = f"Bearer {key}"
        self.num_answers = 0
        self._num_refused = 0
        self._failures = 0
        self._since = 0.0
        self.until = 0.0
        self._lock = threading.Lock()

    def find_model(self, names: Sequence[str]) -> None:
        """Find the model to ask for: the one that has one of these names, or the only one.

        Raises:
            UserError: if the server has several others.
            ResourceError: if the server does not say what it has.
        """
        served = [model.id for model in self.server.json("/v1/models", ServedModels).data]
        matching_names = [name for name in served if name in names] or served
        if len(matching_names) != 1:
            raise UserError(
                KEY,
                got=f"{self.address}, which serves {', '.join(matching_names)}",
                expected=f"servers of {' or '.join(names)}",
            )
        (self.model,) = matching_names

    def complete(self, body: Mapping[str, object]) -> Choice | str:
        """Ask for a completion.

        Args:
            body: of the request.

        Returns:
            The completion, or what the server has against the question.

        Raises:
            UnavailableError: if the server may answer later.
            ResourceError: if it never will.
        """
        try:
            response = self.server.ask("/v1/completions", body)
            choice = response.json(Choice) if response.status == 200 else None
        except ResourceError as error:
            raise UnavailableError(str(error)) from error
        # A server that has answered before, or refused few questions so far, may be right that the
        # question is wrong.
        with self._lock:
            if choice is not None:
                self.num_answers = self.num_answers + 1
                self._failures = 0
                return choice
            if response.status in REQUEST_ERROR_CODES:
                self._num_refused += 1
                if self.num_answers or self._num_refused < MAX_REFUSED_PROMPTS:
                    return str(response)
        if response.status in REQUEST_ERROR_CODES | SERVER_ERROR_CODES:
            raise ResourceError(
                f"{response.url} answered {response}",
                next_step=f"check the address, and {SERVER_KEYS} if it asks for one",
            )
        after = response.headers.get("Retry-After", "")
        raise UnavailableError(
            str(response), min(float(after), RETRY_TIMEOUT_S) if after.isdecimal() else None
        )

    def record_failure(self, error: UnavailableError) -> bool:
        """Record a failure, and return whether the server is worth asking again.

        All of the server's threads fail at once, which counts as one failure.
        """
        with self._lock:
            now = time.monotonic()
            if not self._failures:
                self._since = now
            # Threads that fail before the pause is over belong to the same failure.
            if now >= self.until:
                delay = min(FIRST_DELAY * 2**self._failures, LONGEST_DELAY)
                self._failures = self._failures + 1
                self.until = now + (error.seconds or delay)
            return now - self._since < RETRY_TIMEOUT_S
