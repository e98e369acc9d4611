"""The loaders of engines, as data, and the check of a draft's folder against a loader.

A loader says how an engine loads the drafts of one method. The engines need a GPU, and most of what
goes wrong raises no error in them: tensors stay uninitialized, settings are not read. What an
engine loads, renames and ignores, and which keys of config.json it reads, was found in the engine's
source code. Each engine has a file here that states this. The present file has the types, what
several engines have in common, and the check. The check applies a loader to config.json and to the
names and shapes of the tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
TensorShape = tuple[int, ...]
# How an engine reacts to an unknown or a missing tensor: it stops with an error ("refused"), or
# continues without a message ("silent").
LoadOutcome = Literal["refused", "silent"]
# Where a parameter's values come from. "file": the draft's file. "shared": the draft's file, or the
# target if the file has no such tensor and the target's has the same shape. "target": the target,
# even if the file has such a tensor. "unused": the draft's file, but nothing reads the values.
TensorSource = Literal["file", "shared", "target", "unused"]


def choose_aux_layers(num_layers: int) -> list[int]:
    """Return the auxiliary layers that every engine assumes if a checkpoint does not name them.

    An auxiliary layer is a layer of the target whose output a draft reads. The draft reads the
    hidden states after 2, n//2 and n-3 layers: a low, a middle and a high layer.

    Args:
        num_layers: n, the number of layers of the target.
    """
    return [2, num_layers // 2, num_layers - 3]


@dataclass(frozen=True)
class Limit:
    """A setting that an engine cannot express.

    Attributes:
        setting: the name of the setting, in words.
        has: (a head's config) -> whether the head has this setting.
        instead: the setting that heads must have instead.
    """

    setting: str
    has: Callable[[Any], bool]
    instead: str


@dataclass(frozen=True)
class Slot:
    """A parameter of an engine's model of a draft.

    Attributes:
        name: the name of the tensor. {i} stands for a layer after the first, {a} for an auxiliary
            hidden state.
        shape: the sizes of the axes, as in `H A*D`. H: draft hidden, D: target hidden, A: number of
            auxiliary states, I: intermediate, Q and K: rows of queries and keys, E: head size, V
            and W: target and draft vocabulary, R: rank of a correction.
        when: a switch that must be on for the parameter to exist. With a leading `!`, the switch
            must be off. Empty: the parameter always exists.
        source: where the values come from.
    """

    name: str
    shape: str
    when: str = ""
    source: TensorSource = "file"


@dataclass(frozen=True)
class Setting:
    """A setting that is read from config.json.

    Attributes:
        keys: dotted keys. The value is that of the first key that exists and is not null. A key
            that ends in `#` stands for the length of a list. Without keys the engine always uses
            the default.
        default: the value if no key has one.
    """

    keys: tuple[str, ...] = ()
    default: object = None


@dataclass(frozen=True)
class Loader:
    """The way an engine loads the drafts of one method in one layout.

    Attributes:
        architectures: the values of `architectures` for which the engine uses this loader; empty if
            it does not look at them.
        slots: the parameters of the engine's model.
        unknown: how the engine reacts to a tensor without a parameter.
        unset: how the engine reacts to a parameter without a tensor.
        settings: the settings that the engine reads from config.json, by their names in the head's
            config.
        aux_layers: version of the engine -> where this version finds the auxiliary layers: dotted
            keys, and the number to add to each layer, so that L means "after L layers". Layers are
            read in ascending order. Without such a key they are 2, n//2 and n-3.
        inner: the key of a dictionary in config.json that holds the config of the draft's layers,
            with the keys of LlamaConfig. None if these keys are at the top level.
        taken: keys that the engine reads besides those in the dictionary `inner`.
        required: keys without which the engine stops.
        never_null: keys that may be left out but may not be null.
        renamed: (a part of a tensor's name, what replaces it, the switch that must be on). With an
            empty switch the part is always replaced.
        ignored: parts of names of tensors that the engine skips.
        arguments: settings that the engine takes from its command line instead -> the option.
        limits: settings that the engine's code cannot express, whatever the folder holds.
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
    """Return the parameters of a Llama layer, with their names and shapes.

    Args:
        prefix: the prefix of all names, e.g. `layers.0`.
        width: the input size of the projections to queries, keys and values, in the letters of
            `Slot.shape`: H for a usual layer, 2*H for one that reads two hidden states at once.
        norms: the names of the layer's norms, besides `post_attention_layernorm`.
    """
    # H: hidden size, I: intermediate size, Q and K: rows of the query and of the key projection.
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


# All engines read config.json through transformers' LlamaConfig. Each setting has the default that
# LlamaConfig has for a missing key.
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
MISSING_VALUE = object()  # stands for a key that is not there, since None is a value of JSON


@dataclass
class LoaderCheck:
    """The result of a check of a folder against a loader.

    Attributes:
        loader: the loader.
        refused: the reasons why the engine stops.
        silent: the things that the engine loads wrongly without an error.
        notes: facts that users should know.
        settings: the settings as the engine reads them from config.json.
    """

    loader: Loader
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def find_loader(loaders: Sequence[Loader], config: Mapping[str, object]) -> Loader | None:
    """Return the loader with which an engine loads a draft that has this config.json, or None.

    Args:
        loaders: the loaders of the engine for the draft's method. A loader may expect the config of
            the draft's layers under a key, `inner`. It then fits only a config.json with this key.
        config: the draft's config.json.
    """
    # A draft in speculators' layout is loaded only by the loader for that layout. It expects the
    # config of the draft's layers under `transformer_layer_config`.
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
    """Check how an engine would load the folder of a draft, without running the engine.

    The check compares config.json, and the names and shapes of the tensors, with what is known of
    the engine's source code.

    Args:
        loader: the facts about the engine's code that loads drafts of this method and layout.
        config: the folder's config.json.
        shapes: tensor name -> shape, for the tensors in the folder.
        head: the config of the head, which says how it was trained.
        target: the `FrozenTarget` or `TargetFiles` of the draft; None if it is not known.

    Returns:
        The result: `refused`, the reasons why the engine stops; `silent`, what the engine loads
        wrongly without an error; and notes.
    """
    # Check the keys of config.json that the engine needs, and those that must not be null.
    result = LoaderCheck(loader)
    _check_architecture(result, config)
    config = _merge_inner_config(loader, config)
    result.refused += [
        f"config.json has {key} null, but the engine expects a number: leave the key out"
        for key in loader.never_null
        if _get_value(config, key) is None
    ]

    # Read the settings as the engine does, and find settings that the engine does not support.
    result.settings = {
        name: _read_setting(config, setting.keys, setting.default)
        for name, setting in loader.settings.items()
    }
    result.silent += [
        f"it does not support {limit.setting}; expected {limit.instead}"
        for limit in loader.limits
        if limit.has(head)
    ]

    # Compare the settings with those of training, and the tensors in the folder with the parameters
    # of the engine's model.
    trained = {**COMMON_HEAD_SETTINGS, **vars(head)}
    if "aux_layers" in trained:
        _check_aux_layers(result, config, trained, target)
    sizes = _read_slot_sizes(result.settings, config, target)
    _check_settings(result, trained)
    _check_tensors(result, shapes, sizes)
    return result


def _check_architecture(result: LoaderCheck, config: Mapping[str, Any]) -> None:
    """Check that config.json has the architecture and the keys that the engine needs.

    Args:
        result: the result. Reasons why the engine would stop are added to `result.refused`.
        config: the config.json of the draft's folder.
    """
    # An engine chooses its model class by `architectures` in config.json. In some layouts this key
    # is in an inner dictionary, whose key is `loader.inner`. If the engine knows several
    # architectures, the error names the shortest one.
    loader = result.loader
    inner_config = config.get(loader.inner or "")
    architectures = (config if inner_config is None else inner_config).get("architectures") or []
    if loader.architectures and not set(architectures) & loader.architectures:
        names = f"architectures {', '.join(map(str, architectures))}" if architectures else ""
        result.refused.append(
            f"config.json has {names or 'no architectures'}; this engine expects"
            f" {min(loader.architectures, key=len)} for such a draft"
        )
    result.refused += [
        f"config.json has no {key}"
        for key in loader.required
        if _get_value(config, key) is MISSING_VALUE
    ]


def _merge_inner_config(loader: Loader, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config that the engine reads, as one flat dictionary.

    In some layouts an inner dictionary of config.json describes the draft's layers. The engine
    reads this dictionary, and the keys `loader.taken` outside of it, which take precedence. A
    config.json without an inner dictionary is returned as it is.
    """
    inner_config = config.get(loader.inner or "")
    if not isinstance(inner_config, dict):
        return config
    outer_keys = {key: config[key] for key in loader.taken if config.get(key) is not None}
    return {**inner_config, **outer_keys}


def _check_settings(result: LoaderCheck, trained: Mapping[str, Any]) -> None:
    """Compare each setting that the engine reads from config.json with the setting of training.

    Args:
        result: the result. A difference that an option of the engine's command line corrects is
            added to `result.notes`. Any other difference is added to `result.silent`, because the
            engine reports no error.
        trained: the settings that the draft was trained with.
    """
    for name, value in result.settings.items():
        if name not in trained or value == trained[name]:
            continue
        argument = result.loader.arguments.get(name)
        if argument:
            result.notes.append(
                f"start the engine with {argument} {trained[name]}: it does not read {name} from"
                " config.json"
            )
        else:
            result.silent.append(
                f"it reads {name} as {value}, but the draft was trained with {trained[name]}"
            )


def _get_value(config: Any, key: str) -> Any:
    """Return the value at a dotted key of nested JSON, e.g. `a.0.b` for config["a"][0]["b"].

    MISSING_VALUE is returned if there is no such key. (None is a value of JSON.)
    """
    value = config
    for part in key.split("."):
        try:
            value = value[int(part) if part.isdigit() else part]
        except (LookupError, TypeError):
            return MISSING_VALUE
    return value


def _read_setting(config: Mapping[str, object], keys: Sequence[str], default: object) -> Any:
    """Return a setting as an engine reads it from config.json.

    Args:
        config: config.json.
        keys: dotted keys, of which the first that exists and is not null counts. A key that ends in
            `#` stands for the length of a list; an empty list does not count.
        default: the value if no key counts.
    """
    for key in keys:
        value = _get_value(config, key.removesuffix("#"))
        is_length = key.endswith("#")
        if value is not MISSING_VALUE and value is not None and (value or not is_length):
            return len(value) if is_length else value
    return default


def _check_aux_layers(
    result: LoaderCheck, config: Mapping[str, Any], trained: Mapping[str, Any], target: Any
) -> None:
    """Compare the auxiliary layers that the engine would use with those of training.

    An auxiliary layer is a layer of the target whose output the draft reads. In this project,
    layer L means the output after L layers. An engine may number the layers in another way.

    Args:
        result: the result. A difference that an option of the engine's command line corrects is
            added to `result.notes`. Any other difference is added to `result.silent`, because the
            engine reports no error.
        config: the config.json of the draft's folder.
        trained: the settings that the draft was trained with.
        target: the target; None if it is not known.
    """
    trained_layers = list(trained["aux_layers"])
    # An engine reads the default layers if nothing names others.
    default = choose_aux_layers(target.num_layers if target else trained["target_num_layers"])

    # Some engines take the layers from an option of their command line. `argument` is the name of
    # this option.
    argument = result.loader.arguments.get("aux_layers")
    if argument:
        # The engine will read the trained layers, so their number is right. Either they are its
        # default, or the user passes them, as the note below asks.
        result.settings["num_aux_hidden_states"] = len(trained_layers)
        if trained_layers != default:
            # The option counts layers from 0, so its layer 0 is layer 1 of this project.
            engine_layers = [layer - 1 for layer in trained_layers]
            result.notes.append(
                f"start the engine with {argument}={engine_layers}: it does not read the auxiliary"
                " layers from config.json"
            )

    # Other engines read the layers from config.json. Each version of an engine has its own keys.
    # The first key whose list is not empty counts. Adding `added` to a layer of this list gives the
    # layer as this project numbers it.
    for version, keys in result.loader.aux_layers.items():
        read_layers = default
        for key, added in keys.items():
            stated_layers = _read_setting(config, [key], [])
            if stated_layers:
                read_layers = [layer + added for layer in stated_layers]
                break
        read_layers = sorted(set(read_layers))
        if read_layers != trained_layers:
            where = f" ({version})" if version else ""
            result.silent.append(
                f"it reads the target's hidden states after layers {read_layers}{where}, but the"
                f" draft was trained to read them after layers {trained_layers}"
            )


def _read_slot_sizes(
    settings: dict[str, Any], config: Mapping[str, Any], target: Any
) -> dict[str, int]:
    """Return the sizes from which the shapes of the engine's parameters are computed.

    A parameter (`Slot`) has a shape in letters, such as "H 2*D", and may exist only if a switch,
    such as "bias", is on. The result has the size of each letter and the value of each switch.

    Args:
        settings: the settings as the engine reads them. A missing `head_dim` is filled in.
        config: the config.json of the draft's folder.
        target: the target; None if it is not known.
    """
    # The sizes that every draft has, by the letters that `Slot` defines. Like Llama, the engine
    # computes a missing `head_dim` as hidden size / number of heads.
    num_heads = settings["num_attention_heads"]
    head_dim = settings["head_dim"] or settings["hidden_size"] // num_heads
    settings["head_dim"] = head_dim
    sizes = {
        "H": settings["hidden_size"],
        "I": settings["intermediate_size"],
        "Q": num_heads * head_dim,
        "K": settings["num_key_value_heads"] * head_dim,
        "V": settings["vocab_size"],
        "E": head_dim,
        # The rank of the correction that DSpark adds to a token's logits, which depends on the
        # tokens before it (Markov head). Other drafts have none.
        "R": settings.get("markov_rank") or 0,
        "bias": settings["bias"],
        "one_layer": settings["num_layers"] == 1,
    }

    # Heads (such as EAGLE-3) also have sizes of the target and of the draft vocabulary.
    if "draft_vocab_size" in settings:
        sizes |= {
            "W": settings["draft_vocab_size"],
            "D": settings["target_hidden_size"],
            "A": settings["num_aux_hidden_states"],
        }
        sizes |= {
            "fc_norm": settings["fc_norm"],
            "norm_before_fc": settings["norm_before_fc"],
            "own_width": sizes["D"] != sizes["H"],
            "pruned": sizes["W"] != (target.vocab_size if target else sizes["V"]),
            "states_vocabulary": config.get("draft_vocab_size") is not None,
        }
    return sizes


def _check_tensors(
    result: LoaderCheck, shapes: Mapping[str, TensorShape], sizes: dict[str, int]
) -> None:
    """Compare the names and shapes of the tensors in a folder with those of the engine's model.

    Args:
        result: the result. Differences that stop the engine are added to `result.refused`, other
            differences to `result.silent` or `result.notes`.
        shapes: tensor name -> shape, for the tensors in the folder.
        sizes: the sizes and switches that `_read_slot_sizes` returns.
    """
    # `loader.unset` and `loader.unknown` say how the engine reacts to a missing and to an unknown
    # tensor: "refused" or "silent". These are also the names of lists of the result.
    loader = result.loader
    unset_messages: list[str] = getattr(result, loader.unset)
    unknown_messages: list[str] = getattr(result, loader.unknown)
    is_required = loader.unset == "refused"
    consequence = "the engine requires it" if is_required else "it stays uninitialized"

    # Rename the tensors of the file as the engine does. Some replacements apply only if a switch is
    # on.
    stored = {}
    for name_in_file, shape in shapes.items():
        name = name_in_file
        for part, replacement, switch in loader.renamed:
            if not switch or sizes[switch]:
                name = name.replace(part, replacement)
        stored[name] = (name_in_file, shape)

    # Compare the shape of each parameter with that of its tensor in the file. A tensor may be
    # missing if its values come from the target, unless the target's tensor has another shape.
    target_shape = (sizes["V"], sizes.get("D", sizes["H"]))
    slots = _list_slots_by_name(loader, result.settings, sizes)
    for name, slot in slots.items():
        shape = _compute_shape(slot, sizes)
        if name in stored:
            name_in_file, shape_in_file = stored[name]
            if shape_in_file != shape:
                result.refused.append(
                    f"{name_in_file} is {list(shape_in_file)}, but by config.json it must be"
                    f" {list(shape)}"
                )
            elif slot.source == "target":
                result.notes.append(f"it uses the target's {name} and ignores the one in the file")
        elif slot.source == "shared" and shape != target_shape:
            unset_messages.append(
                f"{name} {list(shape)} is not in the file, and the target's tensor has another"
                " shape"
            )
        elif slot.source == "file":
            unset_messages.append(f"{name} {list(shape)} is not in the file: {consequence}")

    # Find the tensors in the file for which the engine's model has no parameter.
    unknown_messages += [
        f"it has no parameter for {name_in_file}"
        for name, (name_in_file, _) in stored.items()
        if name not in slots and not any(part in name for part in loader.ignored)
    ]


def _list_slots_by_name(
    loader: Loader, settings: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Slot]:
    """Return the parameters that the engine's model has with these settings, by tensor name.

    Args:
        loader: the loader. Its `slots` describe the parameters of the model.
        settings: the settings as the engine reads them.
        sizes: the sizes and switches that `_read_slot_sizes` returns.
    """
    slots: dict[str, Slot] = {}
    for slot in loader.slots:
        # Skip a parameter that does not exist. `slot.when` names a switch that must be on, or off
        # if the name begins with "!", for the parameter to exist.
        switch = slot.when.removeprefix("!")
        must_be_on = not slot.when.startswith("!")
        if switch and bool(sizes[switch]) != must_be_on:
            continue

        # A name with {i} stands for one parameter in each layer after the first. A name with {a}
        # stands for one parameter for each of the A auxiliary hidden states.
        numbers = range(1)
        if "{i}" in slot.name:
            numbers = range(1, settings["num_layers"])
        elif "{a}" in slot.name:
            numbers = range(sizes["A"])
        for number in numbers:
            slots[slot.name.format(i=number, a=number)] = slot
    return slots


def _compute_shape(slot: Slot, sizes: Mapping[str, int]) -> TensorShape:
    """Return the shape of a parameter as numbers, from its text in letters, e.g. "H 2*D".

    This example has two axes: the size H, and two times the size D.

    Args:
        slot: the parameter.
        sizes: the size of each letter.
    """
    axes = []
    for axis in slot.shape.split():
        factors = [sizes[part] if part in sizes else int(part) for part in axis.split("*")]
        axes.append(math.prod(factors))
    return tuple(axes)
