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
        likely_cause: why few tokens of such a draft may be accepted, if no repair explains it.
    """

    likely_cause: ClassVar[str] = (
        "the draft was trained on other features than it reads now (other layers, a quantized"
        " target, or states before the final norm)"
    )

    @abstractmethod
    def plan_draft(
        self, target: ModelConfigInfo, draft_info: ModelConfigInfo | None, settings: DraftSettings
    ) -> PlannedDraft:
        """Describe the size and the cost of a draft: an existing one, or one still to be trained.

        Args:
            target: the target, described by its config.json.
            draft_info: the existing draft, described by its config.json. None: the draft that would
                be trained with `settings`.
            settings: keys of the recipe's `draft:`. Absent keys have their defaults.

        Returns:
            What `specdistill plan` needs to estimate memory and time.

        Raises:
            UserError: for a target that cannot have such a draft.
        """

    def is_described(self, draft: ModelConfigInfo, target: ModelConfigInfo) -> bool:
        """Return whether a draft's config.json says that the draft is one of this method.

        The default recognizes no draft.

        Args:
            draft: the draft, described by its config.json.
            target: the target, described by its config.json.
        """
        return False

    def find_native_layers(
        self, raw: RawConfig, names: Set[str], text: PreTrainedConfig
    ) -> tuple[str, int] | None:
        """Find draft layers of this method that are part of a target's own checkpoint.

        MTP layers are an example. The default finds none.

        Args:
            raw: the content of the target's config.json.
            names: the names of the tensors in the target's checkpoint; empty if they are not at
                hand.
            text: the target's text config, as transformers reads it.

        Returns:
            The key of config.json that says how many such layers there are, and their number; None
            if there are none.
        """
        return None

    def build_simulation(self, draft: DraftT, num_tokens: int) -> nn.Module | None:
        """Build an objective that simulates drafting on completions of the target.

        `specdistill doctor` uses the objective to find out why few tokens of a draft are accepted.
        By default drafting cannot be simulated.

        Args:
            draft: the draft.
            num_tokens: K, draft tokens per round.

        Returns:
            The objective; None if drafting cannot be simulated.
        """
        return None

    def find_repairs(self, draft: DraftT, target: FrozenTarget) -> Iterator[tuple[str, DraftT]]:
        """Yield likely causes of low acceptance, each with a copy of the draft without that fault.

        `specdistill doctor` measures each copy. If a copy accepts more tokens, its cause is
        confirmed. The default yields none.
        """
        return iter(())


class Method(ABC, Generic[RecipeT, DraftT]):
    """A way to draft: how its drafts are recognized, created, trained, decoded with and exported.

    A method overrides the operations that it supports. Most operations that are not overridden,
    such as training, raise a UserError that names the method. Those that recognize or check a
    draft's files find nothing instead.

    Attributes:
        name: the name of the method's row in the table.
        advice: the answers to `specdistill plan` and `specdistill doctor`.
    """

    name: ClassVar[str]
    advice: Advice[DraftT]

    def has_tensors(self, names: Set[str]) -> bool:
        """Return whether these tensor names prove that a folder holds a draft of this method.

        By default no names prove it.
        """
        return False

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder claims, by config.json or tensor names, to hold such a draft.

        The claim is weaker evidence than `has_tensors`. It only counts if `has_tensors` is false
        for every method. By default no folder is recognized.

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
            rows: training data. Some methods choose a draft vocabulary or a mask token by how often
                tokens occur in the data.

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
        """Write a draft into a folder, in the layout that other projects use for the method.

        Args:
            draft: the trained draft.
            target: the target that it was trained for.
            folder: where to write config.json and the weights.
        """
        raise self._make_unsupported_error("saving a draft")

    @abstractmethod
    def load_proposer(
        self, folder: Path | None, target: FrozenTarget, *, key: str, **options: object
    ) -> Proposer:
        """Load a draft for decoding.

        Args:
            folder: the folder of the draft; None for a method that is not trained.
            target: the target that verifies.
            key: the recipe key to name in errors.
            **options: the method's own options, as `Recipe.list_proposer_options` returns them.

        Raises:
            UserError: naming `key`, for a draft that is broken or does not fit the target.
        """

    def build_lookup(self, min_tokens: int, max_tokens: int) -> Proposer:
        """Build a lookup that proposes first; another draft runs only if the lookup finds nothing.

        The lookup searches the text for an earlier occurrence of the last tokens.

        Args:
            min_tokens: the least number of last tokens that must occur again.
            max_tokens: the greatest number of last tokens that are searched for.
        """
        raise self._make_unsupported_error("drafting in front of another draft")

    def read_head_shape(self, config: RawConfig, num_layers: int | None) -> HeadShape | None:
        """Read from config.json the shape that a head was trained with; by default, return None.

        Here a head is a draft of method eagle, eagle3, dflash or dspark.

        Args:
            config: the content of the head's config.json.
            num_layers: the target's number of layers, for files that do not say it; None if
                unknown.

        Returns:
            The shape; None for drafts of other methods.
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
        """Check a draft by its config.json and by the names, shapes and dtypes of its tensors.

        The values of the weights are not needed, so a draft can be checked before they are loaded
        or downloaded. The default checks nothing.

        Args:
            folder: the folder, with config.json and, for whole models, the tokenizer.
            tensors: the draft's tensors by name; they may be on the meta device.
            target: the target's files. None: only compare the draft's files with each other.
            key: the recipe key to name in errors.
            name: what errors call the draft.
            **options: the method's own options, as `Recipe.list_proposer_options` returns them.

        Returns:
            The sizes and settings of the draft's layers, as its config.json states them, for
            methods eagle, eagle3, dflash and dspark; None for other methods.

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
        """Check that an engine can serve a draft.

        The caller checks the layout's `limits`. This method checks what else the engine requires;
        by default that is nothing.

        Args:
            engine: the name of the engine.
            layout: the engine's layout for this method.
            draft: the draft.
            target: the target.

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
        """Return the error to raise for an operation that this method does not support.

        Args:
            operation: what was asked for, as a noun such as "training".
        """
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
        """Build the object that proposes tokens with a loaded draft during decoding."""

    def load_proposer(
        self, folder: Path | None, target: FrozenTarget, *, key: str, **options: object
    ) -> Proposer:
        """Load a draft for decoding, in the target's dtype and on its device.

        See `Method.load_proposer` for the arguments.
        """
        assert folder is not None  # only methods without weights have none
        draft = self.load(folder, target, key=key)
        # The draft reads the target's features, so it runs in their dtype, whatever its file has.
        draft.to(device=target.device, dtype=target.model.dtype)
        return self.build_proposer(draft, target)
