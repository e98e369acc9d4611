"""Servers that are what a measurement needs: the right model, the right draft, one version."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdistill.engines import ENGINES
from specdistill.engines.server import Client, Completion, Identity, Request, Server
from specdistill.errors import UserError
from specdistill.measurement.configurations import Settings
from specdistill.methods import METHODS
from specdistill.methods.load import locate
from specdistill.methods.target_record import check_target
from specdistill.suites.suite import Prompt
from specdistill.targets.files import TargetFiles


@dataclass(frozen=True)
class Peer:
    """A server that serves the right model."""

    engine: str
    client: Client
    server: Server
    identity: Identity

    @property
    def k(self) -> int:
        """Draft tokens a round; 0 without a draft."""
        return self.identity.num_speculative_tokens or 0

    def complete(self, prompt: Prompt, settings: Settings, seed: int) -> Completion:
        model, sampling = self.identity.models[0], vars(settings.sampling)
        request = Request(model, prompt.token_ids, settings.max_new_tokens, **sampling, seed=seed)
        return self.client.complete(self.server, request, self.k)


def check_draft(draft: str | None, method: str, target: TargetFiles) -> None:
    """Raises UserError when `eval.draft`, which a server does not confirm, is no draft or another target's; None says nothing.

    Of a Hub id config.json alone is fetched. A layer of the target's own checkpoint is what the server says that it serves.
    """
    if draft is not None and METHODS[method].artifact != "layer":
        check_target(locate(draft, patterns=("config.json",)), target, "eval.draft")


def connect(engine: str, address: str, key: str, target: Sequence[str], timeout: float) -> Peer:
    """A running server. target: the names that its model may have, a folder or Hub id last. key: of the recipe, that led to it.

    Raises UserError when it serves another model, ResourceError when it does not answer.
    """
    server, client = Server(address, key=key, timeout=timeout), ENGINES[engine].client
    assert client is not None, engine
    identity = client.identify(server)
    if not any(_same_model(name, wanted) for name in identity.models for wanted in target):
        got = f"{address}, which serves {identity.models[0]}"
        raise UserError(key, got=got, expected=f"a server of {target[-1]} (or --served-model-name {target[0]})")
    return Peer(engine, client, server, identity)


def connect_pair(
    engine: str, address: str, baseline_address: str | None, *, target: Sequence[str], k: int, timeout: float
) -> tuple[Peer, Peer | None]:
    """The server with a draft and the one without, as `connect`.

    Raises UserError also when they draft another number of tokens, draft where they should not, or have different versions.
    """
    speculative = connect(engine, address, "eval.server", target, timeout)
    if not speculative.k:
        raise UserError("eval.server", got=f"{address}, which does not draft", expected="a server started with a draft")
    if speculative.k != k:
        raise UserError("eval.num_speculative_tokens", got=k, expected=f"{speculative.k}, as the server at {address} drafts")
    if baseline_address is None:
        return speculative, None
    baseline = connect(engine, baseline_address, "eval.baseline_server", target, timeout)
    if baseline.k:
        got = f"{baseline_address}, which drafts"
        raise UserError("eval.baseline_server", got=got, expected="a server started without a draft")
    if baseline.identity.version != speculative.identity.version:
        got = f"{engine} {baseline.identity.version}"
        raise UserError("eval.baseline_server", got=got, expected=f"{speculative.identity.version}, as eval.server runs")
    return speculative, baseline


def _same_model(name: str, wanted: str) -> bool:
    return name == wanted or (Path(wanted).is_dir() and Path(name).is_dir() and Path(name).samefile(wanted))
