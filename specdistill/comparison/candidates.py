"""The drafts of a comparison: located, named and checked to be different before anything is loaded."""

import filecmp
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdistill.errors import UserError, nearest
from specdistill.hub import split_revision
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import implementation, locate, method_of

KEY = "drafts"
UNTRAINED = [name for name, method in METHODS.items() if method.artifact is None]  # named in place of a folder


@dataclass(frozen=True)
class Candidate:
    """One draft. draft: the entry as given; folder: of its files; revision: a Hub commit; num_layers: decoder layers, by its config.json.

    All of these are None for a method without a draft.
    """

    name: str
    method: str
    draft: str | None
    folder: Path | None
    revision: str | None
    num_layers: int | None


def find_candidates(entries: Sequence[str]) -> list[Candidate]:
    """Candidates with unique names, from folders, Hub ids (org/name or org/name@revision) and methods without a draft (`ngram`).

    Raises UserError for fewer than two, for a folder without a draft, and for two that are the same or copies of each other;
    ResourceError when the Hub fails.
    """
    if len(entries) < 2:
        raise UserError(KEY, got=f"{len(entries)} candidate{'s' * (len(entries) != 1)}", expected="two or more: drafts=[a,b]")
    folders = [None if entry in UNTRAINED else _locate(entry) for entry in entries]
    _check_different(entries, folders)
    candidates = []
    for entry, folder, name in zip(entries, folders, _names(entries), strict=True):
        if folder is None:
            candidates.append(Candidate(name, entry, None, None, None, None))
            continue
        method = method_of(folder, key=KEY)
        num_layers = implementation(method).num_layers(read_config(folder, KEY))
        revision = None if Path(entry).is_dir() else folder.name
        candidates.append(Candidate(name, method, entry, folder, revision, num_layers))
    return candidates


def _locate(entry: str) -> Path:
    """The folder of an entry: the entry itself, or the Hub's files in the local cache."""
    if entry and Path(entry).is_dir():  # Path("") is the working directory
        return Path(entry)
    expected = f"a draft folder, a Hub id or {' or '.join(UNTRAINED)}"
    if entry.startswith((".", "/", "~")) or split_revision(entry)[0].count("/") != 1:
        raise UserError(
            KEY, got=f"{entry or 'an empty name'}, which is no folder", expected=expected, nearest=nearest(entry, UNTRAINED)
        )
    return locate(entry, key=KEY, expected=expected)


def _check_different(entries: Sequence[str], folders: Sequence[Path | None]) -> None:
    pairs = itertools.combinations(zip(entries, folders, strict=True), 2)
    for (first, first_folder), (second, second_folder) in pairs:
        if first_folder is None or second_folder is None:
            same = first == second
        else:
            same = first_folder.resolve() == second_folder.resolve() or _copies(first_folder, second_folder)
        if same:
            raise UserError(KEY, got=f"{first} and {second}, which are the same draft", expected="different candidates")


def _copies(first: Path, second: Path) -> bool:
    """Whether config and weights of two folders are equal byte for byte."""
    names = [
        {path.name for pattern in ("config.json", "*.safetensors", "*.bin") for path in folder.glob(pattern)}
        for folder in (first, second)
    ]
    if not names[0] or names[0] != names[1]:
        return False
    return all(filecmp.cmp(first / name, second / name, shallow=False) for name in sorted(names[0]))


def _names(entries: Sequence[str]) -> list[str]:
    """Each entry's last part, with as many parts before it as make it unique: runs/a/draft -> a-draft; remaining duplicates get a number.

    Names become folders, so they are compared without case.
    """
    # A revision may hold slashes, as refs/pr/1 does.
    parts = [
        list(Path(entry).resolve().parts[1:])
        if Path(entry).is_dir()
        else [part.replace("/", "-") for part in entry.split("/", 1)]
        for entry in entries
    ]
    depths = [1] * len(entries)
    while True:
        names = ["-".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        count = Counter(name.casefold() for name in names)
        longer = [
            depth + (count[name.casefold()] > 1 and depth < len(part))
            for name, part, depth in zip(names, parts, depths, strict=True)
        ]
        if longer == depths:
            break
        depths = longer
    unique: list[str] = []
    taken: set[str] = set()
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        chosen = next(option for option in itertools.chain([name], numbered) if option.casefold() not in taken)
        taken.add(chosen.casefold())
        unique.append(chosen)
    return unique
