"""The description of an engine, as data and functions.

An engine consists of the layouts of its drafts, its loaders, the command that serves, and a client
for its server.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdistill.common.errors import UserError
from specdistill.serving.engines.client import Client
from specdistill.serving.engines.loader import Limit, Loader


@dataclass(frozen=True)
class HeadExport:
    """The data that the config.json of an exported head is built from.

    Attributes:
        llama: the keys that describe the head's layers, named as in the config of a Llama.
        head: the config of the head.
        target: the `TargetFiles` of the head's target; None if the layout does not need it.
        num_speculative_tokens: K, draft tokens per round.
    """

    llama: dict[str, Any]
    head: Any
    target: Any
    num_speculative_tokens: int


@dataclass(frozen=True)
class Layout:
    """The form of a draft's folder that an engine reads.

    The default values describe the folder of a draft model.

    Attributes:
        config: builds the config.json of a head.
        limits: settings that the engine does not support; the first one that a head has is
            reported.
        first_layer: the prefix of tensor names in the first layer of an EAGLE-3 head.
        needs_target: why a head in this layout cannot be written without the target's files, for
            the error if there are none; empty if it can.
        fc_bias: whether an EAGLE-1 head always has a bias in `fc`. If the head has none, zeros are
            written.
    """

    config: Callable[[HeadExport], dict[str, object]] = lambda export: export.llama
    limits: tuple[Limit, ...] = ()
    first_layer: str = "midlayer."
    needs_target: str = ""
    fc_bias: bool = False

    def check(self, engine: str, head: object, folder: Path | str) -> None:
        """Raise UserError for a head (a draft such as EAGLE-3) that the engine cannot load.

        `self.limits` lists the settings that the engine does not support in this layout.

        Args:
            engine: the name of the engine, for the error.
            head: the config of the head.
            folder: the name of the draft in the error.
        """
        for limit in self.limits:
            if limit.has(head):
                raise UserError(
                    "engine",
                    got=f"{engine} for {folder}, a head with {limit.setting}",
                    expected=limit.instead,
                )


@dataclass(frozen=True)
class Serving:
    """The way an engine is given the drafts of one method.

    A method's `serving.py` has one `Serving` for each engine that takes its drafts.

    Attributes:
        name: the engine's name of the method.
        layout: the layout of an exported draft. None: nothing is exported for the engine.
        loaders: the ways in which the engine loads a folder. The first one whose `inner` key is
            None or in config.json is used.
        options: (config.json of a draft, or a method's settings) -> further options with which the
            engine's server is started.
    """

    name: str = ""
    layout: Layout | None = None
    loaders: tuple[Loader, ...] = ()
    options: Callable[[Mapping[str, Any]], dict[str, object]] = lambda config: {}


@dataclass(frozen=True)
class Served:
    """The facts that a command to serve a draft, or the target alone, is built from.

    Attributes:
        method: the method of the draft; None to serve the target without a draft.
        output: the folder of the draft; with `in_target`, the model that the engine loads.
        target: the name or folder of the target; None if it is not known.
        num_tokens: K, draft tokens per round.
        samples: whether the draft was measured with sampled (not greedy) draft tokens.
        config: the config.json that was written. For a method without a draft: its settings.
        serving: how the engine loads the method's drafts.
        in_target: whether the draft has no folder of its own. Such a draft needs no file, or is in
            the target's checkpoint, which is `output`.
        lookup_first: the `LookupFirstConfig` of the lookup in front of the draft; None for none.
        chat_template: the file of the template that the draft was trained with; None for the
            target's own.
        gguf: the GGUF file of the target; None for any other target. `target` is then a copy of
            the file in safetensors.
        revision: the commit or tag of the target on the Hub.
        draft_revision: the commit or tag of the draft on the Hub.
        lengths: pairs (sequences at once, K) if K changes with the load. Each K holds from its
            number of sequences on.
        max_length: the most tokens of a sequence, the target's context.
        dtype: the dtype of the target's weights.
        num_gpus: the number of GPUs that share the target.
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
    gguf: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    max_length: int = 8192
    dtype: str = "bfloat16"
    num_gpus: int = 1

    @property
    def model(self) -> str:
        """The model that an engine loads as the target."""
        return str(self.output) if self.method is not None and self.in_target else self.target_name

    @property
    def pinned(self) -> str | None:
        """The commit or tag of `model` on the Hub; None without one."""
        if self.model == self.target_name:
            return self.revision
        # Otherwise the engine loads `output`, the exported draft, as its model. This folder or Hub
        # repository contains the target together with the draft, so its revision is the draft's.
        return self.draft_revision

    @property
    def most_tokens(self) -> int:
        """The largest K, draft tokens per round, at any load; `num_tokens` if K never changes."""
        return max((k for _, k in self.lengths), default=self.num_tokens)

    @property
    def target_name(self) -> str:
        """The target's name, or a placeholder where it is not known."""
        return self.target or "TARGET"


def build_server_options(target: Any, config: Any, longest: int) -> list[str]:
    """Return the command-line options of a vLLM or SGLang server that follow from a recipe.

    Args:
        target: the recipe's section `target`.
        config: the recipe's section `eval`.
        longest: the number of tokens of the longest sequence. It is not used here; llama.cpp has
            a function with the same parameters that needs this number.
    """
    # The options have the same names in both engines.
    words = ["--dtype", target.dtype]
    words += (
        ["--tensor-parallel-size", str(config.tensor_parallel)] if config.tensor_parallel else []
    )
    return [*words, "--trust-remote-code"] if target.trust_remote_code else words


@dataclass(frozen=True)
class Program:
    """The program that starts an engine's server.

    Attributes:
        command: the command as users type it.
        arguments: (served) -> the arguments for a target and its draft.
        measured: options with which a server must be started for a measurement, with or without a
            draft.
        measured_draft: further options for the measurement of a server with a draft.
        variables: (served) -> the environment variables that users set for the program.
        settings: (a recipe's `target`, its `eval`, tokens of the longest sequence) -> options.
    """

    command: str
    arguments: Callable[[Served], list[str]]
    measured: tuple[str, ...]
    measured_draft: tuple[str, ...] = ()
    variables: Callable[[Served], dict[str, str]] = lambda served: {}
    settings: Callable[[Any, Any, int], list[str]] = build_server_options

    def format_command(self, served: Served) -> str:
        """Return the shell command that starts the server, on several lines ended by backslashes.

        Each environment variable and each option has a line of its own.

        Args:
            served: the target, the draft and the settings to serve them with.
        """
        # Words that begin with -- start a new line; the value of an option stays on its line.
        words = [shlex.quote(word) for word in self.arguments(served)]
        options = [f"\\\n    {word}" if word.startswith("--") else word for word in words]
        variable_lines = [
            f"{name}={shlex.quote(value)} \\\n" for name, value in self.variables(served).items()
        ]
        return "".join(variable_lines) + " ".join([self.command, *options])


@dataclass(frozen=True)
class FrontLookup:
    """The lookup that an engine can put in front of a draft. It proposes chains of tokens.

    The engine's program reads the lookup's settings from `Served.lookup_first`.

    Attributes:
        note: sentences about serving with a lookup, for SERVE.md and model cards.
        mark: a text in the log of a server that has a lookup; empty if the log does not say.
        limit: (a `LookupFirstConfig`, K or None if it is not known) -> the first key whose value
            the engine does not support, and what is expected instead. None if there is no such key.
    """

    note: str
    mark: str = ""
    limit: Callable[[Any, int | None], tuple[str, str] | None] = lambda lookup, k: None

    def find_missing_key(self, lookup: Any, k: int | None = None) -> tuple[str, str] | None:
        """Return the first setting of a lookup that the engine has no equivalent for.

        Args:
            lookup: a `LookupFirstConfig`, the settings of a lookup in front of a draft.
            k: K, draft tokens per round; None if it is not known.

        Returns:
            The key of the setting and what is expected instead. None if the engine can do exactly
            this lookup.
        """
        # No engine drafts a tree behind a lookup, so `draft_tree` must not be set. A recipe can set
        # `draft_tokens` instead, the length of a chain. The engine's own `limit` checks the other
        # settings, which differ between engines.
        if lookup.draft_tree:
            return (
                "draft_tree",
                "the key draft_tokens in its place: behind a lookup, engines draft only chains",
            )
        return self.limit(lookup, k)


@dataclass(frozen=True)
class Engine:
    """One inference engine.

    Attributes:
        name: the name in commands and recipes.
        title: the name in sentences.
        versions: the versions in whose sources the facts about the engine were read.
        serve_command: (served) -> lines for a shell. None: drafts can only be checked for the
            engine, not exported.
        counters: a sentence that says where a running engine shows what it accepts.
        flags: other settings of the server, in words -> the options that set them. The texts may
            hold {length}, {total} (of four sequences) and {dtype}, which are filled in for a
            target.
        snippet: (served) -> Python code that serves.
        program: the program of the server; None if specdistill does not start the server.
        loader_version: the version whose loaders the doctor checks drafts against; empty if none
            were read.
        client: the client of the server; None if the server is not measured.
        counts_past_end: whether the server counts accepted tokens after the end of a completion.
        lookup: the lookup in front of a draft; None if the engine has none.
        layouts: the name of the engine whose layouts this engine reads; empty for its own.
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

    def describe_front(self, lookup: Any, k: int | None = None) -> FrontLookup | None:
        """Return how this engine looks up tokens before it drafts, if it supports the settings.

        Args:
            lookup: a `LookupFirstConfig`, the settings of a lookup in front of a draft; None for no
                lookup.
            k: K, the most draft tokens per round; None if it is not known.

        Returns:
            The facts about the engine's own lookup. None if `lookup` is None, if the engine has no
            lookup, or if it cannot look up with these settings.
        """
        return (
            self.lookup
            if self.lookup and lookup and not self.lookup.find_missing_key(lookup, k)
            else None
        )

    def drafting(self, k: int, lookup: Any) -> tuple[int, Any]:
        """Return the K and the lookup to start this engine with, to serve a draft as measured.

        In a measurement with a lookup, the lookup proposed K tokens per round, and the draft only
        `lookup.levels` tokens in rounds in which nothing was looked up. An engine that does not
        support the lookup serves the draft alone, with `lookup.levels` as its K.

        Args:
            k: the K of the measurement.
            lookup: the `LookupFirstConfig` of the measurement; None if there was no lookup.

        Returns:
            K, draft tokens per round, and the lookup or None.
        """
        if lookup is None:
            return k, None
        supports_lookup = self.describe_front(lookup, k) is not None
        return (k, lookup) if supports_lookup else (lookup.levels, None)
