"""The interface of a method, and what `specdistill plan` and `specdistill doctor` ask of it.

The folder of each method has a `method.py` with one subclass of `Method` and one instance of it,
`METHOD`. Commands get the instance by `specdistill.methods.load.load_method` and know nothing else
of the method. So a new method is a folder and a row of the table.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from datasets import Dataset
from torch import Size, Tensor, nn
from transformers import PreTrainedConfig

from specdistill.common.errors import UserError
from specdistill.decoding.proposer import Proposer
from specdistill.methods.layers import DraftT, HeadShape
from specdistill.methods.recipe import Recipe
from specdistill.methods.sizes import ModelConfigInfo, PlannedDraft, RawConfig
from specdistill.serving.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

RecipeT = TypeVar("RecipeT", bound=Recipe)

DraftSettings = Mapping[str, Any]  # keys of a recipe's `draft:`


class Advice(ABC, Generic[DraftT]):
    """The answers of a method to the commands `specdistill plan` and `specdistill doctor`.

    Attributes:
        likely_cause: why a draft of this method may accept little, if no repair explains it.
    """

    likely_cause: ClassVar[str] = (
        "the draft was trained on other features than it reads now (other layers, a quantized"
        " target, or states before the final norm)"
    )

    @abstractmethod
    def plan_draft(
        self, target: ModelConfigInfo, draft_info: ModelConfigInfo | None, settings: DraftSettings
    ) -> PlannedDraft:
        """Describe the size and the cost of a given draft, or of the one a recipe would train.

        Args:
            target: the target, described by its config.json.
            draft_info: the draft, described by its config.json; None for the draft of a recipe.
            settings: keys of the recipe's `draft:`. Absent keys have their defaults.

        Returns:
            The draft as `specdistill plan` counts it.

        Raises:
            UserError: for a target that cannot have such a draft.
        """

    def is_described(self, draft: ModelConfigInfo, target: ModelConfigInfo) -> bool:
        """Return whether a draft's config.json says that this method made the draft."""
        return False

    def find_native_layers(
        self, raw: RawConfig, names: Set[str], text: PreTrainedConfig
    ) -> tuple[str, int] | None:
        """Find the layers of this method that come with a target.

        Args:
            raw: the content of the target's config.json.
            names: the names of the tensors in the target's checkpoint; empty if they are not at
                hand.
            text: the target's text config, as transformers reads it.

        Returns:
            The key that says how many such layers there are, and their number; None if there are
            none.
        """
        return None

    def build_simulation(self, draft: DraftT, num_tokens: int) -> nn.Module | None:
        """Build an objective that simulates drafting on completions of the target.

        `specdistill doctor` uses it to find out why few tokens of a draft are accepted.

        Args:
            draft: the draft.
            num_tokens: K, draft tokens per round.

        Returns:
            The objective; None if drafting cannot be simulated.
        """
        return None

    def find_repairs(self, draft: DraftT, target: FrozenTarget) -> Iterator[tuple[str, DraftT]]:
        """Yield likely causes of low acceptance, each with a repaired copy of the draft."""
        return iter(())


