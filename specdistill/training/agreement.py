"""What every process of a launch must hold alike before it works for hours: the recipe, the code and the libraries of its machine."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import specdistill
from specdistill.processes import agree
from specdistill.project import ROOT
from specdistill.recipe.fields import Section

OPTIONAL = ("deepspeed", "peft")
SHOWN = 12  # digits of a hash, enough to tell
# Keys that say where a machine keeps things, not what they are.
PLACES = ("train.output_dir", "train.logging_dir", "data.cache_dir", "data.rows", "hidden_states.path")


def check_alike(recipe: Section, packages: Sequence[str], sharding: str) -> None:
    """Raises UserError, naming a key of the recipe, the code or a package, when a process of this launch has another one.

    sharding: of its launch configuration. OPTIONAL packages are compared where a machine has them.
    """
    keys = {key: value for key, value in _leaves(recipe.model_dump()) if key not in PLACES}
    installed = {distribution.metadata["Name"] for distribution in distributions()}
    versions = {name: version(name) for name in (*packages, *installed.intersection(OPTIONAL))}
    agree({**keys, **versions, "code of specdistill": code_fingerprint(), "accelerate launch": f"sharding {sharding}"})


def code_fingerprint() -> str:
    """A hash of the package's and the training scripts' Python files, the same wherever they are installed."""
    digest = hashlib.sha256()
    for folder in (Path(specdistill.__file__).parent, ROOT / "train"):
        for path in sorted(folder.rglob("*.py")):
            place = path.relative_to(folder)
            if place.parts[0] != "_project":  # that is where a wheel has the scripts
                digest.update(f"{place.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:SHOWN]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each key of a recipe, written out, with its value."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
