"""The work of making a row set: which rows, for which target, where they and their blocks are, or will be."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specdistill.errors import UserError
from specdistill.files.folders import check_holds, check_writable
from specdistill.produce.cleaning import SuiteIndex, cleaned, load_suites
from specdistill.produce.sources import Source, load_sources
from specdistill.recipe.sections import DataConfig
from specdistill.rows.files import cache_folder
from specdistill.rows.row_set import PART, RowTarget, check, fingerprint


@dataclass(frozen=True)
class Job:
    """Rows of a recipe for a target. measured_on: suites that the draft will be measured on. states: where the hidden states of servers'
    answers wait for a store, if there is one.
    """

    config: DataConfig
    target: RowTarget
    measured_on: Sequence[str] = ()
    states: Path | None = None

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.config, self.target, self.measured_on)

    @cached_property
    def folder(self) -> Path:
        """`data.rows`, or the recipe's own place in the cache."""
        return Path(
            self.config.rows or cache_folder(self.config.cache_dir) / "rows" / self.fingerprint
        )

    @cached_property
    def plan(self) -> str:
        """A hash of all that generation depends on, without the keys that say what becomes of its documents."""
        of_documents = ("packing", "validation_fraction", "validation_split")
        return fingerprint(self.config, self.target, self.measured_on, without=of_documents)

    @property
    def blocks(self) -> Path:
        return self.folder.parent / f"{self.plan}.blocks"

    @cached_property
    def sources(self) -> tuple[list[Source], Counter[str]]:
        """The sources without the rows that are filtered, and how many these are."""
        return cleaned(
            load_sources(self.config, self.target.tokenizer), self.config, self.measured_on
        )

    @cached_property
    def suite_index(self) -> SuiteIndex:
        """The suites that the target's own prompts are compared with."""
        return SuiteIndex(load_suites(self.config.decontaminate, self.measured_on))

    def check(self) -> None:
        """Raises UserError for folders and settings with which no rows can be made, or none that the target can read."""
        check(self.config, self.target)
        check_writable(cache_folder(self.config.cache_dir), "data.cache_dir")
        check_holds(self.folder, "data.rows", "a row set", PART.fullmatch)
        prompt_tokens, max_length = self.config.regenerate.prompt_tokens, self.config.max_length
        if self.config.regenerate.num_tokens > 0 and prompt_tokens >= max_length:
            expected = f"1 to {max_length - 1} tokens, less than data.max_length"
            raise UserError("data.regenerate.prompt_tokens", got=prompt_tokens, expected=expected)