class Method(ABC, Generic[RecipeT, DraftT]):
    """A way to draft: how its drafts are recognized, created, trained, decoded with and exported.

    A method overrides the operations that it supports. An operation that is not overridden raises a
    UserError that names the method. A search that is not overridden finds nothing.

    Attributes:
        name: the name of the method's row in the table.
        advice: the answers to `specdistill plan` and `specdistill doctor`.
    """

    name: ClassVar[str]
    advice: Advice[DraftT]

    def has_tensors(self, names: Set[str]) -> bool:
        """Return whether these tensor names prove that a folder holds a draft of this method."""
        return False

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder's config.json or tensor names claim that it is such a draft.

        This is weaker evidence than `has_tensors`, and is only asked if no method has that.

        Args:
            config: the content of the folder's config.json.
            names: the names of the folder's tensors.
        """
        return False

    def create(self, recipe: RecipeT, target: FrozenTarget, rows: Dataset) -> DraftT:
        """Create the draft that a recipe describes, as it is before training.

        Args:
            recipe: a recipe of this method.
            target: the target.
            rows: training data, by which a draft vocabulary or a mask is chosen.

        Returns:
            The draft, in float32 on the target's device.

        Raises:
            UserError: for settings that do not fit each other or the target.
        """
        raise self._make_unsupported_error("training")

    def build_objective(self, draft: DraftT, recipe: RecipeT, target: FrozenTarget) -> nn.Module:
        """Build the module that holds the draft and computes its loss, as the trainer uses it.

        Returns:
            A `specdistill.training.objective.Objective`, or a module with the same interface.
        """
        raise self._make_unsupported_error("training")

    def save(self, draft: DraftT, target: FrozenTarget, folder: Path) -> None:
        """Write a draft into a folder, in the method's public layout."""
        raise self._make_unsupported_error("saving a draft")

    @abstractmethod
    def load_proposer(
        self, folder: Path | None, target: FrozenTarget, *, key: str, **options: object
    ) -> Proposer:
        """Load a draft for decoding.

        Args:
            folder: the folder of the draft; None for a method that is not trained.
            target: the target that verifies.
            key: the recipe key that errors name.
            **options: the method's own options, as `Recipe.proposer_options` returns them.

        Raises:
            UserError: naming `key`, for a draft that is broken or does not fit the target.
        """

    def build_lookup(self, min_tokens: int, max_tokens: int) -> Proposer:
        """Build a lookup that proposes first; the draft proposes where the lookup finds nothing.

        Args:
            min_tokens: the fewest tokens that must agree with the last ones.
            max_tokens: the most tokens that are compared.
        """
        raise self._make_unsupported_error("drafting in front of another draft")

    def read_head_shape(self, config: RawConfig, num_layers: int | None) -> HeadShape | None:
        """Read the shape that a head was trained with.

        Args:
            config: the content of the head's config.json.
            num_layers: the target's number of layers, for files that do not say it; None if
                unknown.

        Returns:
            The shape; None for drafts that are not heads.
        """
        return None

    def check(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: TargetFiles | None,
        *,
        key: str,
        name: Path | str,
        **options: object,
    ) -> HeadShape | None:
        """Check a draft by config.json and the headers of its weights, which need no content.

        So a draft can be checked before its weights are downloaded.

        Args:
            folder: the folder, with config.json and, for whole models, the tokenizer.
            tensors: the draft's tensors by name, which need no content.
            target: the target's files; None checks what the draft's files say by themselves.
            key: the recipe key that errors name.
            name: what errors call the draft.
            **options: as in `load_proposer`.

        Returns:
            The shape of a head as decoding would read it; None for other drafts.

        Raises:
            UserError: for a draft that is broken or does not fit the target.
        """
        return None

    def check_native(self, shapes: Mapping[str, Size], target: TargetFiles) -> int:
        """Check the draft that is part of a target's own checkpoint.

        Args:
            shapes: the shapes of the checkpoint's tensors, by name.
            target: the target's files.

        Returns:
            The number of tensors of the draft.

        Raises:
            UserError: if the checkpoint holds no such draft.
        """
        raise self._make_unsupported_error("drafts in the target's checkpoint")

    def check_served(
        self, engine: str, layout: Layout, draft: DraftT, target: FrozenTarget
    ) -> None:
        """Check that a draft can be given to an engine, apart from the layout's `limits`.

        Raises:
            UserError: for what the engine cannot express.
        """
        return

    def export(
        self,
        folder: Path,
        engine: str,
        layout: Layout,
        output: Path,
        target: TargetFiles | None,
        num_tokens: int,
    ) -> None:
        """Write a draft in the layout of an engine.

        Args:
            folder: the folder of the draft.
            engine: the name of the engine.
            layout: the engine's layout for this method.
            output: a new folder.
            target: the target's files; None if they are not known.
            num_tokens: K, draft tokens per round.

        Raises:
            UserError: before anything is written, for what the engine cannot express.
        """
        raise self._make_unsupported_error("export")

    def _make_unsupported_error(self, operation: str) -> UserError:
        """Return the error for an operation that this method does not have."""
        return UserError(
            "method", got=self.name, text=f"method {self.name} does not support {operation}"
        )


class FeatureMethod(Method[RecipeT, DraftT]):
    """A method whose draft reads the target's features and is a module of its own."""

    @abstractmethod
    def load(self, folder: Path, target: FrozenTarget, *, key: str) -> DraftT:
        """Load a draft in the dtype of its file.

        Raises:
            UserError: naming `key`, for a draft that is broken or does not fit the target.
        """

    @abstractmethod
    def build_proposer(self, draft: DraftT, target: FrozenTarget) -> Proposer:
        """Build the proposer that decodes with a loaded draft."""

    def load_proposer(
        self, folder: Path | None, target: FrozenTarget, *, key: str, **options: object
    ) -> Proposer:
        """Load a draft for decoding, in the target's dtype and on its device."""
        assert folder is not None  # only methods without weights have none
        draft = self.load(folder, target, key=key)
        # The file may have another dtype than the target, whose features the draft reads.
        draft.to(device=target.device, dtype=target.model.dtype)
        return self.build_proposer(draft, target)
