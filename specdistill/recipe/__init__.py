"""Recipes: what to train, on what, and how it is measured, as OmegaConf structured configs over frozen dataclasses.

A recipe is a YAML file (`recipe=path/to.yaml`, or a name under `recipes/` without the ending) plus `key=value` overrides. It is
strict: an unknown, missing or mistyped key is a `UserError` that names the nearest key. Library code takes plain arguments.
"""

import dataclasses
import json
import math
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from specdistill.errors import UserError, nearest, one_line
from specdistill.methods import METHODS
from specdistill.project import RECIPES

R = TypeVar("R")


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    least: float = -math.inf,
    most: float = math.inf,
    only: str | Sequence[str] = (),
) -> Any:
    """A recipe field with its help text (units) and its valid names, or the range of its value (of every item, for a list).

    `only` names the methods whose training reads it; none stands for all.
    """
    only = (only,) if isinstance(only, str) else tuple(only)
    help = f"{', '.join(only)}: {help}" if only else help
    metadata = {"help": help, "choices": choices, "least": least, "most": most, "only": only}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _reads(entry: dataclasses.Field[Any], method: str) -> bool:
    return not entry.metadata["only"] or method in entry.metadata["only"]


def _default(config: Any, name: str) -> Any:
    return next(entry.default for entry in dataclasses.fields(config) if entry.name == name)


def section(of: type) -> Any:
    return field(default_factory=of)


def like(schema: type, name: str) -> Any:
    """The field of another schema: same default, help and range, stated once."""
    entry = next(entry for entry in dataclasses.fields(schema) if entry.name == name)
    return field(default=entry.default, metadata=entry.metadata)


@dataclass(frozen=True)
class TargetConfig:
    model: str = option(MISSING, "target: pico, a folder or a Hub id")
    revision: str | None = option(None, "branch, tag or commit of a Hub id")
    adapter: str | None = option(
        None, "LoRA adapter of the target (peft), a folder or a Hub id; the draft learns the adapted target"
    )
    dtype: str = option("float32", "weights' dtype", choices=["float32", "bfloat16", "float16"])
    attn: str = option("sdpa", "attention implementation of transformers", choices=["sdpa", "eager", "flash_attention_2"])
    trust_remote_code: bool = option(False, "run Python code that the model's repository carries")


@dataclass(frozen=True)
class RegenerateConfig:
    num_tokens: int = option(0, "tokens the target writes as training data; 0 trains on the source as it is", least=0)
    prompt_tokens: int = option(32, "tokens taken from the head of a text row as its prompt", least=1)
    temperatures: list[float] = option(
        [0.0, 0.8], "sampling temperatures, an equal share of the rows each; 0 is greedy", least=0
    )
    batch_size: int = option(128, "rows written at a time", least=1)


@dataclass(frozen=True)
class DataConfig:
    source: Any = option("pico", "pico, a jsonl/json/parquet file, a Hub id, or a list of {source, weight, split}")
    split: str = option("train", "split of the source")
    max_length: int = option(512, "tokens in a packed row; longer documents are left out", least=8)
    validation_fraction: float = option(
        0.02, "share of the documents held out for the training-time evaluation", least=0, most=0.9
    )
    packing: bool = option(True, "put several documents into a row; they never see each other")
    loss_mask: str = option("assistant", "tokens that carry loss", choices=["assistant", "all"])
    regenerate: RegenerateConfig = section(RegenerateConfig)
    seed: int = option(0, "order of the documents, and sampling in regeneration")
    cache_dir: str | None = option(None, "where prepared rows are kept; default: the datasets library's cache")


@dataclass(frozen=True)
class HiddenStatesConfig:
    mode: str = option("online", "where the target's features come from: computed in each step", choices=["online"])


@dataclass(frozen=True)
class LoraConfig:
    rank: int = option(0, "rank of the update of each adapted matrix; 0 trains all weights", least=0, only="draft_model")
    alpha: int = option(16, "the update is scaled by alpha / rank", least=1)
    dropout: float = option(0.0, "dropout of the update's input", least=0, most=1)
    target_modules: list[str] | None = option(None, "linear layers adapted, by the end of their name; null: all but the head")


EAGLES = ("eagle", "eagle3")
HEADS = (*EAGLES, "mtp")
SHAPED = (*EAGLES, "draft_model")  # an MTP layer has the shape of the target's own


