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
# After this many refused requests without one answer, the fault is with the server, not with the
# requests. A smaller number would give up a good server if the first prompts are too long.
MAX_REFUSED_PROMPTS = 32
# Seconds that a server may fail, without one answer in between. After that, the other servers
# continue without it. In this time a server may restart and load its weights.
RETRY_TIMEOUT_S = 600.0
# Seconds before a server that failed is asked again. The delay doubles with each failure.
FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
# HTTP statuses of a wrong request (the next request may succeed), and of a server that cannot be
# used (no request will succeed: the key or the address is wrong).
REQUEST_ERROR_CODES = {400, 413, 422}
SERVER_ERROR_CODES = {401, 403, 404, 405, 501}


class Choice(JsonAnswer):
    """A completion.

    Attributes:
        text: the text of the completion.
        token_ids: the token ids, from vLLM and SGLang.
        tokens: the token ids, from llama.cpp.
        finish_reason: why the completion ended.
        states: the path of the file to which vLLM wrote the hidden states.
    """

    text: str = locate_field("choices", 0, "text")
    token_ids: list[Count] | None = locate_field("choices", 0, "token_ids", default=None)
    tokens: list[Count] | None = locate_field("choices", 0, "tokens", default=None)
    finish_reason: str | None = locate_field("choices", 0, "finish_reason", default=None)
    states: str | None = locate_field("kv_transfer_params", "hidden_states_path", default=None)


class UnavailableError(Exception):
    """An error of a server that may answer later.

    Attributes:
        seconds: the time until the server may be asked again; None if the server does not say.
    """

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class CompletionServer:
    """A server that generates training data, at an address.

    Attributes:
        model: the name of its model, once `find_model` has asked for it.
        num_answers: the number of completions that the server has returned.
        until: the time, by `time.monotonic`, before which the server is not asked again. All
            threads that ask the server wait until then.
        states: the folder to which the server writes the hidden states of its completions. None:
            hidden states are not requested.

    Args:
        address: `http://host:port`.
        timeout: the most seconds that an answer may take.
        states: the folder of hidden states, or None.
    """

    def __init__(self, address: str, timeout: float, states: Path | None = None) -> None:
        # The address of OpenAI's API, which ends in /v1, is accepted, too.
        address = address.rstrip("/").removesuffix("/v1")
        self.server = Server(
            address, key=KEY, timeout=timeout, timeout_key="data.regenerate.timeout"
        )
        self.address = self.server.address
        self.model = ""
        self.states = states

        # Send the key of this address, if the user has set one. The connection must be encrypted,
        # or stay on this machine.
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
                    got=f"a key for {self.address} with characters that are not ASCII",
                    expected="ASCII characters only",
                )
            self.server.session.headers["Authorization"] = f"Bearer {key}"

        # The threads that ask the server share these counts, under the lock.
        self.num_answers = 0
        self._num_refused = 0
        self._failures = 0
        self._since = 0.0
        self.until = 0.0
        self._lock = threading.Lock()

    def find_model(self, names: Sequence[str]) -> None:
        """Ask the server for its models, and store in `model` which of them to request.

        This is the model that has one of `names`. If the server has only one model, it may have any
        name.

        Args:
            names: the possible names of the target.

        Raises:
            UserError: if the server has several models, unless exactly one of them has such a name.
            ResourceError: if the server does not list its models.
        """
        # If no model has one of the names, all of them are candidates.
        served = [model.id for model in self.server.json("/v1/models", ServedModels).data]
        matching_names = [name for name in served if name in names] or served
        if len(matching_names) != 1:
            raise UserError(
                KEY,
                got=f"{self.address}, which serves {', '.join(matching_names)}",
                expected=f"the address of a server of the target, {' or '.join(names)}",
            )
        (self.model,) = matching_names

    def complete(self, body: Mapping[str, object]) -> Choice | str:
        """Request a completion; the type of the result or error tells what to do after a failure.

        Args:
            body: the JSON of the request.

        Returns:
            The completion. If the server refuses this one request: its answer, as a text. The
            caller then skips the prompt.

        Raises:
            UnavailableError: if the server may answer later, so that asking again makes sense.
            ResourceError: if the server cannot be used at all, e.g. because a key is missing.
        """
        # If no whole answer arrives, the server may be restarting.
        try:
            response = self.server.ask("/v1/completions", body)
            choice = response.json(Choice) if response.status == 200 else None
        except ResourceError as error:
            raise UnavailableError(str(error)) from error

        # An answer ends a series of failures. A refusal counts as the fault of the request if the
        # server has answered other requests, or has refused only few requests so far.
        with self._lock:
            if choice is not None:
                self.num_answers = self.num_answers + 1
                self._failures = 0
                return choice
            if response.status in REQUEST_ERROR_CODES:
                self._num_refused += 1
                if self.num_answers or self._num_refused < MAX_REFUSED_PROMPTS:
                    return str(response)

        # The server cannot be used at all.
        if response.status in REQUEST_ERROR_CODES | SERVER_ERROR_CODES:
            raise ResourceError(
                f"{response.url} answered {response}",
                next_step=f"check the address; if the server needs a key, set it in {SERVER_KEYS}",
            )

        # Any other status, such as 429 or 503, is temporary. Wait as long as the server says.
        after = response.headers.get("Retry-After", "")
        raise UnavailableError(
            str(response), min(float(after), RETRY_TIMEOUT_S) if after.isdecimal() else None
        )

    def record_failure(self, error: UnavailableError) -> bool:
        """Record a failure, and return whether the server should be asked again.

        The next request may be sent at `self.until`, after a pause that doubles with each failure.
        A server that has failed for RETRY_TIMEOUT_S seconds without one answer should not be asked
        again.

        Args:
            error: the failure; `error.seconds` is the pause that the server asks for, if it does.
        """
        with self._lock:
            now = time.monotonic()
            if not self._failures:
                self._since = now
            # Many threads ask the server, and all of them fail at about the same time. So failures
            # before the pause is over count as one.
            if now >= self.until:
                delay = min(FIRST_DELAY * 2**self._failures, LONGEST_DELAY)
                self._failures = self._failures + 1
                self.until = now + (error.seconds or delay)
            return now - self._since < RETRY_TIMEOUT_S
