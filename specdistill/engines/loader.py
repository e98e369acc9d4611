"""How an engine loads the drafts of one method, as data, and the check of a draft's folder against it.

The engines need a GPU, and most of what goes wrong raises no error in them: tensors stay uninitialized, settings go unread. What they load,
rename and ignore, and what they read of config.json, was read in their sources and stands in their files; here are the types, what several
have in common, and the check, which applies a loader to config.json and to the names and shapes of the tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
TensorShape = tuple[int, ...]
# What becomes of a tensor that should not be there, or is missing: the engine stops with an error, or continues without a message.
LoadOutcome = Literal["refused", "silent"]
# Where a parameter's values come from: the file; or the target's where the file has none and the shape is the same; the target's,
# whatever the file has; the file, and nothing reads it.
TensorSource = Literal["file", "shared", "target", "unused"]


def engine_aux_layers(num_layers: int) -> list[int]:
    """Low, middle and high: [2, n//2, n-3] after-L-layers, which every engine assumes when a checkpoint does not say."""
    return [2, num_layers // 2, num_layers - 3]


@dataclass(frozen=True)
class Limit:
    """A setting that an engine cannot express, whether a head has it, and what heads have there instead."""

    setting: str
    has: Callable[[Any], bool]
    instead: str


@dataclass(frozen=True)
class Slot:
    """A parameter. name: {i} stands for a layer after the first, {a} for an auxiliary state.

    shape: sizes, as in `H A*D`: H draft hidden, D target hidden, A auxiliary states, I intermediate, Q and K rows of queries and keys,
    E head size, V and W target and draft vocabulary, R rank of a correction. when: a switch that must be on, or off after `!`.
    """

    name: str
    shape: str
    when: str = ""
    source: TensorSource = "file"


@dataclass(frozen=True)
class Setting:
    """What is read of config.json: the first of these dotted keys that is there and not null, else the default.

    A key that ends in `#` stands for the length of a list there. Without keys the engine always takes the default.
    """

    keys: tuple[str, ...] = ()
    default: Any = None


@dataclass(frozen=True)
class Loader:
    """How an engine loads the drafts of one method in one layout.

    inner: the key of the dictionary that holds the Llama's keys, which stand next to `taken` from outside.
    architectures: those that lead to this loader; empty where it is chosen otherwise.
    required: keys without which it stops.
    renamed: (part of a name, what it becomes, switch). ignored: parts of names of tensors that are left alone.
    unknown, unset: what becomes of a tensor without a parameter, of a parameter without a tensor.
    aux_layers: where each version of the engine finds the layers to read: dotted keys, and what it adds to each layer. The sum counts
    "after L layers", and layers are read in ascending order; without such a key, 2, n//2 and n-3.
    never_null: keys that may be left out and not be null.
    settings: by their names in the head's config. arguments: settings that its command line has, and the words there.
    limits: of its code, whatever is in the folder.
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


def layer_slots(prefix: str, width: str, *norms: str) -> tuple[Slot, ...]:
    """A Llama layer whose queries, keys and values are projected from `width`, with these norms."""
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


# What transformers' LlamaConfig, through which all engines read the file, makes of keys that are not there.
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

# Settings that every head has here, and its config does not hold.
COMMON_TO_HEADS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bias": False,
    "use_aux_hidden_state": True,
}
MISSING = object()


@dataclass
class LoaderCheck:
    """refused: why the engine stops. silent: what it loads differently from what the draft expects, without an error. notes: what to know.

    settings: what it makes of config.json.
    """

    loader: Loader
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def loader_of(loaders: Sequence[Loader], config: Mapping[str, Any]) -> Loader | None:
    """Which of an engine's loaders takes a draft with this config.json; None where it loads no such draft."""
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
    """What a loader makes of a folder.

    config: its config.json. shapes: of its tensors, by name. head: the config of the head in it, which says how it was trained. target:
    its `FrozenTarget` or `TargetFiles`, None where it is not known.
    """
    result, trained = LoaderCheck(loader), {**COMMON_TO_HEADS, **vars(head)}
    inner = config.get(loader.inner or "")
    named = (config if inner is None else inner).get("architectures") or []
    if loader.architectures and not set(named) & loader.architectures:
        got = f"architectures {', '.join(map(str, named))}" if named else "no architectures"
        expected = sorted(loader.architectures, key=len)[0]
        result.refused.append(
            f"config.json has {got}; this engine loads such a draft as {expected}"
        )
    result.refused += [
        f"config.json has no {key}" for key in loader.required if _get(config, key) is MISSING
    ]
    if isinstance(inner, dict):  # read together with what stands next to them
        config = {
            **inner,
            **{key: config[key] for key in loader.taken if config.get(key) is not None},
        }
    result.refused += [
        f"config.json says {key} null, which is taken for a number: leave the key out"
        for key in loader.never_null
        if _get(config, key) is None
    ]
    result.settings = {
        name: _read(config, setting.keys, setting.default)
        for name, setting in loader.settings.items()
    }
    lacking = (limit for limit in loader.limits if limit.has(head))
    result.silent += [
        f"it does not support {limit.setting}; expected {limit.instead}" for limit in lacking
    ]
    if "aux_layers" in trained:
        _check_aux_layers(result, config, trained, target)
    sizes = _sizes(result.settings, config, target)
    for name, value in result.settings.items():
        if name not in trained or value == trained[name]:
            continue
        if argument := loader.arguments.get(name):
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
    """What stands under a dotted key, an index being a part of it; MISSING where nothing does."""
    for part in key.split("."):
        try:
            config = config[int(part) if part.isdigit() else part]
        except (LookupError, TypeError):
            return MISSING
    return config


def _read(config: Mapping[str, Any], keys: Sequence[str], default: Any) -> Any:
    for key in keys:
        value, is_length = _get(config, key.removesuffix("#")), key.endswith("#")
        if value is not MISSING and value is not None and (value or not is_length):
            return len(value) if is_length else value
    return default


def _check_aux_layers(
    result: LoaderCheck, config: Mapping[str, Any], trained: Mapping[str, Any], target: Any
) -> None:
    wanted = list(trained["aux_layers"])
    default = engine_aux_layers(target.num_layers if target else trained["target_num_layers"])
    if argument := result.loader.arguments.get("aux_layers"):
        result.settings["num_aux_hidden_states"] = len(wanted)
        if wanted != default:
            result.notes.append(
                f"start it with {argument}={[layer - 1 for layer in wanted]}: it reads no layers from the file"
            )
    for version, keys in result.loader.aux_layers.items():
        stated = (
            [layer + added for layer in _read(config, [key], [])] for key, added in keys.items()
        )
        read = sorted(set(next(filter(None, stated), default)))
        if read != wanted:
            where = f" ({version})" if version else ""
            result.silent.append(
                f"it reads the target after layers {read}{where}, and the draft was trained to read {wanted}"
            )


def _sizes(read: dict[str, Any], config: Mapping[str, Any], target: Any) -> dict[str, int]:
    """The sizes that shapes are made of, and the switches that slots ask for; `read`: the settings, which get their `head_dim`."""
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
    loader = result.loader
    unset, unknown = getattr(result, loader.unset), getattr(result, loader.unknown)
    without = "it must be" if loader.unset == "refused" else "it stays uninitialized"
    stored = {}
    for name_in_file, shape in shapes.items():
        name = name_in_file
        for part, becomes, switch in loader.renamed:
            if not switch or sizes[switch]:
                name = name.replace(part, becomes)
        stored[name] = (name_in_file, shape)
    slots: dict[str, Slot] = {}
    for slot in loader.slots:
        if not slot.when or bool(sizes[slot.when.removeprefix("!")]) != slot.when.startswith("!"):
            states = range(sizes["A"]) if "{a}" in slot.name else range(1)
            numbers = range(1, result.settings["num_layers"]) if "{i}" in slot.name else states
            slots |= {slot.name.format(i=number, a=number): slot for number in numbers}
    for name, slot in slots.items():
        shape = tuple(
            math.prod(
                sizes[factor] if factor in sizes else int(factor) for factor in axis.split("*")
            )
            for axis in slot.shape.split()
        )
        if name in stored:
            name_in_file, shape_in_file = stored[name]
            if shape_in_file != shape:
                what = f"{name_in_file} is {list(shape_in_file)}, and its config.json makes this parameter {list(shape)}"
                result.refused.append(what)
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
