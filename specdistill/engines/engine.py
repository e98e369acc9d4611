"""What an engine is here: the layouts it is given, the loaders it has, the command that serves, and its server's interface."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdistill.engines.counters import ServerCounts
from specdistill.engines.layout import Layout
from specdistill.engines.loader import Loader

if TYPE_CHECKING:  # requests is slow to import
    from specdistill.engines.client import Server


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


class Client(Protocol):
    """How the server of an engine is spoken to."""

    def identify(self, server: "Server") -> Identity: ...

    def complete(
        self,
        server: "Server",
        model: str,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
    ) -> Completion: ...

    def gauges(self, server: "Server") -> dict[str, float]:
        """The engine's own averages; empty where it has none."""
        ...


class PlainOptions(Protocol):
    def __call__(self, target: str, *, dtype: str, max_length: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class PythonOptions:
    """Arguments of an engine's Python class.

    plain: for a target, a folder or a Hub id. draft: method, folder and K -> what a draft adds or replaces; the folder is an export.
    """

    plain: PlainOptions
    draft: Callable[[str, str, int], dict[str, Any]]


@dataclass(frozen=True)
class Engine:
    """One inference engine.

    name: in commands and recipes; title: in prose. versions: those whose sources its facts were read in.
    layouts: method -> how a draft is exported; methods that are not there cannot be.
    serve_command: lines for a shell. counters: where a running engine says what it accepts.
    loaders: method -> how a folder is loaded; the first whose `inner` key is None or in config.json is taken.
    loader_version: of the loaders, where it is one of several.
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
    python: PythonOptions | None = None

    @property
    def loader_title(self) -> str:
        return f"{self.title} {self.loader_version or self.versions}"
