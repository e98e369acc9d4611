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
LOOKUP_FIRST = "ngram+"  # before a draft: look-up where that finds something, else this draft
UNTRAINED = [name for name, method in METHODS.items() if not method.is_trained]  # named in place of a folder


@dataclass(frozen=True)
class Candidate:
    """One draft. draft: its folder or Hub id as given; folder: of its files; revision: a Hub commit; num_layers, hidden_size: of its
    decoder, by its config.json. looks_up_first: a look-up stands in front of it (see specdistill.methods.ngram.first).

    All of these but the last are None for a method without a draft.
    """

    name: str
    method: str
    draft: str | None = None
    folder: Path | None = None
    revision: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    looks_up_first: bool = False


def find_candidates(entries: Sequence[str]) -> list[Candidate]:
    """Candidates with unique names, from folders, Hub ids (org/name or org/name@revision) and methods without a draft (`ngram`); of
    `ngram+<folder or Hub id>` a look-up stands in front of the draft.

    Raises UserError for fewer than two, for a folder without a draft, and for two that are the same or copies of each other;
    ResourceError when the Hub fails.
    """
    if len(entries) < 2:
        raise UserError(KEY, got=f"{len(entries)} candidate{'s' * (len(entries) != 1)}", expected="two or more: drafts=[a,b]")
    prefixes, drafts = zip(*map(_split, entries), strict=True)
    folders = [None if entry in UNTRAINED else _locate(draft) for entry, draft in zip(entries, drafts, strict=True)]
    for one, two in itertools.combinations(range(len(entries)), 2):
        first, second = folders[one], folders[two]
        same = _copies(first, second) if first and second else entries[one] == entries[two]
        if same and prefixes[one] == prefixes[two]:
            got = f"{entries[one]} and {entries[two]}, which are the same draft"
            raise UserError(KEY, got=got, expected="different candidates")
    return [_candidate(*parts) for parts in zip(_names(prefixes, drafts), drafts, folders, map(bool, prefixes), strict=True)]


def _split(entry: str) -> tuple[str, str]:
    """(LOOKUP_FIRST or nothing, the draft)."""
    prefix = LOOKUP_FIRST if entry.startswith(LOOKUP_FIRST) and not Path(entry).is_dir() else ""
    if prefix and entry.removeprefix(prefix) in UNTRAINED:
        raise UserError(KEY, got=entry, expected=f"a draft folder or a Hub id after {LOOKUP_FIRST}")
    return prefix, entry.removeprefix(prefix)


def _candidate(name: str, entry: str, folder: Path | None, looks_up_first: bool) -> Candidate:
    if folder is None:
        return Candidate(name, entry)
    method = method_of(folder, key=KEY)
    config, revision = read_config(folder, KEY), None if Path(entry).is_dir() else folder.name
    nested = next((config[part] for part in NESTED if isinstance(config.get(part), dict)), config)
    num_layers = implementation(method).num_layers(nested)
    return Candidate(name, method, entry, folder, revision, num_layers, nested.get("hidden_size"), looks_up_first)


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


def _names(prefixes: Sequence[str], drafts: Sequence[str]) -> list[str]:
    """Each draft's prefix and last part, with as many parts before it as make it unique: runs/a/draft -> a-draft; remaining duplicates
    get a number.

    Names become folders, so they are compared without case.
    """
    parts = [
        Path(draft).resolve().parts[1:]
        if Path(draft).is_dir()
        else [part.replace("/", "-") for part in draft.split("/", 1)]  # a revision may hold slashes, as refs/pr/1 does
        for draft in drafts
    ]
    depths, longer = [0] * len(drafts), [1] * len(drafts)
    while longer != depths:
        depths = longer
        names = [prefix + "-".join(part[-depth:]) for prefix, part, depth in zip(prefixes, parts, depths, strict=True)]
        count = Counter(name.casefold() for name in names)
        is_double = [count[name.casefold()] > 1 for name in names]
        longer = [min(depth + double, len(part)) for depth, double, part in zip(depths, is_double, parts, strict=True)]
    unique: dict[str, str] = {}
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        chosen = next(option for option in itertools.chain([name], numbered) if option.casefold() not in unique)
        unique[chosen.casefold()] = chosen
    return list(unique.values())
