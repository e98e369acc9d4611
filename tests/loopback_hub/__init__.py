"""A Hugging Face Hub on loopback for the real client, with repositories, large files and faults.

    with loopback_hub(tmp_path / "hub") as hub:
        hub.create("org/name", {"config.json": b"{}"})
        # or, in this process: with hub.client(tmp_path / "home")
        subprocess.run([...], env=hub.environment(tmp_path / "home"))
        assert hub.tags("org/name") == {"v1": hub.commits("org/name")[0]}

`store.py` keeps what was sent, `reading.py` and `writing.py` answer, `server.py` is HTTP and
faults, `cas.py` the storage of Xet.
"""

import os
import shutil
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from unittest import mock

from huggingface_hub import close_session, constants

from specdistill.common.project import ROOT
from tests.loopback_hub.cas import Storage
from tests.loopback_hub.reading import OWNER, STRANGER, RefusedError, Request
from tests.loopback_hub.server import Fault, Faults, Handler
from tests.loopback_hub.store import File, Objects, Repository

TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
__all__ = ["Fault", "Hub", "environment", "fetched", "loopback_hub"]


class Hub:
    """The Hub as a test controls and inspects it, in addition to the requests of clients."""

    # Tokens of the owner of every repository, and of somebody who sees what is public.
    token = "hf_loopbackOwner" + "0" * 21
    other_token = "hf_loopbackOther" + "0" * 21
    xet_token = "xet_loopback" + "0" * 21

    def __init__(self, folder: Path, port: int, transfer: Literal["lfs", "xet"]):
        self.address = f"http://127.0.0.1:{port}"
        # Large files are on another host, to which clients send no tokens.
        self.storage_address = f"http://localhost:{port}"
        self.transfer = transfer
        self.objects = Objects(folder / "objects")
        self.arriving = folder / "arriving"
        self.arriving.mkdir(parents=True, exist_ok=True)
        self.cas = Storage(folder / "cas") if transfer == "xet" else None
        self.users = {self.token: OWNER, self.other_token: STRANGER}
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults = Faults()
        self.inject = self.faults.inject

    def create(
        self,
        name: str,
        files: Mapping[str, bytes | Path] | None = None,
        *,
        card: str = "",
        tags: tuple[str, ...] = (),
        downloads: int = 0,
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Create a repository with these files and `card` as its README.md; return its commit.

        The repository has `tags` in addition to those of the card.
        """
        self.repositories[name] = Repository(name, private, gated, tags, downloads)
        return self.commit(
            name,
            {**(files or {}), **({"README.md": card.encode()} if card else {})},
            "initial commit",
        )

    def commit(
        self,
        name: str,
        files: Mapping[str, bytes | Path | None],
        title: str = "another commit",
    ) -> str:
        """Commit files on top of main, and return the commit; a file that is None is deleted."""
        kept_files = {
            path: None if content is None else self._keep(path, content)
            for path, content in files.items()
        }
        return self.repositories[name].commit(kept_files, title).id

    def tag(self, name: str, tag: str, revision: str = "main") -> None:
        commit = self.repositories[name].resolve(revision)
        assert commit, f"{name} has no {revision}"
        self.repositories[name].git_tags[tag] = commit.id

    def grant(self, name: str, user: str = STRANGER) -> None:
        """Allow the user to read a gated repository."""
        self.repositories[name].members.add(user)

    def files(self, name: str, revision: str = "main") -> dict[str, Path]:
        """Return the files of a revision, with the path of their bytes."""
        commit = self.repositories[name].resolve(revision)
        assert commit, f"{name} has no {revision}"
        return {path: self.objects.path(file.sha256) for path, file in commit.files.items()}

    def commits(self, name: str, revision: str = "main") -> list[str]:
        """Return the commits of a revision, the last one first."""
        return [commit.id for commit in self.repositories[name].history(revision)]

    def tags(self, name: str) -> dict[str, str]:
        """Return the commit of each tag."""
        return dict(self.repositories[name].git_tags)

    def asked(self, route: str) -> list[Request]:
        return [request for request in self.requests if request.route == route]

    def environment(self, home: Path, *, token: str | None = token) -> dict[str, str]:
        """Return the environment of a process that asks this Hub as the owner.

        The process keeps in `home` what it fetches.
        """
        variables = environment(self.address, home)
        variables["HF_HUB_DISABLE_XET"] = "1" if self.transfer == "lfs" else "0"
        return {**variables, **({"HF_TOKEN": token} if token else {})}

    @contextmanager
    def client(self, home: Path, *, token: str | None = token) -> Iterator[None]:
        """Let huggingface_hub in this process ask this Hub as the owner.

        It keeps in `home` what it fetches.
        """
        settings = {
            "ENDPOINT": self.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.address
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": self.transfer == "lfs",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        }
        variables = {
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            **({"HF_TOKEN": token} if token else {}),
        }
        # transformers keeps its client, and with it the address of the first Hub that it asked
        own_client = mock.patch("transformers.utils.hub._hf_api", None)
        # Reading the machine's certificates takes half of a client's time, and nothing here needs
        # them.
        without_tls = mock.patch("httpx2._transports.default.create_ssl_context", return_value=TLS)
        with (
            mock.patch.multiple(constants, **settings),
            mock.patch.dict(os.environ, variables),
            own_client,
            without_tls,
        ):
            if token is None:
                os.environ.pop("HF_TOKEN", None)
            try:
                yield
            finally:
                close_session()

    def find_upload(self, path: str, sha256: str) -> File:
        """Return a large file of a commit; its bytes must have arrived before."""
        xet_file = (self.cas.list_hashes() if self.cas else {}).get(sha256)
        if self.cas and xet_file and self.cas.fetch(*xet_file, self.arriving / sha256) == sha256:
            (self.arriving / sha256).replace(self.objects.path(sha256))
        if sha256 not in self.objects:
            raise RefusedError(400, f"LFS pointer of {path} pointed to a file that does not exist")
        file = self.objects.describe(path, sha256, lfs=True)
        return File(**{**vars(file), "xet": xet_file[0] if xet_file else None})

    def _keep(self, path: str, content: bytes | Path) -> File:
        file = self.objects.add(path, content)
        if not (self.cas and file.lfs):
            return file
        return File(**{**vars(file), "xet": self.cas.add(self.objects.path(file.sha256))})


@contextmanager
def loopback_hub(folder: Path, transfer: Literal["lfs", "xet"] = "lfs") -> Iterator[Hub]:
    """Run a Hub that keeps its files in `folder`.

    It moves large files by classic LFS, or by Xet as the Hub does now.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = hub = Hub(folder, server.server_port, transfer)  # type: ignore[attr-defined]
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        shutil.rmtree(hub.arriving)


def environment(address: str, home: Path) -> dict[str, str]:
    """Return the environment of a process that asks the Hub at this address without a token.

    The process keeps in `home` what it fetches.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_TOKEN", "HF_HUB_CACHE", "HF_TOKEN_PATH")
    }
    return {
        **inherited,
        "HF_ENDPOINT": address,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }


def fetched(home: Path) -> set[str]:
    """Return the names of the files that were fetched into `home`."""
    return {path.name for path in home.rglob("snapshots/*/**/*") if path.is_file()}
