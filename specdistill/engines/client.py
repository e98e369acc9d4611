"""One running server over HTTP: it answers, or a ResourceError says what failed and what to do next. `requests` is slow to import."""

from typing import TYPE_CHECKING, Any

from specdistill.errors import ResourceError, UserError, one_line

if TYPE_CHECKING:
    import requests

CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 200  # of an answer that is an error


class Server:
    """A server by its address (`http://host:port`); `key` is the key it came from, `timeout` the seconds that one answer may take."""

    def __init__(self, address: str, *, key: str, timeout: float) -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(key, got=address, expected="the address of a running server, as http://127.0.0.1:8000")
        self.address = address.rstrip("/")
        self.key = key
        self.timeout = timeout
        import requests

        self.session = requests.Session()

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

    def _request(self, method: str, path: str, hint: str, body: dict[str, Any] | None = None) -> "requests.Response":
        import requests

        url = f"{self.address}{path}"
        try:
            response = self.session.request(method, url, json=body, timeout=(CONNECT_SECONDS, self.timeout))
        except requests.Timeout as error:
            what = f"{url} did not answer in {self.timeout:g} s"
            raise ResourceError(what, next_step="look at the server's log, or raise eval.server_timeout") from error
        except requests.RequestException as error:
            raise ResourceError(f"{url} does not answer", next_step="start the server, or look at its log") from error
        if response.status_code != 200:
            content = one_line(response.text)[:SHOWN_CHARACTERS]
            raise ResourceError(f"{url} answered {response.status_code} ({content})", next_step=hint)
        return response
