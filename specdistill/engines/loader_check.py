"""The loader check: what an engine would refuse of a draft's folder, and what it would load otherwise than the draft was trained.

The engines need a GPU, and most of what goes wrong raises no error in them: tensors stay uninitialized, settings go unread. The rules are
data (`specdistill.engines.loader`); the check applies them to config.json and to the names and shapes of the tensors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdistill.engines.engine import Engine
from specdistill.engines.limits import engine_aux_layers
from specdistill.engines.loader import AuxLayers, Loader, Outcome, Slot, Source

Shape = tuple[int, ...]
# Settings that every head has here, and its config does not hold.
COMMON_TO_HEADS = {"tie_word_embeddings": False, "attention_bias": False, "bias": False, "use_aux_hidden_state": True}


@dataclass
class LoaderCheck:
    """refused: why the engine stops. silent: what it loads otherwise than the draft expects, without an error. notes: what to know.

    settings: what it makes of config.json.
    """

    loader: Loader
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def problem(self, outcome: Outcome, what: str) -> None:
        (self.refused if outcome is Outcome.REFUSED else self.silent).append(what)


def loader_of(engine: Engine, method: str, config: Mapping[str, Any]) -> Loader | None:
    """How an engine would load a draft with this config.json; None where it loads no such draft."""
    loaders = engine.loaders.get(method, ())
    if "speculators_model_type" in config:
        loaders = tuple(loader for loader in loaders if loader.inner == "transformer_layer_config")
    return next((loader for loader in loaders if loader.inner is None or loader.inner in config), None)


def check_loader(
    loader: Loader, config: Mapping[str, Any], shapes: Mapping[str, Shape], head: object, target: Any = None
) -> LoaderCheck:
    """What a loader makes of a folder.

    config: its config.json. shapes: of its tensors, by name. head: the config of the head in it, which says how it was trained. target:
    its `FrozenTarget` or `TargetFiles`, None where it is not known.
    """
    result = LoaderCheck(loader)
    _check_architectures(result, config)
    result.refused += [f"config.json has no {key}" for key in loader.required if not _is_there(config, key)]
    flat = _flat(loader, config)
    for key in loader.never_null:
        if key in flat and flat[key] is None:
            result.refused.append(f"config.json says {key} null, which is taken for a number: leave the key out")
    result.settings = {name: _read(flat, setting.keys, setting.default) for name, setting in loader.settings.items()}
    for limit in loader.limits:
        if limit.has(head):
            result.silent.append(f"it does not support {limit.setting}; expected {limit.instead}")
    trained = {**COMMON_TO_HEADS, **vars(head)}
    if "aux_layers" in trained:
        _check_aux_layers(result, flat, trained, target)
    sizes, switches = _sizes(result, flat, target)
    _check_settings(result, trained)
    _check_tensors(result, shapes, sizes, switches)
    return result


def _check_architectures(result: LoaderCheck, config: Mapping[str, Any]) -> None:
    inner = config.get(result.loader.inner or "", config)
    named, known = inner.get("architectures") or [], result.loader.architectures
    if known and not set(named) & known:
        got = f"architectures {', '.join(map(str, named))}" if named else "no architectures"
        result.refused.append(f"config.json has {got}; this engine loads such a draft as {sorted(known, key=len)[0]}")


def _flat(loader: Loader, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys that the engine reads side by side, where the layout nests a Llama's."""
    inner = config.get(loader.inner or "")
    if not isinstance(inner, dict):
        return config
    return {**inner, **{key: config[key] for key in loader.taken if config.get(key) is not None}}


def _is_there(config: Any, key: str) -> bool:
    for part in key.split("."):
        if isinstance(config, list) and part.isdigit() and int(part) < len(config):
            config = config[int(part)]
        elif isinstance(config, dict) and part in config:
            config = config[part]
        else:
            return False
    return True


def _read(config: Mapping[str, Any], keys: tuple[str, ...], default: Any) -> Any:
    for key in keys:
        place, dot, last = key.rstrip("#").rpartition(".")
        holder = (config.get(place) or {}) if dot else config
        value = holder.get(last)
        if value is not None and not (key.endswith("#") and not value):
            return len(value) if key.endswith("#") else value
    return default


def _check_aux_layers(result: LoaderCheck, config: Mapping[str, Any], trained: Mapping[str, Any], target: Any) -> None:
    wanted = list(trained["aux_layers"])
    default = engine_aux_layers(target.num_layers if target else trained["target_num_layers"])
    argument = result.loader.arguments.get("aux_layers")
    if argument:
        result.settings["num_aux_hidden_states"] = len(wanted)
        if wanted != default:
            result.notes.append(f"start it with {argument}={[layer - 1 for layer in wanted]}: it reads no layers from the file")
    for version in result.loader.aux_layers:
        read = sorted(set(_aux_layers(version, config) or default))
        if read != wanted:
            where = f" ({version.version})" if version.version else ""
            result.silent.append(f"it reads the target after layers {read}{where}, and the draft was trained to read {wanted}")