@dataclass(frozen=True)
class DraftConfig:
    num_layers: int | None = option(
        None, "decoder layers of the draft; null: 1 for a head, the start's choice otherwise", least=1
    )
    aux_layers: list[int] | None = option(
        None, "target layers read, counted as 'after L layers'; null: [2, n//2, n-3]", only="eagle3"
    )
    vocab_size: int | None = option(
        None, "draft vocabulary, the target's most frequent tokens; null: all of them", least=1, only="eagle3"
    )
    hidden_size: int | None = option(None, "null: the target's", least=1, only=("eagle3", "draft_model"))
    intermediate_size: int | None = option(None, "MLP width; null: the target's", least=1, only=SHAPED)
    num_attention_heads: int | None = option(None, "null: the target's", least=1, only=SHAPED)
    num_key_value_heads: int | None = option(None, "null: the target's", least=1, only=SHAPED)
    head_dim: int | None = option(None, "null: the target's", least=1, only=SHAPED)
    fc_norm: bool = option(False, "EAGLE-3.1: normalise each auxiliary state before fc", only="eagle3")
    norm_output: bool = option(False, "EAGLE-3.1: feed back the normalised hidden state", only="eagle3")
    norm_before_residual: bool = option(
        False, "take the residual after the hidden norm; SGLang cannot express true", only="eagle3"
    )
    fc_bias: bool = option(False, "a bias in fc, as SafeAILab's first heads have; vLLM loads none", only="eagle")
    sliding_window: int | None = option(None, "positions a head sees, itself included; null: all of them", least=2, only=EAGLES)
    ttt_steps: int = option(5, "steps the training-time test unrolls; 1 is plain EAGLE, more is HASS", least=1, only=HEADS)
    init: str | None = option(
        None,
        "initialization: a trained draft (a folder, for a draft model also a Hub id); for a draft model also layers | width | scratch, "
        "for mtp scratch; null: the method's own",
    )
    max_parameters: int | None = option(
        None, "most parameters of a draft model; its shape is then proposed", least=1, only="draft_model"
    )
    allow_larger: bool = option(False, "go on with a draft model that has more parameters than the target", only="draft_model")
    lora: LoraConfig = section(LoraConfig)
    heterogeneous_vocab: bool = option(False, "a draft model with another tokenizer: draft over the tokens both have")

    def shape(self, method: str) -> dict[str, Any]:
        """What a fresh head is built from: all that the method reads but the vocabulary, the unroll and the start."""
        elsewhere = {"vocab_size", "ttt_steps", "init", "lora", "heterogeneous_vocab"}
        entries = [entry for entry in dataclasses.fields(self) if entry.name not in elsewhere and _reads(entry, method)]
        return {entry.name: getattr(self, entry.name) for entry in entries} | {"num_layers": self.num_layers or 1}

    def check_shape(self, method: str, head: Any) -> None:
        """Raises UserError for a shape asked of a trained head whose config says another."""
        for name in (*self.shape(method), "vocab_size"):
            asked, has = getattr(self, name), getattr(head, "draft_vocab_size" if name == "vocab_size" else name, None)
            if isinstance(asked, list):
                asked = tuple(asked)
            if asked != _default(self, name) and asked != has:
                raise UserError(f"draft.{name}", got=asked, expected=f"{has}, as {self.init} has")

    def small(self) -> dict[str, Any]:
        """What a draft model is built from: its start, its sizes and their limits."""
        names = ("init", "num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        return {name: getattr(self, name) for name in (*names, "head_dim", "max_parameters", "allow_larger")}


@dataclass(frozen=True)
class LossConfig:
    divergence: Any = option(
        "forward_kl",
        "how the draft's distribution is compared with the target's: forward_kl, reverse_kl, jsd, tvd, tvd_plus_plus, nla, lk, "
        "cross_entropy, or a weighted sum {name: weight}",
    )
    jsd_beta: float = option(0.5, "the target's share of jsd's mixture, between 0 and 1")
    step_decay: float = option(0.8, "weight of unroll step k is step_decay ** k", least=0, most=1, only=HEADS)
    feature_weight: float = option(
        0.0, "SmoothL1 to the target's next feature counts this much, beside the divergence", least=0, only="eagle"
    )
    noise: float = option(0.0, "uniform noise of at most this size on the features read", least=0, only="eagle")
    temperature: float = option(1.0, "divides both sets of logits", least=0.01)
    labels: str = option(
        "soft", "learn the target's distributions, or the text's own tokens", choices=["soft", "hard"], only="draft_model"
    )
    reference: str | None = option(None, "folder of a draft that says which tokens can be learnt (AdaSPEC)", only="draft_model")
    selected: float = option(0.4, "share of the tokens kept when there is a reference", least=0.01, most=1, only="draft_model")


@dataclass(frozen=True)
class OnPolicyConfig:
    fraction: float = option(
        0.0,
        "share of the batches that the draft writes and the target scores",
        least=0,
        most=1,
        only="draft_model",
    )
    temperature: float = option(1.0, "at which the draft writes; 0 is greedy", least=0)
    prompt_tokens: int = option(32, "tokens kept from the beginning of a row", least=1)
    num_tokens: int = option(64, "tokens the draft writes after them", least=1)


@dataclass(frozen=True)
class NgramConfig:
    min: int = option(1, "ngram: fewest tokens that must agree", least=1)
    max: int = option(3, "ngram: most tokens compared; the longest agreement counts", least=1)
    lookup: str = option(
        "text", "ngram: where they are looked up: prompt and output, or the prompt", choices=["text", "prompt"]
    )


@dataclass(frozen=True)
class TreeConfig:
    budget: int | None = option(None, "a dynamic tree (EAGLE-2), with depth and top_k: nodes proposed a round", least=1)
    depth: int | None = option(None, "its levels, a draft step each; they count in place of num_speculative_tokens", least=1)
    top_k: int | None = option(None, "nodes expanded of each level, and children of each of them", least=1)
    branching: list[int] | None = option(
        None, "or a static tree: children of the root, of each of these, and so on, as [4,2,1]", least=1
    )


@dataclass(frozen=True)
class SweepConfig:
    num_speculative_tokens: list[int] = option([], "other K to measure, one axis at a time around eval's own settings", least=1)
    temperature: list[float] = option([], "other temperatures to measure", least=0)
    batch_size: list[int] = option([], "other numbers of prompts decoded together", least=1, most=64)
    tree: list[TreeConfig] = option([], "trees to measure, each with the keys of eval.tree")
    context: list[int] = option([], "prompt lengths to measure, powers of two: long prompts cut to so many tokens", least=1)


@dataclass(frozen=True)
class EvalConfig:
    engine: str = option(
        "specdistill",
        "what decodes: this package, or a running server (eval.server)",
        choices=["specdistill", "vllm", "sglang"],
    )
    server: str | None = option(None, "vllm, sglang: address of the server that drafts, as http://127.0.0.1:8000")
    baseline_server: str | None = option(None, "vllm, sglang: address of a server that does not; null: no speedup is measured")
    server_timeout: float = option(300.0, "vllm, sglang: seconds that one answer may take", least=0.1)
    suite: str = option("pico", "suite name, suite YAML, or a jsonl file with prompt | messages | text rows")
    draft: str | None = option(None, "draft folder; null: <train.output_dir>/draft")
    output_dir: str | None = option(None, "where the report goes; null: <train.output_dir>/report")
    num_speculative_tokens: int = option(4, "K, tokens drafted a round", least=1)
    confidence_threshold: float | None = option(
        None, "draft_model: stop drafting where its best next token is less probable; null: never", least=0, most=1
    )
    draft_context: str = option(
        "refuse", "draft_model: a text longer than the draft's context, refused or seen in part", choices=["refuse", "window"]
    )
    ngram: NgramConfig = section(NgramConfig)
    tree: TreeConfig | None = option(None, "null drafts a chain, and these keys a tree, in the one form or the other")
    temperature: float = option(0.0, "0 is greedy", least=0)
    top_p: float = option(1.0, "nucleus kept, for the target and the draft alike", least=0.01, most=1)
    top_k: int = option(0, "tokens kept; 0 keeps all", least=0)
    max_new_tokens: int = option(128, "tokens written for each prompt", least=1)
    num_prompts: int | None = option(None, "prompts used, spread evenly over the categories; null: all", least=1)
    batch_size: int = option(1, "prompts decoded together, with and without the draft", least=1, most=64)
    repeats: int = option(3, "timed repetitions of each prompt, with and without the draft; medians count", least=1)
    warmup: int = option(2, "untimed prompts, or batches of them, first", least=0)
    run_code: bool = option(
        False, "run the programs that the model writes for suite rows with a `test`, as the user that measures"
    )
    sampling_draws: int = option(400, "draws of the two-sample losslessness test; 0 leaves it out", least=0)
    seed: int = option(0, "sampling and bootstrap seed")
    baseline: str | None = option(
        None, "what max_regression rules compare with: a report.json, its folder, or a Hub revision's report as org/name@v1.2"
    )
    sweep: SweepConfig = section(SweepConfig)
    target_precision: float | None = option(
        None,
        "stop once acceptance length and speedup are known to this share, either way, as 0.01; null: measure every prompt",
        least=0.0001,
        most=1,
    )


@dataclass(frozen=True)
class Recipe:
    """A draft recipe: one method, one target, its data, its training and how it is judged."""

    method: str = option("eagle3", "how the draft proposes tokens", choices=list(METHODS))
    target: TargetConfig = section(TargetConfig)
    data: DataConfig = section(DataConfig)
    hidden_states: HiddenStatesConfig = section(HiddenStatesConfig)
    draft: DraftConfig = section(DraftConfig)
    loss: LossConfig = section(LossConfig)
    on_policy: OnPolicyConfig = section(OnPolicyConfig)
    optimizer: str = option("muon_adamw", "optimizer of the draft", choices=["muon_adamw", "adamw"])
    train: dict[str, Any] = option({"output_dir": MISSING}, "transformers.TrainingArguments, field by field")
    eval: EvalConfig = section(EvalConfig)
    gate: str = option("default", "gate name, or a gate YAML")


@dataclass(frozen=True)
class TokenizerConfig:
    vocab_size: int = option(1024, "byte-level BPE tokens, special ones included", least=1)


@dataclass(frozen=True)
class ShapeConfig:
    num_layers: int = option(16, "decoder layers", least=1)
    hidden_size: int = option(128, "width, a multiple of 64", least=1)
    intermediate_size: int = option(448, "MLP width", least=1)
    context_length: int = option(512, "longest text, in tokens", least=16)


@dataclass(frozen=True)
class CurriculumConfig:
    batch_tokens: int = option(8192, "tokens in every optimizer step", least=1)
    lengths: list[int] = option([256, 512], "row lengths, in the order they are trained", least=2)
    shares: list[float] = option([0.85, 0.15], "share of the steps each length gets", least=0, most=1)


@dataclass(frozen=True)
class TargetRecipe:
    """The recipe of pico itself: tokenizer, shape, curriculum and training arguments."""

    tokenizer: TokenizerConfig = section(TokenizerConfig)
    shape: ShapeConfig = section(ShapeConfig)
    curriculum: CurriculumConfig = section(CurriculumConfig)
    train: dict[str, Any] = option({"output_dir": MISSING}, "transformers.TrainingArguments, field by field")


def load_recipe(schema: type[R], arguments: Sequence[str]) -> R:
    """Build a recipe from `recipe=… key=value …` command-line arguments. Raises UserError for anything the user got wrong."""
    overrides = [_split_argument(argument) for argument in arguments]
    path = [value for key, value in overrides if key == "recipe"]
    layers = [_read_yaml(find_recipe(path[-1]))] if path else []
    layers += [_override(key, value) for key, value in overrides if key != "recipe"]
    config = OmegaConf.structured(schema)
    for layer in layers:
        plain = cast(dict[str, Any], OmegaConf.to_container(layer))
        _check_names(schema, plain)
        try:
            config = OmegaConf.merge(config, layer)
        except (ValidationError, ConfigKeyError) as error:
            key = error.full_key or "recipe"
            # Of a section in a list OmegaConf names the last part alone.
            key = next((leaf for leaf, _ in _leaves(plain) if leaf.endswith(f"].{key}")), key)
            raise _type_error(schema, key, OmegaConf.select(layer, key)) from error
        _check_conversions(schema, plain, config)
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise UserError(missing[0], got="nothing", expected=f"a value ({_help(schema, missing[0])})")
        recipe = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        got = one_line(str(error).split("\n")[0])
        raise UserError(error.full_key or "recipe", got=got, expected="a value, or ${another.key}") from error
    assert isinstance(recipe, schema)
    _check_values(recipe)
    return recipe


def read_section(schema: type[R], values: Any, key: str) -> R:
    """A recipe's section that stands in another file, as strict as in a recipe; errors name its keys under `key`."""
    if not isinstance(values, dict):
        raise UserError(key, got=repr(values), expected="a section with keys of its own")
    _check_names(schema, values, f"{key}.")
    try:
        config = OmegaConf.merge(OmegaConf.structured(schema), values)
    except (ValidationError, ConfigKeyError) as error:
        name = re.sub(r"\[.*", "", error.full_key or "")
        expected = next(kind for leaf, kind, _, _ in describe(schema) if leaf == name)
        raise UserError(f"{key}.{name}", got=repr(values[name]), expected=expected) from error
    _check_conversions(schema, values, config)
    found = OmegaConf.to_object(config)
    assert isinstance(found, schema)
    _check_values(found, f"{key}.")
    return found


def check_trainable(recipe: Recipe, script: str) -> None:
    """Raises UserError when `script` does not train the recipe's method, or when a setting is for the training of another one."""
    trained_by = METHODS[recipe.method].trained_by
    if trained_by != script:
        own = [name for name, method in METHODS.items() if method.trained_by == script]
        who = f"which {trained_by} trains" if trained_by else "which needs no training"
        raise UserError("method", got=f"{recipe.method}, {who}", expected=" or ".join(own))
    _check_applies(recipe, recipe.method)


def _check_applies(config: Any, method: str, prefix: str = "") -> None:
    for name, hint, entry in _fields(type(config)):
        key, value = f"{prefix}{name}", getattr(config, name)
        if _schema_of(hint):
            if value is not None:
                _check_applies(value, method, f"{key}.")
        elif not _reads(entry, method) and value != entry.default:
            expected = f"{_shown(entry.default)}: only {' and '.join(entry.metadata['only'])} reads it"
            raise UserError(key, got=f"{value} with method {method}", expected=expected)


def schema_of(arguments: Sequence[str]) -> type[Recipe] | type[TargetRecipe]:
    """The schema that the file of a `recipe=…` argument is written for: a target's own recipe has keys that a draft's lacks."""
    names = [value for key, value in map(_split_argument, arguments) if key == "recipe"]
    keys = set(_read_yaml(find_recipe(names[-1]))) if names else set()
    draft, target = ({entry.name for entry in dataclasses.fields(schema)} for schema in (Recipe, TargetRecipe))
    return TargetRecipe if keys & (target - draft) else Recipe


def find_recipe(name: str) -> Path:
    """A recipe's path: the path itself, or a name under `recipes/` without the ending."""
    for candidate in (Path(name), RECIPES / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))
    raise UserError("recipe", got=repr(name), expected="a YAML file or a name under recipes/", nearest=nearest(name, known))


