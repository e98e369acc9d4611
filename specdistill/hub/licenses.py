"""Find the licences of what a draft was made from, and check what they demand of its publisher.

Licences are named as on the Hub (https://huggingface.co/docs/hub/repositories-licenses). The rules
follow the texts of the licences: section 1.b of Llama's community licences, which covers a draft
because it learns from the outputs of its target, and the No Derivatives clause of Creative Commons.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from specdistill.common.documents import read_front_matter
from specdistill.common.errors import convert_errors
from specdistill.common.repositories import convert_hub_errors
from specdistill.recipe.data_sources import LOADERS, SELF_SOURCE, list_entries

UNKNOWN_LICENSE = "unknown"
OTHER_LICENSE = "other"
DATA = "training data"  # the role of data sets in a draft
CARD = "README.md"
# Files that a licence may demand to be passed on with the weights.
TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
# The identifiers that a card's `license` may have. Any other licence is stated as `license: other`
# with its name in `license_name`.
IDENTIFIERS = frozenset(
    Path(__file__).with_name("licenses.txt").read_text(encoding="utf-8").split()
)


@dataclass(frozen=True)
class Terms:
    """The demands of a licence on a model that learnt from the licensed material.

    Attributes:
        prefix: how the name of the model must begin.
        display: words that its card must show.
        notice: the text of a file next to the weights.
    """

    prefix: str
    display: str
    notice: str


def _build_llama_license(name: str, built_with: str, prefix: str) -> Terms:
    """Return the demands of one of Llama's community licences.

    Args:
        name: the name of the models that the licence is for.
        built_with: the name that follows "Built with" on a card.
        prefix: how the names of derived models must begin.
    """
    return Terms(
        prefix,
        f"Built with {built_with}",
        f"{name} is licensed under the {name} Community License, Copyright © Meta Platforms, Inc."
        " All Rights Reserved.",
    )


# The demands of licences, by the licence's name on the Hub. Version 3 asks for other names than
# later versions.
TERMS = {
    "llama3": _build_llama_license("Meta Llama 3", "Meta Llama 3", "Llama 3"),
    **{
        f"llama{version}": _build_llama_license(f"Llama {version}", "Llama", "Llama")
        for version in ("3.1", "3.2", "3.3", "4")
    },
}


@dataclass(frozen=True)
class Licensed:
    """A model or data set that a draft was made from, with its licence.

    Attributes:
        what: its role in the draft, e.g. `target` or `training data`.
        name: its name.
        license: its licence; None if it is not known.
    """

    what: str
    name: str
    license: str | None

    @property
    def shown(self) -> str:
        """The name of the licence, or `unknown`."""
        return self.license or UNKNOWN_LICENSE

    @property
    def terms(self) -> Terms | None:
        """The demands of the licence; None if it demands nothing that is known here."""
        return TERMS.get((self.license or "").lower())


def read_model_license(what: str, name: str, folder: Path) -> Licensed:
    """Read the licence of a model from the card in its folder, if it has one.

    Args:
        what: the role of the model, e.g. `target`, which errors name.
        name: the name of the model.
        folder: the folder that may hold the card.

    Raises:
        UserError: for a card that cannot be read.
    """
    path = folder / CARD
    license = None
    with convert_errors((ValueError, OSError), what, path, "a model card"):
        if path.is_file():
            license = license_from_card(read_front_matter(path))
    return Licensed(what, name, license)


def find_data_licenses(source: object) -> list[Licensed]:
    """Find the licences of the training data.

    The source `self` (prompts that the target made up itself) is left out, because it has the
    licence of the target.

    Args:
        source: the value of the recipe key `data.source`.

    Raises:
        UserError: for a wrong setting of a source.
        ResourceError: when the Hub fails.
    """
    return [
        _find_source_license(entry.source, entry.known_license)
        for _, entry in list_entries(source)
        if entry.source != SELF_SOURCE
    ]


def _find_source_license(source: str, license: str | None) -> Licensed:
    """Return a source of data with its licence.

    Args:
        source: a file, a folder or the Hub id of a data set.
        license: the licence that the recipe states. If it is None, the licence of a data set on the
            Hub is read from its card.
    """
    # A source that is a local path, or has the form of one, is not searched on the Hub.
    if Path(source).exists() or Path(source).suffix in LOADERS or source.count("/") != 1:
        # A local path is shortened to its name, so that no folders of this machine are published.
        return Licensed(DATA, Path(source).name, license)

    # The card of a private data set, or of one that was removed, cannot be read. The error is
    # suppressed, and the licence is then not known.
    if license is None:
        with (
            convert_hub_errors("data.source", source, expected="a Hub id"),
            suppress(RepositoryNotFoundError),
        ):
            card = HfApi().dataset_info(source).card_data
            license = license_from_card(vars(card)) if card else None
    return Licensed(DATA, source, license)


def list_prohibitions(parts: Sequence[Licensed], repository: str) -> Iterator[str]:
    """Yield the reasons why licences forbid publishing a draft.

    Args:
        parts: what the draft was made from.
        repository: the repository that the draft would be published in.
    """
    name = repository.rpartition("/")[2]
    for part in parts:
        # Refuse data without a licence, and licences with No Derivatives (`nd` in cc-by-nd-4.0).
        subject = f"the licence of the {part.what}, {part.name}, is {part.license}, which"
        if part.what == DATA and part.license is None:
            yield (
                f"the licence of the {part.what}, {part.name}, is not known: state it as `license`"
                " of its entry in data.source"
            )
        if re.search(r"(^|-)nd(-|$)", part.shown.lower()):
            yield f"{subject} forbids distributing works that derive from it"

        # A licence may ask that the name begin with a prefix. Upper case and separators do not
        # count: llama-3.1-8B begins with "Llama 3", too.
        if part.terms and not _normalize_name(name).startswith(_normalize_name(part.terms.prefix)):
            yield (
                f"{subject} asks that the repository's name begin with {part.terms.prefix}, and it"
                f" is {name}"
            )


def choose_draft_license(requested: str | None, parts: Sequence[Licensed]) -> str:
    """Return the licence of the draft: the requested one, or else the licence of its target."""
    target_licenses = [part.shown for part in parts if part.what == "target"]
    return requested or (target_licenses[0] if target_licenses else UNKNOWN_LICENSE)


def build_license_metadata(license: str) -> dict[str, Any]:
    """Return the keys of a card's metadata that state a licence.

    The Hub accepts only known identifiers as `license`. Any other licence is `other` with a name.
    """
    if license in IDENTIFIERS:
        return {"license": license}
    return {"license": OTHER_LICENSE, "license_name": license}


def license_from_card(metadata: Mapping[str, object] | None) -> str | None:
    """Return the licence that a card's metadata states, or None if it states none."""
    # The value may be a list, of which the first entry counts. If it is `other`, the name of the
    # licence is in the key `license_name`.
    metadata = metadata or {}
    value = metadata.get("license")
    value = value[0] if isinstance(value, list) and value else value
    if value == OTHER_LICENSE:
        return str(metadata.get("license_name") or value)
    return str(value) if value else None


def _normalize_name(name: str) -> str:
    """Return a name in lower case, without the characters that may separate its words."""
    return re.sub(r"[\s._-]", "", name.lower())