def _aux_layers(version: AuxLayers, config: Mapping[str, Any]) -> list[int] | None:
    for key, added in version.keys:
        layers = _read(config, (key,), None)
        if layers:
            return [layer + added for layer in layers]
    return None


def _sizes(result: LoaderCheck, flat: Mapping[str, Any], target: Any) -> tuple[dict[str, int], dict[str, bool]]:
    """The sizes that shapes are made of, and the switches that slots ask for."""
    read = result.settings
    read["head_dim"] = read["head_dim"] or read["hidden_size"] // read["num_attention_heads"]
    sizes = {
        "H": read["hidden_size"],
        "I": read["intermediate_size"],
        "Q": read["num_attention_heads"] * read["head_dim"],
        "K": read["num_key_value_heads"] * read["head_dim"],
        "V": read["vocab_size"],
    }
    switches = {"bias": bool(read["bias"]), "one_layer": read["num_layers"] == 1}
    if "draft_vocab_size" in read:
        sizes |= {"W": read["draft_vocab_size"], "D": read["target_hidden_size"], "A": read["num_aux_hidden_states"]}
        switches |= {
            "fc_norm": bool(read["fc_norm"]),
            "norm_before_fc": bool(read["norm_before_fc"]),
            "own_width": sizes["D"] != sizes["H"],
            "pruned": sizes["W"] != (target.vocab_size if target else sizes["V"]),
            "states_vocabulary": flat.get("draft_vocab_size") is not None,
        }
    return sizes, switches


def _check_settings(result: LoaderCheck, trained: Mapping[str, Any]) -> None:
    for name, value in result.settings.items():
        if name not in trained or value == trained[name]:
            continue
        argument = result.loader.arguments.get(name)
        if argument:
            result.notes.append(f"start it with {argument} {trained[name]}: it does not read {name} from the file")
        else:
            result.silent.append(f"it reads {name} as {value}, and the draft was trained with {trained[name]}")


def _check_tensors(result: LoaderCheck, shapes: Mapping[str, Shape], sizes: dict[str, int], switches: dict[str, bool]) -> None:
    loader = result.loader
    stored = {_rename(loader, name, switches): (name, shape) for name, shape in shapes.items()}
    slots = {name: slot for slot in loader.slots if _applies(slot, switches) for name in _names(slot, result, sizes)}
    without = "it must be" if loader.unset is Outcome.REFUSED else "it stays uninitialized"
    for name, slot in slots.items():
        shape = _shape(slot, sizes)
        if name in stored:
            name_in_file, shape_in_file = stored[name]
            if shape_in_file != shape:
                what = f"{name_in_file} is {list(shape_in_file)}, and its config.json makes this parameter {list(shape)}"
                result.refused.append(what)
            elif slot.source is Source.TARGET:
                result.notes.append(f"it takes the target's {name} and ignores the file's")
        elif slot.source is Source.SHARED and shape != (sizes["V"], sizes.get("D", sizes["H"])):
            result.problem(loader.unset, f"{name} {list(shape)} is not in the file, and the target's has another shape")
        elif slot.source is Source.FILE:
            result.problem(loader.unset, f"{name} {list(shape)} is not in the file: {without}")
    for name, (name_in_file, _) in stored.items():
        if name not in slots and not any(part in name for part in loader.ignored):
            result.problem(loader.unknown, f"it has no parameter for {name_in_file}")


def _rename(loader: Loader, name: str, switches: dict[str, bool]) -> str:
    for part, becomes, switch in loader.renamed:
        if not switch or switches[switch]:
            name = name.replace(part, becomes)
    return name


def _applies(slot: Slot, switches: dict[str, bool]) -> bool:
    return not slot.when or switches[slot.when.removeprefix("!")] != slot.when.startswith("!")


def _names(slot: Slot, result: LoaderCheck, sizes: dict[str, int]) -> list[str]:
    if "{i}" in slot.name:
        return [slot.name.format(i=index) for index in range(1, result.settings["num_layers"])]
    if "{a}" in slot.name:
        return [slot.name.format(a=index) for index in range(sizes["A"])]
    return [slot.name]


def _shape(slot: Slot, sizes: dict[str, int]) -> Shape:
    factors = (axis.split("*") for axis in slot.shape.split())
    return tuple(math.prod(int(factor) if factor.isdigit() else sizes[factor] for factor in axis) for axis in factors)
