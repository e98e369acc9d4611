"""Licences of what a draft was made from, and what they ask of whoever publishes it.

They are named as on the Hub (https://huggingface.co/docs/hub/repositories-licenses). Read in the licences themselves: section 1.b of
Llama's community licences (a draft learns from its target's outputs, which they cover), and the No Derivatives clause of Creative Commons.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from specdistill.errors import refusing
from specdistill.files.documents import head_of
from specdistill.recipe.data_sources import LOADERS, SELF, entries
from specdistill.repositories import hub_errors

UNKNOWN, OTHER = "unknown", "other"
DATA = "training data"
CARD = "README.md"
# What a licence may ask to be passed on with the weights.
TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
# The identifiers that a card's `license` may have; others are stated as `license_name`, with `other`.
IDENTIFIERS = frozenset(
    Path(__file__).with_name("licenses.txt").read_text(encoding="utf-8").split()
)


@dataclass(frozen=True)
class Terms:
    """What a licence asks of a model that learnt from what it covers.

    prefix: how the model's name begins. display: words on its card. notice: for a text file next to the weights.
    """

    prefix: str
    display: str
    notice: str


def _llama(name: str, built_with: str, prefix: str) -> Terms:
    notice = f"{name} is licensed under the {name} Community License, Copyright © Meta Platforms, Inc. All Rights Reserved."
    return Terms(prefix, f"Built with {built_with}", notice)


TERMS = {
    "llama3": _llama("Meta Llama 3", "Meta Llama 3", "Llama 3"),
    **{
        f"llama{version}": _llama(f"Llama {version}", "Llama", "Llama")
        for version in ("3.1", "3.2", "3.3", "4")
    },
}


@dataclass(frozen=True)
class Licensed:
    """Something that a draft was made from. what: its part in that. license: None where nobody states it."""

    what: str
    name: str
    license: str | None

    @property
    def shown(self) -> str:
        return self.license or UNKNOWN

    @property
    def terms(self) -> Terms | None:
        return TERMS.get((self.license or "").lower())


def licensed_model(what: str, name: str, folder: Path) -> Licensed:
    """A model whose card, if it has one, is in a folder. Raises UserError for a card that cannot be read."""
    path = folder / CARD
    with refusing((ValueError, OSError), what, path, "a model card"):
        return Licensed(what, name, stated(head_of(path)) if path.is_file() else None)


def licensed_data(source: Any) -> list[Licensed]:
    """The sources of `data.source`, but for the target's own prompts, which are as the target is.

    Raises UserError for a wrong setting of them, ResourceError when the Hub fails.
    """
    return [
        _licensed_source(entry.source, entry.known_license)
        for _, entry in entries(source)
        if entry.source != SELF
    ]


def _licensed_source(source: str, license: str | None) -> Licensed:
    """A data set of the Hub has the licence that its card states, where none is given and the Hub shows it."""
    if Path(source).exists() or Path(source).suffix in LOADERS or source.count("/") != 1:
        return Licensed(
            DATA, Path(source).name, license
        )  # without the folders of the machine that trained
    if license is None:
        with (
            hub_errors("data.source", source, expected="a Hub id"),
            suppress(RepositoryNotFoundError),
        ):
            card = HfApi().dataset_info(source).card_data
            license = stated(vars(card)) if card else None
    return Licensed(DATA, source, license)


def forbidden(parts: Sequence[Licensed], repository: str) -> Iterator[str]:
    """Why licences forbid a draft made of these parts to be published under this name; nothing where they do not."""
    name = repository.rpartition("/")[2]
    for part in parts:
        stated = f"the licence of the {part.what}, {part.name}, is {part.license}, which"
        if part.what == DATA and part.license is None:
            yield f"nobody states the licence of the {part.what}, {part.name}: `license` of its entry in data.source says it"
        if re.search(r"(^|-)nd(-|$)", part.shown.lower()):
            yield f"{stated} forbids to distribute what derives from it"
        # "Llama 3" is also the beginning of llama-3.1-8B
        if part.terms and not _letters(name).startswith(_letters(part.terms.prefix)):
            yield f"{stated} asks that the repository's name begin with {part.terms.prefix}, and it is {name}"


def license_of_draft(given: str | None, parts: Sequence[Licensed]) -> str:
    """What the draft is licensed under: as given, else as its target."""
    return given or next((part.shown for part in parts if part.what == "target"), UNKNOWN)


def front_matter(license: str) -> dict[str, Any]:
    """The keys of a card that state a licence."""
    return (
        {"license": license}
        if license in IDENTIFIERS
        else {"license": OTHER, "license_name": license}
    )


def stated(metadata: Mapping[str, Any] | None) -> str | None:
    """The licence that a card's metadata states."""
    value = (metadata or {}).get("license")
    value = value[0] if isinstance(value, list) and value else value
    return (
        str((metadata or {}).get("license_name") or value)
        if value == OTHER
        else str(value)
        if value
        else None
    )


def _letters(name: str) -> str:
    """A name without what may stand between its words."""
    return re.sub(r"[\s._-]", "", name.lower())
