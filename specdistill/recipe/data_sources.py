"""The keys of `data.source`, and what is known of the sources without reading them: their names, licences, and what is not pinned."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.recipe.fields import ReadWhen, Section, option
from specdistill.recipe.load import validate

# Each names a function of a split, which returns a fingerprint of its rows and a function that yields them.
BUILT_IN = {"pico": "specdistill.pico:rows"}
BUILT_IN_LICENSES = {"pico": "PSF-2.0"}
SELF = "self"
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
OF_SELF = ReadWhen("with source: self", lambda it: it.source == SELF)
OF_OTHERS = ReadWhen(
    "with rows that exist: those of self are generated", lambda it: it.source != SELF
)
NOT_READ = {"weight", "license"}  # keys of a source that do not change which rows are read
FROM_HUB = ReadWhen(
    "of a data set on the Hub: files and folders have no revisions",
    lambda it: it.source not in {SELF, *BUILT_IN} and not Path(it.source).exists(),
)


class SourceEntry(Section):
    source: str = option(..., "the name of a source")
    revision: str | None = option(None, "branch, tag or commit of a Hub id", read_when=FROM_HUB)
    weight: float = option(1.0, "2 uses every row twice", gt=0)
    split: str | None = option(None, "null: data.split", read_when=OF_OTHERS)
    name: str | None = option(None, "configuration of a Hub id", read_when=OF_OTHERS)
    columns: dict[str, str] = option(
        {},
        "our name: the source's own, of each column that is read; {}: data.columns",
        read_when=OF_OTHERS,
    )
    where: dict[str, Any] = option(
        {},
        "rows used: those whose columns hold these values, e.g. {language: [English, German]}",
        read_when=OF_OTHERS,
    )
    min_turns: int = option(
        0,
        "rows used: conversations with at least this many user turns; 0: texts, too",
        ge=0,
        read_when=OF_OTHERS,
    )
    license: str | None = option(
        None,
        "for the card of a published draft; null: pico's own, or what a Hub id's card states",
        read_when=OF_OTHERS,
    )
    num_prompts: int | None = option(
        None,
        "prompts that the target generates; null: as many as data.regenerate.num_tokens needs",
        ge=2,
        read_when=OF_SELF,
    )
    temperature: float = option(
        1.0, "sampling temperature of these prompts", gt=0, read_when=OF_SELF
    )
    system: list[str] = option(
        [],
        "system messages that set the topic, an equal share of the prompts each; rows do not contain them",
        read_when=OF_SELF,
    )

    @property
    def known_license(self) -> str | None:
        """As far as it is stated here."""
        return self.license or BUILT_IN_LICENSES.get(self.source)


def entries(source: Any) -> Iterator[tuple[str, SourceEntry]]:
    """Each source with the key that errors name. Raises UserError for a wrong name or setting."""
    if isinstance(source, str):
        yield "data.source", SourceEntry(source=source)
        return
    if not isinstance(source, Sequence) or not source:
        expected = "pico, self, a file, a Hub id, or a list of {source, weight, split}"
        raise UserError("data.source", got=repr(source), expected=expected)
    for index, entry in enumerate(source):
        key = f"data.source[{index}]"
        if not isinstance(entry, Mapping):
            raise UserError(
                key, got=repr(entry), expected="{source, weight, split} with the name of a source"
            )
        yield f"{key}.source", validate(SourceEntry, entry, f"{key}.")


def source_names(source: Any) -> list[str]:
    """The sources in their order, as a reader tells them apart."""
    stated = [{"source": source}] if isinstance(source, str) else source
    return [
        " ".join(str(value) for key, value in entry.items() if key not in NOT_READ and value)
        for entry in stated
    ]


def left_open(source: Any) -> Iterator[str]:
    """A warning for each source without a revision or a licence. Raises as `entries` does."""
    for _, entry in entries(source):
        is_on_hub = (
            entry.source.count("/") == 1
            and FROM_HUB.holds(entry)
            and Path(entry.source).suffix not in LOADERS
        )
        if is_on_hub and entry.revision is None:
            yield f"data.source: {entry.source} has no revision, so its rows may change: pin revision to a commit"
        if not is_on_hub and entry.source != SELF and entry.known_license is None:
            yield f"data.source: {entry.source} has no license, which publishing a draft needs: state it in its entry"
