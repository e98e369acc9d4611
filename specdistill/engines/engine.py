"""What an engine is here: the layouts it is given, the loaders it has, the command that serves, and its server's interface."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specdistill.engines.client import Server
from specdistill.engines.counters import ServerCounts
from specdistill.engines.layout import Layout
from specdistill.engines.loader import Loader


@dataclass(frozen=True)
class Served:
    """What a command that serves is made of. target: the name an engine is given, None where it is not known.

    samples: whether the draft was measured with drafts that are drawn, not greedy.
    config: the config.json that was written, empty for a GGUF file.
    """

    method: str
    output: Path
    target: str | None
    num_tokens: int
    samples: bool
    config: Mapping[str, Any]

    @property
    def quoted_output(self) -> str:
        return shlex.quote(str(self.output))

    @property
    def quoted_target(self) -> str:
        return shlex.quote(self.target or "TARGET")


@dataclass(frozen=True)
class Identity:
    """What a server says of itself. `models`: the names and the folder of what it serves, the name to ask for first.

    num_speculative_tokens: K; None for a server that does not draft. max_length: tokens of a sequence; None where it does not say.
    """

    version: str
    models: tuple[str, ...]
    max_length: int | None
    num_speculative_tokens: int | None


@dataclass(frozen=True)
class Completion:
    """A completion from a server. `seconds` from the request to the whole answer; `text` as the server spells it."""

    text: str
    num_tokens: int
    seconds: float
    counts: ServerCounts


@dataclass(frozen=True)
class Request:
    """A prompt to complete. temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    model: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


class Client(Protocol):
    """How the server of an engine is spoken to. Its methods raise ResourceError when it does not answer as it should."""

    def identify(self, server: Server) -> Identity: ...

    def complete(self, server: Server, request: Request) -> Completion: ...

    def gauges(self, server: Server) -> dict[str, float]:
        """The engine's own averages; empty where it has none."""
        ...


@dataclass(frozen=True)
class Engine:
    """One inference engine.

    name: in commands and recipes; title: in prose. versions: those whose sources its facts were read in.
    layouts: method -> how a draft is exported; methods that are not there cannot be.
    serve_command: lines for a shell. counters: where a running engine says what it accepts.
    loaders: method -> how a folder is loaded; the first whose `inner` key is None or in config.json is taken.
    loader_version: of the loaders, where it is one of several.
    client: of its server, None where that is not measured. counts_past_end: whether it counts draft tokens that it accepts past the end of
    a completion.
    plain_options: (target's folder or Hub id, dtype, most tokens of a sequence) -> arguments of its Python class, where drafts are compared
    in it; draft_options: (method, exported folder, K) -> what a draft adds or replaces.
    """

    name: str
    title: str
    versions: str
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    serve_command: Callable[[Served], str] = lambda served: ""
    counters: str = ""
    loaders: Mapping[str, tuple[Loader, ...]] = field(default_factory=dict)
    loader_version: str = ""
    client: Client | None = None
    counts_past_end: bool = False
    plain_options: Callable[[str, str, int], dict[str, Any]] | None = None
    draft_options: Callable[[str, str, int], dict[str, Any]] = lambda method, folder, num_tokens: {}

    @property
    def loader_title(self) -> str:
        return f"{self.title} {self.loader_version or self.versions}"
