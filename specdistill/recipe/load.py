"""Recipes from files and command lines: OmegaConf merges a YAML file and `key=value` overrides, pydantic validates the result."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdistill.errors import UserError, nearest, one_line
from specdistill.project import RECIPES
from specdistill.recipe.fields import Section
from specdistill.recipe.validation import validate

S = TypeVar("S", bound=Section)

REQUIRED = "???"  # OmegaConf's mark of a value that the command line must give


def load_recipe(schema: type[S], arguments: Sequence[str]) -> S:
    """Build a recipe from `recipe=… key=value …` command-line arguments. Raises UserError for anything the user got wrong."""
    return validate(schema, merged(arguments))


def merged(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a recipe's file under those of the command line, interpolations resolved, nothing validated yet."""
    overrides = [split_argument(argument) for argument in arguments]
    files = [value for key, value in overrides if key == "recipe"]
    layers = [_read_yaml(find_recipe(files[-1]))] if files else []
    layers += [_override(key, value) for key, value in overrides if key != "recipe"]
    config = OmegaConf.create({})
    try:
        for layer in layers:
            config = cast(DictConfig, OmegaConf.merge(config, layer))
        values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        got = one_line(str(error).split("\n")[0])
        raise UserError(error.full_key or "recipe", got=got, expected="a value, or ${another.key}") from error
    return cast(dict[str, Any], _without_required(values))


def find_recipe(name: str) -> Path:
    """A recipe's path: the path itself, or a name under `recipes/` without the ending."""
    for candidate in (Path(name), RECIPES / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))
    raise UserError("recipe", got=repr(name), expected="a YAML file or a name under recipes/", nearest=nearest(name, known))


def recipe_yaml(recipe: Section) -> str:
    """A resolved recipe as YAML, every key in its place; `load_recipe` reads it back equal."""
    return OmegaConf.to_yaml(OmegaConf.create(recipe.model_dump()))


def save_recipe(recipe: Section, path: Path) -> None:
    path.write_text(recipe_yaml(recipe), encoding="utf-8")


def split_argument(argument: str) -> tuple[str, str]:
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


def _without_required(node: Any) -> Any:
    """A tree without the values that are still to be given: pydantic then says that they are missing."""
    if isinstance(node, dict):
        return {name: _without_required(value) for name, value in node.items() if value != REQUIRED}
    return node