def save_recipe(recipe: Any, path: Path) -> None:
    """Write the resolved recipe; `load_recipe` reads it back equal."""
    path.write_text(recipe_yaml(recipe), encoding="utf-8")


def recipe_yaml(recipe: Any) -> str:
    """A resolved recipe as YAML, every key in its place."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def describe(schema: type) -> list[tuple[str, str, str, str]]:
    """Rows of (key, type, default, help) for every leaf of a recipe, for `--help`."""
    rows: list[tuple[str, str, str, str]] = []
    for name, hint, entry in _fields(schema):
        inner = _schema_of(hint)
        if inner is not hint:
            default = entry.default_factory() if callable(entry.default_factory) else entry.default
            rows.append((name, _kind(hint, entry), _shown(default), entry.metadata["help"]))
        if inner:
            rows += [(f"{name}.{key}", *rest) for key, *rest in describe(inner)]  # type: ignore[misc]
    return rows


def _split_argument(argument: str) -> tuple[str, str]:
    key, separator, value = argument.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise UserError(argument, got="an argument without key=", expected="key=value")
    return key, value


def _read_yaml(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError("recipe", got=f"{path}: {error}", expected="a readable YAML file") from error
    if not isinstance(config, DictConfig):
        raise UserError("recipe", got=f"{path}, which holds a list", expected="YAML with keys")
    return config


def _override(key: str, value: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([f"{key}={value}"])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(key, got=repr(value), expected="a YAML value") from error


def _check_names(schema: type, layer: dict[str, Any], prefix: str = "") -> None:
    """Unknown keys are errors that name the nearest key, wherever in the recipe it stands."""
    known = {name: hint for name, hint, _ in _fields(schema)}
    for name, value in layer.items():
        key = f"{prefix}{name}"
        if name not in known:
            close = nearest(str(name), known)
            anywhere = nearest(key, [row[0] for row in describe(schema)])
            expected = f"one of {', '.join(sorted(known))}"
            raise UserError(key, got="an unknown key", expected=expected, nearest=f"{prefix}{close}" if close else anywhere)
        hint = known[name]
        if inner := _schema_of(hint):
            if value is None and inner is not hint:
                continue
            if not isinstance(value, dict):
                raise UserError(
                    key, got=repr(value), expected=f"{'null or ' * (inner is not hint)}a section with keys of its own"
                )
            _check_names(inner, value, f"{key}.")
        elif (inner := _schema_of_items(hint)) and isinstance(value, list):
            for index, item in enumerate(value):
                if not isinstance(item, dict):
                    raise UserError(f"{key}[{index}]", got=repr(item), expected="a section with keys of its own")
                _check_names(inner, item, f"{key}[{index}].")
        elif isinstance(value, dict) and hint is not Any and get_origin(hint) is not dict:
            raise UserError(key, got=f"keys below it ({', '.join(map(str, value))})", expected=_type_name(hint))


def _check_conversions(schema: type, layer: dict[str, Any], config: Any) -> None:
    """OmegaConf reads 3 as true, 5 as '5' and '5' as 5; of its conversions a recipe accepts only an int for a float."""
    for key, value in _leaves(layer):
        converted = OmegaConf.select(config, key)
        if type(converted) is not type(value) and (type(value), type(converted)) != (int, float):
            raise _type_error(schema, key, value)


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every value below `node` that stands for itself: not `???`, not an interpolation."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{key}[{index}]")
    elif not (isinstance(node, str) and ("${" in node or node == MISSING)):
        yield key, node


def _check_values(config: Any, prefix: str = "") -> None:
    """Names must be among the choices of their field, numbers within its range."""
    for name, hint, entry in _fields(type(config)):
        key, value = f"{prefix}{name}", getattr(config, name)
        if _schema_of(hint):
            if value is not None:
                _check_values(value, f"{key}.")
            continue
        if _schema_of_items(hint):
            for index, item in enumerate(value):
                _check_values(item, f"{key}[{index}].")
            continue
        choices, least, most = (entry.metadata[rule] for rule in ("choices", "least", "most"))
        if choices and value is not None and value not in choices:
            close = nearest(str(value), choices)
            raise UserError(key, got=repr(value), expected=f"one of {', '.join(choices)}", nearest=close)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not least <= number <= most:
                raise UserError(key, got=number, expected=_kind(hint, entry))


def _kind(hint: Any, entry: dataclasses.Field[Any]) -> str:
    """A field's type with its choices or range, as help and errors state it."""
    choices, least, most = (entry.metadata[rule] for rule in ("choices", "least", "most"))
    if choices:
        return "|".join([*choices, *["null"] * (entry.default is None)])
    bounds = f", at least {least}" * (least > -math.inf) + f", at most {most}" * (most < math.inf)
    return f"{_type_name(hint)}{bounds}"


