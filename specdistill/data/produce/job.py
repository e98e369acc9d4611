"""The work of making a row set: which rows, for which target, and in which folders."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from specdistill.common.errors import UserError
from specdistill.common.folders import check_holds, check_writable
from specdistill.common.processes import find_rank_and_world_size
from specdistill.data.produce.blocks import plan_blocks
from specdistill.data.produce.cleaning import SuiteIndex, load_suites, remove_overlaps
from specdistill.data.produce.sources import Source, load_sources
from specdistill.data.rows.files import cache_folder
from specdistill.data.rows.row_set import (
    PART,
    RowTarget,
    check_row_set,
    compute_fingerprint,
    is_whole,
    read_rows,
)
from specdistill.recipe.sections import DataConfig, Regeneration, ServerRegeneration


class RunSize(NamedTuple):
    """The number of rows of a training, and of the tokens to generate before it.

    Attributes:
        num_rows: training rows, all of `data.max_length` tokens; None if they are not counted yet.
        num_generated: tokens that each process still has to generate.
        batch_size: sequences that a process generates at a time.
        num_tokens: tokens of the training rows; with their padding if they are not made yet.
        is_made: whether the rows are made. Otherwise the numbers of rows and tokens are estimates.
    """

    num_rows: int | None
    num_generated: int = 0
    batch_size: int = 1
    num_tokens: int = 0
    is_made: bool = False


def estimate_rows(num_tokens: int, tokens_per_row: int, validation_fraction: float) -> int:
    """Estimate the number of training rows that generated tokens fill.

    Args:
        num_tokens: the tokens to generate.
        tokens_per_row: how many of them fit into a row.
        validation_fraction: the share of the rows that is held out.
    """
    return int((1 - validation_fraction) * num_tokens / tokens_per_row)


@dataclass(frozen=True)
class Job:
    """The work of making the rows of a recipe for a target.

    Attributes:
        config: the `data:` section.
        target: the target that the rows are for.
        measured_on: suites that the draft will be measured on.
        states: the folder where the hidden states of servers' answers wait for a feature store;
            None if they are not kept.
    """

    config: DataConfig
    target: RowTarget
    measured_on: Sequence[str] = ()
    states: Path | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The hash of everything that the rows depend on."""
        return compute_fingerprint(self.config, self.target, self.measured_on)

    @cached_property
    def folder(self) -> Path:
        """The folder of the row set: `data.rows`, or the recipe's own folder in the cache."""
        return Path(
            self.config.rows or cache_folder(self.config.cache_dir) / "rows" / self.fingerprint
        )

    @cached_property
    def plan(self) -> str:
        """The plan of the generated answers: a hash of everything that they depend on.

        Recipes with equal plans share generated blocks. Keys that only decide what happens to bad
        rows, how documents are divided into splits, and how they are packed are left out, so that
        changing such a key does not discard the answers.
        """
        return compute_fingerprint(
            self.config,
            self.target,
            self.measured_on,
            without=(
                "packing",
                "validation_fraction",
                "validation_split",
                "on_bad_row",
                "max_bad_rows",
            ),
        )

    @property
    def blocks(self) -> Path:
        """The folder of the generated blocks, next to the folder of the row set."""
        return self.folder.parent / f"{self.plan}.blocks"

    @cached_property
    def sources(self) -> tuple[list[Source], Counter[str]]:
        """The sources of training rows, without the rows that overlap evaluation prompts.

        The second value says how many rows were removed, by the reason. The sources are read when
        the property is used for the first time.
        """
        return remove_overlaps(
            load_sources(self.config, self.target.tokenizer), self.config, self.measured_on
        )

    @cached_property
    def suite_index(self) -> SuiteIndex:
        """The index of the suites that the target's own prompts are compared with."""
        return SuiteIndex(load_suites(self.config.decontaminate, self.measured_on))

    def load_target(self, target: RowTarget) -> "Job":
        """Return a copy of this job for the same target with its weights loaded.

        Args:
            target: the target with its weights.
        """
        # If the sources were already read, copy them, too, so that they are not read twice.
        # `cached_property` stores its value in the dictionary of the instance.
        job = replace(self, target=target)
        if "sources" in vars(self):
            vars(job)["sources"] = self.sources
        return job

    def run_size(self) -> RunSize:
        """Return the number of training rows, and what each process still has to generate for them.

        The sizes are needed for estimates before the rows are made. The number of rows is None if
        it is only known later.
        """
        # If the row set is complete, its manifest has the number of rows, and nothing is generated.
        if is_whole(self.folder):
            *_, manifest = read_rows(self.folder)
            split = manifest.splits["train"]
            return RunSize(split.rows, num_tokens=split.tokens, is_made=True)

        # Without generation, the number of rows is not known before they are packed.
        settings = self.config.regenerate
        max_length = self.config.max_length
        if not isinstance(settings, Regeneration):
            return RunSize(None)

        # Estimate the number of rows from the tokens to generate. Of the `max_length` tokens of a
        # row, the first `prompt_tokens` are assumed to be its prompt, and the others generated.
        # `max(1, …)` avoids a division by 0 for a prompt as long as a row, which `check` refuses.
        generated_per_row = max(1, max_length - settings.prompt_tokens)
        num_rows = None
        # Without packing no estimate is possible: each answer gets a row of its own, of any length.
        if self.config.packing:
            num_rows = estimate_rows(
                settings.num_tokens, generated_per_row, self.config.validation_fraction
            )
        # `num_tokens` counts whole rows, with their prompts.
        size = RunSize(num_rows, num_tokens=(num_rows or 0) * max_length)

        # If servers generate, this process has nothing to generate. Otherwise it generates the
        # blocks whose files are not there yet.
        if isinstance(settings, ServerRegeneration):
            return size
        missing = [
            block
            for block in plan_blocks(settings.num_tokens)
            if not (self.blocks / f"{block.name}.arrow").exists()
        ]
        if not missing:
            return size

        # The processes of the launch share the missing blocks.
        _, num_processes = find_rank_and_world_size()
        num_tokens = sum(block.num_tokens for block in missing) // min(num_processes, len(missing))

        # A batch has at most as many sequences as a block, which may be fewer than `batch_size`.
        rows_per_block = max(1, missing[0].num_tokens // generated_per_row)
        batch_size = min(settings.batch_size, rows_per_block)
        return size._replace(num_generated=num_tokens, batch_size=batch_size)

    def check(self) -> None:
        """Check the settings, and that the folders can be written, before any row is made.

        Raises:
            UserError: if rows cannot be made with these settings, or if the target could not read
                the rows.
        """
        check_row_set(self.config, self.target)
        check_writable(cache_folder(self.config.cache_dir), "data.cache_dir")

        # If the folder of the row set exists, it may hold only files of a row set. PART matches the
        # names of such files.
        check_holds(self.folder, "data.rows", "a row set", PART.fullmatch)

        settings = self.config.regenerate
        max_length = self.config.max_length
        if isinstance(settings, Regeneration) and settings.prompt_tokens >= max_length:
            raise UserError(
                "data.regenerate.prompt_tokens",
                got=settings.prompt_tokens,
                expected=f"1 to {max_length - 1} tokens, less than data.max_length",
            )
