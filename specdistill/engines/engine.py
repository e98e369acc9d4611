"""What an engine is here: the layouts of the drafts it is given, the loaders it has, the command that serves, and its server's client."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdistill.engines.client import Client
from specdistill.engines.loader import Limit, Loader
from specdistill.errors import UserError


@dataclass(frozen=True)
class HeadExport:
    """What the config.json of a head is made of.

    llama: the keys of a Llama. head: the head's own config. target: its `TargetFiles`, or None where the layout needs none.
    """

    llama: dict[str, Any]
    head: Any
    target: Any
    num_speculative_tokens: int


@dataclass(frozen=True)
class Layout:
    """The folder of a draft as an engine reads it. Without arguments: the folder of a model of its own.

    config: the config.json of a head. limits: what a head cannot have, first reason first.
    first_layer: how names of tensors in the first layer of an EAGLE-3 head begin.
    needs_target: why a head's folder repeats the target's embedding; empty where it does not.
    fc_bias: whether an EAGLE-1 head always has one in `fc`: zeros for a head without.
    """

    config: Callable[[HeadExport], dict[str, Any]] = lambda export: export.llama
    limits: tuple[Limit, ...] = ()
    first_layer: str = "midlayer."
    needs_target: str = ""
    fc_bias: bool = False

    def check(self, engine: str, head: Any, folder: Path | str) -> None:
        """Raises UserError for a head that the engine cannot express."""
        for limit in self.limits:
            if limit.has(head):
                raise UserError(
                    "engine",
                    got=f"{engine} for {folder}, a head with {limit.setting}",
                    expected=limit.instead,
                )


@dataclass(frozen=True)
class Serving:
    """How an engine is given the drafts of one method; a method's `serving.py` has one for each engine that takes them.

    name: what the engine calls the method.
    layout: of an exported draft; None: nothing is exported for it.
    loaders: how it loads a folder; the first whose `inner` key is None or in config.json is taken.
    options: config.json of a draft, or a method's settings -> what else its server is started with.
    """

    name: str = ""
    layout: Layout | None = None
    loaders: tuple[Loader, ...] = ()
    options: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class Served:
    """What a command that serves is made of. method: None serves the target without a draft.

    serving: how the engine is given the method's drafts. in_target: the draft has no folder of its own, but is in the target's checkpoint,
    which `output` is, or needs no file.

    target: the name an engine is given, None where it is not known. revision, draft_revision: of Hub ids, commits or tags.
    num_tokens: K. lengths: (sequences at once, K) from each such number on, where K changes with it.
    lookup_first: the `LookupFirstConfig` of what stands in front of the draft, None for nothing.
    max_length: tokens of a sequence that the target has room for. dtype: of its weights. num_gpus: that share it.
    chat_template: the file of the template that the draft was trained with, None for the target's own.
    samples: whether the draft was measured with drafts that are drawn, not greedy.
    config: the config.json that was written; the settings of a method without a draft.
    """

    method: str | None
    output: Path
    target: str | None
    num_tokens: int
    samples: bool
    config: Mapping[str, Any]
    serving: Serving = Serving()
    in_target: bool = False
    lookup_first: Any = None
    chat_template: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    max_length: int = 8192
    dtype: str = "bfloat16"
    num_gpus: int = 1

    @property
    def model(self) -> str:
        """What an engine loads as the target."""
        return str(self.output) if self.method is not None and self.in_target else self.target_name

    @property
    def pinned(self) -> str | None:
        """The revision of `model`."""
        return self.draft_revision if self.model != self.target_name else self.revision

    @property
    def most_tokens(self) -> int:
        """Draft tokens per round, at most, for an engine that takes `lengths`."""
        return max((k for _, k in self.lengths), default=self.num_tokens)

    @property
    def target_name(self) -> str:
        return self.target or "TARGET"


def of_recipe(target: Any, config: Any, longest: int) -> list[str]:
    """What a recipe's sections `target` and `eval` say of how an engine is started, in the words that vLLM and SGLang share."""
    words = ["--dtype", target.dtype]
    words += (
        ["--tensor-parallel-size", str(config.tensor_parallel)] if config.tensor_parallel else []
    )
    return [*words, "--trust-remote-code"] if target.trust_remote_code else words


