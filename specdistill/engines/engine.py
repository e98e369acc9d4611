"""What an engine is here: the layouts of the drafts it is given, the loaders it has, the command that serves, and its server's client."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdistill.engines.limits import AUX_LAYERS, Limit, reads_default_layers
from specdistill.engines.loader import Loader
from specdistill.engines.server import Client
from specdistill.errors import UserError

SIZES, NORMS = ("target_hidden_size", "num_aux_hidden_states"), ("fc_norm", "norm_output", "norm_before_fc")


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
    """The folder of a draft of one method. Without arguments: the folder of a model of its own.

    config: the config.json of a head. limits: what a head cannot have, first reason first.
    first_layer: how names of tensors in the first layer of an EAGLE-3 head begin.
    needs_target: why a head's folder repeats the target's embedding; empty where it does not.
    fc_bias: whether an EAGLE-1 head always has one in `fc`: zeros for a head without.
    gguf_types: of the weights in one GGUF file, where that is the layout.
    """

    config: Callable[[HeadExport], dict[str, Any]] = lambda export: export.llama
    limits: tuple[Limit, ...] = ()
    first_layer: str = "midlayer."
    needs_target: str = ""
    fc_bias: bool = False
    gguf_types: tuple[str, ...] = ()

    def check(self, engine: str, head: Any, folder: Path) -> None:
        """Raises UserError for a head that the engine cannot express."""
        for limit in self.limits:
            if limit.has(head):
                raise UserError("engine", got=f"{engine} for {folder}, a head with {limit.setting}", expected=limit.instead)


def eagle3_config(
    export: HeadExport,
    *keys: str,
    architecture: str = "LlamaForCausalLMEagle3",
    aux_layers: Callable[[list[int]], dict[str, Any]] = lambda layers: {AUX_LAYERS: layers},
) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head: a Llama's keys, `draft_vocab_size`, and the head's own `keys` that the engine reads.

    aux_layers: where the layers that it reads are stated; asked only for other layers than the default ones.
    """
    head, layers = export.head, list(export.head.aux_layers)
    own = {**vars(head), "num_aux_hidden_states": len(layers)}
    if head.hidden_size != head.target_hidden_size and "target_hidden_size" not in keys:
        keys = (*keys, "target_hidden_size")
    return {
        "architectures": [architecture],
        **export.llama,
        "draft_vocab_size": head.draft_vocab_size,
        **{key: own[key] for key in keys},
        **({} if reads_default_layers(head) else aux_layers(layers)),
    }


@dataclass(frozen=True)
class Served:
    """What a command that serves is made of. method: None serves the target without a draft.

    target: the name an engine is given, None where it is not known.
    samples: whether the draft was measured with drafts that are drawn, not greedy.
    config: the config.json that was written, empty for a GGUF file. files: the names in `output`, which need not be on this machine.
    """

    method: str | None
    output: Path
    target: str | None
    num_tokens: int
    samples: bool
    config: Mapping[str, Any]
    files: tuple[str, ...] = ()

    @property
    def quoted_output(self) -> str:
        return shlex.quote(str(self.output))

    @property
    def quoted_target(self) -> str:
        return shlex.quote(self.target_name)

    @property
    def target_name(self) -> str:
        return self.target or "TARGET"


@dataclass(frozen=True)
class Program:
    """What starts an engine's server.

    command: as users type it. arguments: what they add for a target and its draft. measured: options that measuring needs, also of the
    target alone; measured_draft: of one with a draft.
    """

    command: str
    arguments: Callable[[Served], list[str]]
    measured: tuple[str, ...]
    measured_draft: tuple[str, ...] = ()

    def shell(self, served: Served) -> str:
        """The command with its arguments, a line for each option."""
        words = [shlex.quote(word) for word in self.arguments(served)]
        return " ".join([self.command, *(f"\\\n    {word}" if word.startswith("--") else word for word in words)])


@dataclass(frozen=True)
class Engine:
    """One inference engine.

    name: in commands and recipes; title: in prose. versions: those whose sources its facts were read in.
    layouts: method -> how a draft is exported; methods that are not there cannot be.
    serve_command: lines for a shell. counters: where a running engine says what it accepts. flags: what else is set when it is started, and
    how. snippet: serving in Python.
    program: of its server, None where that is not started here.
    loaders: method -> how a folder is loaded; the first whose `inner` key is None or in config.json is taken.
    loader_version: of the loaders, where it is one of several.
    client: of its server, None where that is not measured. counts_past_end: whether it counts draft tokens that it accepts past the end of
    a completion.
    """

    name: str
    title: str
    versions: str
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    serve_command: Callable[[Served], str] = lambda served: ""
    counters: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    snippet: Callable[[Served], str] | None = None
    program: Program | None = None
    loaders: Mapping[str, tuple[Loader, ...]] = field(default_factory=dict)
    loader_version: str = ""
    client: Client | None = None
    counts_past_end: bool = False
