"""The drafts of a comparison: located, named and checked to be different before anything is loaded."""

import filecmp
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdistill.errors import UserError, nearest
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import implementation, locate, method_of
from specdistill.repositories import split_revision

KEY = "drafts"
NESTED = ("transformer_layer_config", "model", "text_config")  # where some layouts have a decoder's sizes
UNTRAINED = [name for name, method in METHODS.items() if method.artifact is None]  # named in place of a folder


@dataclass(frozen=True)
class Candidate:
    """One draft. draft: the entry as given; folder: of its files; revision: a Hub commit; num_layers, hidden_size: of its decoder, by
    its config.json.

    All of these are None for a method without a draft.
    """

    name: str
    method: str
    draft: str | None = None
    folder: Path | None = None
    revision: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None


def find_candidates(entries: Sequence[str]) -> list[Candidate]:
    """Candidates with unique names, from folders, Hub ids (org/name or org/name@revision) and methods without a draft (`ngram`).

    Raises UserError for fewer than two, for a folder without a draft, and for two that are the same or copies of each other;
    ResourceError when the Hub fails.
    """
    if len(entries) < 2:
        raise UserError(KEY, got=f"{len(entries)} candidate{'s' * (len(entries) != 1)}", expected="two or more: drafts=[a,b]")
    folders = [None if entry in UNTRAINED else _locate(entry) for entry in entries]
    for (first, its_folder), (second, folder) in itertools.combinations(zip(entries, folders, strict=True), 2):
        if _copies(its_folder, folder) if its_folder and folder else first == second:
            raise UserError(KEY, got=f"{first} and {second}, which are the same draft", expected="different candidates")
    return [_candidate(*parts) for parts in zip(_names(entries), entries, folders, strict=True)]


def _candidate(name: str, entry: str, folder: Path | None) -> Candidate:
    if folder is None:
        return Candidate(name, entry)
    method = method_of(folder, key=KEY)
    config, revision = read_config(folder, KEY), None if Path(entry).is_dir() else folder.name
    nested = next((config[part] for part in NESTED if isinstance(config.get(part), dict)), config)
    return Candidate(
        name, method, entry, folder, revision, implementation(method).num_layers(config), nested.get("hidden_size")
    )


def _locate(entry: str) -> Path:
    """The folder of an entry: the entry itself, or the Hub's files in the local cache."""
    if entry and Path(entry).is_dir():  # Path("") is the working directory
        return Path(entry)
    expected = f"a draft folder, a Hub id or {' or '.join(UNTRAINED)}"
    if entry.startswith((".", "/", "~")) or split_revision(entry)[0].count("/") != 1:
        got = f"{entry or 'an empty name'}, which is no folder"
        raise UserError(KEY, got=got, expected=expected, nearest=nearest(entry, UNTRAINED))
    return locate(entry, key=KEY, expected=expected)


def _copies(first: Path, second: Path) -> bool:
    """Whether two folders are one, or config and weights of both are equal byte for byte."""
    patterns = ("config.json", "*.safetensors", "*.bin")
    names, others = ({path.name for pattern in patterns for path in folder.glob(pattern)} for folder in (first, second))
    same_files = names and names == others and not any(filecmp.cmpfiles(first, second, names, shallow=False)[1:])
    return bool(first.resolve() == second.resolve() or same_files)


def _names(entries: Sequence[str]) -> list[str]:
    """Each entry's last part, with as many parts before it as make it unique: runs/a/draft -> a-draft; remaining duplicates get a number.

    Names become folders, so they are compared without case.
    """
    parts = [
        Path(entry).resolve().parts[1:]
        if Path(entry).is_dir()
        else [part.replace("/", "-") for part in entry.split("/", 1)]  # a revision may hold slashes, as refs/pr/1 does
        for entry in entries
    ]
    depths, longer = [0] * len(entries), [1] * len(entries)
    while longer != depths:
        depths = longer
        names = ["-".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        count = Counter(name.casefold() for name in names)
        is_double = [count[name.casefold()] > 1 for name in names]
        longer = [min(depth + double, len(part)) for depth, double, part in zip(depths, is_double, parts, strict=True)]
    unique: dict[str, str] = {}
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        chosen = next(option for option in itertools.chain([name], numbered) if option.casefold() not in unique)
        unique[chosen.casefold()] = chosen
    return list(unique.values())
