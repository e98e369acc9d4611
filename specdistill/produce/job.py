"""The work of making a row set: which rows, for whom, where they and their blocks go."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specdistill.command import check_writable
from specdistill.errors import UserError
from specdistill.produce.cleaning.decontamination import SuiteIndex
from specdistill.produce.cleaning.overlaps import cleaned, suites_at_hand
from specdistill.produce.sources import Source, load_sources
from specdistill.recipe.sections import DataConfig
from specdistill.rows.row_set import RowTarget, cache_of, fingerprint, is_part, place_of

# Keys of `data:` that say what becomes of documents, not what is generated.
OF_DOCUMENTS = ("packing", "validation_fraction", "validation_split")


@dataclass(frozen=True)
class Job:
    """Rows to be made, into a folder, of a recipe for a target. measured_on: suites that the draft will be measured on."""

    folder: Path
    config: DataConfig
    target: RowTarget
    measured_on: Sequence[str] = ()

    @classmethod
    def of(cls, config: DataConfig, target: RowTarget, measured_on: Sequence[str] = ()) -> "Job":
        """Into `data.rows`, or the recipe's own place."""
        return cls(Path(config.rows) if config.rows else place_of(config, target, measured_on), config, target, measured_on)

    @cached_property
    def plan(self) -> str:
        """A hash of all that generation depends on."""
        return fingerprint(self.config, self.target, self.measured_on, without=OF_DOCUMENTS)

    @property
    def blocks(self) -> Path:
        """The folder of the blocks."""
        return self.folder.parent / f"{self.plan}.blocks"

    @cached_property
    def sources(self) -> tuple[list[Source], Counter[str]]:
        """Without the rows that are filtered, and how many these are."""
        return cleaned(load_sources(self.config), self.config, self.measured_on)

    @cached_property
    def suite_index(self) -> SuiteIndex:
        """Of the suites that the target's own prompts are compared with."""
        return SuiteIndex(suites_at_hand(self.config.decontaminate, self.measured_on))

    def check(self) -> None:
        check_writable(cache_of(self.config), "data.cache_dir")
        if foreign := next((path.name for path in self.folder.glob("*") if not is_part(path)), None):
            raise UserError(
                "data.rows", got=f"{self.folder}, which holds {foreign}", expected="a new folder, or one of a row set"
            )
        prompt_tokens, max_length = self.config.regenerate.prompt_tokens, self.config.max_length
        if self.config.regenerate.num_tokens > 0 and prompt_tokens >= max_length:
            expected = f"1 to {max_length - 1} tokens, less than data.max_length"
            raise UserError("data.regenerate.prompt_tokens", got=prompt_tokens, expected=expected)
