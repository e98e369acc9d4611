"""The loaders of engines, as data, and the check of a draft's folder against a loader.

A loader says how an engine loads the drafts of one method. The engines need a GPU, and most of what
goes wrong raises no error in them: tensors stay uninitialized, settings are not read. What an
engine loads, renames and ignores, and what it reads of config.json, was read in its sources and is
stated in its own file. This file has the types, what several engines have in common, and the check.
The check applies a loader to config.json and to the names and shapes of the tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
TensorShape = tuple[int, ...]
# What an engine does about a tensor that should not be there, or is missing: it stops with an error
# ("refused"), or continues without a message ("silent").
LoadOutcome = Literal["refused", "silent"]
# Where a parameter's values come from. "file": the file. "shared": the file, or the target where
# the file has none and the shape is the same. "target": the target, whatever the file has.
# "unused": the file, but nothing reads them.
TensorSource = Literal["file", "shared", "target", "unused"]


def choose_aux_layers(num_layers: int) -> list[int]:
    """Return the auxiliary layers that every engine assumes if a checkpoint does not name them.

    These are a low, a middle and a high one: after 2, n//2 and n-3 layers.

    Args:
        num_layers: n, layers of the target.
    """
    return [2, num_layers // 2, num_layers - 3]


@dataclass(frozen=True)
class Limit:
    """A setting that an engine cannot express.

    Attributes:
        setting: its name in words.
        has: whether a head, given by its config, has it.
        instead: what heads must have instead.
    """

    setting: str
    has: Callable[[Any], bool]
    instead: str


@dataclass(frozen=True)
class Slot:
    """A parameter of an engine's model of a draft.

    Attributes:
        name: {i} stands for a layer after the first, {a} for an auxiliary state.
        shape: sizes, as in `H A*D`. H: draft hidden, D: target hidden, A: auxiliary states, I:
            intermediate, Q and K: rows of queries and keys, E: head size, V and W: target and draft
            vocabulary, R: rank of a correction.
        when: a switch that must be on, or after `!` off, for the parameter to exist.
        source: where its values come from.
    """

    name: str
    shape: str
    when: str = ""
    source: TensorSource = "file"


@dataclass(frozen=True)
class Setting:
    """A setting that is read from config.json.

    Attributes:
        keys: dotted keys. The first one that is there and not null has the value. A key that ends
            in `#` stands for the length of a list. Without keys the engine always takes the
            default.
        default: the value where no key has one.
    """

    keys: tuple[str, ...] = ()
    default: object = None


@dataclass(frozen=True)
class Loader:
    """The way an engine loads the drafts of one method in one layout.

    Attributes:
        architectures: those that lead to this loader; empty where it is chosen otherwise.
        slots: the parameters.
        unknown: what the engine does about a tensor without a parameter.
        unset: what it does about a parameter without a tensor.
        settings: what it reads of config.json, by the setting's name in the head's config.
        aux_layers: where each version of the engine finds the auxiliary layers: dotted keys, and
            what is added to each layer found there. The sum counts "after L layers". Layers are
            read in ascending order. Without such a key they are 2, n//2 and n-3.
        inner: the key of the dictionary that holds the Llama's keys.
        taken: keys outside of that dictionary that are read together with it.
        required: keys without which the engine stops.
        never_null: keys that may be left out but may not be null.
        renamed: (part of a tensor's name, its replacement, the switch that must be on; empty:
            always).
        ignored: parts of names of tensors that are left alone.
        arguments: settings that the engine takes on its command line instead, and the words there.
        limits: settings that its code cannot express, whatever the folder holds.
    """

    architectures: frozenset[str]
    slots: tuple[Slot, ...]
    unknown: LoadOutcome
    unset: LoadOutcome
    settings: dict[str, Setting]
    aux_layers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    inner: str | None = None
    taken: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    never_null: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()


def list_layer_slots(prefix: str, width: str, *norms: str) -> tuple[Slot, ...]:
    """Return the parameters of a Llama layer.

    Args:
        prefix: of the names.
        width: what queries, keys and values are projected from, as a size of `Slot.shape`.
        norms: names of the layer's norms, besides `post_attention_layernorm`.
    """
    shapes = {
        "self_attn.q_proj": f"Q {width}",
        "self_attn.k_proj": f"K {width}",
        "self_attn.v_proj": f"K {width}",
        "self_attn.o_proj": "H Q",
        "mlp.gate_proj": "I H",
        "mlp.up_proj": "I H",
        "mlp.down_proj": "H I",
        **dict.fromkeys((*norms, "post_attention_layernorm"), "H"),
    }
    return tuple(Slot(f"{prefix}.{name}.weight", shape) for name, shape in shapes.items())


# All engines read the file through transformers' LlamaConfig. These are its defaults for missing
# keys.
LLAMA_SETTINGS = {
    "vocab_size": Setting(("vocab_size",), 32000),
    "hidden_size": Setting(("hidden_size",), 4096),
    "intermediate_size": Setting(("intermediate_size",), 11008),
    "num_attention_heads": Setting(("num_attention_heads",), 32),
    "num_key_value_heads": Setting(("num_key_value_heads", "num_attention_heads"), 32),
    "head_dim": Setting(("head_dim",)),
    "num_layers": Setting(("num_hidden_layers",), 32),
    "rms_norm_eps": Setting(("rms_norm_eps",), 1e-6),
    "tie_word_embeddings": Setting(("tie_word_embeddings",), False),
    "attention_bias": Setting(("attention_bias",), False),
    "bias": Setting(("bias",), False),
}

# Settings that are the same for every head of this project, so a head's config does not hold them.
COMMON_HEAD_SETTINGS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bias": False,
    "use_aux_hidden_state": True,
}
MISSING_VALUE = object()


@dataclass
class LoaderCheck:
    """The result of a check of a folder against a loader.

    Attributes:
        loader: the loader.
        refused: why the engine stops.
        silent: what it loads differently from what the draft expects, without an error.
        notes: what users should know.
        settings: the settings as the engine reads them from config.json.
    """

    loader: Loader
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def find_loader(loaders: Sequence[Loader], config: Mapping[str, object]) -> Loader | None:
    """Return the loader that takes a draft with this config.json, or None if none does."""
    if "speculators_model_type" in config:
        loaders = [loader for loader in loaders if loader.inner == "transformer_layer_config"]
    return next(
        (loader for loader in loaders if loader.inner is None or loader.inner in config), None
    )


def check_loader(
    loader: Loader,
    config: Mapping[str, Any],
    shapes: Mapping[str, TensorShape],
    head: object,
    target: Any = None,
) -> LoaderCheck:
    """Check what a loader makes of a folder.

    Args:
        loader: of the engine, for the draft's method and layout.
        config: the folder's config.json.
        shapes: of its tensors, by name.
        head: the config of the head in it, which says how it was trained.
        target: its `FrozenTarget` or `TargetFiles`; None where it is not known.
    """
    # Check the keys of config.json that decide whether the engine loads the folder at all.
    result = LoaderCheck(loader)
    trained = {**COMMON_HEAD_SETTINGS, **vars(head)}

    # An engine finds the loader by the architecture that config.json names.
    inner = config.get(loader.inner or "")
    architectures = (config if inner is None else inner).get("architectures") or []
    if loader.architectures and not set(architectures) & loader.architectures:
        got = (
            f"architectures {', '.join(map(str, architectures))}"
            if architectures
            else "no architectures"
        )
        result.refused.append(
            f"config.json has {got}; this engine loads such a draft as"
            f" {min(loader.architectures, key=len)}"
        )
    result.refused += [
        f"config.json has no {key}" for key in loader.required if _get(config, key) is MISSING_VALUE
    ]

    # Some layouts nest the config of the head.
    if isinstance(inner, dict):  # The engine reads some outer keys together with the inner ones.
        config = {
            **inner,
            **{key: config[key] for key in loader.taken if config.get(key) is not None},
        }
    result.refused += [
        f"config.json says {key} null, which is taken for a number: leave the key out"
        for key in loader.never_null
        if _get(config, key) is None
    ]

    # Compare the settings that the engine reads with those that the draft was trained with.
    result.settings = {
        name: _read(config, setting.keys, setting.default)
        for name, setting in loader.settings.items()
    }
    result.silent += [
        f"it does not support {limit.setting}; expected {limit.instead}"
        for limit in loader.limits
        if limit.has(head)
    ]

    # Compare each setting with the draft, and the tensors with the parameters.
    if "aux_layers" in trained:
        _check_aux_layers(result, config, trained, target)
    sizes = _read_slot_sizes(result.settings, config, target)
    for name, value in result.settings.items():
        if name not in trained or value == trained[name]:
            continue
        argument = loader.arguments.get(name)
        if argument:
            result.notes.append(
                f"start it with {argument} {trained[name]}: it does not read {name} from the file"
            )
        else:
            result.silent.append(
                f"it reads {name} as {value}, and the draft was trained with {trained[name]}"
            )
    _check_tensors(result, shapes, sizes)
    return result


def _get(config: Any, key: str) -> Any:
    """Return the value of a dotted key, or MISSING_VALUE; a number in the key is a list index."""
    for part in key.split("."):
        try:
            config = config[int(part) if part.isdigit() else part]
        except (LookupError, TypeError):
            return MISSING_VALUE
    return config


def _read(config: Mapping[str, object], keys: Sequence[str], default: object) -> Any:
    """Return the value of the first key that has one, or the default; see `Setting`."""
    for key in keys:
        value, is_length = _get(config, key.removesuffix("#")), key.endswith("#")
        if value is not MISSING_VALUE and value is not None and (value or not is_length):
            return len(value) if is_length else value
    return default


def _check_aux_layers(
    result: LoaderCheck, config: Mapping[str, Any], trained: Mapping[str, Any], target: Any
) -> None:
    """Compare the target's layers that each version of the engine reads with those trained on.

    Args:
        result: receives what differs.
        config: the folder's config.json.
        trained: the settings that the draft was trained with.
        target: as of `check_loader`.
    """
    wanted_layers = list(trained["aux_layers"])
    default = choose_aux_layers(target.num_layers if target else trained["target_num_layers"])
    argument = result.loader.arguments.get("aux_layers")
    if argument:
        result.settings["num_aux_hidden_states"] = len(wanted_layers)
        if wanted_layers != default:
            result.notes.append(
                f"start it with {argument}={[layer - 1 for layer in wanted_layers]}: it reads"
                f" no layers"
                " from the file"
            )
    for version, keys in result.loader.aux_layers.items():
        stated_layers = (
            [layer + added for layer in _read(config, [key], [])] for key, added in keys.items()
        )
        read = sorted(set(next(filter(None, stated_layers), default)))
        if read != wanted_layers:
            where = f" ({version})" if version else ""
            result.silent.append(
                f"it reads the target after layers {read}{where}, and the draft was trained to read"
                f" {wanted_layers}"
            )


def _read_slot_sizes(
    read: dict[str, Any], config: Mapping[str, Any], target: Any
) -> dict[str, int]:
    """Return the sizes that shapes are built from, and the switches that slots ask for.

    Args:
        read: the settings. This fills in their `head_dim` where it is not given.
        config: the folder's config.json.
        target: as of `check_loader`.
    """
    # The letters of the slots' shapes, as numbers.
    read["head_dim"] = read["head_dim"] or read["hidden_size"] // read["num_attention_heads"]
    sizes = {
        "H": read["hidden_size"],
        "I": read["intermediate_size"],
        "Q": read["num_attention_heads"] * read["head_dim"],
        "K": read["num_key_value_heads"] * read["head_dim"],
        "V": read["vocab_size"],
        "E": read["head_dim"],
        "R": read.get("markov_rank") or 0,
        "bias": read["bias"],
        "one_layer": read["num_layers"] == 1,
    }
    if "draft_vocab_size" in read:
        sizes |= {
            "W": read["draft_vocab_size"],
            "D": read["target_hidden_size"],
            "A": read["num_aux_hidden_states"],
        }
        sizes |= {
            "fc_norm": read["fc_norm"],
            "norm_before_fc": read["norm_before_fc"],
            "own_width": sizes["D"] != sizes["H"],
            "pruned": sizes["W"] != (target.vocab_size if target else sizes["V"]),
            "states_vocabulary": config.get("draft_vocab_size") is not None,
        }
    return sizes


def _check_tensors(
    result: LoaderCheck, shapes: Mapping[str, TensorShape], sizes: dict[str, int]
) -> None:
    """Compare the folder's tensors with the loader's parameters.

    Args:
        result: receives what differs.
        shapes: of the folder's tensors, by name.
        sizes: as `_sizes` returns them.
    """
    loader = result.loader
    unset = getattr(result, loader.unset)
    unknown = getattr(result, loader.unknown)
    without = "it must be" if loader.unset == "refused" else "it stays uninitialized"

    # The tensors of the file, by the names that the engine gives them.
    stored = {}
    for name_in_file, shape in shapes.items():
        name = name_in_file
        for part, becomes, switch in loader.renamed:
            if not switch or sizes[switch]:
                name = name.replace(part, becomes)
        stored[name] = (name_in_file, shape)

    # The parameters that the engine has with these settings, by name.
    slots: dict[str, Slot] = {}
    for slot in loader.slots:
        if not slot.when or bool(sizes[slot.when.removeprefix("!")]) != slot.when.startswith("!"):
            states = range(sizes["A"]) if "{a}" in slot.name else range(1)
            numbers = range(1, result.settings["num_layers"]) if "{i}" in slot.name else states
            slots |= {slot.name.format(i=number, a=number): slot for number in numbers}

    # Compare each parameter with the tensor of its name, and find tensors without a parameter.
    for name, slot in slots.items():
        axes = []
        for axis in slot.shape.split():
            factors = axis.split("*")
            axes.append(
                math.prod(sizes[factor] if factor in sizes else int(factor) for factor in factors)
            )
        shape = tuple(axes)
        if name in stored:
            name_in_file, shape_in_file = stored[name]
            if shape_in_file != shape:
                result.refused.append(
                    f"{name_in_file} is {list(shape_in_file)}, and its config.json makes this"
                    f" parameter {list(shape)}"
                )
            elif slot.source == "target":
                result.notes.append(f"it takes the target's {name} and ignores the file's")
        elif slot.source == "shared" and shape != (sizes["V"], sizes.get("D", sizes["H"])):
            unset.append(
                f"{name} {list(shape)} is not in the file, and the target's has another shape"
            )
        elif slot.source == "file":
            unset.append(f"{name} {list(shape)} is not in the file: {without}")
    unknown += [
        f"it has no parameter for {name_in_file}"
        for name, (name_in_file, _) in stored.items()
        if name not in slots and not any(part in name for part in loader.ignored)
    ]