def _schema_of(hint: Any) -> type | None:
    """The schema of a section, also of one that may be null; None for a value or a list."""
    if get_origin(hint) is list:
        return None
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _schema_of_items(hint: Any) -> type | None:
    """The schema of the sections in a list of them; None for anything else."""
    return _schema_of(get_args(hint)[0]) if get_origin(hint) is list else None


def _fields(schema: type) -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    hints = get_type_hints(schema)
    return [(entry.name, hints[entry.name], entry) for entry in dataclasses.fields(schema)]


def _type_error(schema: type, key: str, value: Any) -> UserError:
    rows = {row[0]: row for row in describe(schema)}
    leaf = next((name for name in (key, re.sub(r"\[.*", "", key), key.split(".")[0]) if name in rows), None)
    expected = rows[leaf][1] if leaf else "a value of the right type"
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return UserError(key, got=f"{plain!r} ({'null' if plain is None else type(plain).__name__})", expected=expected)


def _shown(default: Any) -> str:
    """A default as a recipe would write it."""
    if isinstance(default, dict):
        return f"{{{', '.join(f'{name}: {_shown(value)}' for name, value in default.items())}}}"
    if isinstance(default, str):
        return "required" if default == MISSING else default
    return json.dumps(default)


def _help(schema: type, key: str) -> str:
    return next((row[3] for row in describe(schema) if row[0] == key), "required")


def _type_name(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if argument is type(None) else _type_name(argument) for argument in get_args(hint))
    if origin is list:
        return f"list of {_type_name(get_args(hint)[0])}"
    if hint is Any:
        return "name, list or mapping"
    if dataclasses.is_dataclass(hint):
        return "section"
    return "mapping" if origin is dict else str(hint.__name__)