@dataclass(frozen=True)
class Program:
    """What starts an engine's server.

    command: as users type it. arguments: what they add for a target and its draft; variables: what they set in the environment for it.
    measured: options that measuring needs, also of the target alone; measured_draft: of one with a draft.
    settings: (a recipe's target, its eval, tokens of the longest sequence) -> options.
    """

    command: str
    arguments: Callable[[Served], list[str]]
    measured: tuple[str, ...]
    measured_draft: tuple[str, ...] = ()
    variables: Callable[[Served], dict[str, str]] = lambda served: {}
    settings: Callable[[Any, Any, int], list[str]] = of_recipe

    def shell(self, served: Served) -> str:
        """The command with its variables and arguments, a line for each variable and option."""
        words = [shlex.quote(word) for word in self.arguments(served)]
        options = (f"\\\n    {word}" if word.startswith("--") else word for word in words)
        surroundings = (
            f"{name}={shlex.quote(value)} \\\n" for name, value in self.variables(served).items()
        )
        return "".join([*surroundings, " ".join([self.command, *options])])


@dataclass(frozen=True)
class FrontLookup:
    """How an engine looks tokens up in front of a draft, of which it drafts chains; its program reads `Served.lookup_first`.

    note: what serving so needs and does, for SERVE.md and cards. mark: what is in the log of a server that does. limit: (a
    `LookupFirstConfig`; K, None where it is not known) -> the first key of it that the engine cannot express and what is expected; None.
    """

    note: str
    mark: str = ""
    limit: Callable[[Any, int | None], tuple[str, str] | None] = lambda lookup, k: None

    def lacks(self, lookup: Any, k: int | None = None) -> tuple[str, str] | None:
        """As `limit`, of trees too."""
        return (
            ("draft_tree", "draft_tokens: engines draft chains")
            if lookup.draft_tree
            else self.limit(lookup, k)
        )


@dataclass(frozen=True)
class Engine:
    """One inference engine.

    name: in commands and recipes; title: in prose. versions: those whose sources its facts were read in.
    serve_command: lines for a shell; None: drafts are checked for it, not exported. counters: where a running engine says what it accepts.
    flags: what else is set when it is started, and how, with {length}, {total} (of four sequences) and {dtype}, which fit a target.
    snippet: serving in Python.
    program: of its server, None where that is not started here.
    loader_version: whose loaders the doctor checks drafts against; empty where none were read.
    client: of its server, None where that is not measured. counts_past_end: whether it counts draft tokens that it accepts past the end of
    a completion. lookup: in front of a draft, None where it has none.
    layouts: the engine whose name its drafts' layouts go by, where that is not its own.
    """

    name: str
    title: str
    versions: str
    serve_command: Callable[[Served], str] | None = None
    counters: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    snippet: Callable[[Served], str] | None = None
    program: Program | None = None
    loader_version: str = ""
    client: Client | None = None
    counts_past_end: bool = False
    lookup: FrontLookup | None = None
    layouts: str = ""

    def front(self, lookup: Any, k: int | None = None) -> FrontLookup | None:
        """How it has a lookup of up to K tokens in front of a draft; None where it cannot express that, and for no lookup."""
        return self.lookup if self.lookup and lookup and not self.lookup.lacks(lookup, k) else None

    def drafting(self, k: int, lookup: Any) -> tuple[int, Any]:
        """Draft tokens per round, and the lookup in front of the draft, with which it is started in place of what was measured: the draft
        alone, with its own number, where it cannot express the lookup.
        """
        return (k, lookup) if lookup is None or self.front(lookup, k) else (lookup.levels, None)
